"""Describes the models of a training run as scenarios of the matrix, with the places where weights are extracted or
loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.matrix.axes import AxisName, AxisValue, Offload, Phase, Staging
from fsdp_doctor.matrix.cases import Case, Scenario, make_scenario

CANNOT_BE_DETERMINED = "cannot be determined"
VERSIONS_BETWEEN = "; "

Role: TypeAlias = Literal["model", "actor", "ref", "critic"]
# Setting that determines a value, or an explanation if no setting does.
Because: TypeAlias = Setting | str | None


@dataclass(frozen=True, kw_only=True)
class ExtractionPoint:
    """Place where a framework extracts or loads weights, described by a case of the matrix."""

    purpose: str
    case: Case


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Reason for the value of an axis: a setting, or the framework's default."""

    axis: AxisName
    value: str
    because: str

    def __str__(self) -> str:
        return f"{self.axis}={self.value}: {self.because}"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One model of the run, for one range of framework versions.

    ``role`` is the model's purpose. ``versions`` is empty if all known versions behave the same. ``scenario`` has no
    staging, since each extraction has its own staging. ``scenario`` is None if the model does not use FSDP, or if its
    settings cannot be determined; ``why_not`` gives the reason.
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

    def change(self, values: Mapping[AxisName, AxisValue], because: str) -> Use:
        """Returns this use with the given values on the axes of its scenario and of its cases.

        A use without a scenario is returned unchanged.

        because: the reason for all these values.
        """
        if self.scenario is None or not values:
            return self
        by_name = {str(axis): value for axis, value in values.items()}
        return dataclasses.replace(
            self,
            scenario=self.scenario.change(**by_name),
            reasons=(*self.reasons, *(Reason(axis=a, value=str(v), because=because) for a, v in values.items())),
            extractions=tuple(
                dataclasses.replace(point, case=Case(point.case.scenario.change(**by_name), point.case.method))
                for point in self.extractions
            ),
        )


@dataclass(frozen=True)
class Chosen:
    """Value of an axis and the reason for it. A value without a reason is not shown to the user."""

    value: AxisValue | Offload
    because: Because = None


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """Offloads of a model.

    ``policy``, ``param`` and ``optimizer`` give the setting that turns this offload on, or an explanation if no setting
    does so; None if the offload is off. ``default`` explains why all offloads are off.
    """

    policy: Because = None
    param: Because = None
    optimizer: Because = None
    default: Because = None

    @property
    def chosen(self) -> Chosen:
        reasons = [because for because in (self.policy, self.param, self.optimizer) if because is not None]
        if not reasons:
            return Chosen(Offload(), self.default)
        offload = Offload.from_flags(
            policy=self.policy is not None, param=self.param is not None, optimizer=self.optimizer is not None
        )
        return Chosen(offload, "; ".join(dict.fromkeys(map(str, reasons))))


def make_use(
    role: Role,
    versions: str,
    chosen: Mapping[AxisName, Chosen],
    extractions: Callable[[Scenario], Iterable[ExtractionPoint]],
) -> Use:
    """Makes a use in which each axis has its chosen value, or else its default."""
    values = {"offload": "none", "staging": "unstaged"} | {str(axis): str(c.value) for axis, c in chosen.items()}
    scenario = make_scenario(values)
    reasons = (Reason(axis=axis, value=str(c.value), because=str(c.because)) for axis, c in chosen.items() if c.because)
    return Use(
        role=role,
        versions=versions,
        scenario=scenario,
        reasons=tuple(reasons),
        extractions=tuple(extractions(scenario)),
    )


def make_extraction_point(purpose: str, scenario: Scenario, method: str, *, staged: bool = False) -> ExtractionPoint:
    """Describes an extraction by a method from a model in the scenario.

    staged: whether the framework moves the model to the device before the extraction.
    """
    staging = Staging.STAGED if staged else Staging.UNSTAGED
    return ExtractionPoint(purpose=purpose, case=Case(dataclasses.replace(scenario, staging=staging), method))


def make_loading_point(purpose: str, scenario: Scenario, method: str, *, staged: bool = False) -> ExtractionPoint:
    """Describes a load by a method into a model in the scenario, before the model's first step.

    staged: whether the framework moves the model to the device before the load.
    """
    return make_extraction_point(purpose, dataclasses.replace(scenario, phase=Phase.FRESH), method, staged=staged)


def merge_equal(uses: Sequence[Use]) -> tuple[Use, ...]:
    """Merges the uses of one role that differ only in their versions."""
    versions: dict[Use, list[str]] = {}
    for use in uses:
        versions.setdefault(dataclasses.replace(use, versions=""), []).append(use.versions)
    if len(versions) == 1:
        return tuple(versions)
    return tuple(dataclasses.replace(use, versions=VERSIONS_BETWEEN.join(of)) for use, of in versions.items())
