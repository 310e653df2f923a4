"""SkyRL: ``trainer`` of its Hydra settings: policy, ref and critic, each with ``fsdp_config``.

Read in SkyRL at skyrl_train-v0.1.0 and v0.4.0, skyrl-v0.1.0 to v0.3.0: config.py and ppo_base_config.yaml for the
defaults, distributed/fsdp_strategy.py for wrapper and offload, workers/worker.py for the backend, fsdp/fsdp_worker.py
for what is read. The package skyrl follows skyrl_train; a version given is skyrl's.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.check.findings import note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    VersionRange,
    get_if_true,
    load_known_keys,
    matching,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, OffloadChoice, Role, Use, extraction, use_of
from fsdp_doctor.matrix.axes import Backend, Strategy
from fsdp_doctor.matrix.cases import Scenario

_SECTION: dict[Role, str] = {"actor": "trainer.policy", "ref": "trainer.ref", "critic": "trainer.critic"}
_STRATEGY = "trainer.strategy"
_MOVED = "distributed/fsdp_strategy.py moves it by hand where all are colocated, the default"


@dataclass(frozen=True)
class _Versions(VersionRange):
    """fsdp: the strategy that the word ``fsdp`` means. default: the word where none is set. adapter: its path."""

    fsdp: Strategy = Strategy.FSDP1
    default: str = "fsdp2"
    backend: Backend = Backend.MIXED
    adapter: str = "lora.layered_summon"


_VERSIONS = (
    _Versions("skyrl before 0.2, and skyrl_train", "<0.2", backend=Backend.DEVICE_ONLY),
    _Versions("skyrl 0.2", ">=0.2,<0.3"),
    _Versions("skyrl since 0.3", ">=0.3", fsdp=Strategy.FSDP2, default="fsdp", adapter="lora.adapter"),
)


def _key_table(role: Role) -> KeyTable:
    section = _SECTION[role]
    return KeyTable(
        policy=(f"{section}.fsdp_config.cpu_offload",),
        shard_group=(f"{section}.fsdp_config.fsdp_size",),
        lora_rank=(f"{section}.model.lora.rank",),
        path=(f"{section}.model.path", "trainer.policy.model.path"),
    )


class SkyRl(Framework):
    name = "SkyRL"
    read_in = "skyrl_train 0.1.0 to skyrl 0.3.0"
    distributions = ("skyrl",)
    keys = load_known_keys("skyrl")

    def recognizes(self, settings: Settings) -> bool:
        return bool(settings.below("trainer.policy") or settings.below("trainer.placement"))

    def world_size(self, settings: Settings) -> int | None:
        per_node = settings.number("trainer.placement.policy_num_gpus_per_node", default=1)
        nodes = settings.number("trainer.placement.policy_num_nodes", default=1)
        return per_node * nodes if per_node and nodes else None

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        roles: list[Role] = ["actor"]
        in_reward = settings.flag("trainer.algorithm.use_kl_in_reward")
        if in_reward or settings.flag("trainer.algorithm.use_kl_loss", default=True):
            roles.append("ref")
        if settings.first("trainer.critic.model.path") is not None:
            roles.append("critic")
        return {role: (f"{_SECTION[role]}.fsdp_config",) for role in roles}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        row, table = settings.first(_STRATEGY), _key_table(role)
        if row is not None and str(row.value) not in ("fsdp", "fsdp2"):
            return not_under_fsdp(role, row)
        uses = [_read_use(settings, role, versions, given) for versions in matching(_VERSIONS, given.framework_version)]
        policy = get_if_true(settings, *table.policy)
        is_fsdp1 = any(use.scenario is not None and use.scenario.version == 1 for use in uses)
        sentence = f"{role}: SkyRL does not read cpu_offload for a model that FSDP1 trains"
        return ModelReading(
            uses=uses,
            model=table.configured_model(settings, given.world_size),
            findings=[note(sentence, policy)] if policy and is_fsdp1 and role != "ref" else [],
        )


def _read_use(settings: Settings, role: Role, versions: _Versions, given: Given) -> Use:
    row, table = settings.first(_STRATEGY), _key_table(role)
    strategy = versions.fsdp if (settings.text(_STRATEGY) or versions.default) == "fsdp" else Strategy.FSDP2
    offload = _read_offload(settings, role, strategy)
    return use_of(
        role,
        versions.label,
        {
            "strategy": Chosen(strategy, row or f"strategy={versions.default} is the default"),
            "offload": offload.chosen,
            "transfer": Chosen("nonblocking", "fsdp_utils.py: non_blocking=True")
            if offload.param
            else Chosen("blocking"),
            "model": table.model(settings),
            "backend": Chosen(versions.backend, "skyrl's workers/worker.py: gloo beside NCCL since 0.2"),
            "sharding": table.sharding(settings, given.world_size),
        },
        lambda scenario: _extraction_points(scenario, role, versions.adapter),
    )


def _read_offload(settings: Settings, role: Role, strategy: Strategy) -> OffloadChoice:
    """The policy, or else the manual offload that colocation brings; under FSDP1 only the reference has a policy."""
    offload = _key_table(role).offload(settings, "cpu_offload=false is the default")
    if offload.policy and strategy == "fsdp1" and role != "ref":
        offload = OffloadChoice()
    if offload.policy or not settings.flag("trainer.placement.colocate_all", default=True):
        return offload
    return OffloadChoice(param=_MOVED, optimizer=None if role == "ref" else _MOVED)


def _extraction_points(scenario: Scenario, role: Role, adapter: str) -> list[ExtractionPoint]:
    """FSDPWeightExtractor after backload_to_gpu; of an adapter collect_lora_params."""
    if role != "actor":
        return []
    staged = scenario.param_offload
    if scenario.model == "qwen3-lora":
        return [extraction("adapter for the rollout", scenario, adapter, staged=staged)]
    path = "state_dict.to.full_tensor" if scenario.version == 2 else "sharded_state_dict.full_tensor"
    return [extraction("weights for the rollout", scenario, path, staged=staged)]
