"""Measures how long ``fsdp-doctor explain`` takes, including the start of Python.

python benchmarks/explain.py [--of steps|lines|tracebacks] [--megabytes 10] [--repeat 5]

steps: a log of training steps of 64 ranks, each ending in a traceback.
lines: a log of one-line failures only, each from another rank.
tracebacks: a log of tracebacks only, each from another rank.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TextIO

_RANKS = 64
_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in rollout_mode',
    "    params = self.actor_module_fsdp.state_dict()",
    "AssertionError: Expects tensor to be on the compute device cuda:{device}, was on cpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=_WRITERS, default="steps")
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory) / "job.log"
        with open(log, "w") as file:
            _WRITERS[options.of](file, options.megabytes * 1_000_000)
        times = [timed(log) for _ in range(options.repeat)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"Python {platform.python_version()}, {platform.machine()}, a log of {options.megabytes} MB, {options.of}")
    print(
        f"explain   {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), "
        f"of the CPU {used.ru_utime / options.repeat:.2f} s, peak {used.ru_maxrss / 1024:.0f} MiB"
    )


def write_steps(file: TextIO, size: int) -> None:
    order = random.Random(0)
    waiting = [[line.format(device=rank % 8) for line in _TRACEBACK] for rank in range(_RANKS)]
    step = 0
    while file.tell() < size:
        step += 1
        rank = order.randrange(_RANKS)
        file.write(f"[rank{rank}]: 2026-04-13 10:00:00,{step % 1000:03d} INFO step={step} loss=0.5 lr=1e-5 grad=0.3\n")
    while any(waiting):
        rank = order.choice([rank for rank in range(_RANKS) if waiting[rank]])
        file.write(f"[rank{rank}]: {waiting[rank].pop(0)}\n")


def write_lines(file: TextIO, size: int, traceback: Sequence[str] = _TRACEBACK[-1:]) -> None:
    rank = 0
    while file.tell() < size:
        file.writelines(f"[rank{rank}]: {line.format(device=rank % 8)}\n" for line in traceback)
        rank += 1


def write_tracebacks(file: TextIO, size: int) -> None:
    write_lines(file, size, _TRACEBACK)


def timed(log: pathlib.Path) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "fsdp_doctor", "explain", str(log)], capture_output=True, text=True)
    assert "fsdp1-manual-offload-then-state-dict" in done.stdout, done.stderr
    return time.perf_counter() - begin


_WRITERS = {"steps": write_steps, "lines": write_lines, "tracebacks": write_tracebacks}

if __name__ == "__main__":
    main()
