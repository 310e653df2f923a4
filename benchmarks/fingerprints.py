"""Measures the cost of fingerprints next to an extraction, and checks the Triton kernel against torch operations.

    torchrun --standalone --nproc-per-node 2 benchmarks/fingerprints.py [--model qwen3-4b] [--out FILE] [--shapes]

Times are medians on the slowest rank. A sync is ``full_tensors`` and a copy of every tensor into a receiver's memory on
the same device, which is the fastest possible sync. The proof of a sync is ``RepeatedFingerprint.full_tensors`` and
``RepeatedFingerprintOfTensors`` of the received tensors, read at the next sync. With --shapes, the kernel alone is also
measured with other program shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench import sharded_model
from bench.measure import Clock

import fsdp_doctor
from fsdp_doctor.matrix.cases import make_scenario
from fsdp_doctor.plan.meta_model import build_on_meta
from fsdp_doctor.weights.fingerprints import block_sums, keyed_sum

_GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--sum-gib", type=float, default=4.0, help="of memory that the kernel alone sums")
    parser.add_argument("--shapes", action="store_true", help="measure other shapes of the kernel's programs, too")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device != "cpu":
        device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(options.device).set_device(device)
    dist.init_process_group("gloo" if options.device == "cpu" else f"cpu:gloo,{options.device}:nccl")

    clock = Clock(device)
    found: dict[str, Any] = {"device": _name(device), "torch": torch.__version__, "model": options.model}
    found["disagreements"] = disagreements(device) if device.type == "cuda" else []
    found |= bandwidth(clock, int(options.sum_gib * _GIB), options.repeat)
    if options.shapes:
        found["shapes"] = of_shapes(clock, int(options.sum_gib * _GIB), options.repeat)
    for offload in ("none", "policy"):
        found[offload] = of_model(clock, options, offload)
    if dist.get_rank() == 0:
        text = json.dumps(found, indent=1)
        print(text)
        if options.out is not None:
            options.out.write_text(text)
    dist.destroy_process_group()
    return 1 if found["disagreements"] else 0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def median(clock: Clock, run: Any, repeat: int) -> float:
    """Returns the median in seconds. The first two runs, which compile and warm up, do not count."""
    times = [clock.measure_seconds(run) for _ in range(repeat + 2)][2:]
    return sorted(times)[len(times) // 2]


def disagreements(device: torch.device) -> list[str]:
    """Compares the kernels with torch operations, for several dtypes, placements and alignments."""
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn):
        tensor = (torch.randn(401, 731, device=device) * 50).to(dtype)
        flat, rows = tensor.view(-1), tensor.shape[0]
        blocks = {
            "whole": keyed_sum.make_range_block(0, flat, 0),
            "odd": keyed_sum.make_range_block(0, flat[3:100_003], 100_003),
            "columns": keyed_sum.make_grid_block(0, tensor[:, 301:].contiguous(), (0, 301), (731, 1)),
            "transposed": keyed_sum.make_grid_block(0, tensor, (0, 0), (1, rows)),
        }
        for place, block in blocks.items():
            on_device = torch.zeros(1, 2, dtype=torch.int64, device=device)
            on_host = torch.zeros(1, 2, dtype=torch.int64)
            block_sums.BlockSums([block], on_device.device).add(on_device)
            on_cpu = keyed_sum.IndexedBlock(0, block.tensor.cpu(), block.base, block.sizes, block.strides)
            block_sums.BlockSums([on_cpu], on_host.device).add(on_host)
            if not torch.equal(on_device.cpu(), on_host):
                found.append(f"{dtype} {place}: {on_device.tolist()}, not {on_host.tolist()}")
    return found


def of_shapes(clock: Clock, nbytes: int, repeat: int) -> dict[str, dict[str, float]]:
    """Measures the kernel in GB/s with other program shapes."""
    from fsdp_doctor.weights.fingerprints import sum_kernels

    usual, found = sum_kernels.SHAPE, {}
    for columns, rows, tile_rows, tile_columns, num_warps in (
        (512, 128, 2, 256, 4),
        (1024, 64, 2, 256, 4),
        (1024, 64, 2, 256, 8),
        (1024, 128, 4, 256, 8),
        (2048, 64, 2, 256, 8),
        (4096, 64, 4, 256, 16),
    ):
        sum_kernels.SHAPE = sum_kernels.ProgramShape(
            columns=columns, rows=rows, tile_rows=tile_rows, tile_columns=tile_columns, num_warps=num_warps
        )
        found[str(sum_kernels.SHAPE)] = bandwidth(clock, nbytes, repeat)
    sum_kernels.SHAPE = usual
    return found


def bandwidth(clock: Clock, nbytes: int, repeat: int) -> dict[str, float]:
    """Returns the GB/s at which the kernel and torch operations sum bfloat16 numbers, without the rest of a sync."""
    tensor = torch.empty(nbytes // 8192 * 4096, dtype=torch.bfloat16, device=clock.device).normal_()
    into = torch.zeros(1, 2, dtype=torch.int64, device=clock.device)
    columns = tensor.view(-1, 4096)
    blocks = {
        "kernel_gb_per_s": keyed_sum.make_range_block(0, tensor, 0),
        "kernel_columns_gb_per_s": keyed_sum.make_grid_block(0, columns, (0, 4096), (8192, 1)),
        "kernel_odd_gb_per_s": keyed_sum.make_range_block(0, tensor, 1),
    }
    found = {}
    for name, block in blocks.items():
        sums = block_sums.BlockSums([block], into.device)
        found[name] = nbytes / 1e9 / median(clock, lambda sums=sums: sums.add(into), repeat)
    words = tensor[: len(tensor) // 16].view(torch.int32)
    seconds = median(clock, lambda: keyed_sum.sum_words(words, 0), 2)
    return found | {"torch_operations_gb_per_s": words.nbytes / 1e9 / seconds}


def of_model(clock: Clock, options: argparse.Namespace, offload: str) -> dict[str, float]:
    """Measures the operations on a model in milliseconds."""
    mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),))
    scenario = make_scenario({"strategy": "fsdp2", "offload": offload, "staging": "unstaged"})
    model = sharded_model.shard_model(build_on_meta(options.model), scenario, mesh)
    received = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(model)}
    nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in received.values()}.values())
    assert fsdp_doctor.fingerprint(model).tensors == fsdp_doctor.fingerprint_tensors(received).tensors

    proofs = Proofs(fsdp_doctor.RepeatedFingerprint(model), fsdp_doctor.RepeatedFingerprintOfTensors(received))

    def shards() -> None:
        for shard in fsdp_doctor.local_shards(model):
            del shard

    runs = {
        "full_tensors": lambda: extract(model),
        "local_shards": shards,
        "fingerprint": lambda: fsdp_doctor.fingerprint(model),
        "fingerprint_tensors": lambda: fsdp_doctor.fingerprint_tensors(received),
        "sync": lambda: sync(model, received),
        "sync_with_proof": lambda: sync(model, received, proofs),
        "read_and_compare": proofs.compare,
    }
    found = {name: 1e3 * median(clock, run, options.repeat) for name, run in runs.items()}
    found["proof_percent_of_sync"] = 100 * (found["sync_with_proof"] / found["sync"] - 1)
    with mock.patch.object(block_sums.BlockSums, "add", autospec=True, side_effect=block_sums.BlockSums.add) as launch:
        sync(model, received, proofs)
    return {"bytes": nbytes, "launches_of_a_proof": launch.call_count} | {
        name: round(value, 2) for name, value in found.items()
    }


def extract(model: nn.Module) -> None:
    for _, tensor in fsdp_doctor.full_tensors(model):
        del tensor


def sync(model: nn.Module, received: dict[str, torch.Tensor], proofs: Proofs | None = None) -> None:
    """Syncs the weights to a receiver on every rank. If there are ``proofs``, compares those of the sync before."""
    if proofs is not None and proofs.is_started:
        proofs.compare()
    for name, tensor in proofs.trained.full_tensors() if proofs is not None else fsdp_doctor.full_tensors(model):
        received[name].copy_(tensor)
        del tensor
    if proofs is not None:
        proofs.received.start()
        proofs.is_started = True


@dataclasses.dataclass
class Proofs:
    trained: fsdp_doctor.RepeatedFingerprint
    received: fsdp_doctor.RepeatedFingerprintOfTensors
    is_started: bool = False

    def compare(self) -> None:
        """Reads both fingerprints of the last sync, and compares them."""
        assert not fsdp_doctor.compare_fingerprints(self.trained.read(), self.received.read())


if __name__ == "__main__":
    raise SystemExit(main())
