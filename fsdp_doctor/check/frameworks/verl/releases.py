"""What verl's versions do with a model: which of them offload, stage and read it alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_doctor.check.frameworks.framework import VersionRange, in_question
from fsdp_doctor.check.frameworks.verl.roles import OLD_SFT, REF, SFT, VerlModel, asks_for_reference
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
    backend, critic_backend: of the process group, and of the critic's own.
    always_ref: a reference model is built whether anything asks for one or not. fsdp1_only: FSDP2 and LoRA are not
        known yet.
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
    backend: Backend = "mixed"
    critic_backend: Backend = "mixed"
    always_ref: bool = False
    fsdp1_only: bool = False


_V0_4 = VerlVersions(
    label="v0.4 to v0.7, use_legacy_worker_impl=auto or enable",
    versions=SpecifierSet(">=0.4,<0.8"),
    engine=False,
    stages=False,
    asks_offloaded=True,
    critic_backend="device-only",
)
_V0_3 = dataclasses.replace(
    _V0_4, label="v0.3", versions=SpecifierSet(">=0.3,<0.4"), asks_offloaded=False, always_ref=True, fsdp1_only=True
)
_V0_2 = dataclasses.replace(_V0_3, label="before v0.3", versions=SpecifierSet("<0.3"), backend="device-only")
_FIRST_ENGINE = VerlVersions(
    label="v0.6 and v0.7, use_legacy_worker_impl=disable",
    versions=SpecifierSet(">=0.6,<0.8"),
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
_RELEASES = (_V0_2, _V0_3, _V0_4, _FIRST_ENGINE, _V0_8, _V0_9, _NEWEST)

# Of fsdp_sft_trainer.py, which has NCCL alone.
_OLD_SFT = (
    VerlVersions(
        label="before v0.4", versions=SpecifierSet("<0.4"), backend="device-only", stages=False, fsdp1_only=True
    ),
    VerlVersions(label="v0.4", versions=SpecifierSet(">=0.4,<0.5"), backend="device-only", stages=False),
    VerlVersions(label="v0.5 to v0.7.0", versions=SpecifierSet(">=0.5,<0.8"), backend="device-only", stages=False),
)
SAVES_BY_MANAGER = _OLD_SFT[2]


def of_model(model: VerlModel, settings: Settings, version: Version | None) -> list[VerlVersions]:
    """The ranges of versions that build the model: by the version, and by the implementation that is chosen."""
    if model is OLD_SFT:
        return [one for one in in_question(_OLD_SFT, version) if _can_read(one, model, settings)]
    found = in_question(_RELEASES, version)
    if model is SFT:  # It has the engine alone, and no setting that chooses.
        only = dataclasses.replace(_FIRST_ENGINE, label="v0.6 and v0.7", backend="device-only")
        return [
            only if one is _FIRST_ENGINE else dataclasses.replace(one, backend="device-only")
            for one in found
            if one.engine
        ]
    implementation = settings.word("trainer.use_legacy_worker_impl")
    left_out = {"disable": _V0_4, "enable": _FIRST_ENGINE, "auto": _FIRST_ENGINE}.get(implementation)
    found = [one for one in found if one is not left_out and _can_read(one, model, settings)]
    return [one for one in found if _builds_reference(one, model, settings)] if model is REF else found


def _can_read(versions: VerlVersions, model: VerlModel, settings: Settings) -> bool:
    """Whether those versions know what the settings ask for."""
    of_fsdp2 = model.strategy_row(settings) is not None and model.strategy(settings) == "fsdp2"
    of_adapter = model is not OLD_SFT and model.adapter(settings) is not None
    newer = "trainer.use_legacy_worker_impl" in settings or bool(settings.below("critic.fsdp"))
    return not (versions.fsdp1_only and (of_fsdp2 or of_adapter or newer))


def _builds_reference(versions: VerlVersions, model: VerlModel, settings: Settings) -> bool:
    """With an adapter the actor without it is the reference: ``ref_in_actor``."""
    return versions.always_ref or (asks_for_reference(settings) and model.adapter(settings) is None)
