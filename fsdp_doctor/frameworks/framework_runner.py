"""The cases of one framework on one rank, one after the other, in a session that is kept while it stays whole."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_doctor.case.recorder import RecordSink
from fsdp_doctor.frameworks.framework_extraction import FrameworkExtraction
from fsdp_doctor.frameworks.framework_run import BuiltSession, FrameworkRun
from fsdp_doctor.frameworks.framework_worker import FrameworkWorker
from fsdp_doctor.frameworks.preparation import PreparationRun
from fsdp_doctor.frameworks.round_trips import ResumeRun, Rollback, SavingRun
from fsdp_doctor.matrix.frameworks.framework_matrix import PathKind
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase

_RUNS: Mapping[PathKind, type[FrameworkRun]] = {
    "prepare": PreparationRun,
    "extraction": FrameworkExtraction,
    "rollback": Rollback,
    "resume": ResumeRun,
}


class FrameworkRunner:
    """Runs cases of one configuration on this rank, in a generation of workers that makes one session.

    report: called with the record each time the case reaches another stage.
    """

    def __init__(self, worker: FrameworkWorker, report: RecordSink) -> None:
        self._worker = worker
        self._report = report
        self._kept: BuiltSession | None = None

    def examine(self, case: FrameworkCase) -> None:
        """Runs one case. Every rank must call it with the same case; of exceptions it raises SystemExit alone."""
        self._run(_RUNS[case.way.kind], case)

    def save(self, case: FrameworkCase) -> None:
        """Does the first half of a resume. Every rank must call it with the same case."""
        self._run(SavingRun, case)

    def _run(self, kind: type[FrameworkRun], case: FrameworkCase) -> None:
        kept, self._kept = self._kept, None
        self._kept = kind(case, self._worker, self._report).run(kept if kind.takes_kept else None)
