"""Runs the scripts of the findings, and tells what each shows: ``python -m examples.findings [NAME]... [--log FILE]``.

A script ends with the line ``shown`` or ``not shown``. One that does not end so could not run, and its last exception
says why: a package is not installed, or this torch lacks a name. Exit code 0: each is shown; 1: some are not; 3: some
could not run.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch

_HERE = pathlib.Path(__file__).parent
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_SECONDS = 300
_EXIT_NOT_SHOWN, _EXIT_COULD_NOT_RUN = 1, 3


class Ended(NamedTuple):
    """outcome: ``shown``, ``not shown`` or ``could not run: REASON``."""

    name: str
    outcome: str
    seconds: float
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a script's name, or a part of it; by default all")
    parser.add_argument("--log", type=pathlib.Path, help="write what the scripts print there")
    parser.add_argument("--jobs", type=int, default=1, help="how many scripts run at once")
    options = parser.parse_args()
    scripts = [path for path in sorted(_HERE.glob("*.py")) if path != pathlib.Path(__file__)]
    scripts = [path for path in scripts if not options.names or any(name in path.stem for name in options.names)]
    if not scripts:
        parser.error(f"no script has {' or '.join(options.names)} in its name")
    ended: list[Ended] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in as_completed([pool.submit(_run, script) for script in scripts]):
            ended = sorted([*ended, run.result()])
            print("{0:55} {2:5.0f} s  {1}".format(*run.result()), flush=True)
            if options.log is not None:
                options.log.write_text("\n".join(f"== {each.name}: {each.outcome}\n{each.output}" for each in ended))
    outcomes = {each.outcome for each in ended}
    if outcomes - {"shown", "not shown"}:
        return _EXIT_COULD_NOT_RUN
    return _EXIT_NOT_SHOWN if "not shown" in outcomes else 0


def _run(script: pathlib.Path) -> Ended:
    text = script.read_text()
    if "current_accelerator" in text and torch.accelerator.current_accelerator() is None:
        return Ended(script.stem, "could not run: there is no accelerator", 0.0, "")
    ranks = 1 if "--nproc-per-node 1" in text else 2
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--redirects", "3"]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *launch, "--log-dir", directory, str(script)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return Ended(script.stem, f"could not run: it did not end in {_SECONDS} s", time.monotonic() - begin, "")
        # Files of each rank: in one stream their lines would mix.
        printed, errors = (_read_all(pathlib.Path(directory), name) for name in ("stdout.log", "stderr.log"))
    lines = printed.splitlines()
    if done.returncode == 0 and {"shown", "not shown"} & set(lines):
        outcome = "shown" if "shown" in lines else "not shown"
    else:
        raised = _EXCEPTION.findall(errors)
        outcome = f"could not run: {raised[0] if raised else f'exit code {done.returncode}'}"
    return Ended(script.stem, outcome, time.monotonic() - begin, printed)


def _read_all(directory: pathlib.Path, name: str) -> str:
    """Returns the text of the files of all ranks, one rank after the other."""
    return "".join(file.read_text(errors="replace") for file in sorted(directory.rglob(name)))


if __name__ == "__main__":
    sys.exit(main())
