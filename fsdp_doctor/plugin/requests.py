"""What pytest asks of the process that supervises the ranks, what that answers, and what it tells the ranks."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fsdp_doctor.plugin.marks import RanksNeeded
from fsdp_doctor.verdict.records import PhaseReport, RankReport

TestPhase: TypeAlias = Literal["setup", "call", "teardown"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What the ranks' own sessions of pytest begin with.

    options: of the command line, read. args: files and directories. scratch: a directory for all that the ranks write.
    """

    options: dict[str, Any]
    args: list[str]
    scratch: pathlib.Path


@dataclass(frozen=True, kw_only=True)
class PhaseCommand:
    """One phase of one test, for a rank.

    number: counts the tests of a run. next_nodes: ids of the nodes, parents included, of the test that comes next;
    empty after the last one. still_whole: so far every rank has done the same and has left nothing behind, so
    collectives must work.
    """

    phase: TestPhase
    file: str
    test: str
    number: int
    next_nodes: tuple[str, ...] = ()
    still_whole: bool = True

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def command_from_line(line: str) -> PhaseCommand:
    return PhaseCommand(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class PhaseRequest:
    """``builds_model``: whether the test has a scenario."""

    needs: RanksNeeded
    command: PhaseCommand
    timeout: float | None
    builds_model: bool


@dataclass(frozen=True, kw_only=True)
class PhaseAnswer:
    """How a phase ended on every rank. ``goes_on``: whether the next phase of the test can run in the same workers."""

    reports: list[RankReport]
    phases: list[PhaseReport | None]
    goes_on: bool


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """There can be no such ranks. ``exit_code``: as in errors.py."""

    reason: str
    exit_code: int


Answer: TypeAlias = PhaseAnswer | Refusal
