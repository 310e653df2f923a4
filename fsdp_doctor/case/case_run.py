"""What every case of the matrix is, whatever its path does: build, exercise the path, agree, train on."""

from __future__ import annotations

import abc
import pathlib
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction
from fsdp_doctor.case.recorded_run import RecordedRun, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import Path, impossible


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A case, its path and the function behind it, and what the rank has to run it with.

    report: called with the record each time the case reaches another stage.
    """

    case: Case
    path: Path
    function: PathFunction
    runtime: Runtime
    leftovers: Leftovers
    report: RecordSink


class CaseRun(RecordedRun, abc.ABC):
    """A case of the matrix, in a scenario that our own trainer builds."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment.case.id, assignment.report)
        self._case = assignment.case
        self._path = assignment.path
        self._contract = assignment.path.contract
        self._function = assignment.function
        self._runtime = assignment.runtime
        self._leftovers = assignment.leftovers

    @abc.abstractmethod
    def _new_trainer(self) -> Trainer:
        """The scenario's trainer, sharded, and trained where its phase says so."""

    @abc.abstractmethod
    def _exercise(self, trainer: Trainer) -> None:
        """Brings the scenario to its state, runs the path and verifies it."""

    @abc.abstractmethod
    def _train_on(self, trainer: Trainer) -> None:
        """Has the trainer train the step that follows, and looks at what it starts from."""

    @abc.abstractmethod
    def _is_reusable(self, trainer: Trainer) -> bool:
        """Whether the trainer is again what :meth:`_new_trainer` gave; asked when nothing went wrong."""

    def run(self, kept: Trainer | None) -> Trainer | None:
        """Returns the trainer, in the state between two steps, if it may be used again."""
        trainer, exercised = kept, False
        with self._catching():
            trainer = trainer or self._build()
            self._exercise(trainer)
            exercised = True
        goes_on = not self.record.unsupported and self._agree() and self._unbroken and not self.record.refusal
        if goes_on and trainer and exercised:
            with self._catching():
                self._train_on(trainer)
            self._agree()
        self._add(retire=self._leftovers.undo(), done=True)
        self._report(self.record)
        reusable = self._unbroken and not self._changed_somewhere and trainer is not None and self._is_reusable(trainer)
        return trainer if reusable else None

    def _build(self) -> Trainer:
        self._enter("build")
        reason = _why_not(self._case, self._path, self._runtime)
        if reason:
            raise Unsupported(reason)
        return self._new_trainer()

    def _arguments(self, trainer: Trainer, **further: Any) -> PathArguments:
        return PathArguments(
            model=trainer.model,
            device=self._runtime.device,
            optimizer=trainer.optimizer,
            scratch=self._scratch,
            control=self._runtime.control,
            **further,
        )

    @property
    def _scratch(self) -> pathlib.Path:
        """A directory of this case's own, not yet made."""
        return self._runtime.scratch / self._case.id.replace("/", "-")

    @property
    def _watches_state(self) -> bool:
        """Reading the model would wait for copies in flight, and so hide the race that a non-blocking
        scenario is there to show: nothing of ours looks at it there until the path is through."""
        return self._case.scenario.transfer == "blocking"


def _why_not(case: Case, path: Path, runtime: Runtime) -> str:
    """Why the path cannot be tried in this scenario; empty if it can."""
    if reason := impossible(path, case.scenario):
        return reason
    on_disk = path.name == "dcp" or path.contract.given in ("dcp", "rank_files")
    if on_disk and runtime.num_nodes > 1:
        return "the checkpoint directory is not shared between the nodes"
    return ""
