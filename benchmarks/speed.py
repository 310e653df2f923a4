"""Measures how long the program takes: without torch, for one case, for one more case, for the default matrix.

    python benchmarks/speed.py [--repeat 5] [probe options ...]

Whole commands are timed from outside, start-up included. All figures come from the same run. To compare machines, use
the ratios.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ONE_CASE = ["-k", "fsdp2/none/unstaged/weights_info"]


def seconds(*arguments: str) -> float:
    """Returns the seconds of one run of the program. A bad verdict is a result like any other."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, ROOT / "fsdp-doctor", *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def median(repeat: int, *arguments: str) -> float:
    return statistics.median(seconds(*arguments) for _ in range(repeat))


def num_cases(*arguments: str) -> int:
    command = [sys.executable, str(ROOT / "fsdp-doctor"), "list", *arguments]
    return len(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of the commands that need no torch")
    options, probe = parser.parse_known_args()

    print(f"fsdp-doctor --help       {median(options.repeat, '--help'):8.3f} s   (median of {options.repeat})")
    print(f"fsdp-doctor list         {median(options.repeat, 'list'):8.3f} s   (median of {options.repeat})")
    one = seconds("probe", *probe, *ONE_CASE)
    print(f"probe, one case          {one:8.3f} s")
    selection = [word for word in probe if word not in ("--device", "cpu", "cuda")]
    cases = num_cases(*selection)
    everything = seconds("probe", *probe)
    more = (everything - one) / (cases - 1)
    print(f"probe, {cases:4d} cases       {everything:8.3f} s")
    print(f"one case more            {more:8.3f} s   1/{one / more:.0f} of a run of one case")


if __name__ == "__main__":
    main()
