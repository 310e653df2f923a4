"""What a framework saves it must load: into the same session, or into another process's of other weights.

After the load the weights, every value of the optimizer and the next two steps are those of the run that went on.
"""

from __future__ import annotations

import copy
import pathlib
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.case import held_pieces, models, reference
from fsdp_doctor.case.findings import Findings, compare, first_names
from fsdp_doctor.case.held_pieces import Full
from fsdp_doctor.case.loaded_state import optimizer_problems, options_of
from fsdp_doctor.case.training_state import StepOutcome, deterministic, differences, outcome_of
from fsdp_doctor.frameworks.adapter import STEPS_BEFORE, FrameworkSession
from fsdp_doctor.frameworks.framework_run import FrameworkRun
from fsdp_doctor.verdict.records import Problem

_STEPS_AFTER = 2
_ORDINAL = ("next", "second")


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A run where it was saved. Tensors are on the host, unsharded. options: of each of the optimizer's groups."""

    weights: Full
    moments: Full
    options: list[dict[str, Any]]


class RoundTrip(FrameworkRun):
    """What the cases that save and load have in common."""

    def _now(self, session: FrameworkSession) -> SavedState:
        self._recorder.enter("reference")
        truth = reference.take(session.model, session.optimizer, self._runtime)
        options = copy.deepcopy(options_of(session.optimizer))
        return SavedState(weights=truth.full, moments=truth.optimizer, options=options)

    def _save(self, session: FrameworkSession) -> None:
        self._recorder.enter("save")
        session.save(self._saved_at)

    @property
    def _saved_at(self) -> pathlib.Path:
        return self._directory / "saved"

    def _outcome(self, session: FrameworkSession) -> StepOutcome:
        self._runtime.synchronize()
        return outcome_of(session.model, session.optimizer)

    def _check_loaded(self, session: FrameworkSession, saved: SavedState) -> None:
        self._recorder.enter("verify")
        self._runtime.synchronize()
        found = Findings()
        held = held_pieces.of_model(session.model, saved.weights)
        for piece in held:
            if piece.expected is None:
                found.note("incomplete", "not a name of the model that was saved", piece.name)
            elif difference := compare(piece.held.cpu(), piece.expected):
                found.note("wrong", f"not what was saved: {difference}", piece.name)
        self._recorder.add(problems=found.problems(), num_tensors=len(held))
        self._recorder.add(problems=optimizer_problems(session.model, session.optimizer, saved.moments, saved.options))
        self._agree_or_stop()
        self._recorder.enter("next step")

    def _check_step(self, session: FrameworkSession, number: int, expected: StepOutcome) -> None:
        """``number``: 0 for the first step after the load. Of the steps that end otherwise the first is told."""
        others = differences(self._outcome(session), expected)
        if others and not self._recorder.record.problems:
            what = f"the {_ORDINAL[number]} training step ends otherwise than that of the run that went on"
            self._recorder.add(problems=(Problem(kind="poisoned", detail=f"{what}: {first_names(others)}"),))


class Rollback(RoundTrip):
    """Saves, trains on, and loads into the same session."""

    def _train(self, session: FrameworkSession, kept: bool) -> None:
        first = 0 if kept else STEPS_BEFORE
        began_at = session.num_steps
        saved: SavedState | None = None
        went_on: list[StepOutcome] = []

        def at(number: int) -> None:
            nonlocal saved
            after = number - first
            if after == 0:
                saved = self._now(session)
                self._save(session)
                self._agree_or_stop()
                self._recorder.enter("next step")
            elif 0 < after <= _STEPS_AFTER:
                went_on.append(self._outcome(session))
            elif after > _STEPS_AFTER:
                self._check_step(session, after - _STEPS_AFTER - 1, went_on[after - _STEPS_AFTER - 1])
            if after == _STEPS_AFTER:
                assert saved is not None
                self._recorder.enter("load")
                session.load(self._saved_at)
                session.num_steps = began_at + first
                self._check_loaded(session, saved)

        with deterministic():
            session.train(first + 2 * _STEPS_AFTER, self._between_steps(at))


class SavingRun(RoundTrip):
    """The first half of a resume: saves, and leaves what must be there after the load, and after the next steps."""

    takes_kept = False

    def _train(self, session: FrameworkSession, kept: bool) -> None:
        saved: SavedState | None = None
        went_on: list[StepOutcome] = []

        def at(number: int) -> None:
            nonlocal saved
            if number == STEPS_BEFORE:
                saved = self._now(session)
                self._save(session)
            elif number > STEPS_BEFORE:
                self._recorder.enter("next step")
                went_on.append(self._outcome(session))

        with deterministic():
            session.train(STEPS_BEFORE + _STEPS_AFTER, self._between_steps(at))
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._runtime.rank == 0:
            torch.save(saved, self._directory / "state.pt")
        torch.save(went_on, self._directory / f"went_on_{self._runtime.rank}.pt")


class ResumeRun(RoundTrip):
    """The second half, in other processes: a session of other weights loads, and goes on."""

    weights: models.Weights = "other"
    takes_kept = False

    def _train(self, session: FrameworkSession, kept: bool) -> None:
        saved: SavedState = torch.load(self._directory / "state.pt", weights_only=False)
        went_on: list[StepOutcome] = torch.load(self._directory / f"went_on_{self._runtime.rank}.pt")

        def at(number: int) -> None:
            if number == 0:
                self._check_loaded(session, saved)
            else:
                self._check_step(session, number - 1, went_on[number - 1])

        self._recorder.enter("load")
        with deterministic():
            session.train(_STEPS_AFTER, self._between_steps(at), resume_from=self._saved_at)
