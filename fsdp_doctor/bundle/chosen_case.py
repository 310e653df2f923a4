"""Which case of the matrix a bug report is about, and the script that shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_doctor import repro
from fsdp_doctor.bundle.private_kinds import IS_PLACEHOLDER
from fsdp_doctor.check import CheckResult, cases
from fsdp_doctor.errors import FsdpDoctorError, UsageError
from fsdp_doctor.explain import Explanation
from fsdp_doctor.matrix.cases import AnyCase, Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import distinct_failures
from fsdp_doctor.report.layout import rerun_command

SCRIPT = "repro.py"


@dataclass(frozen=True, kw_only=True)
class ChosenCase:
    """The case of a bug report.

    why: in words, how it was found. command: that runs it. result: of the report, where it has the case.
    script: the standalone script, or empty, and then no_script says why.
    """

    case: AnyCase
    why: str
    command: str
    result: CaseResult | None = None
    script: str = ""
    no_script: str = ""

    @property
    def script_command(self) -> str:
        """That starts the script, as its own docstring has it."""
        return next((line.strip() for line in self.script.splitlines() if line.strip().startswith("torchrun")), "")


def choose(found: Explanation | None, checked: CheckResult | None, report: Report | None) -> ChosenCase | None:
    """The case that fits best to what the log, the configuration and the report say; None where nothing names one."""
    for case_id, why in _candidates(found, checked, report):
        try:
            case = select(Selection(case_ids=(case_id,)))[0]
        except FsdpDoctorError:
            # A user's own path, or a case of another version.
            continue
        return _with_script(case, why, report)
    return None


def _candidates(
    found: Explanation | None, checked: CheckResult | None, report: Report | None
) -> Iterator[tuple[str, str]]:
    """(id, why), the best first."""
    named = [match.entry for match in found.matches if match.grade != "possible"] if found is not None else []
    ids = [entry.id for entry in named]
    if report is not None:
        yield from ((one.id, f"the report shows {one.known} there") for one in report.bad if one.known in ids)
        for failure in distinct_failures(report):
            yield failure.results[0].id, f"it is {failure.kind} in the report"
    findings = [finding for finding in checked.findings if finding.bad] if checked is not None else []
    for finding in findings:
        if finding.entry in ids:
            yield from (
                (case, f"the configuration amounts to it, and the log shows {finding.entry}") for case in finding.cases
            )
    yield from ((entry.evidence, f"it reproduces {entry.id}") for entry in named if entry.reproduced)
    for finding in findings:
        yield from ((case, "the configuration amounts to it, and it is known to fail") for case in finding.cases)
    yield from (
        (case.id, "the configuration amounts to it") for case in (cases(checked) if checked is not None else ())
    )


def _with_script(case: AnyCase, why: str, report: Report | None) -> ChosenCase:
    result = next((one for one in report.results if one.case == case), None) if report is not None else None
    command = rerun_command(report, result) if report is not None and result is not None else ""
    script, no_script = "", ""
    try:
        if isinstance(case, FrameworkCase):
            raise UsageError("there is no script for a framework's own code")
        script = repro.script(case, _expectation(case, report), SCRIPT)
    except UsageError as error:
        no_script = str(error)
    return ChosenCase(
        case=case,
        why=why,
        command=command or f"fsdp-doctor probe --case '{case.id}'",
        result=result,
        script=script,
        no_script=no_script,
    )


def _expectation(case: Case, report: Report | None) -> repro.Expectation:
    """What the report says of the case; where it says nothing that a script can show, what the catalogue does."""
    if report is None:
        return repro.expected(case)
    try:
        expectation = repro.reported(case, report)
    except UsageError:
        return repro.expected(case)
    return dataclasses.replace(expectation, message=IS_PLACEHOLDER.sub(r"\\S+", expectation.message))
