"""The axes of the matrix, the scenarios that they span, and the ids of cases.

A *scenario* is a point on every axis but the extraction path: a model that is built, sharded,
trained for one step, offloaded and (perhaps) staged. A *case* is a scenario and a path. The id
of a case spells strategy, offload and staging, then every other axis that is not at its
default, then the path: ``fsdp2/policy/staged/uneven/state_dict``. No value of one axis is also
a value of another, so an id can be read back without positions.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from fsdp_doctor.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of the matrix. The first value is the default; each has its meaning beside it."""

    name: str
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
            "policy+param": "offload_policy=true, param_offload=true: the policy wins, as in verl",
            "policy+optimizer": "offload_policy=true, optimizer_offload=true: the policy wins",
            "policy+param+optimizer": "all three true: the policy wins",
        },
    ),
    Axis(
        name="staging",
        always_in_id=True,
        values={
            "unstaged": "the path meets the shards where the offload left them",
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
            "qwen3-lora": "Qwen3 with a LoRA adapter of peft on every linear layer, all else frozen",
            "custom": "the configuration or checkpoint given with --model DIR",
        },
    ),
    Axis(
        name="dims",
        values={
            "even": "every sharded dimension divides by 2 and 4",
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
)

AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
_AXIS_OF_VALUE: dict[str, str] = {value: axis.name for axis in AXES for value in axis.values}


@dataclass(frozen=True, kw_only=True, order=True)
class Scenario:
    """A point on every axis but the path. Each field holds a value of the axis of that name."""

    strategy: str
    offload: str
    staging: str
    model: str = AXIS["model"].default
    dims: str = AXIS["dims"].default
    phase: str = AXIS["phase"].default
    backend: str = AXIS["backend"].default
    sharding: str = AXIS["sharding"].default
    pinning: str = AXIS["pinning"].default
    transfer: str = AXIS["transfer"].default

    @property
    def id(self) -> str:
        return "/".join(
            value for axis in AXES if (value := getattr(self, axis.name)) != axis.default or axis.always_in_id
        )

    @property
    def policy(self) -> bool:
        """Whether torch owns the placement: the policy overrides the manual offloads, as in verl."""
        return "policy" in self.offload

    @property
    def param_offload(self) -> bool:
        return not self.policy and "param" in self.offload

    @property
    def optimizer_offload(self) -> bool:
        return not self.policy and "optimizer" in self.offload

    @property
    def contradiction(self) -> str:
        """Why no model can be on all these points at once; empty if one can."""
        if self.pinning == "unpinned" and not (self.policy and self.version == 2):
            return "only FSDP2's CPUOffloadPolicy can be told not to pin"
        if self.transfer == "nonblocking" and not (self.param_offload or self.optimizer_offload):
            return "only a manual offload can be non-blocking"
        if self.dims == "uneven" and self.model == "custom":
            return "the dimensions of a model given with --model are its own"
        return ""

    @property
    def version(self) -> int:
        """1 for FullyShardedDataParallel, 2 for fully_shard."""
        return 2 if self.strategy == "fsdp2" else 1


@dataclass(frozen=True, order=True)
class Case:
    """A scenario and the name of an extraction path."""

    scenario: Scenario
    path: str

    @property
    def id(self) -> str:
        return f"{self.scenario.id}/{self.path}"


def parse_case_id(text: str, known_paths: tuple[str, ...]) -> Case:
    """Reads an id back. Raises UsageError that names the part which is not known."""
    *values, path = text.split("/")
    fields: dict[str, str] = {}
    for value in values:
        axis = _AXIS_OF_VALUE.get(value)
        if axis is None:
            raise UsageError(f"case {text!r}: {value!r} is no value of an axis{_nearest(value, _AXIS_OF_VALUE)}")
        if axis in fields:
            raise UsageError(f"case {text!r} names the axis {axis} twice: {fields[axis]} and {value}")
        fields[axis] = value
    missing = [axis.name for axis in AXES if axis.always_in_id and axis.name not in fields]
    if missing:
        raise UsageError(
            f"case {text!r} does not say its {' and '.join(missing)}; an id looks like fsdp2/policy/staged/state_dict"
        )
    if path not in known_paths and ":" not in path:
        raise UsageError(f"case {text!r}: there is no path {path!r}{_nearest(path, known_paths)}")
    return Case(Scenario(**fields), path)


def check_axis_value(axis: str, value: str) -> str:
    """Returns ``value`` if the axis has it. Raises UsageError with the nearest ones if not."""
    if value not in AXIS[axis].values:
        known = ", ".join(AXIS[axis].values)
        raise UsageError(f"{value!r} is no value of --{axis}; it has {known}")
    return value


def scenario_from_dict(fields: dict[str, str]) -> Scenario:
    """The inverse of ``dataclasses.asdict``, for records and reports."""
    return Scenario(**{field.name: fields[field.name] for field in dataclasses.fields(Scenario)})


def _nearest(word: str, known: tuple[str, ...] | dict[str, str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=3)
    return f" (near it: {', '.join(close)})" if close else ""
