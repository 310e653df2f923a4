"""AReaL: its YAML, in which the allocation determines the training engine and each engine has ``fsdp.offload_params``.

Sources read in AReaL v0.3.3 to v1.0.4: api/cli_args.py (FSDPEngineConfig, TrainEngineConfig) for the keys;
api/alloc_mode.py for the allocation; engine/fsdp_engine.py for the backend (NCCL, with gloo only in a second group),
the policy and the extractions; engine/fsdp_utils/grad.py for gradients on the CPU, whose norm is moved to the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fsdp_doctor.check.framework import (
    FsdpFramework,
    ModelReading,
    VersionRange,
    load_facts,
    report_not_under_fsdp,
)
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, make_extraction_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Strategy
from fsdp_doctor.matrix.cases import Scenario

_ROLES: tuple[Role, ...] = ("actor", "critic", "ref", "model")
_ALLOCATION = "allocation_mode"
# Parentheses contain the degrees for parts of the model: megatron:(attn:d2p1t4|ffn:d1p1e8).
_BETWEEN_PARTS = re.compile(r"[+|](?![^()]*\))")
_DEGREES = re.compile(r"(?:[a-z]\d+)+")


class Areal(FsdpFramework[VersionRange]):
    facts = load_facts("areal")

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        is_trained = any(f"{role}.backend" in settings or settings.list_below(f"{role}.fsdp") for role in _ROLES)
        is_cluster = "cluster.n_nodes" in settings or bool(settings.list_below("actor"))
        return _ALLOCATION in settings or (is_trained and is_cluster)

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        for role in _ROLES:
            _, allocation = _read_allocation(settings, role)
            if "(" not in allocation and (degrees := _parse_degrees(allocation)):
                return math.prod(degrees.values())
        return None

    def list_models(self) -> dict[Role, tuple[str, ...]]:
        roles = [role for role in _ROLES if f"{role}.path" in self.settings or f"{role}.backend" in self.settings]
        return {role: self.list_keys(role).sections for role in roles or _ROLES[:1]}

    def read(self, role: Role) -> ModelReading:
        row, allocation = _read_allocation(self.settings, role)
        if row is None:
            raise Unreadable(f"neither {role}.backend nor {_ALLOCATION} says which engine trains the {role}")
        # If no engine is named, Megatron trains if there are pipeline stages.
        default = "megatron" if _parse_degrees(allocation).get("p", 1) > 1 else "fsdp"
        engine = default if _DEGREES.fullmatch(allocation) else allocation.partition(":")[0]
        if engine not in ("fsdp", "megatron"):
            raise Unreadable(f"{row}: this engine is not known, or has its own FSDP, which is not checked")
        return self.read_role(role) if engine == "fsdp" else report_not_under_fsdp(role, row)

    def choose_axes(self, role: Role, versions: VersionRange) -> dict[AxisName, Chosen]:
        return {
            "strategy": Chosen(Strategy.FSDP2, "AReaL uses fully_shard only"),
            "offload": self.choose_offload(role, "offload_params=false is the default").chosen,
            "model": self.choose_model(role),
            "backend": Chosen(
                Backend.DEVICE_ONLY, "areal/engine/fsdp_engine.py: the model's process group has only NCCL"
            ),
        }

    def list_extractions(self, role: Role, versions: VersionRange, scenario: Scenario) -> Iterator[ExtractionPoint]:
        """Lists save_pretrained, and _get_full_tensor, which first copies a DTensor's CPU shard to the device."""
        if role == "actor":
            sync = "from_local" if scenario.policy else "parameters.data.full_tensor"
            yield make_extraction_point("weights for the rollout", scenario, sync)
        if role != "ref":
            yield make_extraction_point("checkpoint", scenario, "get_model_state_dict.full+cpu")


def _read_allocation(settings: Settings, role: Role) -> tuple[Setting | None, str]:
    """Returns the setting that says how the model is trained, and the part of its value about training."""
    row = settings.find_first(f"{role}.backend", _ALLOCATION)
    parts = _BETWEEN_PARTS.split(str(row.value).strip()) if row else []
    training = [part for part in parts if not part.startswith(("sglang", "vllm"))]
    return row, training[-1] if training else ""


def _parse_degrees(allocation: str) -> dict[str, int]:
    """Maps the letter of each parallelism to its degree: ``fsdp:d4t2`` gives 4 for d and 2 for t."""
    degrees = re.findall(r"([a-z])(\d+)", allocation.rpartition(":")[2])
    return {letter: int(number) for letter, number in degrees}
