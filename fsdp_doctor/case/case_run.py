"""Run of a case on one rank, from building the model to reporting the record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic

from fsdp_doctor.case.case_steps import CaseSteps, T
from fsdp_doctor.case.recorder import SharedOutcome
from fsdp_doctor.case.side_effects import SideEffects
from fsdp_doctor.verdict.records import Record


class CaseRun(Generic[T]):
    """Run of one case. ``run`` performs the whole run; the pytest plugin calls its parts.

    A run builds and trains a model; takes the reference; rehearses the next steps without the method; offloads and
    stages; notes the state; runs the method and verifies its effects; exchanges outcomes with the other ranks; offloads
    again and loads; trains the next steps and checks each; cleans up the process; and reports the record. Subclasses of
    ``CaseSteps`` implement these points for each kind of case: ``ExtractionSteps`` and ``LoadingSteps`` for the matrix,
    ``SessionSteps`` for a framework.

    A framework owns its training loop, so the run cannot call a training step. The run is therefore a generator that
    yields where a training step must be made, and ``CaseSteps.drive`` advances the generator.

    side_effects: the watch over the process; None if the process belongs to a framework, and ends with it.
    """

    def __init__(self, steps: CaseSteps[T], side_effects: SideEffects | None = None) -> None:
        self._steps = steps
        self._recorder = steps.recorder
        self._side_effects = side_effects
        self._stopped = False

    @property
    def record(self) -> Record:
        return self._recorder.record

    def run(self, kept: T | None) -> T | None:
        """Runs the whole case. Returns the trainer, which is between two steps, if the next case may use it."""
        trainer = self._run_cycle(kept)
        if trainer is not None and self._is_called_again():
            # What is measured is the first call, as of every other method.
            first = self.record
            self._recorder.add(call=2)
            trainer = self._run_cycle(trainer)
            self._recorder.add(seconds=first.seconds, peak_extra_bytes=first.peak_extra_bytes)
        if trainer is not None:
            self.take_back(trainer)
        elif not self.record.retire:
            self._recorder.add(retire=self._steps.explain_retirement())
        self._recorder.add(done=True)
        self._recorder.report()
        return trainer

    def _run_cycle(self, kept: T | None) -> T | None:
        """Builds or takes the trainer, runs the case, and cleans up the process.

        Returns the trainer if the next case may use it; None otherwise.
        """
        trainer, reusable = self._build(kept), False
        if trainer is not None:
            reusable = self._steps.drive(trainer, self._live(trainer))
        else:
            self._agree()
        if self._side_effects is not None:
            self._recorder.clean_up(self._side_effects)
        return trainer if reusable and self._recorder.unbroken else None

    def _live(self, trainer: T) -> Generator[None, None, bool]:
        """Prepares a built trainer, runs the method, and trains on. Returns whether the trainer may be used again."""
        if (yield from self._prepare(trainer)):
            with self._watch_process():
                self.exercise(trainer, lambda: self._steps.call_method(trainer), owned=True)
        return (yield from self._go_on(trainer))

    def _build(self, kept: T | None) -> T | None:
        """Builds and trains the model, or takes the kept trainer. Returns None if that failed."""
        with self._steps.record_exceptions():
            self._steps.check_possible()
            return kept if kept is not None else self._steps.build()
        return None

    def _prepare(self, trainer: T) -> Generator[None, None, bool]:
        """Takes the reference, offloads and stages. Returns whether that succeeded."""
        steps = self._steps
        with steps.record_exceptions():
            steps.check_built(trainer)
            for _ in range(steps.steps_before):
                yield
            steps.take_reference(trainer)
        self._stopped = steps.agrees_on_reference and not self._agree().works
        if self._stopped or not self._recorder.unbroken:
            return False
        with steps.record_exceptions():
            yield from steps.look_ahead(trainer)
            steps.offload(trainer)
            steps.note_state(trainer)
            return True
        return False

    def _go_on(self, trainer: T) -> Generator[None, None, bool]:
        """Trains the next steps if the method ended in the same way on all ranks.

        Returns whether the trainer may be used again.
        """
        steps, recorder = self._steps, self._recorder
        outcome = SharedOutcome() if self._stopped else self._agree()
        if outcome.works and recorder.unbroken:
            with steps.record_exceptions():
                if steps.recover(trainer):
                    recorder.enter(steps.step_stage)
                    steps.resume(trainer)
                    for number in range(steps.steps_after):
                        recorder.enter(steps.step_stage)
                        with steps.measure_step(trainer):
                            yield
                        steps.check_trained(trainer, number)
            outcome = self._agree()
        return recorder.unbroken and not outcome.poisoned and steps.is_reusable(trainer)

    @contextlib.contextmanager
    def _watch_process(self) -> Iterator[None]:
        """Context around the method. Notes the settings of the process that an extraction leaves changed."""
        if self._side_effects is None:
            yield
            return
        self._side_effects.look_before()
        yield
        if self._steps.keeps_settings and (changed := self._side_effects.list_changed()):
            self._recorder.note("poisoned", f"the extraction changed settings of the process: {', '.join(changed)}")

    def _agree(self) -> SharedOutcome:
        """Exchanges outcomes with the other ranks, if there is a process group. Returns the outcome over all ranks."""
        if self._steps.runtime is None:
            self._recorder.add(healthy=False)
            return SharedOutcome()
        return SharedOutcome() if self.record.unsupported else self._recorder.agree(self._steps.runtime)

    def _is_called_again(self) -> bool:
        """Returns whether the method is called a second time; the same on every rank."""
        if not self.record.healthy or not self._steps.calls_again():
            return False
        outcome = self._agree()
        return outcome.works and outcome.sound

    # What follows is for a test of the plugin, which runs the method itself.

    def prepare(self, kept: T | None) -> T | None:
        """Builds and trains the model, or takes the kept trainer; offloads and stages it.

        Returns None if that failed.
        """
        trainer = self._build(kept)
        return trainer if trainer is not None and self._steps.drive(trainer, self._prepare(trainer)) else None

    def exercise(self, trainer: T, call: Callable[[], Any], *, owned: bool) -> None:
        """Runs the method by ``call``, and verifies the method's effects.

        call: a function that runs the method and returns its result.
        owned: whether only ``call`` refers to the method's result, so that the result's memory can be measured.
        """
        with self._steps.record_exceptions():
            self._steps.run_method(trainer, call, owned)

    def go_on(self, trainer: T) -> T | None:
        """Exchanges outcomes with the other ranks, and trains the next step.

        Returns the trainer if the next case may use it; None otherwise.
        """
        return trainer if self._steps.drive(trainer, self._go_on(trainer)) else None

    def prepare_second_call(self, trainer: T) -> T | None:
        """Prepares the model, which has trained on, for another call of the same method.

        Returns None if that failed.
        """
        self._recorder.add(call=2)
        return self.prepare(trainer)

    def take_back(self, trainer: T) -> None:
        """Restores the trainer, for the next case, to the state that it had at the beginning of this case."""
        with self._steps.record_exceptions():
            self._steps.take_back(trainer)
