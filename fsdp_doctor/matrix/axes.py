"""The axes of the matrix: their names, their values, and what each value means.

No value of one axis is also a value of another, so the id of a case can be read back without positions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.errors import UsageError

AxisName: TypeAlias = Literal[
    "strategy",
    "offload",
    "staging",
    "model",
    "dims",
    "phase",
    "backend",
    "sharding",
    "pinning",
    "transfer",
    "precision",
    "init",
    "checkpoint",
    "context",
]
Strategy: TypeAlias = Literal["fsdp2", "fsdp1", "fsdp1-orig"]
Offload: TypeAlias = Literal[
    "none",
    "param",
    "optimizer",
    "param+optimizer",
    "policy",
    "policy+param",
    "policy+optimizer",
    "policy+param+optimizer",
]
Staging: TypeAlias = Literal["unstaged", "staged"]
Model: TypeAlias = Literal[
    "qwen3", "qwen3-tied", "qwen3-buffers", "qwen2", "qwen3-moe", "qwen3.5", "qwen3-lora", "custom"
]
Dims: TypeAlias = Literal["even", "uneven"]
Phase: TypeAlias = Literal["trained", "fresh"]
Backend: TypeAlias = Literal["mixed", "device-only"]
Sharding: TypeAlias = Literal["full", "hsdp", "tp", "experts", "replicate", "size1"]
Pinning: TypeAlias = Literal["pinned", "unpinned"]
Transfer: TypeAlias = Literal["blocking", "nonblocking"]
Precision: TypeAlias = Literal["bf16-compute", "fp32-compute"]
Init: TypeAlias = Literal["materialized", "meta"]
CheckpointFit: TypeAlias = Literal[
    "exact", "bf16", "fp32", "extra-key", "missing-key", "tied-twice", "tied-once", "other-run", "other-world"
]

Context: TypeAlias = Literal["ordinary", "no_grad", "inference"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of the matrix. The first value is the default; each has its meaning beside it."""

    name: AxisName
    values: dict[str, str]
    always_in_id: bool = False

    @property
    def default(self) -> str:
        return next(iter(self.values))


AXES: tuple[Axis, ...] = (
    Axis(
        name="strategy",
        always_in_id=True,
        values={
            "fsdp2": "fully_shard",
            "fsdp1": "FullyShardedDataParallel(use_orig_params=False), verl's default",
            "fsdp1-orig": "FullyShardedDataParallel(use_orig_params=True)",
        },
    ),
    Axis(
        name="offload",
        always_in_id=True,
        values={
            "none": "param_offload=false, optimizer_offload=false, offload_policy=false",
            "param": "param_offload=true: the framework moves the shards to the CPU by hand",
            "optimizer": "optimizer_offload=true: the framework moves the optimizer state",
            "param+optimizer": "param_offload=true, optimizer_offload=true",
            "policy": "offload_policy=true: CPUOffloadPolicy / CPUOffload(offload_params=True)",
            "policy+param": "offload_policy=true, param_offload=true: the policy takes precedence, as in verl",
            "policy+optimizer": "offload_policy=true, optimizer_offload=true: the policy takes precedence",
            "policy+param+optimizer": "all three true: the policy takes precedence",
        },
    ),
    Axis(
        name="staging",
        always_in_id=True,
        values={
            "unstaged": "the path reads the shards where the offload left them",
            "staged": "verl's load_fsdp_model_to_gpu first: model.to(device), or flat_param_to",
        },
    ),
    Axis(
        name="model",
        values={
            "qwen3": "a dense Qwen3 with two layers",
            "qwen3-tied": "Qwen3 with lm_head tied to the embedding",
            "qwen3-buffers": "Qwen3 with a persistent buffer in each layer",
            "qwen2": "a dense Qwen2 (biases in the attention)",
            "qwen3-moe": "Qwen3-MoE with fused 3-D experts",
            "qwen3.5": "Qwen3.5 with linear and full attention",
            "qwen3-lora": "Qwen3 with a LoRA adapter (peft) on every linear layer, everything else frozen",
            "custom": "the configuration or checkpoint given with --model DIR",
        },
    ),
    Axis(
        name="dims",
        values={
            "even": "every sharded dimension is divisible by 2 and 4",
            "uneven": "odd vocabulary and intermediate sizes: some shards are shorter",
        },
    ),
    Axis(
        name="phase",
        values={
            "trained": "after forward, backward and optimizer step",
            "fresh": "before the first forward",
        },
    ),
    Axis(
        name="backend",
        values={
            "mixed": "a backend for each device type: cpu:gloo and the accelerator's own",
            "device-only": "the accelerator's backend alone, as init_process_group('nccl') gives",
        },
    ),
    Axis(
        name="sharding",
        values={
            "full": "one shard group over all ranks",
            "hsdp": "a (world/2, 2) mesh: replicated, and sharded by two",
            "tp": "a (world/2, 2) mesh: sharded over the first dim, tensor-parallel over the second",
            "experts": "the experts over a mesh of their own: ShardPlacementResult, torch 2.12 and newer",
            "replicate": "replicate() in place of fully_shard, torch 2.12 and newer",
            "size1": "a (world, 1) mesh: verl's fsdp_size=1",
        },
    ),
    Axis(
        name="pinning",
        values={
            "pinned": "CPUOffloadPolicy(pin_memory=True)",
            "unpinned": "CPUOffloadPolicy(pin_memory=False)",
        },
    ),
    Axis(
        name="transfer",
        values={
            "blocking": "manual offload waits for its copies",
            "nonblocking": "manual offload copies with non_blocking=True",
        },
    ),
    Axis(
        name="precision",
        values={
            "bf16-compute": "mixed precision: parameters are computed with in bfloat16, gradients reduced in float32",
            "fp32-compute": "no mixed precision: FSDP casts nothing, and gathers the shards as they are",
        },
    ),
    Axis(
        name="init",
        values={
            "materialized": "before a load the model holds other weights than the checkpoint",
            "meta": "before a load the model is on the meta device",
        },
    ),
    Axis(
        name="checkpoint",
        values={
            "exact": "the checkpoint has what the model has",
            "bf16": "it is bfloat16, the model's parameters are float32",
            "fp32": "it is float32, the model's parameters are bfloat16",
            "extra-key": "it has a tensor more than the model",
            "missing-key": "it lacks a tensor of the model",
            "tied-twice": "it has both names of the tied weight",
            "tied-once": "it has the tied weight under its first name alone, as safetensors files do",
            "other-run": "other processes saved it, as many as load it",
            "other-world": "other processes saved it, of another number",
        },
    ),
    Axis(
        name="context",
        values={
            "ordinary": "the path is called as it stands",
            "no_grad": "it is called, and what it yields is read, inside of torch.no_grad()",
            "inference": "it is called, and what it yields is read, inside of torch.inference_mode()",
        },
    ),
)

AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
AXIS_OF_VALUE: dict[str, AxisName] = {value: axis.name for axis in AXES for value in axis.values}


def check_axis_value(axis: str, value: str) -> str:
    """Returns ``value`` if the axis has it. Raises UsageError with the nearest ones if not."""
    if value not in AXIS[axis].values:
        known = AXIS[axis].values
        raise UsageError(f"--{axis}: unknown value {value!r}{nearest(value, known)}; use one of {', '.join(known)}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """The similar ones among ``known``, as a part of a sentence; empty where there are none."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
