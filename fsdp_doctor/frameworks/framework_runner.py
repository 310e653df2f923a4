"""Runs the cases of a framework one after the other on one rank."""

from __future__ import annotations

from fsdp_doctor.case.case_run import CaseRun
from fsdp_doctor.case.recorder import Recorder, RecordSink
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.frameworks.adapter import FrameworkSession
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker
from fsdp_doctor.frameworks.session_steps import SavingSteps, SessionSteps, choose_steps
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase


class FrameworkRunner:
    """Runs the cases of one configuration on this rank.

    The session is kept for the next case as long as nothing is wrong with it.

    report: a function that is called with the record each time a case reaches another stage.
    """

    def __init__(self, worker: FrameworkWorker, report: RecordSink) -> None:
        self._worker = worker
        self._report = report
        self._kept: tuple[FrameworkSession, Runtime] | None = None

    def examine(self, case: FrameworkCase) -> None:
        """Runs one case. Every rank must call it with the same case. Raises no exception but SystemExit."""
        self._run(case, choose_steps(case.definition.kind))

    def save(self, case: FrameworkCase) -> None:
        """Trains, and saves the checkpoint of a resume case. Every rank must call it with the same case."""
        self._run(case, SavingSteps)

    def _run(self, case: FrameworkCase, kind: type[SessionSteps]) -> None:
        kept, self._kept = self._kept, None
        session, runtime = kept if kept is not None and kind.takes_kept else (None, None)
        steps = kind(case, self._worker, Recorder(case.id, self._report), runtime)
        session = CaseRun(steps).run(session)
        if session is not None:
            self._kept = session, steps.present_runtime
