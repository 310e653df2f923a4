"""Extent of the matrix for extractions and for loads: the default, the part for ``quick``, the additions for ``full``.

The default matrix has both strategies, all eight of verl's flag combinations, unstaged and staged, with every method;
one to three scenarios for each of ``partial``, ``moved`` and ``optimizer-around-step``; extractions after a training
step; and loads before the first step, also from the meta device and with checkpoints that do not fit. The level
``full`` adds every other axis value, one at a time (or two that are known to interact), mostly with several kinds
of offload. The level ``quick`` has the scenarios that break most often, with the methods that a framework is known to
use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.matrix.axes import AXES, AXIS, OFFLOADS, OffloadWay, Optimizer
from fsdp_doctor.matrix.cases import Scenario, make_scenario
from fsdp_doctor.matrix.contracts import Direction

Level: TypeAlias = Literal["quick", "default", "full"]

_Values: TypeAlias = Mapping[str, tuple[str, ...]]

_DEFAULT: _Values = {axis.name: (axis.default,) for axis in AXES} | {
    "strategy": ("fsdp2", "fsdp1"),
    "offload": tuple(str(offload) for offload in OFFLOADS if offload.way is None),
    "staging": tuple(AXIS["staging"].values),
}
_DEFAULT_MATRIX: dict[Direction, _Values] = {"out": _DEFAULT, "in": {**_DEFAULT, "phase": ("fresh",)}}
_NONE, _POLICY, _PARAM = ("none",), ("policy",), ("param",)
_MANUAL = tuple(str(offload) for offload in OFFLOADS if offload.by_hand)
_DISTINCT_OFFLOADS = ("none", *_MANUAL, "policy")
_WAYS = tuple(OffloadWay)
_BUILT_WAYS = (OffloadWay.PARTIAL, OffloadWay.MOVED, OffloadWay.AROUND_STEP)
_EACH_KIND = ("none", "param", "policy")
_WITH_OPTIMIZER = ("none", "optimizer", "policy")
_FSDP2, _FSDP1, _BOTH, _ALL = ("fsdp2",), ("fsdp1",), ("fsdp2", "fsdp1"), ("fsdp2", "fsdp1", "fsdp1-orig")
_UNSTAGED, _STAGED = ("unstaged",), ("staged",)
_RAISED = ("after-raised-forward", "after-raised-backward")
_SAMPLED_OPTIMIZERS = ("muon", "adamw-8bit")
# By optimizer, the strategies and offloads with which it can train.
_OPTIMIZERS = {
    "sgd": (_ALL, _WITH_OPTIMIZER),
    "muon": (_FSDP2, _WITH_OPTIMIZER),
    "adafactor": (("fsdp1", "fsdp1-orig"), _WITH_OPTIMIZER),
    "adamw-fused": (_ALL, _WITH_OPTIMIZER),
    "adamw-capturable": (_ALL, ("none", "optimizer")),
    "adamw-8bit": (_FSDP2, _WITH_OPTIMIZER),
    "tensor-lr": (_ALL, _WITH_OPTIMIZER),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Part of the matrix: the scenarios with the given axis values, and with defaults on all other axes."""

    changes: dict[str, str]
    strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    stagings: tuple[str, ...]

    def list_scenarios(self, direction: Direction, model: str) -> Iterable[Scenario]:
        axes = {"strategy": self.strategies, "offload": self.offloads, "staging": self.stagings}
        changed = {axis: (value,) for axis, value in self.changes.items()}
        return list_product(direction, {"model": (model,)} | axes | changed)


def _vary_extraction(
    strategies: tuple[str, ...] = _ALL,
    offloads: tuple[str, ...] = _DISTINCT_OFFLOADS,
    stagings: tuple[str, ...] = ("unstaged", "staged"),
    **changes: str,
) -> Variant:
    return Variant(changes=changes, strategies=strategies, offloads=offloads, stagings=stagings)


def _vary_load(
    strategies: tuple[str, ...],
    offloads: tuple[str, ...] = _NONE,
    stagings: tuple[str, ...] = _UNSTAGED,
    **changes: str,
) -> Variant:
    return Variant(changes=changes, strategies=strategies, offloads=offloads, stagings=stagings)


_DEFAULT_VARIANTS: dict[Direction, tuple[Variant, ...]] = {
    "out": (
        _vary_extraction(_BOTH, _NONE, _UNSTAGED, precision="fp32-compute"),
        _vary_extraction(_BOTH, _PARAM, _UNSTAGED, precision="fp32-compute"),
        _vary_extraction(_BOTH, _POLICY, _STAGED, precision="fp32-compute"),
        *(_vary_extraction(_FSDP2, _NONE, _UNSTAGED, optimizer=optimizer) for optimizer in _SAMPLED_OPTIMIZERS),
        _vary_extraction(_FSDP2, _POLICY, _UNSTAGED, context="inference"),
        _vary_extraction(_FSDP1, _NONE, _UNSTAGED, context="inference"),
        *(_vary_extraction(_BOTH, _NONE, _UNSTAGED, phase=raised) for raised in _RAISED),
        _vary_extraction(_FSDP2, _NONE, _UNSTAGED, consumer="packed"),
        _vary_extraction(_FSDP2, _NONE, _UNSTAGED, consumer="step-in-flight"),
        _vary_extraction(_FSDP2, _POLICY, _UNSTAGED, consumer="keeps-views"),
        _vary_extraction(_FSDP2, _POLICY, _STAGED, model="qwen3-moe"),
        _vary_extraction(_FSDP1, _NONE, _UNSTAGED, model="qwen3-moe"),
        _vary_extraction(_FSDP2, _BUILT_WAYS, _UNSTAGED),
        _vary_extraction(_FSDP2, (OffloadWay.PARTIAL,), _STAGED),
        _vary_extraction(_FSDP1, (OffloadWay.PARTIAL,), _UNSTAGED),
    ),
    "in": (
        _vary_load(_FSDP2, _POLICY, _UNSTAGED, precision="fp32-compute"),
        _vary_load(_FSDP1, _NONE, _UNSTAGED, precision="fp32-compute"),
        _vary_load(_FSDP1, _POLICY, _STAGED, precision="fp32-compute"),
        *(_vary_load(_FSDP2, optimizer=optimizer) for optimizer in _SAMPLED_OPTIMIZERS),
        _vary_load(_BOTH, context="inference"),
        *(_vary_load(_BOTH, phase=raised) for raised in _RAISED),
        _vary_load(_FSDP2, ("none", "policy"), init="meta"),
        _vary_load(_BOTH, checkpoint="bf16"),
        _vary_load(_BOTH, checkpoint="fp32"),
        _vary_load(_BOTH, checkpoint="extra-key"),
        _vary_load(_BOTH, checkpoint="missing-key"),
        _vary_load(_BOTH, checkpoint="tied-twice", model="qwen3-tied"),
        _vary_load(_BOTH, checkpoint="tied-once", model="qwen3-tied"),
        _vary_load(_BOTH, checkpoint="other-run"),
        _vary_load(_BOTH, checkpoint="other-world"),
        _vary_load(_BOTH, model="qwen3-moe", checkpoint="hub"),
        _vary_load(_FSDP2, _BUILT_WAYS, _UNSTAGED),
        _vary_load(_FSDP2, (OffloadWay.PARTIAL,), _STAGED),
        _vary_load(_FSDP1, (OffloadWay.PARTIAL,), _UNSTAGED),
    ),
}

# The default matrix samples these axes: some of their values, with the methods that a framework is known to use.
_SAMPLED = ("precision", "optimizer", "context", "consumer")
_CONSUMERS = ("second-group", "slow", "packed", "step-in-flight", "colocated", "keeps-views", "in-place")
_MODELS = ("qwen3-tied", "qwen3-buffers", "qwen2", "qwen3-moe", "qwen3.5", "qwen3-lora")
_DIVIDED_EXPERTS = ("2d", "hidden-experts")
_FULL_VARIANTS: dict[Direction, tuple[Variant, ...]] = {
    "out": (
        _vary_extraction(("fsdp1-orig",)),
        _vary_extraction(phase="fresh"),
        _vary_extraction(_FSDP2, _WAYS, _UNSTAGED),
        _vary_extraction(offloads=_BUILT_WAYS),
        _vary_extraction(offloads=_BUILT_WAYS, stagings=_UNSTAGED, phase="fresh"),
        _vary_extraction(_BOTH, (OffloadWay.PARTIAL,), _UNSTAGED, phase="after-raised-forward"),
        _vary_extraction(_FSDP2, (OffloadWay.PARTIAL,), pinning="unpinned"),
        _vary_extraction(_BOTH, _BUILT_WAYS, _UNSTAGED, dims="uneven"),
        _vary_extraction(_BOTH, (OffloadWay.PARTIAL,), _UNSTAGED, backend="device-only"),
        _vary_extraction(_BOTH, (OffloadWay.PARTIAL,), _UNSTAGED, sharding="hsdp"),
        *(_vary_extraction(_BOTH, _BUILT_WAYS, _UNSTAGED, model=model) for model in ("qwen3-tied", "qwen3-lora")),
        *(_vary_extraction(_ALL, ("none", "policy"), _UNSTAGED, phase=raised) for raised in _RAISED),
        *(_vary_extraction(_FSDP2, _NONE, _STAGED, phase=raised) for raised in _RAISED),
        _vary_extraction(backend="device-only"),
        _vary_extraction(_FSDP2, _POLICY, pinning="unpinned"),
        _vary_extraction(_FSDP2, _POLICY, pinning="unpinned", phase="fresh"),
        _vary_extraction(offloads=_MANUAL, transfer="nonblocking"),
        _vary_extraction(dims="uneven"),
        _vary_extraction(offloads=_MANUAL, dims="uneven", transfer="nonblocking"),
        _vary_extraction(offloads=_EACH_KIND, precision="fp32-compute"),
        _vary_extraction(offloads=("none", "policy"), precision="fp32-compute", sharding="size1"),
        *(_vary_extraction(*where, _UNSTAGED, optimizer=optimizer) for optimizer, where in _OPTIMIZERS.items()),
        _vary_extraction(offloads=_EACH_KIND, context="no_grad"),
        _vary_extraction(offloads=_EACH_KIND, context="inference"),
        # With these consumers a method of torch hangs, and each hang takes a whole deadline.
        *(_vary_extraction(_FSDP2, _NONE, _UNSTAGED, consumer=consumer) for consumer in ("stops", "raises", "dies")),
        *(
            _vary_extraction(_BOTH, _EACH_KIND, _UNSTAGED, consumer=consumer)
            for consumer in ("shared-device", "lazy", "repeated")
        ),
        *(_vary_extraction(offloads=_EACH_KIND, stagings=_UNSTAGED, consumer=consumer) for consumer in _CONSUMERS),
        _vary_extraction(sharding="hsdp"),
        _vary_extraction(sharding="size1"),
        _vary_extraction(_FSDP2, sharding="tp"),
        _vary_extraction(_FSDP2, sharding="experts", model="qwen3-moe"),
        *(_vary_extraction(_FSDP2, sharding=kind, model="qwen3-moe") for kind in _DIVIDED_EXPERTS),
        _vary_extraction(_FSDP2, sharding="replicate"),
        *(_vary_extraction(model=model) for model in _MODELS),
        _vary_extraction(_ALL, ("none", "policy"), _UNSTAGED, model="qwen3-qlora", precision="fp32-compute"),
        _vary_extraction(_BOTH, ("none", "policy"), _UNSTAGED, model="qwen3-qlora-bf16"),
        _vary_extraction(_FSDP2, model="qwen3-float8"),
        _vary_extraction(_FSDP2, ("none", "policy"), _UNSTAGED, model="qwen3-mxfp8"),
        _vary_extraction(_BOTH, _PARAM, _STAGED, model="qwen3-qlora", precision="fp32-compute"),
        _vary_extraction(_BOTH, _NONE, _UNSTAGED, model="qwen3-qlora", precision="fp32-compute", dims="uneven"),
    ),
    "in": (
        _vary_load(("fsdp1-orig",), _DISTINCT_OFFLOADS, ("unstaged", "staged")),
        _vary_load(_ALL, _DISTINCT_OFFLOADS, phase="trained"),
        _vary_load(_FSDP2, _WAYS),
        _vary_load(_ALL, _BUILT_WAYS, ("unstaged", "staged")),
        _vary_load(_ALL, _BUILT_WAYS, phase="trained"),
        _vary_load(_FSDP2, (OffloadWay.PARTIAL,), pinning="unpinned"),
        _vary_load(_BOTH, _BUILT_WAYS, dims="uneven"),
        _vary_load(_FSDP2, (OffloadWay.PARTIAL,), init="meta"),
        *(_vary_load(_BOTH, _BUILT_WAYS, checkpoint=saved) for saved in ("other-run", "other-world")),
        _vary_load(_BOTH, (OffloadWay.PARTIAL,), sharding="hsdp"),
        *(_vary_load(_BOTH, _BUILT_WAYS, model=model) for model in ("qwen3-tied", "qwen3-lora")),
        _vary_load(_ALL, _EACH_KIND, model="qwen3-qlora", precision="fp32-compute"),
        _vary_load(_BOTH, _NONE, model="qwen3-qlora", precision="fp32-compute", phase="trained"),
        _vary_load(_BOTH, ("none", "policy"), model="qwen3-qlora-bf16"),
        _vary_load(_FSDP2, _EACH_KIND, model="qwen3-float8"),
        _vary_load(_FSDP2, ("none", "policy"), model="qwen3-mxfp8"),
        *(_vary_load(_ALL, ("none", "policy"), phase=raised) for raised in _RAISED),
        *(_vary_load(_FSDP2, _NONE, _STAGED, phase=raised) for raised in _RAISED),
        _vary_load(_ALL, _EACH_KIND, backend="device-only"),
        _vary_load(_FSDP2, _POLICY, pinning="unpinned"),
        _vary_load(_ALL, _PARAM, transfer="nonblocking"),
        _vary_load(_ALL, _EACH_KIND, precision="fp32-compute"),
        _vary_load(_ALL, _EACH_KIND, precision="fp32-compute", phase="trained"),
        _vary_load(_ALL, _PARAM, _STAGED, precision="fp32-compute"),
        _vary_load(_ALL, _POLICY, _STAGED, precision="fp32-compute"),
        _vary_load(_ALL, _POLICY, _STAGED, precision="fp32-compute", phase="trained"),
        _vary_load(_FSDP2, ("none", "policy"), precision="fp32-compute", init="meta"),
        *(_vary_load(*where, optimizer=optimizer) for optimizer, where in _OPTIMIZERS.items()),
        *(
            variant
            for optimizer, (strategies, _) in _OPTIMIZERS.items()
            for variant in (
                _vary_load(strategies, optimizer=optimizer, phase="trained"),
                _vary_load(strategies, optimizer=optimizer, checkpoint="other-world"),
            )
        ),
        _vary_load(_ALL, _EACH_KIND, context="no_grad"),
        _vary_load(_ALL, _EACH_KIND, context="inference"),
        _vary_load(_ALL, _EACH_KIND, dims="uneven"),
        _vary_load(_ALL, _EACH_KIND, sharding="hsdp"),
        _vary_load(_ALL, _EACH_KIND, sharding="size1"),
        _vary_load(_FSDP2, _EACH_KIND, sharding="tp"),
        _vary_load(_FSDP2, _EACH_KIND, sharding="experts", model="qwen3-moe"),
        *(_vary_load(_FSDP2, _EACH_KIND, sharding=kind, model="qwen3-moe") for kind in _DIVIDED_EXPERTS),
        _vary_load(_FSDP2, _EACH_KIND, sharding="replicate"),
        _vary_load(_FSDP2, sharding="tp", phase="trained"),
        _vary_load(_FSDP2, sharding="experts", model="qwen3-moe", phase="trained"),
        *(_vary_load(_FSDP2, sharding="tp", checkpoint=saved) for saved in ("other-run", "other-world")),
        *(
            _vary_load(_FSDP2, sharding=sharding, model="qwen3-moe", checkpoint=saved)
            for sharding in ("experts", *_DIVIDED_EXPERTS)
            for saved in ("other-run", "other-world")
        ),
        *(_vary_load(_ALL, _EACH_KIND, model=model) for model in _MODELS),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", dims="uneven"),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", backend="device-only"),
        *(_vary_load(_FSDP2, ("none", "policy"), init="meta", model=model) for model in _MODELS),
        _vary_load(_ALL, ("param", "policy"), checkpoint="bf16"),
        _vary_load(_ALL, ("param", "policy"), checkpoint="fp32"),
        _vary_load(_ALL, ("param", "policy"), checkpoint="extra-key"),
        _vary_load(_ALL, ("param", "policy"), checkpoint="missing-key"),
        _vary_load(_ALL, _EACH_KIND, checkpoint="other-run"),
        _vary_load(_ALL, _EACH_KIND, checkpoint="other-world"),
        _vary_load(_ALL, dims="uneven", checkpoint="other-world"),
        *(_vary_load(_FSDP2, sharding=kind, model="qwen3-moe", checkpoint="hub") for kind in _DIVIDED_EXPERTS),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", checkpoint="bf16"),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", checkpoint="extra-key"),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", checkpoint="missing-key"),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", checkpoint="tied-twice", model="qwen3-tied"),
        _vary_load(_FSDP2, ("none", "policy"), init="meta", checkpoint="tied-once", model="qwen3-tied"),
    ),
}

_QUICK: dict[Direction, tuple[dict[str, str], ...]] = {
    "out": (
        {"strategy": "fsdp2", "offload": "policy", "staging": "staged"},
        {"strategy": "fsdp1", "offload": "param", "staging": "unstaged"},
    ),
    "in": (
        {"strategy": "fsdp2", "offload": "none", "staging": "unstaged"},
        {"strategy": "fsdp2", "offload": "none", "staging": "unstaged", "init": "meta"},
    ),
}


def list_quick_scenarios(direction: Direction, model: str) -> Iterable[Scenario]:
    """Lists the scenarios of the level ``quick``.

    These are the scenarios in which most failures occur, and a load in which no method should fail.
    """
    for values in _QUICK[direction]:
        yield from list_product(direction, {axis: (value,) for axis, value in values.items()} | {"model": (model,)})


def is_sampled(scenario: Scenario) -> bool:
    """Returns whether the default matrix has the scenario only as a sample of an axis.

    If the user asks for values of axes, samples are left out.
    """
    return scenario.model.has_experts or any(scenario.values[axis] != AXIS[axis].default for axis in _SAMPLED)


def has_methods_in_use_alone(level: Level, scenario: Scenario, asked: bool) -> bool:
    """Returns whether a level tries only the methods that a framework is known to use in the scenario.

    asked: whether the user asked for values of axes.
    """
    match level:
        case "quick":
            return True
        case "default":
            # Few methods concern an optimizer, and all of them are tried.
            return is_sampled(scenario) and not asked and scenario.optimizer is Optimizer.ADAMW
        case "full":
            return False
        case _:
            assert_never(level)


def list_product(direction: Direction, chosen: _Values) -> Iterable[Scenario]:
    """Lists every combination of the chosen values, with the default matrix's values on the other axes."""
    values = {**_DEFAULT_MATRIX[direction], **chosen}
    for combination in itertools.product(*(values[axis.name] for axis in AXES)):
        yield make_scenario({axis.name: value for axis, value in zip(AXES, combination, strict=True)})


def list_default_variants(direction: Direction) -> Iterable[Scenario]:
    """Lists the scenarios that the default matrix has in addition to the product of its values."""
    for variant in _DEFAULT_VARIANTS[direction]:
        yield from variant.list_scenarios(direction, AXIS["model"].default)


def list_full_matrix(direction: Direction, model: str) -> Iterable[Scenario]:
    """Lists the default matrix and every variant of it, with ``model`` unless a variant names another model."""
    yield from list_product(direction, {"model": (model,)})
    for variant in (*_DEFAULT_VARIANTS[direction], *_FULL_VARIANTS[direction]):
        yield from variant.list_scenarios(direction, model)
