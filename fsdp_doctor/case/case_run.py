"""The life of a case on one rank, from the model that is built to the record that is reported."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import assert_never

from fsdp_doctor.case import built_scenario, checkpoints
from fsdp_doctor.case.consumers import consume, prepare_consumer
from fsdp_doctor.case.extraction import ExtractionSteps
from fsdp_doctor.case.loading import LoadingSteps
from fsdp_doctor.case.methods.lookup import (
    MethodArguments,
    MethodFunction,
    call_by_name,
    find_function,
    load_user_method,
    run_in_context,
)
from fsdp_doctor.case.next_steps import NextSteps
from fsdp_doctor.case.recorder import Recorder, RecordSink, SharedOutcome
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.sharding import find_experts_mesh
from fsdp_doctor.case.side_effects import SideEffects, read_torch_functions
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.axes import Consumer
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.contracts import Contract, Direction
from fsdp_doctor.matrix.methods import MatrixMethod, explain_impossible, find_method, is_user_method
from fsdp_doctor.verdict.records import Record, make_failure


class CaseRun:
    """The life of one case of the matrix: :meth:`run` is all of it, and the plugin calls its parts.

    Build and train; take the reference; offload; stage; look at the state; run the method and verify what it did;
    agree with the other ranks; offload again and load; train the next step; clean up the process; report the record.
    Where a method that extracts and one that loads differ, ``ExtractionSteps`` and ``LoadingSteps`` say how.

    given: what the method is called with, once the case is prepared.
    undoes_staging: whether a staged module is moved back to the CPU before the next step.
    """

    given: MethodArguments

    def __init__(
        self,
        case: Case,
        method: MatrixMethod,
        function: MethodFunction,
        *,
        runtime: Runtime,
        side_effects: SideEffects,
        saved: checkpoints.SavedCheckpoints,
        next_steps: NextSteps,
        report: RecordSink,
    ) -> None:
        self._scenario = case.scenario
        self._method = method
        self._function = function
        self._runtime = runtime
        self._side_effects = side_effects
        self._recorder = Recorder(case.id, report)
        self.undoes_staging = method.undoes_staging
        self._steps: ExtractionSteps | LoadingSteps
        match method.direction:
            case "out":
                self._steps = ExtractionSteps(case.scenario, method, runtime, self._recorder, next_steps)
            case "in":
                self._steps = LoadingSteps(case.scenario, method, runtime, self._recorder, saved)
            case _:
                assert_never(method.direction)

    @property
    def record(self) -> Record:
        return self._recorder.record

    @property
    def direction(self) -> Direction:
        return self._method.direction

    def run(self, kept: Trainer | None) -> Trainer | None:
        """Runs the whole case. Returns the trainer, between two steps, if the next case may use it."""
        trainer = self._run_cycle(kept)
        if trainer is not None and self._is_called_again():
            # What is measured is the first call, as of every other method.
            first = self.record
            self._recorder.add(call=2)
            trainer = self._run_cycle(trainer)
            self._recorder.add(seconds=first.seconds, peak_extra_bytes=first.peak_extra_bytes)
        if trainer is not None:
            self.take_back(trainer)
        if self._runtime.with_ledgers and trainer is None and not self.record.retire:
            # torch lets go of all of an FSDP1 model but its parameters: they would be in the next one's ledgers.
            self._recorder.add(retire="a model that would be counted with the next")
        self._recorder.add(done=True)
        self._recorder.report()
        return trainer

    def _run_cycle(self, kept: Trainer | None) -> Trainer | None:
        """Carries the case from one state between two training steps to the next, and runs the method between them."""
        trainer = self.prepare(kept)
        if trainer is not None:
            self._side_effects.look_before()
            self.exercise(trainer, self._call_method, owned=True)
            if self.direction == "out" and (changed := self._side_effects.list_changed()):
                self._recorder.note("poisoned", f"the extraction changed settings of the process: {', '.join(changed)}")
        reusable = self.go_on(trainer)
        self._recorder.clean_up(self._side_effects)
        return reusable

    def _call_method(self) -> Any:
        return consume(self._scenario.consumer, self._function, self.given, self._recorder.note)

    def prepare(self, kept: Trainer | None) -> Trainer | None:
        """Builds and trains the model, or takes the kept one; offloads and stages it. None where that failed."""
        recorder, scenario = self._recorder, self._scenario
        with recorder.record_exceptions():
            if reason := _explain_impossible(self._method, scenario, self._runtime):
                raise Unsupported(reason)
            prepare_consumer(scenario.consumer)
            trainer = kept or self._build()
            self._steps.look_ahead(trainer)
            self._steps.take_reference(trainer)
            trainer.interrupt_step()
            recorder.enter("offload")
            with recorder.measure_memory(trainer.watch, "offloaded"):
                trainer.offload()
            if scenario.staging.is_staged:
                recorder.enter("staging")
                with recorder.measure_memory(trainer.watch, "staged"):
                    trainer.stage()
            self._steps.note_state(trainer)
            recorder.enter("fingerprint")
            runtime = self._runtime
            self._check_as_named(trainer)
            self.given = MethodArguments(
                model=trainer.model,
                device=runtime.device,
                optimizer=trainer.optimizer,
                scratch=runtime.name_directory(self.record),
                control=runtime.control,
                state=self._steps.state,
                buffers=self._steps.buffers,
                experts=find_experts_mesh(trainer.model),
            )
            return trainer
        return None

    def _check_as_named(self, trainer: Trainer) -> None:
        """Raises NotAsNamed if the model was built otherwise than the id of its scenario says.

        Before a second call, it was the first that has changed the model.
        """
        runtime = self._runtime
        try:
            built_scenario.check(
                trainer.model, trainer.optimizer, self._scenario, device=runtime.device.type, ranks=runtime.world_size
            )
        except built_scenario.NotAsNamed as difference:
            if self.record.call == 1:
                raise
            self._recorder.note("poisoned", str(difference))

    def train_and_prepare(self, trainer: Trainer) -> Trainer | None:
        """Trains a prepared model a step and prepares it again, with its new weights as the reference."""
        with self._recorder.record_exceptions():
            self._recorder.enter("next step")
            trainer.resume(undo_staging=self.undoes_staging)
            trainer.step()
            return self.prepare(trainer)
        return None

    def prepare_second_call(self, trainer: Trainer) -> Trainer | None:
        """Prepares the model, which has trained on, for another call of the same method; None where that failed."""
        self._recorder.add(call=2)
        return self.prepare(trainer)

    def take_back(self, trainer: Trainer) -> None:
        """Takes a trainer that the next case may use back to where this one found it."""
        with self._recorder.record_exceptions():
            self._steps.take_back(trainer)

    def exercise(self, trainer: Trainer, call: Callable[[], Any], *, owned: bool) -> None:
        """Has ``call`` run the method, and verifies its effects. owned: whether nobody but ``call`` holds the method's
        result, so that its memory can be measured.
        """
        with self._recorder.record_exceptions():
            self._steps.run_method(trainer, call, owned)

    def go_on(self, trainer: Trainer | None) -> Trainer | None:
        """Agrees with the other ranks and trains the next step. Returns the trainer if it may be used again."""
        recorder = self._recorder
        outcome = SharedOutcome() if self.record.unsupported else recorder.agree(self._runtime)
        if outcome.works and recorder.unbroken and trainer:
            with recorder.record_exceptions():
                if self._steps.recover(trainer):
                    self._train_on(trainer)
            outcome = recorder.agree(self._runtime)
        reusable = recorder.unbroken and not outcome.poisoned and self._steps.is_reusable()
        return trainer if reusable else None

    def _train_on(self, trainer: Trainer) -> None:
        recorder, name = self._recorder, self._method.name
        recorder.enter("next step")
        self._steps.prepare_optimizer(trainer)
        with recorder.measure_memory(trainer.watch, "offloaded again", name):
            trainer.unstage(undo_staging=self.undoes_staging)
        with recorder.measure_memory(trainer.watch, "loaded", name):
            trainer.load()
        recorder.enter("fingerprint")
        self._steps.check_resumed(trainer)
        recorder.enter("next step")
        with recorder.measure_memory(trainer.watch, "trained again", name):
            self._steps.train_step(trainer)
        recorder.enter("fingerprint")
        self._steps.check_trained(trainer)

    def _build(self) -> Trainer:
        self._recorder.enter("build")
        return self._steps.build()

    def _is_called_again(self) -> bool:
        """Whether the user's function is called a second time, which shows what it keeps from the first call. The same
        on every rank. A case whose memory is measured has one call.
        """
        if not is_user_method(self._method.name) or self._runtime.with_ledgers or not self.record.healthy:
            return False
        outcome = self._recorder.agree(self._runtime)
        return outcome.works and outcome.sound


class CaseRunner:
    """Runs cases one after the other on this rank, and keeps a scenario while it stays whole.

    report: called with the record each time the case reaches another stage.
    """

    def __init__(self, runtime: Runtime, user_methods: tuple[str, ...], report: RecordSink) -> None:
        read_torch_functions()
        self._runtime = runtime
        self._user_methods = {name: load_user_method(name) for name in user_methods}
        self._report = report
        self._side_effects = SideEffects(runtime.device)
        self._trainer: Trainer | None = None
        self._saved = checkpoints.SavedCheckpoints(runtime)
        self._next_steps = NextSteps()

    def examine(self, case: Case) -> Record:
        """Runs one case. Every rank must call it with the same case; of exceptions it raises SystemExit alone."""
        method = find_method(case.method, case.scenario.version)
        if is_user_method(case.method):
            function, contract = self._user_methods[case.method]
            method = dataclasses.replace(method, contract=contract)
        else:
            function = find_function(method)
        run = self._open(case, method, run_in_context(case.scenario.context, call_by_name(function)))
        self._trainer = run.run(self._take_kept(case.scenario, method))
        return run.record

    def open(self, case: Case, contract: Contract) -> CaseRun:
        """Returns the run of a case whose method the caller runs itself; the caller keeps its trainer, too."""
        method = dataclasses.replace(find_method(case.method, case.scenario.version), contract=contract)
        return self._open(case, method, _refuse_call)

    def save(self, case: Case) -> Record:
        """Saves the checkpoint that a case in other processes is given. Every rank must call it with the same case."""
        record = Record(case_id=case.id, stage="checkpoint")
        self._report(record)
        try:
            checkpoints.save(case.scenario, self._runtime)
        except Unsupported as reason:
            record = dataclasses.replace(record, unsupported=str(reason))
        except Exception as error:
            record = dataclasses.replace(record, failure=make_failure(error))
        record = dataclasses.replace(record, done=True)
        self._report(record)
        return record

    def _open(self, case: Case, method: MatrixMethod, function: MethodFunction) -> CaseRun:
        return CaseRun(
            case,
            method,
            function,
            runtime=self._runtime,
            side_effects=self._side_effects,
            saved=self._saved,
            next_steps=self._next_steps,
            report=self._report,
        )

    def _take_kept(self, scenario: Scenario, method: MatrixMethod) -> Trainer | None:
        """The trainer of the last case if it is of this scenario; a load needs a new one."""
        kept, self._trainer = self._trainer, None
        same = kept is not None and (kept.scenario, kept.with_mesh) == (scenario, not method.without_mesh)
        if same and method.direction == "out":
            return kept
        del kept
        # The memory of a dropped scenario is not to be counted against the next.
        gc.collect()
        if self._runtime.has_accelerator:
            torch.get_device_module(self._runtime.device).empty_cache()
        return None


def _refuse_call(given: MethodArguments) -> None:
    raise AssertionError("the method of an open case is run by its opener")


def _explain_impossible(method: MatrixMethod, scenario: Scenario, runtime: Runtime) -> str:
    """Why the method cannot be tried in this scenario; empty if it can."""
    if reason := explain_impossible(method, scenario):
        return reason
    if scenario.consumer is Consumer.SHARED_DEVICE and (runtime.device.type != "emulated" or runtime.world_size == 1):
        return "the order of launches is seen on the emulated device alone, with 2 ranks or more"
    on_disk = method.name in ("dcp", "save_full_tensors") or method.contract.given in ("dcp", "rank_files")
    if on_disk and runtime.num_nodes > 1:
        return "the checkpoint directory is not shared between the nodes"
    return ""
