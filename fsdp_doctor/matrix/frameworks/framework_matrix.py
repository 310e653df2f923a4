"""Table of one framework: the configurations and methods that are tried, in the framework's own words; no torch."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Axis, Strategy
from fsdp_doctor.matrix.contracts import Direction, Method, allows_values
from fsdp_doctor.matrix.frameworks.adapters import locate_adapter

FrameworkMethodKind: TypeAlias = Literal["prepare", "extraction", "rollback", "resume"]
StateDictType: TypeAlias = Literal["full", "sharded"]
ShimKind: TypeAlias = Literal["function", "variable", "plug-in", "stand-in"]

# The values of the axis ``model``: the doctor's small models that a framework can be given.
MODELS: Mapping[str, str] = {
    "qwen3": "a dense Qwen3 with two layers",
    "uneven": "Qwen3 with odd vocabulary and intermediate sizes: some shards are shorter",
    "tied": "Qwen3 with lm_head tied to the embedding",
    "buffers": "Qwen3 with a persistent buffer in each layer",
    "lora": "Qwen3 with a LoRA adapter (peft) on every linear layer, everything else frozen",
}


@dataclass(frozen=True, kw_only=True)
class FrameworkMethod(Method):
    """Method of a framework to extract, save or load.

    kind: ``prepare``: the framework wraps a model, which must then have the plain model's weights, and a training step
        must change every trainable parameter. ``extraction``: it delivers weights, in memory or in files, according to
        ``contract``. ``rollback``: it saves, trains on, and loads into the same session. ``resume``: it saves, and
        another process with other weights loads. After the load of ``rollback`` and ``resume``, the weights, every
        value of the optimizer and the next two steps must be those of the run that was not interrupted.
    fix: the ids, separated by spaces, of the fixes (``fixes``) that replace functions of the method; empty without any.
    """

    kind: FrameworkMethodKind
    fix: str = ""

    @property
    def direction(self) -> Direction:
        return "out" if self.kind == "extraction" else "in"


@dataclass(frozen=True, kw_only=True)
class Shim:
    """Change to the framework, made only on the emulated device, so that the framework recognizes the device.

    name: ``module:qualified.name`` of a function, or the name of an environment variable or of a plug-in.
    kind: ``stand-in`` replaces a dependency of the framework that is not installed.
    """

    name: str
    kind: ShimKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class ConfiguredBuild:
    """Facts about the model that a configuration must produce; a fact that is left out is not compared.

    only: maps an axis to the values for which the facts are compared.
    strategies: the allowed strategies.
    offloads: whether FSDP's offload policy is on.
    state_dict_type: the form of the saved state dict, as the framework reports it.
    own_sharding: whether the framework shards without torch's FSDP. If so, the model must not have a unit of torch's
        FSDP, and every parameter must be a DTensor.
    """

    only: Mapping[str, tuple[str, ...]]
    strategies: tuple[Strategy, ...] = ()
    offloads: bool | None = None
    state_dict_type: StateDictType | None = None
    own_sharding: bool = False


@dataclass(frozen=True, kw_only=True)
class FrameworkMatrix:
    """Matrix of one framework: its axes, the configurations that are tried, and its methods.

    name: the name that a user gives: an adapter's name, or ``module:ATTRIBUTE``.
    distributions: the packages whose versions a report names, the framework's own first.
    tried: the package versions with which the adapter was run, as in a requirement.
    axes: the framework's axes; one of them is ``offload``.
    configurations: values joined by slashes, as in an id.
    quick: the configurations that ``--level quick`` runs.
    variables: prefixes of environment variables that configure the framework; a worker starts without these variables.
    builds: facts that are compared with the model that the framework built.
    """

    name: str
    title: str
    distributions: tuple[str, ...]
    tried: Mapping[str, str]
    axes: tuple[Axis, ...]
    configurations: tuple[str, ...]
    quick: tuple[str, ...]
    methods: tuple[FrameworkMethod, ...]
    shims: tuple[Shim, ...]
    variables: tuple[str, ...]
    builds: tuple[ConfiguredBuild, ...]

    def find_axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def list_builds(self, values: Mapping[str, str]) -> list[ConfiguredBuild]:
        """Lists the facts about the model that a configuration with these values must bring about."""
        return [build for build in self.builds if allows_values(build.only, values)]

    def find_method(self, name: str) -> FrameworkMethod:
        return next(method for method in self.methods if method.name == name)

    def describe_untried(self, installed: Mapping[str, str]) -> str:
        """Names the packages whose installed version was not tried with the adapter; empty if there are none."""
        untried = [
            f"{package} {installed[package]} (tried: {versions})"
            for package, versions in self.tried.items()
            if package in installed and not SpecifierSet(versions, prereleases=True).contains(installed[package])
        ]
        return f"The adapter of {self.name} was not run with {', '.join(untried)}." if untried else ""


_Products: TypeAlias = tuple[tuple[tuple[str, ...], ...], ...]


class _Table(msgspec.Struct, kw_only=True):
    """Table of an adapter, in a file next to the adapter's module.

    builds_on: another framework whose shims and environment variables are also needed. A shim is a replacement that
        lets a framework find the emulated device.
    models: the entries of MODELS that the framework can be given.
    configurations, quick: products of the values of several axes; an empty value is left out.
    """

    title: str
    distributions: tuple[str, ...]
    models: tuple[str, ...]
    configurations: _Products
    axes: tuple[Axis, ...]
    methods: tuple[FrameworkMethod, ...]
    tried: dict[str, str] = {}
    quick: _Products = ()
    builds: tuple[ConfiguredBuild, ...] = ()
    builds_on: str | None = None
    shims: tuple[Shim, ...] = ()
    variables: tuple[str, ...] = ()


@functools.cache
def read_matrix(name: str) -> FrameworkMatrix:
    """Reads the table of a framework, by the adapter's name or by ``module:ATTRIBUTE``.

    Raises UsageError if there is no such adapter, or if its table is invalid.
    """
    file = locate_adapter(name).table
    try:
        written = msgspec.toml.decode(file.read_bytes())
        table = msgspec.convert(written, _Table)
    except OSError as error:
        raise UsageError(f"cannot read the table of framework {name!r}, {file}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"the table of framework {name!r}, {file}, is not valid: {error}") from None
    unread = _list_unread(written, msgspec.to_builtins(table))
    if trouble := f"the key {unread[0]} is not known" if unread else next(_list_troubles(table), ""):
        raise UsageError(f"the table of framework {name!r}, {file}: {trouble}")
    base = read_matrix(table.builds_on) if table.builds_on else None
    configurations = _multiply(table.configurations)
    return FrameworkMatrix(
        name=name,
        title=table.title,
        distributions=table.distributions,
        tried=table.tried,
        axes=_list_axes(table),
        configurations=configurations,
        quick=_multiply(table.quick) or configurations,
        methods=table.methods,
        builds=table.builds,
        shims=(*(base.shims if base else ()), *table.shims),
        variables=(*(base.variables if base else ()), *table.variables),
    )


def _list_axes(table: _Table) -> tuple[Axis, ...]:
    return (*table.axes, Axis(name="model", values={model: MODELS[model] for model in table.models}))


def _multiply(products: _Products) -> tuple[str, ...]:
    return tuple("/".join(filter(None, values)) for choices in products for values in itertools.product(*choices))


def _list_unread(written: Any, read: Any) -> list[str]:
    """Lists the keys of a TOML table that no field of its record reads; msgspec ignores such keys."""
    match written:
        case dict():
            below = [key for name in written.keys() & read.keys() for key in _list_unread(written[name], read[name])]
            return [*(key for key in written if key not in read), *below]
        case list():
            return [key for each, other in zip(written, read, strict=True) for key in _list_unread(each, other)]
        case _:
            return []


def _list_troubles(table: _Table) -> Iterator[str]:
    """Yields the errors of a table that has the right keys."""
    if unknown := set(table.models) - set(MODELS):
        yield f"models names {', '.join(sorted(unknown))}, but the known models are {', '.join(MODELS)}"
        return
    axes = {axis.name: axis for axis in _list_axes(table)}
    if "offload" not in axes or not axes["offload"].always_in_id:
        yield "an axis named offload with always_in_id = true is missing"
    values = Counter(value for axis in axes.values() for value in axis.values)
    for value, count in values.items():
        if count > 1 or "/" in value or ":" in value:
            yield f"the value {value!r} belongs to two axes, or contains a slash or a colon"
    configurations = _multiply(table.configurations)
    if not configurations or not table.distributions or not table.methods:
        yield "configurations, distributions and methods must not be empty"
    for configuration in configurations:
        if unknown := set(configuration.split("/")) - set(values):
            yield (
                f"the configuration {configuration} names {', '.join(sorted(unknown))}, which is not a value of "
                "any axis"
            )
    if missing := set(_multiply(table.quick)) - set(configurations):
        yield f"quick names {', '.join(sorted(missing))}, which is not in the list of configurations"
    for only in (*(method.only for method in table.methods), *(build.only for build in table.builds)):
        for axis, allowed in only.items():
            if axis not in axes or not set(allowed) <= set(axes[axis].values):
                yield f"only = {{ {axis} = {list(allowed)} }} names an unknown axis or value"
    for package, versions in table.tried.items():
        try:
            SpecifierSet(versions)
        except InvalidSpecifier:
            yield f"tried: {package} {versions!r} is not a range of versions such as >=1.10,<1.16"
