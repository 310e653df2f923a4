"""Saves files of ranks whose tensors are divided over two dimensions of a mesh.

The program is run on four ranks, with a directory.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main(directory: pathlib.Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    # Tensor parallelism divides 10 rows into 5 and 5, and 9 rows into 5 and 4. FSDP divides these parts unevenly.
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 10), nn.Linear(10, 9), nn.Linear(9, 12))
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(), "3": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model[0], mesh=mesh["fsdp"])
    # FSDP divides the columns that tensor parallelism has already divided by columns.
    fully_shard(model[1], mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    fully_shard(model, mesh=mesh["fsdp"])
    save(model.state_dict(), directory / "strided", rank)
    rows = DTensor.from_local(torch.full((2, 3), rank + 1.0), mesh, [Shard(0), Shard(0)], run_check=False)
    unread: dict[str, Any] = {
        "partial": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Partial()], run_check=False),
        "quantized": torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "array": numpy.ones(3),
        "bytes": b"\0\1",
        "inside": {"list": [torch.eye(3).to_sparse()]},
    }
    for name, value in unread.items():
        save({"rows": rows, name: value}, directory / name, rank)
    if rank == 0:
        torch.save(whole, directory / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def save(state: dict[str, Any], directory: pathlib.Path, rank: int) -> None:
    directory.mkdir(exist_ok=True)
    torch.save(state, directory / f"model_world_size_4_rank_{rank}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
