"""Measures the host time of one small tensor among ten thousand, compared with torch's own full_tensor().

torchrun --nproc-per-node 2 benchmarks/small_tensors.py [--device cuda] [--tensors 10000]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from fsdp_doctor import full_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if options.device != "cpu":
        torch.get_device_module(options.device).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model = nn.Module()
    for index in range(options.tensors):
        model.register_parameter(f"w{index}", nn.Parameter(torch.randn(64, 64, device=options.device)))
    fully_shard(model, mesh=init_device_mesh(options.device, (dist.get_world_size(),)))

    def ours() -> None:
        for _, tensor in full_tensors(model):
            del tensor

    def theirs() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.full_tensor()

    mine, other = median(ours, options), median(theirs, options)
    if dist.get_rank() == 0:
        print(f"full_tensors          {mine / options.tensors * 1e6:8.1f} us a tensor")
        print(f"DTensor.full_tensor   {other / options.tensors * 1e6:8.1f} us a tensor")
        print(f"ratio                 {other / mine:8.1f}")
    dist.destroy_process_group()


def median(run: Callable[[], None], options: argparse.Namespace) -> float:
    """Returns the median in seconds. The first run, which warms up, does not count."""
    times = []
    for _ in range(options.repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        if options.device != "cpu":
            torch.get_device_module(options.device).synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
