"""Scenarios and cases of frameworks, their ids, and the cases that a selection includes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.axes import describe_nearest
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, FrameworkMethod, read_matrix

ALL = "all"
_OFFLOAD = "offload"
# Suffix of a method's name if the framework's function is replaced.
_FIXED = "+fix"


@dataclass(frozen=True, kw_only=True, order=True)
class FrameworkScenario:
    """Configuration of a framework. ``configuration`` has its values in the form of an id, in the order of the axes."""

    framework: str
    configuration: str

    @property
    def id(self) -> str:
        return f"{self.framework}:{self.configuration}"

    def to_json(self) -> dict[str, str]:
        return {"framework": self.framework, "configuration": self.configuration}

    @property
    def matrix(self) -> FrameworkMatrix:
        return read_matrix(self.framework)

    @property
    def values(self) -> Mapping[str, str]:
        """Value on each axis of the framework."""
        return _read_values(self.framework, self.configuration)

    @property
    def offload(self) -> str:
        return self.values[_OFFLOAD]

    def list_offloads(self) -> tuple[str, ...]:
        """Lists the values of the framework's axis ``offload``, in order."""
        return tuple(self.matrix.find_axis(_OFFLOAD).values)

    def list_id_values(self, without: str = "") -> list[str]:
        """Lists the values in the scenario's id, except the value of the axis ``without``."""
        axes = (axis for axis in self.matrix.axes if axis.name != without)
        return [self.values[axis.name] for axis in axes if axis.always_in_id or self.values[axis.name] != axis.default]

    @property
    def generation(self) -> str:
        """Name of the group of worker processes that can run the scenario. Each scenario has its own group, because
        frameworks keep singletons.
        """
        return self.id

    def drop_offload(self) -> FrameworkScenario:
        """Returns the same scenario with the default offload."""
        default = self.matrix.find_axis(_OFFLOAD).default
        return make_framework_scenario(self.framework, {**self.values, _OFFLOAD: default})

    def list_methods(self) -> tuple[FrameworkMethod, ...]:
        """Lists the methods that make sense in the scenario, in the order in which they run."""
        return tuple(method for method in self.matrix.methods if method.has_values(self.values))


@dataclass(frozen=True, order=True)
class FrameworkCase:
    """Configuration of a framework, and the name of one of its methods, followed by ``+fix`` if a fix replaces it."""

    scenario: FrameworkScenario
    method: str

    @property
    def is_fixed(self) -> bool:
        """True if the fix of the method replaces the framework's function."""
        return self.method.endswith(_FIXED)

    @property
    def is_built_fixed(self) -> bool:
        """True if the session is built with the framework's function replaced."""
        return self.is_fixed and self.definition.kind in ("prepare", "resume")

    @property
    def plain_method(self) -> str:
        """Name of the method in the framework's table."""
        return self.method.removesuffix(_FIXED)

    def make_fixed(self) -> FrameworkCase | None:
        """Makes the same case with the framework's function replaced; None if there is no fix, or the case is already
        fixed.
        """
        fixable = {method.name for method in self.scenario.matrix.methods if method.fix}
        return FrameworkCase(self.scenario, f"{self.method}{_FIXED}") if self.method in fixable else None

    @property
    def id(self) -> str:
        return f"{self.scenario.id}/{self.method}"

    @property
    def definition(self) -> FrameworkMethod:
        """Definition of the method in the framework's table."""
        return self.scenario.matrix.find_method(self.plain_method)


def make_framework_scenario(framework: str, values: Mapping[str, str]) -> FrameworkScenario:
    """Makes the scenario with these values by axis; axes that are left out have their defaults."""
    words = [
        value
        for axis in read_matrix(framework).axes
        if (value := values.get(axis.name, axis.default)) != axis.default or axis.always_in_id
    ]
    return FrameworkScenario(framework=framework, configuration="/".join(words))


@functools.lru_cache(maxsize=1024)
def _read_values(framework: str, configuration: str) -> Mapping[str, str]:
    axes, axis_of = read_matrix(framework).axes, _map_values_to_axes(framework)
    return {axis.name: axis.default for axis in axes} | {axis_of[word]: word for word in configuration.split("/")}


@functools.cache
def _map_values_to_axes(framework: str) -> Mapping[str, str]:
    return {value: axis.name for axis in read_matrix(framework).axes for value in axis.values}


def find_frameworks(words: Sequence[str]) -> list[str]:
    """Reads the values of ``--framework``; ``all`` means all installed frameworks. Returns each framework once.

    Raises UsageError for a framework without an adapter, CannotRun if none is installed.
    """
    names: list[str] = []
    for word in words:
        if word != ALL:
            names.append(read_matrix(word).name)
            continue
        names += [name for name in BUILT_IN if read_installed_versions(read_matrix(name).distributions[:1])]
        if not names:
            raise CannotRun(f"--framework {ALL}: none of {', '.join(BUILT_IN)} is installed")
    return list(dict.fromkeys(names))


def parse_framework_id(text: str) -> FrameworkCase:
    """Reads the id of a framework's case, such as ``accelerate:fsdp1/offload/sharded/load_state``.

    Raises UsageError that names the unknown part.
    """
    head, *rest = text.split("/")
    framework, _, first = head.rpartition(":")
    axes = read_matrix(framework).axes
    *words, method = first, *rest
    axis_of = _map_values_to_axes(framework)
    values: dict[str, str] = {}
    for word in words:
        if word not in axis_of:
            raise UsageError(f"case {text!r}: {word!r} is not a value of {framework}{describe_nearest(word, axis_of)}")
        if axis_of[word] in values:
            raise UsageError(f"case {text!r} names {axis_of[word]} twice: {values[axis_of[word]]} and {word}")
        values[axis_of[word]] = word
    if missing := [axis.name for axis in axes if axis.always_in_id and axis.name not in values]:
        raise UsageError(f"case {text!r} has no value for {' and '.join(missing)}")
    scenario = make_framework_scenario(framework, values)
    methods = scenario.list_methods()
    names = [method.name for method in methods] + [f"{method.name}{_FIXED}" for method in methods if method.fix]
    if method not in names:
        raise UsageError(f"case {text!r}: {scenario.id} has no method {method!r}{describe_nearest(method, names)}")
    return FrameworkCase(scenario, method)


def is_framework_id(text: str) -> bool:
    """Returns whether an id names a framework's case, whose first part has a colon, such as ``trl:fsdp1``."""
    return ":" in text.partition("/")[0]


def list_scenarios(framework: str, *, quick: bool = False) -> Iterator[FrameworkScenario]:
    """Yields the scenarios of a framework that are tried.

    quick: only the scenarios of ``--level quick``.
    """
    matrix = read_matrix(framework)
    for configuration in matrix.quick if quick else matrix.configurations:
        yield FrameworkScenario(framework=framework, configuration=configuration)


def check_methods(frameworks: Sequence[str], names: Iterable[str]) -> None:
    """Raises UsageError for a method that none of the frameworks has."""
    known = [method.name for framework in frameworks for method in read_matrix(framework).methods]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--method: {', '.join(frameworks)} has no method {name!r}{describe_nearest(name, known)}; "
                f"`fsdp-doctor list --framework {frameworks[0]} --methods` prints them"
            )
