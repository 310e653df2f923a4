"""What verl's versions do with a model: which of them offload, stage and read it alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_doctor.check.frameworks.framework import VersionRange, in_question
from fsdp_doctor.check.frameworks.verl.roles import SFT, VerlModel
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.matrix.axes import Backend


@dataclass(frozen=True, kw_only=True)
class VerlVersions(VersionRange):
    """A range of versions, of one implementation of the workers.

    engine: whether the engine runs the model, and not fsdp_workers.py.
    own_strategy: the engine follows the strategy in the model's section alone, by default ``fsdp`` (until PR 5885).
    stages: it stages before each sync, whatever the offload. stages_policy: under CPUOffloadPolicy too.
    stages_fsdp2: an FSDP2 model without adapters too.
    saves_policy_staged: a checkpoint under the policy is taken from a module that was moved.
    holds: the state dict is read after the module was offloaded again.
    merged_late: a merged adapter is read after the merge was undone.
    nonblocking: FSDP2 shards are offloaded without waiting for the copies.
    asks_offloaded: fully asynchronous training asks an offloaded model for its names and shapes (issue 4657).
    critic_backend: of the critic's own process group.
    """

    engine: bool = True
    own_strategy: bool = False
    stages: bool = True
    stages_policy: bool = False
    stages_fsdp2: bool = True
    saves_policy_staged: bool = False
    holds: bool = True
    merged_late: bool = True
    nonblocking: bool = False
    asks_offloaded: bool = False
    critic_backend: Backend = "mixed"


_FSDP_WORKERS = VerlVersions(
    label="before v0.8.0, trainer.use_legacy_worker_impl=auto or enable",
    versions=SpecifierSet("<0.8"),
    engine=False,
    stages=False,
    asks_offloaded=True,
    critic_backend="device-only",
)
_FIRST_ENGINE = VerlVersions(
    label="before v0.8.0, trainer.use_legacy_worker_impl=disable or a checkout after v0.7.1",
    versions=SpecifierSet("<0.8"),
    own_strategy=True,
    stages_policy=True,
    saves_policy_staged=True,
)
_V0_8 = VerlVersions(label="v0.8", versions=SpecifierSet(">=0.8,<0.9"), saves_policy_staged=True)  # PR 6463
_V0_9 = VerlVersions(  # PRs 6604, 7005, 7014
    label="v0.9.0", versions=SpecifierSet(">=0.9,<0.9.1"), stages_fsdp2=False, holds=False, merged_late=False
)
_NEWEST = dataclasses.replace(  # PR 7347
    _V0_9, label="after v0.9.0", versions=SpecifierSet(">=0.9.1"), nonblocking=True
)
_RELEASES = (_FSDP_WORKERS, _FIRST_ENGINE, _V0_8, _V0_9, _NEWEST)


def of_model(model: VerlModel, settings: Settings, version: Version | None) -> list[VerlVersions]:
    """The ranges of versions in question, by the version and by the implementation that the settings choose."""
    found = in_question(_RELEASES, version)
    if model is SFT:  # It has the engine alone, and no setting that chooses.
        only = dataclasses.replace(_FIRST_ENGINE, label="before v0.8.0")
        return [only if one is _FIRST_ENGINE else one for one in found if one.engine]
    implementation = settings.word("trainer.use_legacy_worker_impl")
    left_out = {"disable": _FSDP_WORKERS, "enable": _FIRST_ENGINE, "auto": _FIRST_ENGINE}.get(implementation)
    return [one for one in found if one is not left_out]
