"""The scenarios of frameworks: a configuration of one, in its own words; and which of their cases a selection means."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.machine.versions import installed_versions
from fsdp_doctor.matrix.axes import nearest
from fsdp_doctor.matrix.frameworks import FRAMEWORKS
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, FrameworkName, FrameworkPath

ALL = "all"
_OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True, order=True)
class FrameworkScenario:
    """A configuration of a framework; ``configuration`` has its values as an id has them, in the order of the axes."""

    framework: FrameworkName
    configuration: str

    @property
    def id(self) -> str:
        return f"{self.framework}:{self.configuration}"

    def to_json(self) -> dict[str, str]:
        return {"framework": self.framework, "configuration": self.configuration}

    @property
    def matrix(self) -> FrameworkMatrix:
        return FRAMEWORKS[self.framework]

    @property
    def values(self) -> Mapping[str, str]:
        """The value of each of the framework's axes."""
        return _values(self.framework, self.configuration)

    @property
    def offload(self) -> str:
        return self.values[_OFFLOAD]

    def offloads(self) -> tuple[str, ...]:
        """What the framework has of them, in order."""
        return tuple(self.matrix.axis(_OFFLOAD).values)

    def id_values(self, without: str = "") -> list[str]:
        """The words of its id, but for that of the axis ``without``."""
        axes = (axis for axis in self.matrix.axes if axis.name != without)
        return [self.values[axis.name] for axis in axes if axis.always_in_id or self.values[axis.name] != axis.default]

    @property
    def generation(self) -> str:
        """Which generation of workers may run it: one of its own, because frameworks keep singletons."""
        return self.id

    def without_offload(self) -> FrameworkScenario:
        """The scenario that differs from this one by its offload alone, and has the default one."""
        default = self.matrix.axis(_OFFLOAD).default
        return framework_scenario(self.framework, {**self.values, _OFFLOAD: default})

    def paths(self) -> tuple[FrameworkPath, ...]:
        """Those that make sense in it, in the order in which they run."""
        return tuple(path for path in self.matrix.paths if path.has_values(self.values))


@dataclass(frozen=True, order=True)
class FrameworkCase:
    """A configuration of a framework and one of its own paths, by its name."""

    scenario: FrameworkScenario
    path: str

    @property
    def id(self) -> str:
        return f"{self.scenario.id}/{self.path}"

    @property
    def way(self) -> FrameworkPath:
        """The path itself."""
        return self.scenario.matrix.path(self.path)


def framework_scenario(framework: FrameworkName, values: Mapping[str, str]) -> FrameworkScenario:
    """Of a value for each axis; an axis that is left out is at its default."""
    axes = FRAMEWORKS[framework].axes
    words = [
        value for axis in axes if (value := values.get(axis.name, axis.default)) != axis.default or axis.always_in_id
    ]
    return FrameworkScenario(framework=framework, configuration="/".join(words))


@functools.lru_cache(maxsize=1024)
def _values(framework: FrameworkName, configuration: str) -> Mapping[str, str]:
    axes = FRAMEWORKS[framework].axes
    axis_of = {value: axis.name for axis in axes for value in axis.values}
    return {axis.name: axis.default for axis in axes} | {axis_of[word]: word for word in configuration.split("/")}


def frameworks_named(words: Sequence[str]) -> list[FrameworkName]:
    """What ``--framework`` names, each once; ``all`` are those that are installed.

    Raises UsageError for one that there is no adapter for, CannotRun where ``all`` is none.
    """
    names: list[FrameworkName] = []
    for word in words:
        names += _installed() if word == ALL else [framework_named(word, "--framework")]
    if words and not names:
        raise CannotRun(f"--framework {ALL}: none of {_list(FRAMEWORKS)} is installed")
    return list(dict.fromkeys(names))


def _installed() -> list[FrameworkName]:
    return [name for name, matrix in FRAMEWORKS.items() if installed_versions(matrix.distributions[:1])]


def framework_named(name: str, option: str) -> FrameworkName:
    """Raises UsageError for a framework that there is no adapter for."""
    if name not in FRAMEWORKS:
        raise UsageError(
            f"{option}: there is no framework {name!r}{nearest(name, FRAMEWORKS)}; use {_list(FRAMEWORKS)}"
        )
    return name


def parse_framework_id(text: str) -> FrameworkCase:
    """Reads an id such as ``accelerate:fsdp1/offload/sharded/load_state`` back.

    Raises UsageError that names the part which is not known.
    """
    head, _, rest = text.partition(":")
    framework = framework_named(head, f"case {text!r}")
    *words, path = rest.split("/")
    matrix = FRAMEWORKS[framework]
    axis_of = {value: axis.name for axis in matrix.axes for value in axis.values}
    values: dict[str, str] = {}
    for word in words:
        if word not in axis_of:
            raise UsageError(f"case {text!r}: {word!r} is not a value of {framework}{nearest(word, axis_of)}")
        if axis_of[word] in values:
            raise UsageError(f"case {text!r} names {axis_of[word]} twice: {values[axis_of[word]]} and {word}")
        values[axis_of[word]] = word
    if missing := [axis.name for axis in matrix.axes if axis.always_in_id and axis.name not in values]:
        raise UsageError(f"case {text!r} has no value for {' and '.join(missing)}")
    scenario = framework_scenario(framework, values)
    names = [own.name for own in scenario.paths()]
    if path not in names:
        raise UsageError(f"case {text!r}: {scenario.id} has no path {path!r}{nearest(path, names)}")
    return FrameworkCase(scenario, path)


def is_framework_id(text: str) -> bool:
    """Whether an id is of a framework's case. Other ids have a colon in a path of the user's own, if at all."""
    return text.partition(":")[0] in FRAMEWORKS


def scenarios_of(framework: FrameworkName) -> Iterator[FrameworkScenario]:
    """Those that are tried."""
    for configuration in FRAMEWORKS[framework].configurations:
        yield FrameworkScenario(framework=framework, configuration=configuration)


def check_paths(frameworks: Sequence[FrameworkName], names: Iterable[str]) -> None:
    """Raises UsageError for a path that none of the frameworks has."""
    known = [path.name for framework in frameworks for path in FRAMEWORKS[framework].paths]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--method: {_list(frameworks)} has no path {name!r}{nearest(name, known)}; "
                f"`fsdp-doctor list --framework {frameworks[0]} --methods` prints them"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
