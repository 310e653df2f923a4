"""Runs the cases of a framework on one rank, one after the other."""

from __future__ import annotations

from fsdp_doctor.case.recorder import Recorder, RecordSink
from fsdp_doctor.frameworks import framework_methods
from fsdp_doctor.frameworks.framework_run import BuiltSession, FrameworkRun, MethodSteps
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase


class FrameworkRunner:
    """Runs cases of one configuration on this rank, in a generation of workers that makes one session.

    The session is kept from case to case while nothing is wrong with it. report: called with the record each time a
    case reaches another stage.
    """

    def __init__(self, worker: FrameworkWorker, report: RecordSink) -> None:
        self._worker = worker
        self._report = report
        self._kept: BuiltSession | None = None

    def examine(self, case: FrameworkCase) -> None:
        """Runs one case. Every rank must call it with the same case; the only exception it raises is SystemExit."""
        self._run(case, framework_methods.choose_steps(case.definition.kind))

    def save(self, case: FrameworkCase) -> None:
        """Runs the first half of a resume. Every rank must call it with the same case."""
        self._run(case, framework_methods.SAVING)

    def _run(self, case: FrameworkCase, steps: MethodSteps) -> None:
        kept, self._kept = self._kept, None
        self._kept = FrameworkRun(case, self._worker, Recorder(case.id, self._report)).run(
            steps, kept if steps.takes_kept else None
        )
