"""The evidence of a failure: environment, logs, explanation, configuration, and the case that matches it."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_doctor import repro
from fsdp_doctor.bundle.command_run import CommandRun
from fsdp_doctor.bundle.named import NamedInLogs, read_names
from fsdp_doctor.bundle.redaction import IS_PLACEHOLDER
from fsdp_doctor.check import CheckResult, list_cases, presentation
from fsdp_doctor.errors import FsdpDoctorError, UsageError
from fsdp_doctor.explain import Explanation, explain, text
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.flight_recorder import read_dump
from fsdp_doctor.explain.log_input import LogInput
from fsdp_doctor.machine.environment import EnvironmentFacts, format_lines
from fsdp_doctor.matrix.cases import AnyCase, Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import group_failures
from fsdp_doctor.report.layout import rerun_command

_BEGIN_LINES = 40
_BEFORE, _AFTER = 120, 120
_END_LINES = 80
_SHOWN_OTHERS = 3
_LINE_CHARACTERS = 4_000
_WIDTH = 120
SCRIPT = "repro.py"
MINIMAL_SCRIPT = "minimal.py"


@dataclass(frozen=True, kw_only=True)
class FailureEvidence:
    """The evidence of one failure.

    environment: the facts of this machine.
    logs: log files and dumps of torch's flight recorder. The output of the command comes after the given logs.
    explanation: the result of ``explain`` on the logs.
    configuration: the result of ``check`` on the configuration.
    run: the command's outcome.
    named: the versions and the ranks that the logs name.
    """

    environment: EnvironmentFacts
    logs: tuple[pathlib.Path, ...] = ()
    explanation: Explanation | None = None
    configuration: CheckResult | None = None
    report: Report | None = None
    run: CommandRun | None = None
    named: NamedInLogs = field(default_factory=NamedInLogs)


def gather(
    environment: EnvironmentFacts,
    *,
    logs: Sequence[pathlib.Path] = (),
    configuration: CheckResult | None = None,
    report: Report | None = None,
    run: CommandRun | None = None,
) -> FailureEvidence:
    """Gathers the evidence of a failure, with the result of ``explain`` on the logs and the command's output.

    Raises UsageError for a log that cannot be read.
    """
    if run is not None:
        logs = (*logs, *([run.output] if run.output.stat().st_size else []), *run.dumps)
    return FailureEvidence(
        environment=environment,
        logs=tuple(logs),
        explanation=explain(logs) if logs else None,
        configuration=configuration,
        report=report,
        run=run,
        named=read_names(log for log in logs if read_dump(log, 0) is None),
    )


def make_texts(evidence: FailureEvidence) -> dict[str, str]:
    """Returns the texts of a bundle by file name, except issue.md, the report, and the files about the case.

    Private text is not replaced.
    """
    files = {"environment.txt": "\n".join(format_lines(evidence.environment)) + "\n"}
    if evidence.explanation is not None:
        files["explain.txt"] = text.render_text(evidence.explanation, _WIDTH)
        # Dumps of the flight recorder are left out, because people cannot read them.
        logs = [log for log in evidence.logs if read_dump(log, 0) is None]
        for number, log in enumerate(logs, start=1):
            files["log.txt" if number == 1 else f"log-{number}.txt"] = cut_excerpt(log, evidence.explanation)
    if evidence.configuration is not None:
        files["check.txt"] = presentation.render_text(evidence.configuration)
    if evidence.run is not None:
        run = evidence.run
        ranks = [f"rank {rank}: exit code {code}" for rank, code in run.rank_exit_codes.items()]
        files["command.txt"] = "\n".join([shlex.join(run.command), "", run.sentence, *ranks]) + "\n"
        if run.stacks:
            files["stacks.txt"] = "\n\n".join(f"{rank.name}:\n{rank.stack}" for rank in run.stacks) + "\n"
    return files


def make_readable_file(path: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Returns a file that can be read twice: the log itself, or for a pipe or standard input a copy in ``directory``.

    Raises UsageError for a log that cannot be read.
    """
    if path.is_file() or not (path.exists() or str(path) == "-"):
        return path
    copy = directory / f"log-{len(list(directory.iterdir())) + 1}.txt"
    with open(copy, "w", encoding="utf-8", errors="replace") as file:
        for piece in LogInput(None if str(path) == "-" else path).read_pieces():
            file.writelines(f"{line}\n" for line in piece.written)
    return copy


def cut_excerpt(path: pathlib.Path, explanation: Explanation) -> str:
    """Returns an excerpt of the log at ``path``: its beginning, the lines around the failure, and its end.

    A line of the excerpt tells how many lines are omitted there. The ends of very long lines are cut off.

    explanation: the result of ``explain`` on the log.
    """
    # The cause and the first other exceptions.
    name = LogInput(path).name
    raised: Iterable[Raised] = (
        *([explanation.cause.first] if explanation.cause else []),
        *explanation.others[:_SHOWN_OTHERS],
    )
    places = [exception.line for exception in raised if exception.file == name]
    windows = [(1, _BEGIN_LINES), *((max(1, line - _BEFORE), line + _AFTER) for line in places)]
    kept: dict[int, str] = {}
    end: deque[tuple[int, str]] = deque(maxlen=_END_LINES)
    number = 0
    for piece in LogInput(path).read_pieces():
        for number, line in enumerate(piece.written, start=number + 1):  # noqa: B020, the number goes on over the pieces
            end.append((number, line))
            if any(first <= number <= last for first, last in windows):
                kept[number] = line
    return "\n".join(_join_lines(kept | dict(end), number)) + "\n"


def _join_lines(kept: dict[int, str], last: int) -> Sequence[str]:
    lines: list[str] = []
    before = 0
    for number in [*sorted(kept), last + 1]:
        if number > before + 1:
            lines.append(f"[... {number - before - 1} lines left out ...]")
        if number in kept:
            lines.append(kept[number][:_LINE_CHARACTERS])
        before = number
    return lines


@dataclass(frozen=True, kw_only=True)
class ChosenCase:
    """The case of a bug report.

    why: the reason for this case, in words.
    command: the command that runs the case.
    result: the result in the report, if the report has the case.
    script: the standalone script; if it is empty, no_script says why.
    minimal: the short script, if there is one.
    """

    case: AnyCase
    why: str
    command: str
    result: CaseResult | None = None
    script: str = ""
    no_script: str = ""
    minimal: str = ""

    @property
    def script_command(self) -> str:
        """The command that starts the short script or, without a short script, the full script.

        The command is read from the script's docstring.
        """
        lines = (line.strip() for line in (self.minimal or self.script).splitlines())
        return next((line.partition("  #")[0] for line in lines if line.startswith("torchrun")), "")


def choose_case(evidence: FailureEvidence) -> ChosenCase | None:
    """Chooses the case that matches the log, the configuration and the report best; None if nothing names a case."""
    for case_id, why in _list_case_candidates(evidence):
        try:
            case = select(Selection(case_ids=(case_id,)))[0]
        except FsdpDoctorError:
            # The id is of a user's own method, or of a case in another version.
            continue
        return _add_script(case, why, evidence.report)
    return None


def _list_case_candidates(evidence: FailureEvidence) -> Iterator[tuple[str, str]]:
    """Yields the id of each candidate and the reason for choosing this case, the best candidate first."""
    report, configuration, explanation = evidence.report, evidence.configuration, evidence.explanation
    matches = explanation.matches if explanation is not None else ()
    named = [match.entry for match in matches if match.grade != "possible"]
    ids = [entry.id for entry in named]
    if report is not None:
        yield from ((bad.id, f"the report shows {bad.known} there") for bad in report.bad if bad.known in ids)
        for failure in group_failures(report):
            yield failure.results[0].id, f"it is {failure.kind} in the report"
    findings = [finding for finding in configuration.findings if finding.bad] if configuration is not None else []
    for finding in findings:
        if finding.entry in ids:
            yield from (
                (case, f"the configuration selects it, and the log shows {finding.entry}") for case in finding.cases
            )
    yield from ((entry.evidence, f"it reproduces {entry.id}") for entry in named if entry.reproduced)
    for finding in findings:
        yield from ((case, "the configuration selects this case, which is known to fail") for case in finding.cases)
    if configuration is not None:
        yield from ((case.id, "the configuration selects this case") for case in list_cases(configuration))


def _add_script(case: AnyCase, why: str, report: Report | None) -> ChosenCase:
    result = next((each for each in report.results if each.case == case), None) if report is not None else None
    command = rerun_command(report, result) if report is not None and result is not None else ""
    script, no_script = "", ""
    try:
        if isinstance(case, FrameworkCase):
            raise UsageError("there is no script for a framework's own code")
        script = repro.render_script(case, _choose_expectation(case, report), SCRIPT)
    except UsageError as error:
        no_script = str(error)
    return ChosenCase(
        case=case,
        why=why,
        command=command or f"fsdp-doctor probe --case '{case.id}'",
        result=result,
        script=script,
        no_script=no_script,
        minimal=_write_minimal(case, result),
    )


def _write_minimal(case: AnyCase, result: CaseResult | None) -> str:
    """Returns the short script; empty if the case has none, or if the catalogue lacks the failure in the report."""
    if isinstance(case, FrameworkCase) or (result is not None and not result.known):
        return ""
    try:
        return "" if repro.find_expected(case).kind == "ok" else repro.render_minimal(case, MINIMAL_SCRIPT)
    except UsageError:
        return ""


def _choose_expectation(case: Case, report: Report | None) -> repro.Expectation:
    """Chooses the outcome that a script must show: the report's, or the catalogue's if the report has none."""
    if report is None:
        return repro.find_expected(case)
    try:
        expectation = repro.read_reported(case, report)
    except UsageError:
        return repro.find_expected(case)
    return dataclasses.replace(expectation, message=IS_PLACEHOLDER.sub(r"\\S+", expectation.message))


def make_case_texts(chosen: ChosenCase) -> dict[str, str]:
    """Returns the files about the case as texts by name: case.txt, and the scripts if the case has any."""
    lines = [chosen.case.id, "", f"Why this one: {chosen.why}.", f"Run it: {chosen.command}"]
    if chosen.result is not None:
        lines.append(f"In the report it is {chosen.result.verdict.kind}: {chosen.result.verdict.reason}")
    if chosen.no_script:
        lines.append(f"No standalone script: {chosen.no_script}")
    scripts = {MINIMAL_SCRIPT: chosen.minimal, SCRIPT: chosen.script}
    return {"case.txt": "\n".join(lines) + "\n", **{name: script for name, script in scripts.items() if script}}
