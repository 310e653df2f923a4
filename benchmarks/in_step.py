"""Measures the cost per bucket of ``full_tensors(in_step=True)``. Extractions with and without ``in_step`` take turns.

torchrun --nproc-per-node 2 benchmarks/in_step.py [--device cuda] [--layers 64] [--bucket-mib 64]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from fsdp_doctor import full_tensors
from fsdp_doctor.weights.extract.plan import Arguments, get_plan
from fsdp_doctor.weights.transport.streams import wait_for_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    model = nn.Sequential(*(nn.Linear(options.width, options.width, device=device) for _ in range(options.layers)))
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    nbytes = options.bucket_mib << 20

    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.repeat + 1):
        for in_step, times in seconds.items():
            wait_for_device(device)
            dist.barrier()
            begin, begin_of_processor = time.perf_counter(), time.process_time()
            for _ in full_tensors(model, bucket_bytes=nbytes, in_step=in_step):
                pass
            wait_for_device(device)
            times.append((time.perf_counter() - begin, time.process_time() - begin_of_processor))
    # The first runs warm up.
    medians = {
        key: [statistics.median(time[kind] for time in times[1:]) for kind in (0, 1)] for key, times in seconds.items()
    }
    plan, _ = get_plan(model, Arguments.check(bucket_bytes=nbytes, in_step=True))
    if dist.get_rank() == 0:
        print(f"{len(plan.buckets)} buckets")
        for kind, usual, stepped in zip(("time", "processor"), medians[False], medians[True], strict=True):
            more = (stepped - usual) / len(plan.buckets) * 1e6
            print(
                f"{kind:10} {usual * 1e3:8.2f} ms, in step {stepped * 1e3:8.2f} ms, "
                f"ratio {stepped / usual:5.2f}, a bucket {more:6.0f} us"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
