"""Compares a save of full tensors with plain writes of the same files, and with torch's ways to save.

torchrun --nproc-per-node 2 benchmarks/saving.py --directory /dev/shm [--device cuda --hidden 4096]

The model has layers of a square and two oblong matrices in bfloat16, under FSDP2. ``plain``: each rank writes its share
of the same files from memory in pieces of 8 MiB, one thread for each file, and then calls fsync. ``save``:
``save_full_tensors``, with its checksums. ``dcp``: ``torch.distributed.checkpoint.save``, which does not write the
Hub's format. ``gather``: ``full_tensors`` to rank 0, which calls ``save_file``.

The ways take turns, ``--repeat`` times. Times are of the slowest rank. ``processor`` is the sum of all ranks' processor
seconds, which other programs on the machine affect least.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from ranks import BACKENDS, join_group, make_shared_directory

from fsdp_doctor import full_tensors, save_full_tensors
from fsdp_doctor.weights.save.writing import MOST_THREADS
from fsdp_doctor.weights.transport.host_copies import count_threads

_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BACKENDS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--directory", help="where the files are written; one in main memory, such as /dev/shm")
    options = parser.parse_args()
    join_group(options.device)
    model = make_model(options.device, options.hidden)
    with make_shared_directory(options.directory) as directory:
        measure(model, directory, options)
    dist.destroy_process_group()


def make_model(device: str, hidden: int) -> nn.Module:
    shapes = [(hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    layers = [nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)) for _ in range(36)]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def measure(model: nn.Module, scratch: pathlib.Path, options: argparse.Namespace) -> None:
    report = save_full_tensors(model, scratch / "first", names="model")
    sizes = [(scratch / "first" / file).stat().st_size for file in report.files]
    dist.barrier()
    remove(scratch / "first")
    say(f"{report.num_bytes / 1e6:.0f} MB in {len(sizes)} files, {dist.get_world_size()} ranks, {options.directory}")
    memory = memoryview(bytearray(max(sizes)))
    ways: dict[str, Callable[[pathlib.Path], object]] = {
        "plain": lambda path: write_plainly(path, sizes, memory),
        "save": lambda path: save_full_tensors(model, path, names="model"),
        "dcp": lambda path: dcp.save(model.state_dict(), checkpoint_id=path),
        "gather": lambda path: gather(model, path),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(options.repeat):
        for way, write in ways.items():
            times[way].append(take(write, scratch / way))
    plain = statistics.median(took for took, _ in times["plain"])
    for way, some in times.items():
        took, used = (statistics.median(each) for each in zip(*some, strict=True))
        rate = report.num_bytes / took / 1e9
        share = f"{rate:5.2f} GB/s, {plain / took:.2f} of plain"
        say(f"{way:7} {took * 1e3:8.1f} ms {share}; processor {used * 1e3:7.0f} ms")


def write_plainly(path: pathlib.Path, sizes: list[int], memory: memoryview) -> None:
    path.mkdir(exist_ok=True)

    def write(number: int) -> None:
        with (path / f"{number}").open("wb", buffering=0) as file:
            for begin in range(0, sizes[number], 8 * _MIB):
                file.write(memory[begin : min(begin + 8 * _MIB, sizes[number])])
            os.fsync(file.fileno())

    with ThreadPoolExecutor(count_threads(MOST_THREADS)) as threads:
        list(threads.map(write, range(dist.get_rank(), len(sizes), dist.get_world_size())))


def gather(model: nn.Module, path: pathlib.Path) -> None:
    tensors = {}
    with full_tensors(model) as every:
        for name, tensor in every:
            if dist.get_rank() == 0:
                tensors[name] = tensor.cpu()
    if dist.get_rank() == 0:
        path.mkdir()
        save_file(tensors, path / "model.safetensors")


def take(write: Callable[[pathlib.Path], object], path: pathlib.Path) -> tuple[float, float]:
    """Returns (the slowest rank's seconds, the sum of all ranks' processor seconds)."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    write(path)
    mine = time.perf_counter() - start, time.process_time() - used
    everyone: list[tuple[float, float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    remove(path)
    return max(took for took, _ in everyone), sum(used for _, used in everyone)


def remove(path: pathlib.Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
