"""Measures the processor time of starting the program, relative to an empty program with typer and rich.

python benchmarks/start.py
"""

from __future__ import annotations

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

_EMPTY = """
import rich.console, typer
app = typer.Typer()
@app.callback(invoke_without_command=True)
def main(show: bool = typer.Option(False, "--version")) -> None:
    if show:
        print("empty 1.0")
app()
"""
_LOG = "RuntimeError: Expects tensor to be on the compute device cuda:0, was on cpu\n"


def measure(*command: str, cwd: str, repeat: int = 9) -> float:
    """Measures the median processor seconds of a command and its children."""
    seconds = []
    for _ in range(repeat):
        before = os.times()
        subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        after = os.times()
        seconds.append(after[2] + after[3] - before[2] - before[3])
    return statistics.median(seconds)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "job.log")
        log.write_text(_LOG)
        empty = measure(sys.executable, "-c", _EMPTY, "--version", cwd=directory)
        print(f"an empty program of typer and rich, --version: {empty * 1e3:.0f} ms of a processor")
        for words in (["--version"], ["--help"], ["list"], ["explain", str(log)], ["check", "--help"]):
            took = measure(sys.executable, "-m", "fsdp_doctor", *words, cwd=directory)
            print(f"fsdp-doctor {words[0]} {'' if len(words) == 1 else '...'}: {took / empty:.1f} times")


if __name__ == "__main__":
    main()
