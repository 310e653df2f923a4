"""How long ``fsdp-doctor explain`` takes, Python's start included: a log of 64 ranks, each ending in a traceback.

python benchmarks/explain.py [--megabytes 10] [--repeat 5]
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

_RANKS = 64
_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/verl/verl/workers/fsdp_workers.py", line 652, in rollout_mode',
    "    params = self.actor_module_fsdp.state_dict()",
    "AssertionError: Expects tensor to be on the compute device cuda:{device}, was on cpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory) / "job.log"
        write(log, options.megabytes * 1_000_000)
        times = [timed(log) for _ in range(options.repeat)]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"Python {platform.python_version()}, {platform.machine()}, a log of {options.megabytes} MB")
    print(f"explain   {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), peak {peak:.0f} MiB")


def write(log: pathlib.Path, size: int) -> None:
    order = random.Random(0)
    waiting = [[line.format(device=rank % 8) for line in _TRACEBACK] for rank in range(_RANKS)]
    with open(log, "w") as file:
        step = 0
        while file.tell() < size:
            step += 1
            rank = order.randrange(_RANKS)
            file.write(
                f"[rank{rank}]: 2026-04-13 10:00:00,{step % 1000:03d} INFO step={step} loss=0.5 lr=1e-5 grad=0.3\n"
            )
        while any(waiting):
            rank = order.choice([rank for rank in range(_RANKS) if waiting[rank]])
            file.write(f"[rank{rank}]: {waiting[rank].pop(0)}\n")


def timed(log: pathlib.Path) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "fsdp_doctor", "explain", str(log)], capture_output=True, text=True)
    assert "fsdp1-manual-offload-then-state-dict" in done.stdout, done.stderr
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
