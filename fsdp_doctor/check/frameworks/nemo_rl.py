"""NeMo-RL: ``policy.dtensor_cfg`` in its YAML, unless Megatron trains.

Sources read in NeMo-RL v0.2.1 to v0.7.0: models/policy/dtensor_policy_worker.py and dtensor_policy_worker_v2.py for the
backend and the extractions; models/dtensor/parallelize.py and models/automodel/setup.py for the offload policy, which
does not pin memory; fsdp1_policy_worker.py until v0.2; algorithms/grpo.py for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_doctor.check.framework import FsdpFramework, ModelReading, VersionRange, load_facts, report_not_under_fsdp
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, make_extraction_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Pinning, Strategy
from fsdp_doctor.matrix.cases import Scenario

_DTENSOR = "policy.dtensor_cfg"
_MEGATRON = "policy.megatron_cfg.enabled"
_DEGREES = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")


class _Versions(VersionRange, frozen=True, kw_only=True):
    """Range of versions; ``mixed_in_v2`` is true if the v2 worker uses gloo in addition to NCCL with offload."""

    mixed_in_v2: bool


class NemoRl(FsdpFramework[_Versions]):
    facts = load_facts("nemo_rl", _Versions)

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return bool(settings.list_below(_DTENSOR) or settings.list_below("policy.megatron_cfg")) or (
            "policy.model_name" in settings and bool(settings.list_below("cluster"))
        )

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        """Counts the ranks that train: the whole cluster, without the GPUs that only generate.

        Separate generation uses GPUs of the only node, or whole nodes if there are several nodes. Returns None if the
        configuration does not give the number of GPUs.
        """
        per_node, nodes = (
            settings.read_number("cluster.gpus_per_node"),
            settings.read_number("cluster.num_nodes", default=1),
        )
        if not per_node or not nodes:
            return None
        if settings.read_flag("policy.generation.colocated.enabled", default=True):
            return per_node * nodes
        name = "gpus_per_node" if nodes == 1 else "num_nodes"
        taken = settings.read_number(f"policy.generation.colocated.resources.{name}")
        if taken is None:
            return None
        return per_node - taken if nodes == 1 else per_node * (nodes - taken)

    def read(self, role: Role) -> ModelReading:
        if self.settings.read_flag(_MEGATRON):
            return report_not_under_fsdp(role, self.settings.find_first(_MEGATRON))
        enabled = self.settings.find_first(f"{_DTENSOR}.enabled")
        if enabled is None:
            raise Unreadable(
                "policy.dtensor_cfg.enabled is not in the configuration; also give the file that its `defaults` names"
            )
        if not self.settings.read_flag(f"{_DTENSOR}.enabled"):
            raise Unreadable(
                f"{enabled}: NeMo-RL uses FSDP1 up to v0.2, and newer versions refuse this setting; neither is checked"
            )
        return self.read_role(role, self.find_other_parallelisms(_DTENSOR, _DEGREES))

    def choose_axes(self, role: Role, versions: _Versions) -> dict[AxisName, Chosen]:
        offload = self.choose_offload(role, "cpu_offload=false is the default")
        is_mixed = offload.policy and self.settings.read_flag(f"{_DTENSOR}._v2") and versions.mixed_in_v2
        return {
            "strategy": Chosen(Strategy.FSDP2, "the DTensor worker uses fully_shard only"),
            "offload": offload.chosen,
            "pinning": Chosen(
                Pinning.UNPINNED if offload.policy else Pinning.PINNED, "nemo_rl: CPUOffloadPolicy(pin_memory=False)"
            ),
            "backend": Chosen(
                Backend.MIXED if is_mixed else Backend.DEVICE_ONLY,
                "the worker's init_process_group: gloo in addition to NCCL with cpu_offload, with _v2 and since v0.5",
            ),
        }

    def list_extractions(self, role: Role, versions: _Versions, scenario: Scenario) -> Iterator[ExtractionPoint]:
        """Lists checkpoints, and dtensor_params_generator after an offloaded model was moved to the device."""
        yield make_extraction_point(
            "weights for generation", scenario, "state_dict.full_tensor.to", staged=scenario.policy
        )
        if self.settings.read_flag("checkpointing.enabled"):
            yield make_extraction_point("checkpoint", scenario, "get_model_state_dict.sharded")
