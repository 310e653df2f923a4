"""SkyRL: ``trainer`` of its Hydra settings: policy, ref and critic, each with ``fsdp_config``.

Read in SkyRL at skyrl_train-v0.1.0 and v0.4.0, skyrl-v0.1.0 to v0.3.0: config.py and ppo_base_config.yaml for absent
keys, distributed/fsdp_strategy.py for wrapper and offload, workers/worker.py for the backend, fsdp/fsdp_worker.py for
what is read. The package skyrl follows skyrl_train; a version given is skyrl's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, Use, extraction, use_of
from fsdp_doctor.matrix.axes import Backend, Strategy
from fsdp_doctor.matrix.cases import Scenario

_SECTION: dict[Role, str] = {"actor": "trainer.policy", "ref": "trainer.ref", "critic": "trainer.critic"}
_KEYS = ("cpu_offload", "reshard_after_forward", "fsdp_size", "wrap_policy")
_STRATEGY = "trainer.strategy"
_COLOCATED = ("trainer.placement.colocate_all",)


@dataclass(frozen=True, kw_only=True)
class _SkyrlVersions(VersionRange):
    """fsdp: what the word of trainer.strategy is. default: the word where there is none. adapter: how one is read."""

    fsdp: Strategy = "fsdp1"
    default: str = "fsdp2"
    backend: Backend = "mixed"
    adapter: str = "lora.layered_summon"


_VERSIONS = (
    _SkyrlVersions(label="skyrl before 0.2, and skyrl_train", versions=SpecifierSet("<0.2"), backend="device-only"),
    _SkyrlVersions(label="skyrl 0.2", versions=SpecifierSet(">=0.2,<0.3")),
    _SkyrlVersions(
        label="skyrl since 0.3", versions=SpecifierSet(">=0.3"), fsdp="fsdp2", default="fsdp", adapter="lora.adapter"
    ),
)


def _table(role: Role) -> KeyTable:
    section = _SECTION[role]
    return KeyTable(
        policy=(f"{section}.fsdp_config.cpu_offload",),
        shard_group=(f"{section}.fsdp_config.fsdp_size",),
        lora_rank=(f"{section}.model.lora.rank",),
        path=(f"{section}.model.path", "trainer.policy.model.path"),
    )


def _recognises(settings: Settings) -> bool:
    return bool(settings.below("trainer.policy") or settings.below("trainer.placement"))


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    roles: list[Role] = ["actor"]
    reward = settings.flag("trainer.algorithm.use_kl_in_reward")
    if reward or settings.flag("trainer.algorithm.use_kl_loss", default=True):
        roles.append("ref")
    if settings.first("trainer.critic.model.path") is not None:
        roles.append("critic")
    return [
        ModelSettings(
            role=role,
            sections=(f"{_SECTION[role]}.fsdp_config",),
            keys=_KEYS,
            read=functools.partial(_read, settings, role, given),
        )
        for role in roles
    ]


def _read(settings: Settings, role: Role, given: Given) -> ModelReading:
    row = settings.first(_STRATEGY)
    if row is not None and str(row.value) not in ("fsdp", "fsdp2"):
        return not_under_fsdp(role, row)
    ranges = in_question(_VERSIONS, given.framework_version)
    uses = [_use(settings, role, versions, given) for versions in ranges]
    flagged = settings.first(*_table(role).policy) if settings.flag(*_table(role).policy) else None
    fsdp1 = any(use.scenario is not None and use.scenario.version == 1 for use in uses)
    sentence = f"{role}: SkyRL does not read cpu_offload for a model that FSDP1 trains"
    return ModelReading(
        uses=uses,
        model=_table(role).configured_model(settings, given.world_size),
        findings=[note(sentence, flagged)] if flagged and fsdp1 and role != "ref" else [],
    )


def _use(settings: Settings, role: Role, versions: _SkyrlVersions, given: Given) -> Use:
    row, table = settings.first(_STRATEGY), _table(role)
    strategy = versions.fsdp if str(row.value if row else versions.default) == "fsdp" else "fsdp2"
    offload = table.offload(settings, "cpu_offload=false is the default")
    if offload.value == "policy" and strategy == "fsdp1" and role != "ref":
        offload = Chosen("none")
    if offload.value == "none" and settings.flag(*_COLOCATED, default=True):
        moved = "param" if role == "ref" else "param+optimizer"
        offload = Chosen(moved, "distributed/fsdp_strategy.py moves it by hand where all are colocated, the default")
    moves = offload.value.startswith("param")
    return use_of(
        role,
        versions.label,
        {
            "strategy": Chosen(strategy, row or f"strategy={versions.default} is the default"),
            "offload": offload,
            "transfer": Chosen(
                "nonblocking" if moves else "blocking", "fsdp_utils.py: non_blocking=True" if moves else None
            ),
            "model": table.model(settings),
            "backend": Chosen(versions.backend, "skyrl's workers/worker.py: gloo beside NCCL since 0.2"),
            "sharding": table.sharding(settings, given.world_size),
        },
        functools.partial(_extraction_points, role=role, adapter=versions.adapter),
    )


def _extraction_points(scenario: Scenario, role: Role, adapter: str) -> list[ExtractionPoint]:
    """FSDPWeightExtractor after backload_to_gpu; of an adapter collect_lora_params."""
    if role != "actor":
        return []
    staged = scenario.param_offload
    if scenario.model == "qwen3-lora":
        return [extraction("adapter for the rollout", scenario, adapter, staged=staged)]
    path = "state_dict.to.full_tensor" if scenario.version == 2 else "sharded_state_dict.full_tensor"
    return [extraction("weights for the rollout", scenario, path, staged=staged)]


def _world_size(settings: Settings) -> int | None:
    per_node = settings.number("trainer.placement.policy_num_gpus_per_node", default=1)
    nodes = settings.number("trainer.placement.policy_num_nodes", default=1)
    return per_node * nodes if per_node and nodes else None


SKYRL = Framework(
    name="SkyRL",
    read_in="skyrl_train 0.1.0 to skyrl 0.3.0",
    distributions=("skyrl",),
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
