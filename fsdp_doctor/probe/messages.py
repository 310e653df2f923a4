"""The messages between the processes of a run, as records, and their form as lines of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from fsdp_doctor.matrix.axes import Backend
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.verdict.records import PhaseReport, Ready, Record, Refused, Stop

# What a worker does with each case whose number it is sent: run it, or save the checkpoint that it is given.
Task: TypeAlias = Literal["run", "save"]


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Start the rank's worker of a new generation.

    generation: its number in this run among those with the same task.
    backend: of the worker's process groups; None for a framework, which makes them itself.
    framework: the one whose cases the worker runs; None for cases of the matrix.
    """

    generation: int
    backend: Backend | None
    framework: str | None = None
    task: Task = "run"

    @classmethod
    def for_case(cls, case: AnyCase, generation: int, task: Task = "run") -> StartWorker:
        if isinstance(case, FrameworkCase):
            return cls(generation=generation, backend=None, framework=case.scenario.framework, task=task)
        return cls(generation=generation, backend=case.scenario.backend, task=task)


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """Have the worker run a case. ``number``: its place in the job's list."""

    number: int


@dataclass(frozen=True, kw_only=True)
class RetireWorker:
    """End the worker; another is started when one is needed."""


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """There is nothing more to do."""


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """End the worker in the middle of the case or the start that is under way; why, detail: for its report."""

    why: Stop
    detail: str


# The conductor's, for the supervisors; and a worker's, for its supervisor.
Instruction: TypeAlias = StartWorker | RunCase | RetireWorker | EndRun
INSTRUCTIONS: tuple[type[Instruction], ...] = (StartWorker, RunCase, RetireWorker, EndRun)
Message: TypeAlias = Record | Ready | Refused | PhaseReport
MESSAGES: tuple[type[Message], ...] = (Record, Ready, Refused, PhaseReport)

_T = TypeVar("_T")


def encode(record: Any) -> str:
    """The record as one line of JSON, which :func:`decode` reads."""
    return json.dumps([type(record).__name__, msgspec.to_builtins(record)])


def decode(text: str | bytes, kinds: tuple[type[_T], ...]) -> _T:
    """Reads a record of one of the kinds. Raises ValueError for any other text."""
    match json.loads(text):
        case [str(name), fields]:
            for kind in kinds:
                if kind.__name__ == name:
                    return msgspec.convert(fields, kind)
    raise ValueError(f"no record of {', '.join(kind.__name__ for kind in kinds)}")
