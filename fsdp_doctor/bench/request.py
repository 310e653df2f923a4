"""What a benchmark measures. Read without torch."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from fsdp_doctor.matrix.contracts import Direction

# As the probe's axes have them: no offload, verl's manual one, CPUOffloadPolicy pinned or not.
OFFLOADS: dict[str, str] = {
    "none": "the shards are on the device",
    "param": 'model.to("cpu"): the shards are in pageable host memory',
    "policy": "CPUOffloadPolicy: the shards are in pinned host memory",
    "policy-unpinned": "CPUOffloadPolicy(pin_memory=False): pageable",
}
STRATEGIES = ("fsdp2", "fsdp1", "fsdp1-orig")
_FSDP1_PATHS = (
    "full_tensors",
    "full_state_dict",
    "sharded_state_dict.full_tensor",
    "summon_full_params",
    "get_model_state_dict.full",
    "get_model_state_dict.full+cpu",
)
PATHS: dict[str, tuple[str, ...]] = {
    "fsdp2": (
        "full_tensors",
        "full_state_dict",
        "state_dict.to.full_tensor",
        "stage-whole-model",
        "unshard",
        "get_model_state_dict.full",
        "get_model_state_dict.full+cpu",
    ),
    "fsdp1": _FSDP1_PATHS,
    "fsdp1-orig": _FSDP1_PATHS,
}
# The way in: where the full tensors are, and by what they are loaded.
SOURCES: dict[str, str] = {
    "rank0": "in pinned memory of rank 0 alone",
    "ranks": "in pinned memory of each rank",
    "files": "in safetensors files that are in the page cache",
}
LOAD_PATHS = ("load_full_tensors", "set_model_state_dict.broadcast", "set_model_state_dict.full")
DTYPES = ("bf16", "fp32", "fp32:bf16")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """model: a named shape, or a directory with a config.json. layers: instead of the model's own number.

    dtypes: of DTYPES; ``fp32:bf16`` is fp32 shards yielded as bf16. bucket_bytes: each is measured, on the way in the
    first; None for the default.
    paths: names of PATHS, or module:function of the user; on the way in, of LOAD_PATHS; empty for all.
    sources: of SOURCES, for the way in.
    """

    direction: Direction
    sources: tuple[str, ...]
    model: str
    layers: int | None
    strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    dtypes: tuple[str, ...]
    bucket_bytes: tuple[int | None, ...]
    paths: tuple[str, ...]
    repeat: int
    device: str
    json_file: pathlib.Path | None
