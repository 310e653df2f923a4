"""Runs the cases of the matrix on one rank, one after the other, and keeps sound trainers between cases."""

from __future__ import annotations

import dataclasses
import gc

import torch
from typing_extensions import assert_never

from fsdp_doctor.case import checkpoints
from fsdp_doctor.case.case_run import CaseRun
from fsdp_doctor.case.extraction import ExtractionSteps
from fsdp_doctor.case.loading import LoadingSteps
from fsdp_doctor.case.matrix_steps import MatrixSteps
from fsdp_doctor.case.methods.lookup import (
    MethodArguments,
    MethodFunction,
    call_by_name,
    find_function,
    load_user_method,
    run_in_context,
)
from fsdp_doctor.case.next_steps import NextSteps
from fsdp_doctor.case.recorder import Recorder, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.side_effects import SideEffects, read_torch_functions
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.methods import MatrixMethod, find_method, is_user_method
from fsdp_doctor.verdict.records import Record, make_failure

_SCENARIOS_BETWEEN_FREEZES = 20


class CaseRunner:
    """Runner of cases on this rank, one after the other. It keeps a scenario's trainer as long as the trainer is sound.

    report: a function that is called with the record each time a case reaches another stage.
    """

    def __init__(self, runtime: Runtime, user_methods: tuple[str, ...], report: RecordSink) -> None:
        read_torch_functions()
        self._runtime = runtime
        self._user_methods = {name: load_user_method(name) for name in user_methods}
        self._report = report
        self._side_effects = SideEffects(runtime.device)
        self._trainer: Trainer | None = None
        self._num_scenarios = 0
        self._saved = checkpoints.SavedCheckpoints(runtime)
        self._next_steps = NextSteps()

    def examine(self, case: Case) -> Record:
        """Runs one case.

        Every rank must call it with the same case; SystemExit is the only exception that it raises.
        """
        method = find_method(case.method, case.scenario.version)
        if is_user_method(case.method):
            function, contract = self._user_methods[case.method]
            method = dataclasses.replace(method, contract=contract)
        else:
            function = find_function(method)
        steps = self._make_steps(case, method, run_in_context(case.scenario.context, call_by_name(function)))
        run = CaseRun(steps, self._side_effects)
        self._trainer = run.run(self._take_kept(case.scenario, method))
        return run.record

    def open(self, case: Case, contract: Contract) -> tuple[CaseRun[Trainer], MatrixSteps]:
        """Returns the run and the steps of a case whose method and trainer the caller handles itself."""
        method = dataclasses.replace(find_method(case.method, case.scenario.version), contract=contract)
        steps = self._make_steps(case, method, _refuse_call)
        return CaseRun(steps, self._side_effects), steps

    def save(self, case: Case) -> Record:
        """Saves the checkpoint that a case in other processes loads. Every rank must call it with the same case."""
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

    def _make_steps(self, case: Case, method: MatrixMethod, function: MethodFunction) -> MatrixSteps:
        runtime, recorder = self._runtime, Recorder(case.id, self._report)
        match method.direction:
            case "out":
                return ExtractionSteps(
                    case.scenario, method, function, runtime=runtime, recorder=recorder, next_steps=self._next_steps
                )
            case "in":
                return LoadingSteps(
                    case.scenario, method, function, runtime=runtime, recorder=recorder, saved=self._saved
                )
            case _:
                assert_never(method.direction)

    def _take_kept(self, scenario: Scenario, method: MatrixMethod) -> Trainer | None:
        """Returns the last case's trainer if it has the same scenario; None otherwise, and None for a load."""
        kept, self._trainer = self._trainer, None
        same = kept is not None and (kept.scenario, kept.with_mesh) == (scenario, not method.without_mesh)
        if same and method.direction == "out":
            return kept
        del kept
        # The memory of a dropped scenario is not to be counted against the next.
        gc.collect()
        self._num_scenarios += 1
        if self._num_scenarios % _SCENARIOS_BETWEEN_FREEZES == 2:
            # What is left now lives as long as this process: imports, caches, and the parts of FSDP1 models that torch
            # never frees. Later collections need not look through it.
            gc.freeze()
        if self._runtime.has_accelerator:
            torch.get_device_module(self._runtime.device).empty_cache()
        return None


def _refuse_call(given: MethodArguments) -> None:
    raise AssertionError("the method of an open case is run by its opener")
