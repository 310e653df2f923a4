"""What there is to try of one framework: its configurations and its own ways out and in, in its own words; no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fsdp_doctor.matrix.contracts import Contract, Direction

FrameworkName: TypeAlias = Literal["accelerate", "trainer", "verl", "trl", "lightning", "torchtitan", "skyrl"]
PathKind: TypeAlias = Literal["prepare", "extraction", "rollback", "resume"]
ShimKind: TypeAlias = Literal["function", "variable", "plug-in", "stand-in"]


@dataclass(frozen=True, kw_only=True)
class FrameworkAxis:
    """A setting of the framework. The first value is the default; each has its meaning beside it.

    No value of one axis of a framework is also a value of another.
    """

    name: str
    values: Mapping[str, str]
    always_in_id: bool = False

    @property
    def default(self) -> str:
        return next(iter(self.values))


# The doctor's own: which of its small models the framework is given. What an adapter cannot have, its axis lacks.
MODELS: Mapping[str, str] = {
    "qwen3": "a dense Qwen3 with two layers",
    "uneven": "the same with odd vocabulary and intermediate sizes: some shards are shorter",
    "tied": "Qwen3 with lm_head tied to the embedding",
    "buffers": "Qwen3 with a persistent buffer in each layer",
    "lora": "Qwen3 with a LoRA adapter (peft) on every linear layer, everything else frozen",
}


def model_axis(*names: str) -> FrameworkAxis:
    """The axis ``model``, with those of MODELS that the adapter can be given, qwen3 first."""
    return FrameworkAxis(name="model", values={name: MODELS[name] for name in ("qwen3", *names)})


@dataclass(frozen=True, kw_only=True)
class FrameworkPath:
    """One of the framework's own ways in or out.

    kind: ``prepare`` the framework wraps a model, whose weights must be the plain model's, and a training step must
        change all that trains. ``extraction`` it gives weights, in memory or in files, which ``contract`` says more
        of. ``rollback`` it saves, trains on, and loads into the same session. ``resume`` it saves, and another process
        with other weights loads. After both loads the weights, every value of the optimizer and the next two steps
        must be those of the run that went on.
    summary: the path in code. only: axes on which it makes sense for these values alone.
    """

    name: str
    kind: PathKind
    summary: str
    contract: Contract = field(default_factory=Contract)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        return "out" if self.kind == "extraction" else "in"

    def applies(self, values: Mapping[str, str]) -> bool:
        """Whether it makes sense in a configuration of these values by axis."""
        return all(values[axis] in allowed for axis, allowed in self.only.items())


@dataclass(frozen=True, kw_only=True)
class Shim:
    """Something that is changed where the device is emulated, so that the framework finds it; nothing is elsewhere.

    name: ``module:qualified.name`` of a function, or the name of an environment variable or of a plug-in.
    kind: ``stand-in`` for something that is not there and that the framework needs.
    """

    name: str
    kind: ShimKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class FrameworkMatrix:
    """One framework: its axes, what the matrix has of their product, and its paths.

    distributions: the packages whose versions a report names, the framework's own first.
    axes: ``offload`` among them. configurations: values joined by slashes, as in an id.
    own_variables: prefixes of environment variables that configure it; a worker starts without them.
    """

    name: FrameworkName
    title: str
    distributions: tuple[str, ...]
    axes: tuple[FrameworkAxis, ...]
    configurations: tuple[str, ...]
    paths: tuple[FrameworkPath, ...]
    shims: tuple[Shim, ...] = ()
    own_variables: tuple[str, ...] = ()

    def axis(self, name: str) -> FrameworkAxis:
        return next(axis for axis in self.axes if axis.name == name)

    def path(self, name: str) -> FrameworkPath:
        return next(path for path in self.paths if path.name == name)


def product(*choices: Iterable[str]) -> tuple[str, ...]:
    """Every combination, joined by slashes; an empty value is left out."""
    return tuple("/".join(filter(None, words)) for words in itertools.product(*choices))
