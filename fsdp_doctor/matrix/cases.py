"""Scenarios and cases, and their ids.

A *scenario* is a point on every axis but the path: a model that is built, sharded, perhaps trained,
offloaded and perhaps staged; and for a path that loads, a checkpoint. A *case* is a scenario and a
path. The id of a case spells strategy, offload and staging, then every other axis that is not at its
default, then the path: ``fsdp2/policy/staged/uneven/state_dict``.
"""

from __future__ import annotations

import dataclasses
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
    Context,
    Dims,
    Init,
    Model,
    Offload,
    Phase,
    Pinning,
    Precision,
    Sharding,
    Staging,
    Strategy,
    Transfer,
    nearest,
)
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase, FrameworkScenario, framework_scenario


@dataclass(frozen=True, kw_only=True, order=True)
class Scenario:
    """A point on every axis but the path; each field holds a value of the axis of that name."""

    strategy: Strategy
    offload: Offload
    staging: Staging
    model: Model = "qwen3"
    dims: Dims = "even"
    phase: Phase = "trained"
    backend: Backend = "mixed"
    sharding: Sharding = "full"
    pinning: Pinning = "pinned"
    transfer: Transfer = "blocking"
    precision: Precision = "bf16-compute"
    init: Init = "materialized"
    checkpoint: CheckpointFit = "exact"
    context: Context = "ordinary"

    @property
    def id(self) -> str:
        return "/".join(
            value for axis in AXES if (value := getattr(self, axis.name)) != axis.default or axis.always_in_id
        )

    def changed(self, **values: str) -> Scenario:
        """This scenario with other values on some axes. Raises KeyError and ValueError as :func:`scenario_of`."""
        return scenario_of(dataclasses.asdict(self) | values)

    @property
    def generation(self) -> str:
        """Which generation of workers may run it: their process groups are made with its backend."""
        return self.backend

    def without_offload(self) -> Scenario:
        """The scenario that differs from this one by its offload alone, and has the default one."""
        return self.changed(offload=AXIS["offload"].default)

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
    def saved_elsewhere(self) -> bool:
        """Whether other processes save the checkpoint than those that load it."""
        return self.checkpoint in ("other-run", "other-world")

    @property
    def contradiction(self) -> str:
        """Why no model can be on all these points at once; empty if one can."""
        if self.pinning == "unpinned" and not (self.policy and self.version == 2):
            return "only FSDP2's CPUOffloadPolicy can be told not to pin"
        if self.transfer == "nonblocking" and not (self.param_offload or self.optimizer_offload):
            return "only a manual offload can be non-blocking"
        if self.sharding in ("tp", "experts", "replicate") and self.version == 1:
            return f"only FSDP2 can be sharded as {self.sharding}"
        if self.sharding == "experts" and self.model not in ("qwen3-moe", "custom"):
            return "only a model with experts has a mesh for them"
        if self.precision == "fp32-compute" and self.checkpoint == "fp32":
            return "a model that loads the checkpoint fp32 has bfloat16 parameters, and computes in float32 nowhere"
        if self.dims == "uneven" and self.model == "custom":
            return "the dimensions of a model given with --model are its own"
        if self.checkpoint in ("tied-twice", "tied-once") and self.model not in ("qwen3-tied", "custom"):
            return f"only a model with tied weights has a checkpoint that is {self.checkpoint}"
        return self._contradiction_on_meta if self.init == "meta" else ""

    @property
    def _contradiction_on_meta(self) -> str:
        if self.version == 1:
            return "FullyShardedDataParallel materializes a model when it wraps it"
        if self.phase == "trained":
            return "a model on the meta device has not been trained"
        if self.param_offload or self.staging == "staged":
            return "there is nothing on the meta device that could be moved"
        return ""

    @property
    def version(self) -> int:
        """1 for FullyShardedDataParallel, 2 for fully_shard."""
        return 2 if self.strategy == "fsdp2" else 1


@dataclass(frozen=True, order=True)
class Case:
    """A scenario and a path.

    path: a name of the table of paths, or the user's ``module:function``.
    """

    scenario: Scenario
    path: str

    @property
    def id(self) -> str:
        return f"{self.scenario.id}/{self.path}"


AnyScenario: TypeAlias = Scenario | FrameworkScenario
AnyCase: TypeAlias = Case | FrameworkCase


def frameworks_of(cases: Iterable[AnyCase]) -> tuple[FrameworkName, ...]:
    """Whose own code they run, each once."""
    return tuple(dict.fromkeys(case.scenario.framework for case in cases if isinstance(case, FrameworkCase)))


def leading_words(case: AnyCase) -> tuple[str, str, str]:
    """Strategy, offload and staging as its id begins with them.

    The strategy of a framework's case has the framework's name before it; it has no staging.
    """
    words = (*case.scenario.id.split("/"), "", "")
    return (words[0], words[1], "") if isinstance(case, FrameworkCase) else (words[0], words[1], words[2])


def any_case_of(scenario: Mapping[str, str], path: str) -> AnyCase:
    """Of what ``dataclasses.asdict`` makes of a scenario. Raises KeyError and ValueError as :func:`scenario_of`."""
    if "framework" in scenario:
        fields: dict[str, Any] = dict(scenario)
        read = FrameworkScenario(**fields)
        # As it is written here; a KeyError for what another version of the doctor calls otherwise.
        return FrameworkCase(framework_scenario(read.framework, read.values), path)
    return Case(scenario_of(scenario), path)


def parse_case_id(text: str, known_paths: tuple[str, ...]) -> Case:
    """Reads an id of the matrix back. Raises UsageError that names the part which is not known."""
    *values, path = text.split("/")
    fields: dict[str, str] = {}
    for value in values:
        axis = AXIS_OF_VALUE.get(value)
        if axis is None:
            raise UsageError(f"case {text!r}: {value!r} is not a value of any axis{nearest(value, AXIS_OF_VALUE)}")
        if axis in fields:
            raise UsageError(f"case {text!r} names the axis {axis} twice: {fields[axis]} and {value}")
        fields[axis] = value
    missing = [axis.name for axis in AXES if axis.always_in_id and axis.name not in fields]
    if missing:
        raise UsageError(
            f"case {text!r} has no value for {' and '.join(missing)}; an id looks like fsdp2/policy/staged/state_dict"
        )
    if path not in known_paths and ":" not in path:
        raise UsageError(f"case {text!r}: there is no path {path!r}{nearest(path, known_paths)}")
    return Case(scenario_of(fields), path)


def scenario_of(values: Mapping[str, str]) -> Scenario:
    """A scenario of values by axis that come from outside; an axis that is left out is at its default.

    Raises KeyError for an axis that there is not, ValueError for a value that its axis does not have.
    """
    for axis, value in values.items():
        if value not in AXIS[axis].values:
            raise ValueError(f"{value!r} is not a value of the axis {axis}")
    fields: dict[str, Any] = dict(values)
    return Scenario(**fields)
