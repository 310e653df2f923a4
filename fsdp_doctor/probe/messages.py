"""The messages between the processes of a run, as records, and their encoding as lines of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from fsdp_doctor.matrix.axes import Backend
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.verdict.records import PhaseReport, Ready, Record, Refused, Stop

# A worker's task for each case whose number it receives: run the case, or save the checkpoint that the case loads.
Task: TypeAlias = Literal["run", "save"]


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Instruction to start this rank's worker, together with the workers of the other ranks.

    generation: the number of this start among the starts with the same task in this run.
    backend: the backend of the worker's process groups; None for a framework, which makes them itself.
    framework: the framework whose cases the worker runs; None for cases of the matrix.
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
    """Instruction to run a case. ``number``: the index of the case in the job's list."""

    number: int


@dataclass(frozen=True, kw_only=True)
class RetireWorker:
    """Instruction to end the worker. Another worker is started when it is needed."""


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """Instruction to end the run."""


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """Order to end the worker while it runs a case or is still starting.

    why, detail: the reason, for the worker's report.
    """

    why: Stop
    detail: str


# The conductor sends instructions to the supervisors, and a worker sends messages to its supervisor.
Instruction: TypeAlias = StartWorker | RunCase | RetireWorker | EndRun
INSTRUCTIONS: tuple[type[Instruction], ...] = (StartWorker, RunCase, RetireWorker, EndRun)
Message: TypeAlias = Record | Ready | Refused | PhaseReport
MESSAGES: tuple[type[Message], ...] = (Record, Ready, Refused, PhaseReport)

_T = TypeVar("_T")


def encode(record: Any) -> str:
    """Encodes the record as one line of JSON, which :func:`decode` reads."""
    return json.dumps([type(record).__name__, msgspec.to_builtins(record)])


def decode(text: str | bytes, kinds: tuple[type[_T], ...]) -> _T:
    """Decodes a record of one of the kinds. Raises ValueError for any other text."""
    match json.loads(text):
        case [str(name), fields]:
            for kind in kinds:
                if kind.__name__ == name:
                    return msgspec.convert(fields, kind)
    raise ValueError(f"no record of {', '.join(kind.__name__ for kind in kinds)}")
