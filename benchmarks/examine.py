"""Measures fsdp_doctor.examine() on a model of a hundred thousand parameters, in one process, without an accelerator.

python benchmarks/examine.py [--device emulated] [--parameters 100000] [--per-module 10]

Every parameter is sharded by fully_shard over a mesh of one rank. Building the model takes minutes and is not timed.
AdamW has three more tensors for each parameter. Under CPUOffloadPolicy, examine also checks whether each parameter is
pinned.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import fsdp_doctor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "emulated")
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--per-module", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if options.device == "emulated":
        from fsdp_doctor import emulated  # noqa: F401, which registers the device
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.device}, {platform.machine()}")
    for name, policy in (
        ("resident", OffloadPolicy()),
        ("under CPUOffloadPolicy", CPUOffloadPolicy(pin_memory=options.device != "cpu")),
    ):
        begin = time.perf_counter()
        model, optimizer = build(options, policy)
        print(f"{name}: {options.parameters} parameters, built in {time.perf_counter() - begin:.0f} s")
        for what, arguments in (("examine(model)", (model,)), ("examine(model, AdamW)", (model, optimizer))):
            times = [timed(*arguments) for _ in range(options.repeat)]
            low, middle, high = min(times), statistics.median(times), max(times)
            print(f"  {what:24} {middle:6.3f} s ({low:.3f} to {high:.3f})")
        begin = time.perf_counter()
        shown = str(fsdp_doctor.examine(model, optimizer))
        print(f"  {'and printed':24} {time.perf_counter() - begin:6.3f} s, {len(shown.splitlines())} lines")
    dist.destroy_process_group()


def build(options: argparse.Namespace, policy: OffloadPolicy) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Builds a model of small matrices with 1,000 modules in each FSDP unit, and AdamW with state for each matrix."""
    device = "cpu" if isinstance(policy, CPUOffloadPolicy) else options.device
    model = nn.Sequential()
    for _ in range(options.parameters // options.per_module):
        model.append(matrices(options.per_module, device))
    mesh = init_device_mesh(options.device, (1,))
    for first in range(0, len(model), 1000):
        fully_shard([*model.children()][first : first + 1000], mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment.detach()}
    return model, optimizer


def matrices(count: int, device: str) -> nn.Module:
    module = nn.Module()
    for index in range(count):
        module.register_parameter(f"w{index}", nn.Parameter(torch.ones(4, 4, device=device)))
    return module


def timed(*arguments: object) -> float:
    begin = time.perf_counter()
    fsdp_doctor.examine(*arguments)  # type: ignore[arg-type]
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
