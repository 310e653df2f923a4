"""The options of a benchmark, with the names of the matrix. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from fsdp_doctor.matrix.axes import AXIS, Offload
from fsdp_doctor.matrix.cases import Scenario, make_scenario
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.methods import is_user_method, list_methods

STRATEGIES = tuple(AXIS["strategy"].values)
# Offloads of the optimizer are left out, because there is no optimizer.
OFFLOADS: tuple[str, ...] = tuple(
    map(str, (Offload(), Offload.from_flags(param=True), Offload.from_flags(policy=True)))
)
# The methods of the matrix that are compared, and full_state_dict, which the matrix does not have.
FULL_STATE_DICT = "fsdp_doctor:full_state_dict"
EXTRACTIONS = (
    *("full_tensors", FULL_STATE_DICT, "state_dict.to.full_tensor", "unshard"),
    *("sharded_state_dict.full_tensor", "summon_full_params"),
    *("get_model_state_dict.full", "get_model_state_dict.full+cpu"),
)
LOADS = ("load_full_tensors", "set_model_state_dict.broadcast", "set_model_state_dict.full")
DTYPES = ("bf16", "fp32", "fp32:bf16")


class BenchSource(str, Enum):
    """The place of the full tensors of a load."""

    RANK0 = "rank0"  # in pinned memory of rank 0 alone
    RANKS = "ranks"  # in pinned memory of each rank
    FILES = "files"  # in safetensors files that are in the page cache


SOURCES = tuple(source.value for source in BenchSource)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of a benchmark, which runs each method on each scenario and dtype.

    model: a named shape, or a directory with a config.json.
    layers: the number of layers; None for the model's own number.
    dtypes: values of DTYPES; ``fp32:bf16`` means fp32 shards that are yielded as bf16.
    bucket_bytes: extractions are measured with each size, loads only with the first; None means the default.
    methods: values of EXTRACTIONS or LOADS, or the user's own module:function for an extraction; empty for all.
    sources: the places of the full tensors of a load.
    """

    direction: Direction
    scenarios: tuple[Scenario, ...]
    sources: tuple[BenchSource, ...]
    model: str
    layers: int | None
    dtypes: tuple[str, ...]
    bucket_bytes: tuple[int | None, ...]
    methods: tuple[str, ...]
    repeat: int
    device: str


def list_scenarios(
    strategies: Iterable[str], offloads: Iterable[str], stagings: Iterable[str], pinnings: Iterable[str]
) -> tuple[Scenario, ...]:
    """Returns the combinations that can be built, without staged scenarios that have nothing to move."""
    names = ("strategy", "offload", "staging", "pinning")
    combined = (
        make_scenario(dict(zip(names, values, strict=True)))
        for values in itertools.product(strategies, offloads, stagings, pinnings)
    )
    return tuple(
        scenario
        for scenario in combined
        if not scenario.contradiction and (not scenario.staging.is_staged or scenario.param_offload)
    )


def list_extractions(scenario: Scenario) -> tuple[str, ...]:
    """Returns the methods to measure in a scenario, without methods that are known to unshard nothing there.

    FSDP2 ignores summon_full_params, and torch cannot unshard tensors that a manual offload has moved to the host.
    """
    there = {method.name for method in list_methods(scenario, "out")}
    if scenario.version == 2:
        there.discard("summon_full_params")
    if scenario.param_offload and not scenario.staging.is_staged:
        there &= {"full_tensors"} if scenario.version == 1 else there - {"unshard"}
    return tuple(name for name in EXTRACTIONS if is_user_method(name) or name in there)
