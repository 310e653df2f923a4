"""The cases of one rank, one after the other, and what is kept between them."""

from __future__ import annotations

import dataclasses
import gc

import torch

from fsdp_doctor.case import checkpoints
from fsdp_doctor.case.case_run import Assignment, CaseRun
from fsdp_doctor.case.extraction_run import ExtractionRun
from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.loading_run import LoadingRun
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction, called_by_name, in_context
from fsdp_doctor.case.paths.lookup import function_of, load_user_path
from fsdp_doctor.case.recorded_run import RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.paths import Path, find_path, is_user_path
from fsdp_doctor.verdict.records import Record
from fsdp_doctor.verdict.tracebacks import failure_from


class CaseRunner:
    """Runs cases one after the other on this rank, and keeps a scenario while it stays whole.

    report: called with the record each time the case reaches another stage.
    """

    def __init__(self, runtime: Runtime, user_paths: tuple[str, ...], report: RecordSink) -> None:
        self._runtime = runtime
        self._user_paths = {name: load_user_path(name) for name in user_paths}
        self._report = report
        self._leftovers = Leftovers(runtime.device)
        self._trainer: Trainer | None = None
        self._saved = checkpoints.Saved(runtime)

    def examine(self, case: Case) -> Record:
        """Runs one case. Every rank must call it with the same case; of exceptions it raises SystemExit alone."""
        path, function = self._path(case)
        run = self._run_of(self._assignment(case, path, in_context(case.scenario.context, function)))
        self._trainer = run.run(self._kept_for(case.scenario, path))
        return run.record

    def open(self, case: Case, contract: Contract) -> CaseRun:
        """The run of a case whose path the caller runs itself; the caller keeps its trainer, too."""
        path = dataclasses.replace(find_path(case.path, case.scenario.version), contract=contract)
        return self._run_of(self._assignment(case, path, _never_called))

    def save(self, case: Case) -> Record:
        """Saves the checkpoint that a case in other processes is given. Every rank must call it with the same case."""
        record = Record(case_id=case.id, stage="checkpoint")
        self._report(record)
        try:
            checkpoints.save(case.scenario, self._runtime)
        except Unsupported as reason:
            record = dataclasses.replace(record, unsupported=str(reason))
        except Exception as error:
            record = dataclasses.replace(record, failure=failure_from(error))
        record = dataclasses.replace(record, done=True)
        self._report(record)
        return record

    def _assignment(self, case: Case, path: Path, function: PathFunction) -> Assignment:
        return Assignment(
            case=case,
            path=path,
            function=function,
            runtime=self._runtime,
            leftovers=self._leftovers,
            report=self._report,
        )

    def _run_of(self, assignment: Assignment) -> CaseRun:
        if assignment.path.direction == "in":
            return LoadingRun(assignment, self._saved)
        return ExtractionRun(assignment)

    def _kept_for(self, scenario: Scenario, path: Path) -> Trainer | None:
        """The trainer of the last case if it is of this scenario and still in its state; a load needs a new one."""
        kept, self._trainer = self._trainer, None
        same = kept is not None and (kept.scenario, kept.with_mesh) == (scenario, not path.without_mesh)
        if same and path.direction == "out":
            return kept
        del kept
        self._release()
        return None

    def _path(self, case: Case) -> tuple[Path, PathFunction]:
        path = find_path(case.path, case.scenario.version)
        if is_user_path(case.path):
            function, contract = self._user_paths[case.path]
            return dataclasses.replace(path, contract=contract), called_by_name(function)
        return path, called_by_name(function_of(path))

    def _release(self) -> None:
        """Gives a dropped scenario's memory back, so that it is not counted against the next."""
        gc.collect()
        if self._runtime.has_accelerator:
            torch.get_device_module(self._runtime.device).empty_cache()


def _never_called(given: PathArguments) -> None:
    raise AssertionError("the path of an open case is run by who opened it")
