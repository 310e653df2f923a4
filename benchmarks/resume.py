"""Measures the time that the recorder of ``fsdp-doctor resume`` adds to a step, also to steps that search the heap.

python benchmarks/resume.py [--device cuda] [--layers 8] [--width 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from fsdp_doctor.resume import recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device = torch.device(options.device)
    model = nn.Sequential(*(nn.Linear(options.width, options.width, device=device) for _ in range(options.layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(options.batch, options.width, device=device)

    # On a busy machine, processor time is more reliable than the clock.
    read_clock = time.process_time if device.type == "cpu" else time.perf_counter

    def measure_step() -> float:
        begin = read_clock()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return read_clock() - begin

    bare = [measure_step() for _ in range(options.steps)]
    with tempfile.TemporaryDirectory() as directory:
        chosen = {"record": directory, "stop": 0, "job": directory, "emulated": False, "deterministic": False}
        os.environ["FSDP_DOCTOR_RESUME"] = json.dumps(chosen)
        recorder.start("torch")
        recorded = [measure_step() for _ in range(options.steps)]
    nbytes = sum(p.nbytes for p in model.parameters())
    without, with_it = statistics.median(bare[2:]), statistics.median(recorded[2:])
    print(f"{device.type}, {nbytes / 1e6:.1f} MB of weights, five times that is read a step")
    print(f"a step: {without * 1e3:.1f} ms, recorded {with_it * 1e3:.1f} ms: {(with_it - without) * 1e3:.1f} ms more")
    print(
        f"the first two recorded steps, which search the heap: {recorded[0] * 1e3:.0f} and {recorded[1] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
