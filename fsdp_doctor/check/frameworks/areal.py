"""AReaL: its YAML, whose allocation says which engine trains, and ``fsdp.offload_params`` of each engine.

Read in AReaL at v0.3.3 to v1.0.4: api/cli_args.py (FSDPEngineConfig, TrainEngineConfig) for the keys and
api/alloc_mode.py for the allocation, engine/fsdp_engine.py for the backend (NCCL, and gloo only as a second group), the
policy, and what is read, engine/fsdp_utils/grad.py for gradients on the CPU, whose norm it takes to the device.
"""

from __future__ import annotations

import functools
import math
import re

from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, extraction, use_of
from fsdp_doctor.matrix.cases import Scenario

_ROLES: tuple[Role, ...] = ("actor", "critic", "ref", "model")
_KEYS = ("wrap_policy", "offload_params", "memory_efficient_load", "per_layer_optim_step", "optim_step_prefetch_layers")
_ALLOCATION = "allocation_mode"
_ENGINES = ("fsdp", "megatron", "archon")
_INFERENCE = ("sglang", "vllm")
_DEGREE = re.compile(r"([a-z])(\d+)")


def _table(role: Role) -> KeyTable:
    return KeyTable(policy=(f"{role}.fsdp.offload_params",), path=(f"{role}.path",))


def _recognises(settings: Settings) -> bool:
    trained = any(f"{role}.backend" in settings or settings.below(f"{role}.fsdp") for role in _ROLES)
    return _ALLOCATION in settings or (trained and ("cluster.n_nodes" in settings or bool(settings.below("actor"))))


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    found = [role for role in _ROLES if f"{role}.path" in settings or f"{role}.backend" in settings]
    return [
        ModelSettings(
            role=role,
            sections=(f"{role}.fsdp",),
            keys=_KEYS,
            read=functools.partial(_read, settings, role, given.world_size),
        )
        for role in found or ["actor"]
    ]


def _read(settings: Settings, role: Role, world_size: int | None) -> ModelReading:
    row, allocation = _allocation(settings, role)
    engine = allocation.partition(":")[0]
    if engine == "archon":
        raise Unreadable(f"{row}: the Archon engine has an FSDP of its own, which is not read")
    if engine == "megatron" or (engine not in _ENGINES and _degrees(allocation).get("p", 1) > 1):
        return not_under_fsdp(role, row)
    if row is None:
        raise Unreadable(f"neither {role}.backend nor {_ALLOCATION} says which engine trains it")
    table = _table(role)
    offload = table.offload(settings, "offload_params=false is the default")
    use = use_of(
        role,
        "",
        {
            "strategy": Chosen("fsdp2", "AReaL uses fully_shard only"),
            "offload": offload,
            "backend": Chosen("device-only", "areal/engine/fsdp_engine.py: the model's process group has NCCL alone"),
        },
        functools.partial(_extraction_points, role=role),
    )
    return ModelReading(uses=(use,), model=table.configured_model(settings, world_size))


def _extraction_points(scenario: Scenario, role: Role) -> list[ExtractionPoint]:
    """_get_full_tensor, which rebuilds a DTensor on the device where the shard is on the CPU; and save_pretrained."""
    sync = "from_local" if scenario.policy else "parameters.data.full_tensor"
    points = [extraction("weights for the rollout", scenario, sync)] if role == "actor" else []
    return points if role == "ref" else [*points, extraction("checkpoint", scenario, "get_model_state_dict.full+cpu")]


def _allocation(settings: Settings, role: Role) -> tuple[Setting | None, str]:
    """The setting that says how the model is trained, and the part of it that is the training's."""
    row = settings.first(f"{role}.backend") or settings.first(_ALLOCATION)
    if row is None:
        return None, ""
    parts = re.split(r"[+|]", str(row.value).strip())
    training = [part for part in parts if not part.startswith(_INFERENCE)]
    return row, training[-1] if training else ""


def _degrees(allocation: str) -> dict[str, int]:
    return {letter: int(number) for letter, number in _DEGREE.findall(allocation.rpartition(":")[2])}


def _world_size(settings: Settings) -> int | None:
    for role in _ROLES:
        row, allocation = _allocation(settings, role)
        if row is not None and "(" not in allocation and (degrees := _degrees(allocation)):
            return math.prod(degrees.values())
    return None


AREAL = Framework(
    name="AReaL",
    read_in="v0.3.3 to v1.0.4",
    distributions=("areal",),
    cpu_collectives=False,
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
