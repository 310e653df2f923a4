"""Scenarios and cases, and their ids.

A *scenario* is a point on every axis except the method: a model that is built, sharded, perhaps trained, offloaded and
perhaps staged; and, for a method that loads, a checkpoint. A *case* is a scenario and a method. The id of a case lists
strategy, offload and staging, then every other axis that is not at its default, then the method:
``fsdp2/policy/staged/uneven/state_dict``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import (
    AXES,
    AXIS,
    AXIS_OF_VALUE,
    Backend,
    CheckpointFit,
    Consumer,
    Context,
    Dims,
    FsdpVersion,
    Init,
    Model,
    Offload,
    OffloadFlag,
    OffloadWay,
    Optimizer,
    Phase,
    Pinning,
    Precision,
    Sharding,
    Staging,
    Strategy,
    Transfer,
    describe_nearest,
    parse_value,
)
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase, FrameworkScenario, make_framework_scenario

_WAYS_OF_FSDP2 = (OffloadWay.BY_PARAMETER, OffloadWay.BY_PHASE, OffloadWay.MOVED)


@dataclass(frozen=True, kw_only=True, order=True)
class Scenario:
    """Point on every axis except the method. Each field has a value of the axis with its name."""

    strategy: Strategy
    offload: Offload
    staging: Staging
    model: Model = Model.QWEN3
    dims: Dims = Dims.EVEN
    phase: Phase = Phase.TRAINED
    backend: Backend = Backend.MIXED
    sharding: Sharding = Sharding.FULL
    pinning: Pinning = Pinning.PINNED
    transfer: Transfer = Transfer.BLOCKING
    precision: Precision = Precision.BF16_COMPUTE
    optimizer: Optimizer = Optimizer.ADAMW
    init: Init = Init.MATERIALIZED
    checkpoint: CheckpointFit = CheckpointFit.EXACT
    context: Context = Context.ORDINARY
    consumer: Consumer = Consumer.ALONE

    @functools.cached_property
    def values(self) -> Mapping[str, str]:
        """Name of the value on each axis, in the form of ids and JSON."""
        return {axis.name: str(getattr(self, axis.name)) for axis in AXES}

    def to_json(self) -> dict[str, str]:
        """Returns the scenario as JSON values, in the form that :func:`make_any_case` reads."""
        return dict(self.values)

    @functools.cached_property
    def id(self) -> str:
        return "/".join(
            value for axis in AXES if (value := self.values[axis.name]) != axis.default or axis.always_in_id
        )

    def change(self, **values: str | Offload) -> Scenario:
        """Returns the scenario with other values on some axes. Raises the errors of :func:`make_scenario`."""
        return make_scenario({**self.values, **{axis: str(value) for axis, value in values.items()}})

    @property
    def generation(self) -> str:
        """Name of the group of worker processes that can run the scenario: the backend of their process groups."""
        return str(self.backend)

    def drop_offload(self) -> Scenario:
        """Returns the same scenario with the default offload."""
        return dataclasses.replace(self, offload=Offload())

    @property
    def policy(self) -> bool:
        """True if torch places the shards; as in verl, the policy overrides the manual offloads."""
        return self.offload.policy

    @property
    def param_offload(self) -> bool:
        return OffloadFlag.PARAM in self.offload.by_hand

    @property
    def optimizer_offload(self) -> bool:
        return OffloadFlag.OPTIMIZER in self.offload.by_hand

    @property
    def version(self) -> FsdpVersion:
        """Number of the FSDP implementation: 1 for FullyShardedDataParallel, 2 for fully_shard."""
        return self.strategy.version

    @property
    def is_of_loading(self) -> bool:
        """True if some value of the scenario makes sense only for a load."""
        return self.init.is_meta or self.checkpoint is not CheckpointFit.EXACT

    @property
    def must_load(self) -> bool:
        """True if a load of weights has to succeed; otherwise every rank may refuse it.

        A model with quantized weights may refuse: a checkpoint of quantized codes lacks their scales, and weights in
        full precision would have to be quantized first.
        """
        return self.can_be_loaded and not self.model.is_quantized

    @property
    def can_be_loaded(self) -> bool:
        """True if a load that does not touch quantized weights has to succeed.

        FSDP1 cannot recover from a backward that raised, and it has lost its shards if a manual offload moved
        parameters that a step had left unsharded. Loading weights repairs neither.
        """
        is_moved = self.offload.takes_shards_away or (self.staging.is_staged and not self.policy)
        is_beyond_repair = self.phase.raised == "backward" or (self.phase.raised is not None and is_moved)
        return self.checkpoint.must_load and not (self.version == 1 and is_beyond_repair)

    @property
    def must_extract(self) -> bool:
        """True if an extraction has to succeed; otherwise every rank may refuse to yield quantized codes as weights."""
        return not self.model.is_quantized

    @property
    def contradiction(self) -> str:
        """Reason why no model can have all these values at once; empty if a model can."""
        if self.version == 1 and self.offload.way in _WAYS_OF_FSDP2:
            return f"only FSDP2's shards can be offloaded as {self.offload}"
        if not self.pinning.is_pinned and not (self.offload.takes_policy and self.version == 2):
            return "only FSDP2's CPUOffloadPolicy can leave memory unpinned"
        if not self.transfer.is_blocking and not self.offload.by_hand:
            return "only verl's manual offload can be non-blocking"
        if self.sharding.needs_fsdp2 and self.version == 1:
            return f"only FSDP2 can be sharded as {self.sharding}"
        if self.checkpoint is CheckpointFit.HUB and self.model.has_adapters:
            return "save_pretrained of a model with adapters writes only the adapters"
        if self.sharding is Sharding.TP and self.model.has_experts:
            return "tensor parallelism divides the dense MLP, but a model with experts has no dense MLP"
        if self.sharding.is_of_experts and not (self.model.has_experts or self.model.is_custom):
            return "only a model with experts has a mesh for experts"
        if self.sharding.divides_experts and self.model.is_custom:
            return (
                f"a model of your own decides itself how it divides experts, so it cannot be sharded as {self.sharding}"
            )
        if self.sharding.divides_experts and not self.dims.is_even:
            return "an uneven model has an odd number of experts, which two groups of ranks cannot share evenly"
        if self.model.is_of_torchao and self.version == 1:
            return "torchao gathers weights in 8 bits only under FSDP2"
        if self.model.is_of_torchao and not self.dims.is_even:
            return "torchao multiplies in 8 bits only if 16 (float8) or 32 (MXFP8) divides the dimensions"
        if self.model is Model.QWEN3_MXFP8 and not self.precision.casts:
            return "torchao gathers weights for MXFP8 in the dtype of a mixed precision"
        if self.model is Model.QWEN3_QLORA and self.precision.casts:
            return "a cast to bfloat16 destroys 4-bit codes that are stored as float32"
        if self.model.is_in_bf16 and not self.precision.casts:
            return "a model in bfloat16 never computes in float32"
        if self.model.is_quantized and (self.init.is_meta or self.checkpoint is not CheckpointFit.EXACT):
            return "a model in 4 bits is quantized from weights before it is sharded"
        if self.model.is_quantized and self.sharding is Sharding.TP:
            return "tensor parallelism divides rows of weights, which 4-bit codes do not have"
        if not self.precision.casts and self.checkpoint is CheckpointFit.FP32:
            return "a model for the checkpoint fp32 has bfloat16 parameters, and never computes in float32"
        if reason := self._explain_no_optimizer():
            return reason
        if self.model.is_custom and not self.dims.is_even:
            return "the dimensions of a model given with --model are its own"
        if self.checkpoint.is_of_tied_weights and not (self.model.is_tied or self.model.is_custom):
            return f"only a model with tied weights has a checkpoint that is {self.checkpoint}"
        if not self.init.is_meta:
            return ""
        if self.version == 1:
            return "FullyShardedDataParallel materializes a model when it wraps it"
        if self.phase.is_trained:
            return "a model on the meta device has not been trained"
        if self.offload.takes_shards_away or self.staging.is_staged:
            return "a model on the meta device has no memory that could be moved"
        return ""

    def _explain_no_optimizer(self) -> str:
        """Explains why the optimizer cannot train such a model; empty if it can."""
        match self.optimizer:
            case Optimizer.MUON if self.version == 1:
                return "Muon needs matrices, but the optimizer of FSDP1 has flat parameters"
            case Optimizer.ADAMW_8BIT if self.version == 1:
                return (
                    "torchao makes no 8-bit state of FSDP1's flat shards here, because their sizes are not "
                    "multiples of its blocks"
                )
            case Optimizer.ADAFACTOR if self.version == 2:
                return "torch's Adafactor squares the norms of gradients in place, which DTensors refuse"
            case Optimizer.ADAMW_CAPTURABLE if self.policy:
                return "a capturable AdamW steps on the device, but under the policy the optimizer steps on the host"
            case _:
                return ""


@dataclass(frozen=True, order=True)
class Case:
    """Scenario and method.

    method: a name in the table of methods, or the user's ``module:function``.
    """

    scenario: Scenario
    method: str

    @property
    def id(self) -> str:
        return f"{self.scenario.id}/{self.method}"

    @property
    def that_must_work(self) -> Case:
        """Case in which the method must work: this case with the exact checkpoint and without quantized weights.

        If the model still cannot be loaded, because a step raised, the method is called before the first step.
        """
        exact = self.scenario.change(checkpoint=AXIS["checkpoint"].default)
        if exact.model.is_quantized:
            exact = exact.change(model=Model.QWEN3_LORA.value)
        return Case(exact if exact.must_load else exact.change(phase="fresh"), self.method)


AnyScenario: TypeAlias = Scenario | FrameworkScenario
AnyCase: TypeAlias = Case | FrameworkCase


def list_frameworks(cases: Iterable[AnyCase]) -> tuple[str, ...]:
    """Lists the frameworks whose own code the cases run, each once."""
    return tuple(dict.fromkeys(case.scenario.framework for case in cases if isinstance(case, FrameworkCase)))


def read_leading_words(case: AnyCase) -> tuple[str, str, str]:
    """Returns the words for strategy, offload and staging with which the scenario's id begins.

    For a framework's case, the framework's name precedes the strategy, and the staging is empty.
    """
    words = (*case.scenario.id.split("/"), "", "")
    return (words[0], words[1], "") if isinstance(case, FrameworkCase) else (words[0], words[1], words[2])


def make_any_case(scenario: Mapping[str, str], method: str) -> AnyCase:
    """Makes the case of a scenario that was read from JSON.

    Raises KeyError and ValueError like :func:`make_scenario`.
    """
    if "framework" in scenario:
        fields: dict[str, Any] = dict(scenario)
        read = FrameworkScenario(**fields)
        # As it is written here; a KeyError for what another version of the doctor calls otherwise.
        return FrameworkCase(make_framework_scenario(read.framework, read.values), method)
    return Case(make_scenario(scenario), method)


def parse_case_id(text: str, known_methods: tuple[str, ...]) -> Case:
    """Reads the id of a case of the matrix. Raises UsageError that names the unknown, repeated or missing part."""
    *values, method = text.split("/")
    fields: dict[str, str] = {}
    for value in values:
        axis = AXIS_OF_VALUE.get(value)
        if axis is None:
            raise UsageError(
                f"case {text!r}: {value!r} is not a value of any axis{describe_nearest(value, AXIS_OF_VALUE)}"
            )
        if axis in fields:
            raise UsageError(f"case {text!r} names the axis {axis} twice: {fields[axis]} and {value}")
        fields[axis] = value
    missing = [axis.name for axis in AXES if axis.always_in_id and axis.name not in fields]
    if missing:
        raise UsageError(
            f"case {text!r} has no value for {' and '.join(missing)}; an id looks like fsdp2/policy/staged/state_dict"
        )
    if method not in known_methods and ":" not in method:
        raise UsageError(f"case {text!r}: there is no method {method!r}{describe_nearest(method, known_methods)}")
    return Case(make_scenario(fields), method)


def make_scenario(values: Mapping[str, str]) -> Scenario:
    """Makes a scenario from values by axis, which may be invalid. Axes that are left out have their defaults.

    Raises KeyError for an unknown axis, ValueError for an unknown value.
    """
    fields: dict[str, Any] = {axis: parse_value(axis, value) for axis, value in values.items()}
    return Scenario(**fields)
