"""What a configuration amounts to: the uses of FSDP in it, and what is extracted or loaded where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.matrix.axes import AxisName
from fsdp_doctor.matrix.cases import Case, Scenario, scenario_of

CANNOT_BE_DETERMINED = "cannot be determined"

VERSIONS_BETWEEN = "; "

Role: TypeAlias = Literal["model", "actor", "ref", "critic"]


@dataclass(frozen=True, kw_only=True)
class ExtractionPoint:
    """A place where a framework takes the weights out, or loads them, as the case of the matrix that it is."""

    purpose: str
    case: Case


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why an axis has its value: a setting, or what the framework does where none says otherwise."""

    axis: AxisName
    value: str
    because: str

    def __str__(self) -> str:
        return f"{self.axis}={self.value}: {self.because}"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One model of the training run, under one range of the framework's versions.

    role: what the model is for. versions: of the framework, empty where all that are known do the same.
    scenario: without staging, which is a matter of each extraction; None where the model is not under FSDP,
        or it cannot be determined, and ``why_not`` says so.
    """

    role: Role
    versions: str = ""
    scenario: Scenario | None = None
    why_not: str = ""
    reasons: tuple[Reason, ...] = ()
    extractions: tuple[ExtractionPoint, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.role}, {self.versions}" if self.versions else self.role

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(dict.fromkeys(extraction.case for extraction in self.extractions))

    def changed(self, values: Mapping[AxisName, str], because: str) -> Use:
        """This use with other values on some axes, in its scenario and in its cases, for one reason."""
        if self.scenario is None or not values:
            return self
        reasons = [Reason(axis=axis, value=value, because=because) for axis, value in values.items()]
        extractions = [
            ExtractionPoint(purpose=point.purpose, case=Case(_changed(point.case.scenario, values), point.case.path))
            for point in self.extractions
        ]
        return dataclasses.replace(
            self,
            scenario=_changed(self.scenario, values),
            reasons=(*self.reasons, *reasons),
            extractions=tuple(extractions),
        )


@dataclass(frozen=True)
class Chosen:
    """The value of an axis, and what chose it: a setting, or words. Without a reason it is not worth a line."""

    value: str
    because: Setting | str | None = None


def use_of(
    role: Role,
    versions: str,
    chosen: Mapping[AxisName, Chosen],
    extractions: Callable[[Scenario], Iterable[ExtractionPoint]],
) -> Use:
    """A use where each axis has the value that was chosen, and else its default; unstaged."""
    values: dict[AxisName, str] = {"offload": "none", "staging": "unstaged"}
    scenario = scenario_of(
        {str(axis): value for axis, value in values.items()} | {a: c.value for a, c in chosen.items()}
    )
    reasons = [
        Reason(axis=axis, value=one.value, because=str(one.because)) for axis, one in chosen.items() if one.because
    ]
    return Use(
        role=role,
        versions=versions,
        scenario=scenario,
        reasons=tuple(reasons),
        extractions=tuple(extractions(scenario)),
    )


def extraction(purpose: str, scenario: Scenario, path: str, *, staged: bool = False) -> ExtractionPoint:
    """What a path takes out of the model of that scenario, for a purpose in words."""
    return ExtractionPoint(
        purpose=purpose, case=Case(scenario.changed(staging="staged" if staged else "unstaged"), path)
    )


def loading(purpose: str, scenario: Scenario, path: str, *, staged: bool = False) -> ExtractionPoint:
    """What a path loads into the model of that scenario, before its first step."""
    return extraction(purpose, scenario.changed(phase="fresh"), path, staged=staged)


def merged(uses: Sequence[Use]) -> tuple[Use, ...]:
    """The uses of one role; those that differ in nothing but the versions become one."""
    found: dict[Use, list[str]] = {}
    for use in uses:
        found.setdefault(dataclasses.replace(use, versions=""), []).append(use.versions)
    if len(found) == 1:
        return tuple(found)
    return tuple(dataclasses.replace(use, versions=VERSIONS_BETWEEN.join(versions)) for use, versions in found.items())


def _changed(scenario: Scenario, values: Mapping[AxisName, str]) -> Scenario:
    return scenario.changed(**{str(axis): value for axis, value in values.items()})
