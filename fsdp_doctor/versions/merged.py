"""The merged report as values: cases by environment, and what they say of each case from version to version.

It is a value of its own and not a report of reports: of each result it keeps what a user would act on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind

MERGED_SCHEMA = "fsdp-doctor/merged"
# Since version 2 there is the verdict "refused".
MERGED_SCHEMA_VERSION = 2

# How a message that was too long ends.
SHORTENED = " ..."

# In place of the device, of an environment that could not be made.
NOWHERE = "not run"
# "not run": the environment has no result of the case, or could not be made.
Shown: TypeAlias = VerdictKind | Literal["not run"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where cases ran: a column.

    name: no other environment of the merged report has it. torch: its version, as it says it itself.
    device: the device type. accelerators: their names. packages: versions by package, torch's among them.
    version: of fsdp-doctor. command: that ran it. rerun_options: what a command that runs one case alone needs
    besides ``--case``. created: ISO 8601, of the last report. reports: its reports, as paths from the merged report
    where they are known, else as file names. notes: what a reader must know to read the verdicts right.
    complete: whether every selected case has a result. ended: what ended an incomplete run, or why there was none.
    """

    name: str
    torch: str
    device: str
    accelerators: tuple[str, ...]
    world_size: int
    python: str
    packages: dict[str, str]
    version: str
    command: str
    rerun_options: str
    created: str
    reports: tuple[str, ...]
    notes: tuple[str, ...]
    complete: bool
    ended: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case showed.

    ranks: the ones that the reason speaks of. also: what was found or followed besides.
    message: ``Type: message`` of the exception, cut to 1,000 characters; empty where none was raised.
    known: the id of the catalogue's entry that a bad verdict shows; empty where there is none.
    """

    kind: VerdictKind
    reason: str
    ranks: tuple[int, ...]
    also: tuple[str, ...]
    message: str
    known: str


@dataclass(frozen=True, kw_only=True)
class Period:
    """Versions that ran one after the other, of the same verdict and entry.

    since, until: the oldest and the newest of them, perhaps the same.
    """

    kind: VerdictKind
    known: str
    since: str
    until: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What the versions of one package make of a case, everything else being equal.

    package: ``torch`` or another. where: the device, the ranks, and what else tells this row of versions from others.
    periods: in the order of the versions; without one nothing ran. not_run: versions of which the case has no result.
    text: the same as a sentence.
    """

    package: str
    where: str
    periods: tuple[Period, ...]
    not_run: tuple[str, ...]
    text: str

    @property
    def changes(self) -> bool:
        """Whether two versions that could run the case differ."""
        return len({(period.kind, period.known) for period in self.periods if period.kind not in NOT_RUN}) > 1


@dataclass(frozen=True, kw_only=True)
class MergedCase:
    """A case with what it showed in each environment: a row.

    outcomes: for each environment the index of one of the merged report's outcomes, null where the case has no result.
    """

    id: str
    strategy: str
    offload: str
    staging: str
    direction: Direction
    path: str
    outcomes: tuple[int | None, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class MergedReport:
    """Several reports, case by case.

    version: of the fsdp-doctor that merged them. environments: by device and version, oldest first.
    outcomes: each once, however many cases showed it. cases: in the order in which they ran.
    """

    version: str
    environments: tuple[Environment, ...]
    outcomes: tuple[Outcome, ...]
    cases: tuple[MergedCase, ...]

    def outcome(self, case: MergedCase, environment: int) -> Outcome | None:
        """What the case showed in the environment of that index; None where it has no result there."""
        index = case.outcomes[environment]
        return None if index is None else self.outcomes[index]

    def shown(self, case: MergedCase, environment: int) -> Shown:
        """The verdict, or that there is none."""
        outcome = self.outcome(case, environment)
        return "not run" if outcome is None else outcome.kind

    def passes(self, case: MergedCase) -> bool:
        """Whether the case is as it should be in every environment: one that did not run it is none."""
        return all(kind in GOOD for kind in self._kinds(case))

    def fails(self, case: MergedCase) -> bool:
        """Whether the case has a bad verdict in some environment."""
        return any(kind != "not run" and kind not in GOOD | NOT_RUN for kind in self._kinds(case))

    def ran(self, case: MergedCase) -> bool:
        """Whether some environment could run the case."""
        return any(kind != "not run" and kind not in NOT_RUN for kind in self._kinds(case))

    def _kinds(self, case: MergedCase) -> list[Shown]:
        return [self.shown(case, number) for number in range(len(self.environments))]
