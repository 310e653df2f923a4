"""Measures the cost of the emulated device: its build, and the matrix on it compared with the matrix on the CPU.

    python benchmarks/emulated.py [--repeat 3]

Whole commands are timed from outside, start-up included. CPU and emulated device take turns. torch's FSDP1 refuses a
machine that has only a CPU, so the ratio is for the FSDP2 half of the default matrix. ``processor`` is user and system
time of all processes of a command. If other programs share the processors, only these ratios can be compared.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from speed import num_cases, seconds

_HALF = ("--strategy", "fsdp2")


def build_seconds() -> float:
    """Returns the seconds of an import with an empty cache, minus the seconds of an import with the filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        return _import_seconds(cache) - _import_seconds(cache)


def _import_seconds(cache: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", "import fsdp_doctor.emulated"]
    subprocess.run(command, env=os.environ | {"FSDP_DOCTOR_CACHE": cache}, check=True, capture_output=True)
    return time.perf_counter() - start


def processor_seconds() -> float:
    """Returns the processor time of all child processes that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each half of the matrix")
    repeat = parser.parse_args().repeat

    print(f"build, once                     {build_seconds():7.1f} s")
    runs: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeat):
        for device in ("cpu", "emulated"):
            before = processor_seconds()
            runs.setdefault(("seconds", device), []).append(seconds("probe", *_HALF, "--device", device))
            runs.setdefault(("processor", device), []).append(processor_seconds() - before)
    print(f"the fsdp2 half of the default matrix, {num_cases(*_HALF)} cases")
    for what in ("seconds", "processor"):
        for device in ("cpu", "emulated"):
            each = ", ".join(f"{value:.1f}" for value in runs[what, device])
            middle = statistics.median(runs[what, device])
            print(f"  {what:9} on {device:9}         {middle:7.1f} s   (median of {each})")
        ratio = statistics.median(runs[what, "emulated"]) / statistics.median(runs[what, "cpu"])
        print(f"  {what:9}, emulated / cpu      {ratio:7.2f}")
    print(f"default matrix, {num_cases()} cases     {seconds('probe', '--device', 'emulated'):7.1f} s")


if __name__ == "__main__":
    main()
