"""SkyRL: ``trainer`` in its Hydra settings, where policy, ref and critic each have an ``fsdp_config``.

Sources read in SkyRL skyrl_train-v0.1.0 and v0.4.0, and skyrl-v0.1.0 to v0.3.0: config.py and ppo_base_config.yaml for
the defaults; distributed/fsdp_strategy.py for the wrapper and the offload; workers/worker.py for the backend;
fsdp/fsdp_worker.py for the extractions. The package skyrl succeeds skyrl_train; a given version is a version of skyrl.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_doctor.check.findings import note
from fsdp_doctor.check.framework import (
    FsdpFramework,
    ModelReading,
    VersionRange,
    load_facts,
    report_not_under_fsdp,
    trains_with_fsdp,
)
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, OffloadChoice, Role, make_extraction_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Strategy, Transfer
from fsdp_doctor.matrix.cases import Scenario

_STRATEGY = "trainer.strategy"
_MOVED = "distributed/fsdp_strategy.py moves it by hand if all models are colocated, the default"


class _Versions(VersionRange, frozen=True, kw_only=True):
    """Range of SkyRL versions.

    ``fsdp`` is the strategy that the word ``fsdp`` means, and ``default`` is the word that applies if none is set.
    ``adapter`` is the method that extracts an adapter.
    """

    fsdp: Strategy = Strategy.FSDP1
    default: str = "fsdp2"
    backend: Backend = Backend.MIXED
    adapter: str = "lora.layered_summon"


class SkyRl(FsdpFramework[_Versions]):
    facts = load_facts("skyrl", _Versions)

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return bool(settings.list_below("trainer.policy") or settings.list_below("trainer.placement"))

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        per_node = settings.read_number("trainer.placement.policy_num_gpus_per_node", default=1)
        nodes = settings.read_number("trainer.placement.policy_num_nodes", default=1)
        return per_node * nodes if per_node and nodes else None

    def list_models(self) -> dict[Role, tuple[str, ...]]:
        roles: list[Role] = ["actor"]
        in_reward = self.settings.read_flag("trainer.algorithm.use_kl_in_reward")
        if in_reward or self.settings.read_flag("trainer.algorithm.use_kl_loss", default=True):
            roles.append("ref")
        if self.settings.find_first("trainer.critic.model.path") is not None:
            roles.append("critic")
        return {role: self.list_keys(role).sections for role in roles}

    def read(self, role: Role) -> ModelReading:
        row = self.settings.find_first(_STRATEGY)
        if row is not None and not trains_with_fsdp(row, ("fsdp", "fsdp2"), ("megatron", "deepspeed", "jax")):
            return report_not_under_fsdp(role, row)
        policy = self.settings.find_first_true(*self.list_keys(role).policy)
        has_fsdp1 = any(self._read_strategy(versions).version == 1 for versions in self.list_ranges())
        sentence = f"{role}: SkyRL does not read cpu_offload for a model that FSDP1 trains"
        return self.read_role(role, [note(sentence, policy)] if policy and has_fsdp1 and role != "ref" else [])

    def choose_axes(self, role: Role, versions: _Versions) -> dict[AxisName, Chosen]:
        strategy = self._read_strategy(versions)
        offload = self._choose_offload(role, strategy)
        return {
            "strategy": Chosen(
                strategy, self.settings.find_first(_STRATEGY) or f"strategy={versions.default} is the default"
            ),
            "offload": offload.chosen,
            "transfer": Chosen(Transfer.NONBLOCKING, "fsdp_utils.py: non_blocking=True")
            if offload.param
            else Chosen(Transfer.BLOCKING),
            "model": self.choose_model(role),
            "backend": Chosen(versions.backend, "skyrl's workers/worker.py: gloo in addition to NCCL since 0.2"),
            "sharding": self.choose_sharding(role),
        }

    def list_extractions(self, role: Role, versions: _Versions, scenario: Scenario) -> Iterator[ExtractionPoint]:
        """Lists the actor's extraction by FSDPWeightExtractor, or of an adapter by collect_lora_params.

        Before the extraction, backload_to_gpu moves an offloaded model to the device.
        """
        if role != "actor":
            return
        if scenario.model.has_adapters:
            yield make_extraction_point(
                "adapter for the rollout", scenario, versions.adapter, staged=scenario.param_offload
            )
            return
        method = "state_dict.to.full_tensor" if scenario.version == 2 else "sharded_state_dict.full_tensor"
        yield make_extraction_point("weights for the rollout", scenario, method, staged=scenario.param_offload)

    def _read_strategy(self, versions: _Versions) -> Strategy:
        word = self.settings.read_text(_STRATEGY) or versions.default
        return versions.fsdp if word == "fsdp" else Strategy.FSDP2

    def _choose_offload(self, role: Role, strategy: Strategy) -> OffloadChoice:
        """Chooses the policy, or else the manual offload that colocation causes.

        Under FSDP1 only the reference model can have a policy.
        """
        offload = self.choose_offload(role, "cpu_offload=false is the default")
        if offload.policy and strategy.version == 1 and role != "ref":
            offload = OffloadChoice()
        if offload.policy or not self.settings.read_flag("trainer.placement.colocate_all", default=True):
            return offload
        return OffloadChoice(param=_MOVED, optimizer=None if role == "ref" else _MOVED)
