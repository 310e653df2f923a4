"""Runs fsdp-doctor over published silent errors, and over clean programs: ``python -m benchmarks.silent [NAME]...``.

Each error is a program with one function replaced. A command or a function of fsdp-doctor judges the program, and is
told nothing of the error. An error is found if the finding names the tensor or the value that is wrong. Exit code 0: no
clean program has a finding; 1: a clean program has a finding; 3: a program could not run. The table says which errors
are missed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from . import methods, resumes
from .entries import ERRORS
from .program import Program
from .variants import CLEAN_PROGRAMS

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EXIT_FALSE_ALARM, _EXIT_COULD_NOT_RUN = 1, 3


class Row(NamedTuple):
    """The outcome of one program.

    finding: the findings of the command; empty without a finding.
    failed: the reason why there is no answer; empty if there is an answer.
    """

    name: str
    command: str
    finding: str
    seconds: float
    failed: str = ""

    @property
    def is_error(self) -> bool:
        return self.name in ERRORS

    def describe_outcome(self) -> str:
        if self.failed:
            return "could not run"
        if not self.is_error:
            return "false alarm" if self.finding else "clean"
        return "found" if self.find_word() else "missed"

    def find_word(self) -> str:
        """Returns the first of the expected words that the finding has; empty if it has none."""
        return next((word for word in ERRORS[self.name].names if word in self.finding), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name, or a part of it; by default all")
    parser.add_argument("--clean", action="store_true", help="the clean programs alone")
    parser.add_argument("--errors", action="store_true", help="the errors alone")
    parser.add_argument("--verbose", action="store_true", help="print each finding")
    parser.add_argument("--markdown", type=pathlib.Path, help="write the table there")
    options = parser.parse_args()

    def is_chosen(name: str) -> bool:
        if (options.clean and name in ERRORS) or (options.errors and name not in ERRORS):
            return False
        return not options.names or any(part in name for part in options.names)

    begin = time.monotonic()
    rows: list[Row] = []
    for found in (_run_on_ranks(is_chosen), _run_probe(is_chosen), _run_resumes(is_chosen)):
        for row in found:
            rows.append(row)
            if row.describe_outcome() not in ("found", "clean") or options.verbose:
                print(f"{row.describe_outcome()}: {row.name}: {row.failed or row.finding or 'no finding'}", flush=True)
    if not rows:
        parser.error("no error and no clean program has such a name")
    table = "\n".join(_write_table(rows))
    print(table)
    if options.markdown is not None:
        options.markdown.write_text(table + "\n")
    print(f"{time.monotonic() - begin:.0f} s")
    outcomes = {row.describe_outcome() for row in rows}
    if "false alarm" in outcomes:
        return _EXIT_FALSE_ALARM
    return _EXIT_COULD_NOT_RUN if "could not run" in outcomes else 0


def _write_table(rows: list[Row]) -> Iterator[str]:
    errors = [row for row in rows if row.is_error]
    for are_unseen in (False, True):
        of_kind = [row for row in errors if bool(ERRORS[row.name].first_run) is are_unseen]
        if not of_kind:
            continue
        if are_unseen:
            yield "Written by somebody who had not seen the code:"
            yield ""
        yield f"| error | reported | mended by |{' first run |' if are_unseen else ''} outcome | by | named | seconds |"
        yield "|---" * (8 if are_unseen else 7) + "|"
        for row in of_kind:
            error = ERRORS[row.name]
            outcome = row.describe_outcome()
            named = f"`{row.find_word()}`" if outcome == "found" else ""
            links = f"{_write_link(error.source)} | {_write_link(error.mended_by)}"
            known = f"{error.first_run} | {outcome}" if are_unseen else outcome
            yield f"| {error.about} (`{row.name}`) | {links} | {known} | {row.command} | {named} | {row.seconds:.1f} |"
        yield ""
    clean = [row for row in rows if not row.is_error]
    alarms = [row.name for row in clean if row.describe_outcome() == "false alarm"]
    failed = [row.name for row in rows if row.failed]
    ran = [row for row in clean if not row.failed]
    found = sum(row.describe_outcome() == "found" for row in errors)
    yield f"{found} of {len(errors)} errors found; {len(alarms)} false alarms on {len(ran)} clean programs."
    if failed:
        yield f"Could not run: {', '.join(failed)}."


def _write_link(address: str) -> str:
    """Writes the address of a GitHub issue as a link named ``repository#number``, and any other address as it is."""
    parts = address.removeprefix("https://github.com/").split("/")
    return f"[{parts[1]}#{parts[3]}]({address})" if len(parts) == 4 else address


def _run_on_ranks(is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    known = {name: error.code for name, error in ERRORS.items()} | CLEAN_PROGRAMS
    chosen = [
        name for name, code in known.items() if isinstance(code, type) and issubclass(code, Program) and is_chosen(name)
    ]
    if not chosen:
        return
    with tempfile.TemporaryDirectory() as directory:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        done = subprocess.run(
            [*launch, "benchmarks.silent.on_ranks", directory, *chosen],
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            text=True,
            capture_output=True,
            check=False,
        )

        def judge(name: str) -> Row:
            file = pathlib.Path(directory, name, "found.json")
            code = known[name]
            if not file.exists():
                return Row(name, code.command, "", 0, f"no answer: {done.stderr[-800:]}")
            found = json.loads(file.read_text())
            begin = time.monotonic()
            findings = [*found["findings"]]
            for number, command in enumerate(found["commands"]):
                report = pathlib.Path(directory, name, f"{number}.json")
                ended = run_doctor(*command, "--json", str(report))
                if ended.returncode == 1:
                    findings += _list_damages(json.loads(report.read_text()))
                if ended.returncode not in (0, 1):
                    return Row(name, code.command, "", 0, ended.stdout + ended.stderr)
            seconds = found["seconds"] + time.monotonic() - begin
            return Row(name, code.command, "\n".join(findings), seconds, found["failed"])

        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(judge, chosen)


def _list_damages(report: dict[str, Any]) -> Iterator[str]:
    """Lists the damages in a report of ``checkpoint verify``, each as the tensor or file, and what is wrong with it."""
    for finding in report["findings"]:
        if finding["severity"] == "damage":
            yield f"{finding.get('tensor', finding.get('file', ''))}: {finding['what']}"


def run_doctor(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of fsdp-doctor."""
    return subprocess.run(
        [sys.executable, "-m", "fsdp_doctor", *words],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        text=True,
        capture_output=True,
        check=False,
    )


def _run_probe(is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    wrong = [name for name, error in ERRORS.items() if hasattr(methods, name) and is_chosen(name)]
    right = [
        name for name in methods.CLEAN_METHODS if any(is_chosen(f"{name}-{each}") for each in methods.CLEAN_SCENARIOS)
    ]
    if not wrong + right:
        return
    module = methods.__name__
    words = [f"--method={module}:{name}" for name in wrong + right]
    scenarios = methods.SCENARIOS if right else methods.SCENARIOS_OF_ERRORS
    with tempfile.TemporaryDirectory() as directory:
        report = pathlib.Path(directory, "report.json")
        ended = run_doctor("probe", *words, *scenarios, "-k", module.partition(".")[0], "--json", str(report))
        if not report.exists():
            yield from (Row(name, "probe", "", 0, ended.stderr[-800:]) for name in wrong + right)
            return
        results = {result["id"]: result for result in json.loads(report.read_text())["results"]}
    cases = {name: f"{methods.ERROR_SCENARIO}/{module}:{name}" for name in wrong} | {
        f"{name}-{scenario}": f"{scenario}/{module}:{name}"
        for name in right
        for scenario in methods.CLEAN_SCENARIOS
        if is_chosen(f"{name}-{scenario}")
    }
    for name, case in cases.items():
        if case not in results:
            yield Row(name, "probe", "", 0, f"there is no case {case}: {ended.stderr[-800:]}")
            continue
        verdict = results[case]["verdict"]
        finding = "" if verdict["kind"] == "ok" else f"{verdict['kind']}: {verdict['reason']}"
        yield Row(name, "probe", finding, results[case]["wall_seconds"])


def _run_resumes(is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    chosen = [name for name in (*resumes.RESUMES, *resumes.CLEAN_RESUMES) if is_chosen(name)]
    for name in chosen:
        begin = time.monotonic()
        try:
            code, text = resumes.judge(name)
        except Exception as error:
            yield Row(name, "resume", "", time.monotonic() - begin, f"{type(error).__name__}: {error}")
            continue
        failed = "" if code in (0, 1) else text
        yield Row(name, "resume", text if code == 1 else "", time.monotonic() - begin, failed)


if __name__ == "__main__":
    sys.exit(main())
