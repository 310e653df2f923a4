"""Axes of the matrix: their names, their values, and the meaning of each value.

A value belongs to only one axis, so the id of a case can be read back without positions.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias, get_args

from typing_extensions import Self, assert_never

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
    "optimizer",
    "init",
    "checkpoint",
    "context",
    "consumer",
]
FsdpVersion: TypeAlias = Literal[1, 2]


class AxisValue(str, Enum):
    """Value of an axis, equal to its name in ids and JSON; ``meaning`` explains it to users."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    def __str__(self) -> str:
        return str(self.value)


class Strategy(AxisValue):
    """FSDP implementation that shards the model."""

    FSDP2 = "fsdp2", "fully_shard"
    FSDP1 = "fsdp1", "FullyShardedDataParallel(use_orig_params=False), verl's default"
    FSDP1_ORIG = "fsdp1-orig", "FullyShardedDataParallel(use_orig_params=True)"

    @property
    def version(self) -> FsdpVersion:
        """Number of the FSDP implementation: 1 for FullyShardedDataParallel, 2 for fully_shard."""
        match self:
            case Strategy.FSDP2:
                return 2
            case Strategy.FSDP1 | Strategy.FSDP1_ORIG:
                return 1
            case _:
                assert_never(self)

    @property
    def uses_original_parameters(self) -> bool:
        """True if FSDP1 shows the wrapped model's own parameters instead of one flat parameter per unit."""
        match self:
            case Strategy.FSDP1_ORIG:
                return True
            case Strategy.FSDP2 | Strategy.FSDP1:
                return False
            case _:
                assert_never(self)


class OffloadFlag(AxisValue):
    """Setting of verl that moves memory to the host; there are three."""

    POLICY = "policy", "offload_policy=true"
    PARAM = "param", "param_offload=true"
    OPTIMIZER = "optimizer", "optimizer_offload=true"

    @property
    def moves(self) -> str:
        """Memory that goes to the host, in words."""
        match self:
            case OffloadFlag.POLICY | OffloadFlag.PARAM:
                return "shards"
            case OffloadFlag.OPTIMIZER:
                return "optimizer state"
            case _:
                assert_never(self)


class OffloadWay(AxisValue):
    """Way to offload that is not a combination of verl's three settings."""

    PARTIAL = "partial", "CPUOffloadPolicy / CPUOffload for every second decoder layer, none for the other units"
    BY_PARAMETER = (
        "by-parameter",
        "a mapping of names to policies: the matrices of each unit are offloaded (pytorch#188120; no release has it)",
    )
    BY_PHASE = (
        "by-phase",
        "CPUOffloadPolicy(offload_after_backward=False): shards are on the host only between forward and backward "
        "(pytorch#192441; no release has it)",
    )
    MOVED = (
        "moved",
        (
            "the trainer puts each shard into separate pinned memory, and moves the optimizer's state "
            "(miles_diffusion#182)"
        ),
    )
    AROUND_STEP = (
        "optimizer-around-step",
        "the optimizer state is on the device only during the update; the gradients of two batches are accumulated "
        "before each update (verl#7804)",
    )


@functools.total_ordering
@dataclass(frozen=True)
class Offload:
    """Combination of verl's three offload flags, in the order of :class:`OffloadFlag`, or another way to offload.

    As in verl, the policy takes precedence: with it, the two manual flags have no effect.
    """

    flags: tuple[OffloadFlag, ...] = ()
    way: OffloadWay | None = None

    @classmethod
    def parse(cls, text: str) -> Offload:
        """Reads ``none``, flags joined by ``+`` in their order, or the name of another way to offload. Raises
        ValueError for anything else.
        """
        for offload in OFFLOADS:
            if str(offload) == text:
                return offload
        raise ValueError(f"{text!r} is not a value of the axis offload")

    @classmethod
    def from_flags(cls, *, policy: bool = False, param: bool = False, optimizer: bool = False) -> Offload:
        flags = {OffloadFlag.POLICY: policy, OffloadFlag.PARAM: param, OffloadFlag.OPTIMIZER: optimizer}
        return cls(tuple(flag for flag, is_set in flags.items() if is_set))

    def __str__(self) -> str:
        return str(self.way or "+".join(self.flags) or "none")

    def __bool__(self) -> bool:
        return bool(self.flags or self.way)

    def __lt__(self, other: Offload) -> bool:
        return OFFLOADS.index(self) < OFFLOADS.index(other)

    @property
    def policy(self) -> bool:
        """True if torch places every shard, and keeps it in host memory between steps."""
        return OffloadFlag.POLICY in self.flags

    @property
    def takes_policy(self) -> bool:
        """True if at least one unit is under CPUOffloadPolicy or CPUOffload."""
        match self.way:
            case OffloadWay.PARTIAL | OffloadWay.BY_PARAMETER | OffloadWay.BY_PHASE:
                return True
            case OffloadWay.MOVED | OffloadWay.AROUND_STEP | None:
                return self.policy
            case _:
                assert_never(self.way)

    @property
    def takes_shards_away(self) -> bool:
        """True if the framework moves the shards to the host between steps, and back before the next step."""
        return OffloadFlag.PARAM in self.by_hand or self.way is OffloadWay.MOVED

    @property
    def takes_optimizer_away(self) -> bool:
        """True if the framework keeps the optimizer state on the host between steps."""
        return OffloadFlag.OPTIMIZER in self.by_hand or self.way in (OffloadWay.MOVED, OffloadWay.AROUND_STEP)

    @property
    def by_hand(self) -> tuple[OffloadFlag, ...]:
        """Flags for which the framework moves memory itself; empty under the policy."""
        return () if self.policy else self.flags

    @property
    def meaning(self) -> str:
        if self.way is not None:
            return self.way.meaning
        if not self.flags:
            return "param_offload=false, optimizer_offload=false, offload_policy=false"
        settings = ", ".join(flag.meaning for flag in self.flags)
        if self.by_hand:
            return f"{settings}: the framework moves the {' and '.join(flag.moves for flag in self.by_hand)}"
        if len(self.flags) > 1:
            return f"{settings}: the policy takes precedence, as in verl"
        return f"{settings}: CPUOffloadPolicy / CPUOffload(offload_params=True)"


_MANUAL_FLAGS = tuple(flag for flag in OffloadFlag if flag is not OffloadFlag.POLICY)
# Every combination of flags, first those without the policy, each by the number of flags; then the other ways.
OFFLOADS: tuple[Offload, ...] = (
    *(
        Offload((*policy, *manual))
        for policy in ((), (OffloadFlag.POLICY,))
        for count in range(len(_MANUAL_FLAGS) + 1)
        for manual in itertools.combinations(_MANUAL_FLAGS, count)
    ),
    *(Offload(way=way) for way in OffloadWay),
)


class Staging(AxisValue):
    """Selects whether the shards are moved to the device before the method is called."""

    UNSTAGED = "unstaged", "the method reads the shards where the offload left them"
    STAGED = "staged", "verl's load_fsdp_model_to_gpu first: model.to(device), or flat_param_to"

    @property
    def is_staged(self) -> bool:
        match self:
            case Staging.STAGED:
                return True
            case Staging.UNSTAGED:
                return False
            case _:
                assert_never(self)


class Model(AxisValue):
    """Model under test."""

    QWEN3 = "qwen3", "a dense Qwen3 with two layers"
    QWEN3_TIED = "qwen3-tied", "Qwen3 with lm_head tied to the embedding"
    QWEN3_BUFFERS = "qwen3-buffers", "Qwen3 with a persistent buffer in each layer"
    QWEN2 = "qwen2", "a dense Qwen2 (biases in the attention)"
    QWEN3_MOE = "qwen3-moe", "Qwen3-MoE with fused 3-D experts"
    QWEN3_5 = "qwen3.5", "Qwen3.5 with linear and full attention"
    QWEN3_LORA = "qwen3-lora", "Qwen3 with a LoRA adapter (peft) on every linear layer, everything else frozen"
    QWEN3_QLORA = (
        "qwen3-qlora",
        "like qwen3-lora, but the linear layers are in 4 bits (bitsandbytes, NF4), stored as float32",
    )
    QWEN3_QLORA_BF16 = (
        "qwen3-qlora-bf16",
        "like qwen3-qlora, but in bfloat16: codes are stored as bfloat16, and the scales are quantized, too "
        "(double quantization)",
    )
    QWEN3_FLOAT8 = "qwen3-float8", "Qwen3 whose decoder layers are gathered and multiplied in float8 (torchao)"
    QWEN3_MXFP8 = "qwen3-mxfp8", "Qwen3 whose decoder layers are multiplied in MXFP8 (torchao's prototype)"
    CUSTOM = "custom", "the configuration or checkpoint given with --model DIR"

    @property
    def is_tied(self) -> bool:
        return self is Model.QWEN3_TIED

    @property
    def has_buffers(self) -> bool:
        return self is Model.QWEN3_BUFFERS

    @property
    def has_adapters(self) -> bool:
        return self is Model.QWEN3_LORA or self.is_quantized

    @property
    def is_quantized(self) -> bool:
        """True if some parameters are codes of a quantization instead of weights."""
        return self in (Model.QWEN3_QLORA, Model.QWEN3_QLORA_BF16)

    @property
    def is_in_bf16(self) -> bool:
        """True if every parameter is in bfloat16, as transformers loads a model by default."""
        return self is Model.QWEN3_QLORA_BF16

    @property
    def is_of_torchao(self) -> bool:
        """True if weights are in a subclass of torchao, which multiplies them in 8 bits."""
        return self in (Model.QWEN3_FLOAT8, Model.QWEN3_MXFP8)

    @property
    def has_experts(self) -> bool:
        return self is Model.QWEN3_MOE

    @property
    def is_custom(self) -> bool:
        """True for the user's own model, of which only the configuration is known."""
        return self is Model.CUSTOM


class Dims(AxisValue):
    """Selects whether all ranks get shards of the same size."""

    EVEN = "even", "every sharded dimension is divisible by 2 and 4"
    UNEVEN = "uneven", "odd vocabulary and intermediate sizes: some shards are shorter"

    @property
    def is_even(self) -> bool:
        match self:
            case Dims.EVEN:
                return True
            case Dims.UNEVEN:
                return False
            case _:
                assert_never(self)


class Phase(AxisValue):
    """Point of a training run at which the method is called."""

    TRAINED = "trained", "after forward, backward and optimizer step"
    FRESH = "fresh", "before the first forward"
    AFTER_RAISED_FORWARD = "after-raised-forward", "after a step whose forward raised, which the job caught"
    AFTER_RAISED_BACKWARD = (
        "after-raised-backward",
        "after a step whose backward raised, which the job caught",
    )

    @property
    def is_trained(self) -> bool:
        return self is not Phase.FRESH

    @property
    def raised(self) -> Literal["forward", "backward"] | None:
        """Part of a step that raised before the method is called, so that the step was not ended."""
        match self:
            case Phase.AFTER_RAISED_FORWARD:
                return "forward"
            case Phase.AFTER_RAISED_BACKWARD:
                return "backward"
            case Phase.TRAINED | Phase.FRESH:
                return None
            case _:
                assert_never(self)


class Backend(AxisValue):
    """Backends of the default process group."""

    MIXED = "mixed", "a backend for each device type: cpu:gloo and the accelerator's default backend"
    DEVICE_ONLY = "device-only", "only the accelerator's backend, as init_process_group('nccl') gives"

    @property
    def has_cpu_collectives(self) -> bool:
        match self:
            case Backend.MIXED:
                return True
            case Backend.DEVICE_ONLY:
                return False
            case _:
                assert_never(self)


class Sharding(AxisValue):
    """Mesh over which the model is sharded."""

    FULL = "full", "one shard group over all ranks"
    HSDP = "hsdp", "a (world/2, 2) mesh: replicated, and sharded by two"
    TP = "tp", "a (world/2, 2) mesh: sharded over the first dim, tensor-parallel over the second"
    EXPERTS = "experts", "the experts over a separate mesh: ShardPlacementResult, torch 2.12 and newer"
    EXPERTS_2D = "2d", "experts as DTensors over the second dim of a (world/2, 2) mesh, then sharded over the first"
    HIDDEN_EXPERTS = (
        "hidden-experts",
        "as 2d, but with plain parameters: each group of ranks has different experts under the same name, as in VeOmni",
    )
    REPLICATE = "replicate", "replicate() instead of fully_shard, torch 2.12 and newer"
    SIZE1 = "size1", "a (world, 1) mesh: verl's fsdp_size=1"

    @property
    def needs_fsdp2(self) -> bool:
        match self:
            case Sharding.TP | Sharding.REPLICATE | Sharding.EXPERTS | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
                return True
            case Sharding.FULL | Sharding.HSDP | Sharding.SIZE1:
                return False
            case _:
                assert_never(self)

    @property
    def divides_experts(self) -> bool:
        """True if two neighbouring ranks, which train on the same batch, divide the experts before FSDP shards them."""
        return self in (Sharding.EXPERTS_2D, Sharding.HIDDEN_EXPERTS)

    @property
    def is_of_experts(self) -> bool:
        return self.divides_experts or self is Sharding.EXPERTS

    @property
    def has_one_mesh(self) -> bool:
        """True if every parameter is sharded over one group of all ranks."""
        return self is Sharding.FULL

    @property
    def keeps_whole_tensors(self) -> bool:
        """True if each rank holds every parameter whole, for any number of ranks."""
        match self:
            case Sharding.REPLICATE | Sharding.SIZE1:
                return True
            case Sharding.FULL | Sharding.HSDP | Sharding.TP:
                return False
            case Sharding.EXPERTS | Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
                return False
            case _:
                assert_never(self)


class Pinning(AxisValue):
    """Selects whether CPUOffloadPolicy keeps the shards in pinned host memory."""

    PINNED = "pinned", "CPUOffloadPolicy(pin_memory=True)"
    UNPINNED = "unpinned", "CPUOffloadPolicy(pin_memory=False)"

    @property
    def is_pinned(self) -> bool:
        match self:
            case Pinning.PINNED:
                return True
            case Pinning.UNPINNED:
                return False
            case _:
                assert_never(self)


class Transfer(AxisValue):
    """Selects whether a manual offload waits for its copies."""

    BLOCKING = "blocking", "manual offload waits for its copies"
    NONBLOCKING = "nonblocking", "manual offload copies with non_blocking=True"

    @property
    def is_blocking(self) -> bool:
        match self:
            case Transfer.BLOCKING:
                return True
            case Transfer.NONBLOCKING:
                return False
            case _:
                assert_never(self)


class Precision(AxisValue):
    """Dtype in which FSDP computes."""

    BF16_COMPUTE = (
        "bf16-compute",
        "mixed precision: computation in bfloat16, reduction of gradients in float32",
    )
    FP32_COMPUTE = "fp32-compute", "no mixed precision: FSDP casts nothing, and gathers the shards as they are"

    @property
    def casts(self) -> bool:
        """True if FSDP gathers the parameters in a dtype other than the dtype of the shards."""
        match self:
            case Precision.BF16_COMPUTE:
                return True
            case Precision.FP32_COMPUTE:
                return False
            case _:
                assert_never(self)


class Optimizer(AxisValue):
    """Optimizer that trains the model. Its state exists once the model is trained."""

    ADAMW = "adamw", "AdamW with torch's defaults (foreach where possible), with step counters on the host"
    SGD = "sgd", "SGD with momentum 0.9"
    MUON = "muon", "Muon for the matrices, torch 2.9 and newer; a separate SGD, without state, for the rest"
    ADAFACTOR = "adafactor", "torch's Adafactor; for a flat parameter it keeps whole second moments, not factors"
    ADAMW_FUSED = "adamw-fused", "AdamW(fused=True), with step counters on the parameters' device"
    ADAMW_CAPTURABLE = "adamw-capturable", "AdamW(capturable=True), as CUDA graphs require"
    ADAMW_8BIT = "adamw-8bit", "torchao's AdamW8bit: blocks of 8-bit codes with a scale each, and a tensor for lr"
    TENSOR_LR = "tensor-lr", "AdamW(lr=torch.tensor(...)), on the host"

    @property
    def has_full_state(self) -> bool:
        """True if each entry of the state is a single value or has a value for each element of its parameter."""
        match self:
            case Optimizer.ADAMW_8BIT:
                return False
            case Optimizer.ADAMW | Optimizer.SGD | Optimizer.MUON | Optimizer.ADAFACTOR:
                return True
            case Optimizer.ADAMW_FUSED | Optimizer.ADAMW_CAPTURABLE | Optimizer.TENSOR_LR:
                return True
            case _:
                assert_never(self)


class Init(AxisValue):
    """State of the model before a load: with weights, or on the meta device."""

    MATERIALIZED = "materialized", "before a load the model holds other weights than the checkpoint"
    META = "meta", "before a load the model is on the meta device"

    @property
    def is_meta(self) -> bool:
        match self:
            case Init.META:
                return True
            case Init.MATERIALIZED:
                return False
            case _:
                assert_never(self)


class CheckpointFit(AxisValue):
    """Relation of a load's checkpoint to the model's state dict: how the two differ, and who saved the checkpoint."""

    EXACT = "exact", "the checkpoint fits the model exactly"
    BF16 = "bf16", "a checkpoint in bfloat16 for parameters in float32"
    FP32 = "fp32", "a checkpoint in float32 for parameters in bfloat16"
    EXTRA_KEY = "extra-key", "the checkpoint has one tensor more than the model"
    MISSING_KEY = "missing-key", "the checkpoint lacks a tensor of the model"
    TIED_TWICE = "tied-twice", "the checkpoint has the tied weight under both names"
    TIED_ONCE = "tied-once", "the checkpoint has the tied weight only under its first name, as safetensors files have"
    OTHER_RUN = "other-run", "another run on the same number of ranks saved the checkpoint"
    OTHER_WORLD = "other-world", "a run on another number of ranks saved the checkpoint"
    HUB = "hub", "another run wrote the checkpoint with save_pretrained, under the Hub's names"

    @property
    def must_load(self) -> bool:
        """True if a load of the checkpoint has to succeed, because it has the model's names, shapes and dtypes.

        A checkpoint of another number of ranks need not load, because methods with one file for each rank cannot
        reshard it.
        """
        match self:
            case CheckpointFit.EXACT | CheckpointFit.TIED_TWICE | CheckpointFit.OTHER_RUN:
                return True
            case CheckpointFit.BF16 | CheckpointFit.FP32 | CheckpointFit.EXTRA_KEY | CheckpointFit.MISSING_KEY:
                return False
            case CheckpointFit.TIED_ONCE | CheckpointFit.OTHER_WORLD | CheckpointFit.HUB:
                return False
            case _:
                assert_never(self)

    @property
    def saved_elsewhere(self) -> bool:
        """True if other processes saved the checkpoint."""
        return self in (CheckpointFit.OTHER_RUN, CheckpointFit.OTHER_WORLD, CheckpointFit.HUB)

    @property
    def is_of_weights_alone(self) -> bool:
        """True if the checkpoint differs in a way that exists only for weights, not for an optimizer."""
        return self in (CheckpointFit.BF16, CheckpointFit.EXTRA_KEY, CheckpointFit.MISSING_KEY, CheckpointFit.HUB)

    @property
    def is_of_every_method(self) -> bool:
        """True if methods that load an optimizer or an adapter are also tried with such a checkpoint."""
        return self in (CheckpointFit.EXACT, CheckpointFit.FP32)

    @property
    def is_of_tied_weights(self) -> bool:
        return self in (CheckpointFit.TIED_TWICE, CheckpointFit.TIED_ONCE)


class Context(AxisValue):
    """Autograd context in which the method is called."""

    ORDINARY = "ordinary", "the method is called without a context around it"
    NO_GRAD = "no_grad", "the method is called, and its results are read, inside of torch.no_grad()"
    INFERENCE = "inference", "the method is called, and its results are read, inside of torch.inference_mode()"


class Consumer(AxisValue):
    """Use of the entries that a method yields. A receiver is another process."""

    ALONE = "alone", "each entry is read when it comes"
    SECOND_GROUP = "second-group", "rank 0 broadcasts each entry to a receiver, over a second process group"
    SLOW = "slow", "as second-group, to a slow receiver"
    PACKED = "packed", "rank 0 packs entries under two streams in turn, and broadcasts the buffers: vLLM's NCCL sender"
    STEP_IN_FLIGHT = "step-in-flight", "as packed, right after the launch of kernels that write the weights"
    COLOCATED = (
        "colocated",
        "every rank packs entries into one buffer, and goes on when the receiver acknowledges it: vLLM's IPC sender",
    )
    SHARED_DEVICE = "shared-device", "rank 0 broadcasts each entry to a receiver on the next rank's device: RLinf"
    KEEPS_VIEWS = "keeps-views", "entries are kept, and read after the last one"
    IN_PLACE = "in-place", "each entry is overwritten once it has been read"
    LAZY = (
        "lazy",
        "the method is called twice; the second call's entries are read and overwritten first, then the first call's "
        "entries are read",
    )
    REPEATED = (
        "repeated",
        "eight calls: memory, streams, threads or descriptors that grow with each call are a leak",
    )
    STOPS = "stops", "rank 0 stops after three entries; then the method is called again"
    RAISES = "raises", "rank 0 raises after three entries, and all ranks call a collective while it handles the error"
    DIES = (
        "dies",
        "the receiver ends after three entries, and all ranks call a collective while rank 0 handles the error",
    )

    @property
    def needs_sender(self) -> bool:
        """True if the consumer is tried only with methods whose entries a framework sends."""
        return self is not Consumer.ALONE

    @property
    def keeps_entries(self) -> bool:
        """True if the consumer keeps entries while it asks for others."""
        return self is Consumer.KEEPS_VIEWS or self in _PACKED

    @property
    def changes_streams(self) -> bool:
        """True if the consumer asks for entries on other streams than the stream of the call."""
        return self in _PACKED


_PACKED = (Consumer.PACKED, Consumer.STEP_IN_FLIGHT)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Dimension of the matrix, or of a framework's matrix: its values with their meanings, the default first."""

    name: str
    values: Mapping[str, str]
    always_in_id: bool = False

    @property
    def default(self) -> str:
        return next(iter(self.values))


_ENUMS: dict[str, type[AxisValue]] = {
    "strategy": Strategy,
    "staging": Staging,
    "model": Model,
    "dims": Dims,
    "phase": Phase,
    "backend": Backend,
    "sharding": Sharding,
    "pinning": Pinning,
    "transfer": Transfer,
    "precision": Precision,
    "optimizer": Optimizer,
    "init": Init,
    "checkpoint": CheckpointFit,
    "context": Context,
    "consumer": Consumer,
}


def parse_value(axis: str, text: str) -> AxisValue | Offload:
    """Reads a value of an axis. Raises KeyError for an unknown axis, ValueError for an unknown value."""
    if text not in AXIS[axis].values:
        raise ValueError(f"{text!r} is not a value of the axis {axis}")
    return Offload.parse(text) if axis == "offload" else _ENUMS[axis](text)


def _read_meanings(axis: AxisName) -> dict[str, str]:
    if axis == "offload":
        return {str(offload): offload.meaning for offload in OFFLOADS}
    return {member.value: member.meaning for member in _ENUMS[axis]}


AXES: tuple[Axis, ...] = tuple(
    Axis(name=name, values=_read_meanings(name), always_in_id=name in ("strategy", "offload", "staging"))
    for name in get_args(AxisName)
)
AXIS: dict[str, Axis] = {axis.name: axis for axis in AXES}
AXIS_OF_VALUE: dict[str, str] = {value: axis.name for axis in AXES for value in axis.values}


def check_axis_value(axis: str, value: str) -> str:
    """Returns ``value`` if the axis has it. Raises UsageError, with the most similar values, if not."""
    if value not in AXIS[axis].values:
        known = AXIS[axis].values
        raise UsageError(
            f"--{axis}: unknown value {value!r}{describe_nearest(value, known)}; use one of {', '.join(known)}"
        )
    return value


def describe_nearest(word: str, known: Iterable[str]) -> str:
    """Returns the words in ``known`` that are similar to ``word``, as a phrase; empty if there are none."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
