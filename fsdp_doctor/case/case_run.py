"""What every case of the matrix is, whatever its path does: build, exercise the path, agree, train on."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction
from fsdp_doctor.case.recorded_run import RecordedRun, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
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
    """A case of the matrix, in a scenario that our own trainer builds.

    given: what the path is called with, once the case is prepared. undoes_staging: as that of the path.
    """

    given: PathArguments

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment.case.id, assignment.report)
        self._case = assignment.case
        self._path = assignment.path
        self._contract = assignment.path.contract
        self.undoes_staging = assignment.path.undoes_staging
        self._function = assignment.function
        self._runtime = assignment.runtime
        self._leftovers = assignment.leftovers

    @abc.abstractmethod
    def _new_trainer(self) -> Trainer:
        """The scenario's trainer, sharded, and trained where its phase says so."""

    @abc.abstractmethod
    def _bring_to_state(self, trainer: Trainer) -> None:
        """Brings the scenario to the state in which the path runs."""

    @abc.abstractmethod
    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        """Runs the path by ``call`` and verifies what it did; see :meth:`exercise`."""

    @abc.abstractmethod
    def _train_on(self, trainer: Trainer) -> None:
        """Has the trainer train the step that follows, and looks at what it starts from."""

    @abc.abstractmethod
    def _is_reusable(self, trainer: Trainer) -> bool:
        """Whether the trainer is again what :meth:`_new_trainer` gave; asked when nothing went wrong."""

    def run(self, kept: Trainer | None) -> Trainer | None:
        """The whole case. Returns the trainer, in the state between two steps, if it may be used again."""
        trainer = self.prepare(kept)
        if trainer is not None:
            self._leftovers.look_before()
            self.exercise(trainer, lambda: self._function(self.given), owned=True)
        reusable = self.go_on(trainer)
        self._add(retire=self._leftovers.undo() or self._counts_against_others(reusable), done=True)
        self._report(self.record)
        return reusable

    def _counts_against_others(self, reusable: Trainer | None) -> str:
        """torch lets go of all of an FSDP1 model but its parameters: they would be in the next one's ledgers."""
        return "a model that would be counted with the next" if self._runtime.with_ledgers and reusable is None else ""

    def prepare(self, kept: Trainer | None) -> Trainer | None:
        """The scenario's trainer in the state in which the path runs; None where the record says why there is none."""
        with self._catching():
            trainer = kept or self._build()
            self._bring_to_state(trainer)
            self.given = self._arguments(trainer)
            return trainer
        return None

    def exercise(self, trainer: Trainer, call: Callable[[], Any], *, owned: bool) -> None:
        """Has ``call`` run the path, and verifies what it did.

        owned: whether the path runs in ``call`` alone and nobody else holds its result, so that its memory can be told.
        """
        with self._catching():
            self._verify(trainer, call, owned)

    def go_on(self, trainer: Trainer | None) -> Trainer | None:
        """Agrees with the other ranks and trains on. Returns the trainer if it may be used again."""
        goes_on = not self.record.unsupported and self._agree() and self._unbroken and not self.record.refusal
        if goes_on and trainer:
            with self._catching():
                self._train_on(trainer)
            self._agree()
        reusable = self._unbroken and not self._changed_somewhere and trainer is not None and self._is_reusable(trainer)
        return trainer if reusable else None

    @property
    def direction(self) -> Direction:
        """Of the path."""
        return self._path.direction

    def _build(self) -> Trainer:
        self._enter("build")
        reason = _why_not(self._case, self._path, self._runtime)
        if reason:
            raise Unsupported(reason)
        return self._new_trainer()

    def _arguments(self, trainer: Trainer) -> PathArguments:
        return PathArguments(
            model=trainer.model,
            device=self._runtime.device,
            optimizer=trainer.optimizer,
            scratch=self._scratch,
            control=self._runtime.control,
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
