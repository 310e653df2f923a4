"""The table of one framework: the configurations and methods that are tried, in its own words; no torch."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from fsdp_doctor.matrix.axes import Axis, Strategy
from fsdp_doctor.matrix.contracts import Direction, Method, allows_values

# In the order of their users.
FrameworkName: TypeAlias = Literal["accelerate", "trainer", "verl", "trl", "lightning", "torchtitan", "skyrl"]
FrameworkMethodKind: TypeAlias = Literal["prepare", "extraction", "rollback", "resume"]
StateDictType: TypeAlias = Literal["full", "sharded"]
ShimKind: TypeAlias = Literal["function", "variable", "plug-in", "stand-in"]

# The values of the axis ``model``: the doctor's small models that a framework can be given.
MODELS: Mapping[str, str] = {
    "qwen3": "a dense Qwen3 with two layers",
    "uneven": "the same with odd vocabulary and intermediate sizes: some shards are shorter",
    "tied": "Qwen3 with lm_head tied to the embedding",
    "buffers": "Qwen3 with a persistent buffer in each layer",
    "lora": "Qwen3 with a LoRA adapter (peft) on every linear layer, everything else frozen",
}


@dataclass(frozen=True, kw_only=True)
class FrameworkMethod(Method):
    """One of the framework's own methods to extract, save or load.

    kind: ``prepare``: the framework wraps a model, which must then have the plain model's weights, and a training step
        must change every parameter that trains. ``extraction``: it gives weights, in memory or in files, as
        ``contract`` says. ``rollback``: it saves, trains on, and loads into the same session. ``resume``: it saves,
        and another process with other weights loads. After both loads the weights, every value of the optimizer and
        the next two steps must be those of the run that was not interrupted.
    """

    kind: FrameworkMethodKind

    @property
    def direction(self) -> Direction:
        return "out" if self.kind == "extraction" else "in"


@dataclass(frozen=True, kw_only=True)
class Shim:
    """A change of the framework that is made only on the emulated device, so that the framework finds it.

    name: ``module:qualified.name`` of a function, or the name of an environment variable or of a plug-in.
    kind: ``stand-in`` replaces something that the framework needs and that is not installed.
    """

    name: str
    kind: ShimKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class ConfiguredBuild:
    """What a configuration must make of the model; a fact that is left out is not compared.

    only: by axis, the values for which it holds. strategies: any of them. offloads: whether FSDP's own offload policy
    is on. state_dict_type: the form in which the framework says that it saves.
    """

    only: Mapping[str, tuple[str, ...]]
    strategies: tuple[Strategy, ...] = ()
    offloads: bool | None = None
    state_dict_type: StateDictType | None = None


@dataclass(frozen=True, kw_only=True)
class FrameworkMatrix:
    """One framework: its axes, the configurations that are tried, and its methods.

    distributions: the packages whose versions a report names, the framework's own first.
    axes: ``offload`` is one of them. configurations: values joined by slashes, as in an id.
    variables: prefixes of the environment variables that configure it; a worker starts without them.
    builds: what is compared with the model that it built.
    """

    name: FrameworkName
    title: str
    distributions: tuple[str, ...]
    axes: tuple[Axis, ...]
    configurations: tuple[str, ...]
    methods: tuple[FrameworkMethod, ...]
    shims: tuple[Shim, ...]
    variables: tuple[str, ...]
    builds: tuple[ConfiguredBuild, ...]

    def find_axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def list_builds(self, values: Mapping[str, str]) -> list[ConfiguredBuild]:
        """What a configuration with these values by axis must make of the model."""
        return [build for build in self.builds if allows_values(build.only, values)]

    def find_method(self, name: str) -> FrameworkMethod:
        return next(method for method in self.methods if method.name == name)


class _Table(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A file ``NAME.toml``.

    builds_on: the framework whose shims and variables it needs, too. models: of MODELS, those that it can be given.
    configurations: products of the values of several axes; an empty value is left out.
    """

    title: str
    distributions: tuple[str, ...]
    models: tuple[str, ...]
    configurations: tuple[tuple[tuple[str, ...], ...], ...]
    axes: tuple[Axis, ...]
    methods: tuple[FrameworkMethod, ...]
    builds: tuple[ConfiguredBuild, ...]
    builds_on: FrameworkName | None = None
    shims: tuple[Shim, ...] = ()
    variables: tuple[str, ...] = ()


@functools.cache
def read_matrix(name: FrameworkName) -> FrameworkMatrix:
    """Reads the table of one framework."""
    table = msgspec.toml.decode(pathlib.Path(__file__).with_name(f"{name}.toml").read_bytes(), type=_Table)
    base = read_matrix(table.builds_on) if table.builds_on else None
    return FrameworkMatrix(
        name=name,
        title=table.title,
        distributions=table.distributions,
        axes=(*table.axes, Axis(name="model", values={model: MODELS[model] for model in table.models})),
        configurations=tuple(
            "/".join(filter(None, values)) for choices in table.configurations for values in itertools.product(*choices)
        ),
        methods=table.methods,
        builds=table.builds,
        shims=(*(base.shims if base else ()), *table.shims),
        variables=(*(base.variables if base else ()), *table.variables),
    )
