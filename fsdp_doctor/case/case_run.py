"""What every case of the matrix is, whatever its path does: build, exercise the path, agree, train on."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.case import built_scenario
from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction
from fsdp_doctor.case.recorded_run import RecordedRun, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.paths import Path, impossible, is_user_path


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
        trainer = self._cycle(kept)
        if trainer is not None and self._is_called_again():
            trainer = self._cycle_again(trainer)
        self._add(retire=self.record.retire or self._counts_against_others(trainer), done=True)
        self._report(self.record)
        return trainer

    def _cycle(self, kept: Trainer | None) -> Trainer | None:
        """From one state between two steps to the next, the path between them."""
        trainer = self.prepare(kept)
        if trainer is not None:
            self._leftovers.look_before()
            self.exercise(trainer, lambda: self._function(self.given), owned=True)
        reusable = self.go_on(trainer)
        self._add(retire=self._leftovers.undo())
        return reusable

    def _is_called_again(self) -> bool:
        """Weights are sent after every step: what a user's function keeps from one call shows in the next.

        The same on every rank, each of which has a trainer that may be used again. A watched life has one call.
        """
        if not is_user_path(self._path.name) or self._runtime.with_ledgers or not self.record.healthy:
            return False
        return self._agree() and self._sound_everywhere

    def _cycle_again(self, trainer: Trainer) -> Trainer | None:
        """What is measured is the first call, as of every other path."""
        first = self.record
        self._add(call=2)
        again = self._cycle(trainer)
        self._add(seconds=first.seconds, peak_extra_bytes=first.peak_extra_bytes)
        return again

    def _counts_against_others(self, reusable: Trainer | None) -> str:
        """torch lets go of all of an FSDP1 model but its parameters: they would be in the next one's ledgers."""
        return "a model that would be counted with the next" if self._runtime.with_ledgers and reusable is None else ""

    def prepare(self, kept: Trainer | None) -> Trainer | None:
        """The scenario's trainer in the state in which the path runs; None where the record says why there is none."""
        with self._catching():
            trainer = kept or self._build()
            self._bring_to_state(trainer)
            self._enter("fingerprint")
            built_scenario.check(
                trainer.model,
                trainer.optimizer,
                self._case.scenario,
                device=self._runtime.device.type,
                ranks=self._runtime.world_size,
            )
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
        """A directory of this call's own, not yet made."""
        name = self._case.id.replace("/", "-")
        return self._runtime.scratch / (name if self.record.call == 1 else f"{name}-{self.record.call}")

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
