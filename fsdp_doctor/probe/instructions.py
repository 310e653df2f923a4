"""What the conductor tells the supervisors, as records, and the records as JSON for the store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fsdp_doctor.matrix.axes import Backend
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.verdict.records import Stop

# What a worker does with each case whose number comes in: run it, or save the checkpoint that it is given.
Task: TypeAlias = Literal["run", "save"]


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Start the rank's worker of a new generation.

    generation: its number in this run among those with the same task.
    backend: what the worker's process groups are made with; None for a framework's, which makes them itself.
    framework: whose cases it runs; None for those of the matrix.
    """

    generation: int
    backend: Backend | None
    framework: FrameworkName | None = None
    task: Task = "run"


def start_for(case: AnyCase, generation: int, task: Task = "run") -> StartWorker:
    """What starts workers for a case."""
    if isinstance(case, FrameworkCase):
        return StartWorker(generation=generation, backend=None, framework=case.scenario.framework, task=task)
    return StartWorker(generation=generation, backend=case.scenario.backend, task=task)


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


Instruction: TypeAlias = StartWorker | RunCase | RetireWorker | EndRun


@dataclass(frozen=True, kw_only=True)
class StopWorker:
    """End the worker in the middle of the case or the start that is under way.

    why, detail: what its report then says.
    """

    why: Stop
    detail: str


_RECORDS: tuple[type[Any], ...] = (StartWorker, RunCase, RetireWorker, EndRun, StopWorker)


def to_json(record: Instruction | StopWorker) -> str:
    return json.dumps({"record": type(record).__name__, **dataclasses.asdict(record)})


def instruction_from_json(text: str | bytes) -> Instruction:
    record: Instruction = _from_json(text)
    return record


def stop_from_json(text: str | bytes) -> StopWorker:
    record: StopWorker = _from_json(text)
    return record


def _from_json(text: str | bytes) -> Any:
    fields = json.loads(text)
    name = fields.pop("record")
    return next(cls for cls in _RECORDS if cls.__name__ == name)(**fields)
