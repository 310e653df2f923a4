"""Measures the host time of a load from safetensors files, compared with plain reads from the page cache.

torchrun --nproc-per-node 2 benchmarks/loading_from_files.py [--device cuda --hidden 2560] [--chunk-mib 2,4,8,16]

The model has the shape of Qwen3-4B. ``plain``: as many threads as in a load read as many bytes of the file into
existing memory, each its own part. ``bare``: the threads read into pinned chunks, and send them to the device. Times
are medians of the slowest rank in milliseconds. ``processor`` is the time of all threads of rank 0; ``before reading``
and ``in all`` are times of its main thread. If other programs share the processors, only processor times can be
compared.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from host_time import sharded
from ranks import BACKENDS, join_group, make_shared_directory

from fsdp_doctor import load_full_tensors
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.load import full_load
from fsdp_doctor.weights.load.portions import LocalParts
from fsdp_doctor.weights.transport.host_copies import HostCopies, count_threads

_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BACKENDS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--chunk-mib", default="2,4,8,16")
    parser.add_argument("--directory", help="where the file is written; one in main memory, such as /dev/shm")
    options = parser.parse_args()
    join_group(options.device)
    model = sharded(options.device, options.hidden)
    with make_shared_directory(options.directory) as directory:
        path = directory / "model.safetensors"
        if dist.get_rank() == 0:
            save_file({n: torch.zeros(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}, path)
        dist.barrier()
        measure(model, path, options)
    dist.destroy_process_group()


def measure(model: nn.Module, path: pathlib.Path, options: argparse.Namespace) -> None:
    shards = [private.read_local_tensor(tensor.tensor) for tensor in reader.read(model).list_tensors()]
    nbytes = sum(shard.nbytes for shard in shards)
    threads = count_threads()
    say(f"{len(shards)} tensors, {nbytes / 1e6:.0f} MB a rank, {dist.get_world_size()} ranks, {threads} threads each")
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    plain = taken(lambda: in_threads(threads, nbytes, functools.partial(read, path, memory)), options)
    say(row("plain", plain, nbytes, plain))
    for mib in map(int, options.chunk_mib.split(",")):
        if options.device != "cpu":
            carry = functools.partial(read_and_send, path, mib * _MIB, options.device)
            bare = taken(functools.partial(in_threads, threads, nbytes, carry), options)
            say(row(f"bare, {mib} MiB", bare, nbytes, plain))
        used: list[tuple[float, float]] = []

        def load_once(chunk_bytes: int = mib * _MIB, used: list[tuple[float, float]] = used) -> None:
            used.append(load(model, path, chunk_bytes))

        took = taken(load_once, options)
        before, in_all = (statistics.median(times) * 1e3 for times in zip(*used, strict=True))
        say(f"{row(f'load, {mib} MiB', took, nbytes, plain)}, before reading {before:.1f}, in all {in_all:.1f}")


def load(model: nn.Module, path: pathlib.Path, chunk_bytes: int) -> tuple[float, float]:
    """Returns the processor seconds of the main thread until the other threads begin to read, and in total."""
    finish = LocalParts.finish
    begins: list[float] = []

    def noted(own: LocalParts) -> None:
        begins.append(time.thread_time())
        finish(own)

    start = time.thread_time()
    with (
        mock.patch.object(LocalParts, "finish", noted),
        mock.patch.object(full_load, "HostCopies", functools.partial(HostCopies, chunk_bytes=chunk_bytes)),
    ):
        load_full_tensors(model, path)
    return begins[0] - start, time.thread_time() - start


def in_threads(count: int, nbytes: int, carry: Callable[[int, int], None]) -> None:
    """Calls ``carry`` in ``count`` threads with the first byte and the end of one part each."""
    length = -(-nbytes // count)
    parts = [(begin, min(begin + length, nbytes)) for begin in range(0, nbytes, length)]
    threads = [threading.Thread(target=carry, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(path: pathlib.Path, memory: torch.Tensor, begin: int, end: int) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(begin, end, 8 * _MIB):
            os.preadv(file.fileno(), [view(memory[start : min(start + 8 * _MIB, end)])], start)


def read_and_send(path: pathlib.Path, chunk_bytes: int, device: str, begin: int, end: int) -> None:
    module = torch.get_device_module(device)
    module.set_device(int(os.environ["LOCAL_RANK"]))
    chunks = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    views, target = [view(chunk) for chunk in chunks], torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
    with path.open("rb", buffering=0) as file, module.stream(module.Stream()) as _:
        stream = module.current_stream()
        taken: list[torch.Event | None] = [None, None]
        for number, start in enumerate(range(begin, end, chunk_bytes)):
            turn, length = number % 2, min(chunk_bytes, end - start)
            if (before := taken[turn]) is not None:
                before.synchronize()
            os.preadv(file.fileno(), [views[turn][:length]], start)
            target[:length].copy_(chunks[turn][:length], non_blocking=True)
            taken[turn] = stream.record_event()
        stream.synchronize()


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def taken(run: Callable[[], object], options: argparse.Namespace) -> tuple[float, float]:
    """Returns the medians in milliseconds of the slowest rank's time and of this rank's processor time.

    The first run does not count.
    """
    times = []
    for _ in range(options.repeat + 1):
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        run()
        if options.device != "cpu":
            torch.get_device_module(options.device).synchronize()
        took, used = time.perf_counter() - start, time.process_time() - used
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, took)
        times.append((max(everyone), used))
    took, used = (statistics.median(some) * 1e3 for some in zip(*times[1:], strict=True))
    return took, used


def row(what: str, took: tuple[float, float], nbytes: int, plain: tuple[float, float]) -> str:
    rate, share = nbytes / took[0] / 1e6, plain[0] / took[0]
    return f"{what:14} {took[0]:8.1f} ms {rate:6.1f} GB/s a rank, {share:.2f} of plain; processor {took[1]:7.1f} ms"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
