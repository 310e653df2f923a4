"""Whether a generation of workers has started, and what to raise where it has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, UsageError
from fsdp_doctor.verdict.records import RankReport

_ERROR_OF: dict[int, Callable[[str], FsdpDoctorError]] = {2: UsageError, 3: CannotRun}


def check_ready(reports: Sequence[RankReport]) -> None:
    """Raises what the workers say if they cannot run here, DoctorFault if they ended in the start."""
    for report in reports:
        if report.refused is not None:
            raise _ERROR_OF.get(report.refused.exit_code, DoctorFault)(report.refused.reason)
    missing = sorted((report for report in reports if report.ready is None), key=lambda report: report.exit_time)
    if missing:
        raise DoctorFault(f"the worker of rank {missing[0].rank} did not start: {_how(missing[0])}")


def _how(report: RankReport) -> str:
    output = report.output.strip().splitlines()[-1:]
    ending = report.exit or report.stopped_detail or "it said nothing readable"
    return ending + (f" ({output[0]})" if output else "")
