"""What a bundle holds, as texts by file name, before anything private is replaced."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.bundle.chosen_case import SCRIPT, ChosenCase
from fsdp_doctor.bundle.command_run import CommandRun
from fsdp_doctor.bundle.log_excerpt import excerpt
from fsdp_doctor.check import CheckResult, presentation
from fsdp_doctor.explain import Explanation, explain, text
from fsdp_doctor.explain.flight_recorder import read_dump
from fsdp_doctor.machine.environment import EnvironmentFacts, lines_of
from fsdp_doctor.report.document import Report

_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What is known of a failure.

    facts: of this machine's environment. logs: files, the output of the command last, dumps of torch's flight
    recorder among them; found: what explains them. checked: the answer to the configurations. run: of the command.
    """

    facts: EnvironmentFacts
    logs: tuple[pathlib.Path, ...] = ()
    found: Explanation | None = None
    checked: CheckResult | None = None
    report: Report | None = None
    run: CommandRun | None = None


def gather(
    facts: EnvironmentFacts,
    *,
    logs: Sequence[pathlib.Path] = (),
    checked: CheckResult | None = None,
    report: Report | None = None,
    run: CommandRun | None = None,
) -> Gathered:
    """Explains the logs. Raises UsageError for a log that cannot be read."""
    read = (*logs, *(_of_command(run) if run is not None else ()))
    found = explain(read) if read else None
    return Gathered(facts=facts, logs=read, found=found, checked=checked, report=report, run=run)


def texts(evidence: Gathered) -> dict[str, str]:
    """What is known, but for the case and the report."""
    found = {"environment.txt": "\n".join(lines_of(evidence.facts)) + "\n"}
    if evidence.found is not None:
        found["explain.txt"] = text.as_text(evidence.found, _WIDTH)
        for number, log in enumerate(_texts_of(evidence.logs), start=1):
            found["log.txt" if number == 1 else f"log-{number}.txt"] = excerpt(log, evidence.found)
    if evidence.checked is not None:
        found["check.txt"] = presentation.as_text(evidence.checked)
    if evidence.run is not None:
        found["command.txt"] = _command_text(evidence.run)
        if evidence.run.stacks:
            found["stacks.txt"] = "\n\n".join(f"{one.name}:\n{one.stack}" for one in evidence.run.stacks) + "\n"
    return found


def _of_command(run: CommandRun) -> tuple[pathlib.Path, ...]:
    """Its output, if it wrote any, and the dumps of the flight recorder."""
    return (*([run.output] if run.output.stat().st_size else []), *run.dumps)


def _command_text(run: CommandRun) -> str:
    ranks = [f"rank {rank}: exit code {code}" for rank, code in run.rank_exit_codes.items()]
    return "\n".join([shlex.join(run.command), "", run.sentence, *ranks]) + "\n"


def _texts_of(logs: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Without dumps of the flight recorder, which `explain` reads and people do not."""
    return [log for log in logs if read_dump(log, 0) is None]


def case_texts(chosen: ChosenCase) -> dict[str, str]:
    """The case, and its script where there is one."""
    lines = [chosen.case.id, "", f"Why this one: {chosen.why}.", f"Run it: {chosen.command}"]
    if chosen.result is not None:
        lines.append(f"In the report it is {chosen.result.verdict.kind}: {chosen.result.verdict.reason}")
    if chosen.no_script:
        lines.append(f"No standalone script: {chosen.no_script}")
    return {"case.txt": "\n".join(lines) + "\n", **({SCRIPT: chosen.script} if chosen.script else {})}
