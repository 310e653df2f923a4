"""Measures full_tensors of this version and of another version, in turn, in the same processes on the same model.

    git archive COMMIT fsdp_doctor | tar x -C DIRECTORY
    torchrun --nproc-per-node 2 benchmarks/two_versions.py DIRECTORY [--hidden 2560] [--repeat 15]

The model has the shape of Qwen3-4B under FSDP2, in bfloat16 on the device. Before the first call, the script times what
any first use of a process costs: the memory of the gather buffers, the first all-gather of the group, and the first
copy kernel. Then both versions are called in turn, each version first in half of the rounds. Times are milliseconds of
rank 0, from when all ranks are ready until the device has finished.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from host_time import sharded
from ranks import BACKENDS, join_group
from torch.distributed import distributed_c10d

HERE = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "fsdp_doctor"


class Version:
    """A version of the package, whose modules are in ``sys.modules`` only while the version is used.

    Each version gets a store of its own, because the versions agree about their plans with keys of the same names.
    root: the directory that holds the package.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.modules: dict[str, Any] = {}
        self.store = dist.PrefixStore(str(root), distributed_c10d._get_default_store())
        with self.use():
            import fsdp_doctor

            self.full_tensors: Callable[..., Iterator[Any]] = fsdp_doctor.full_tensors

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Puts the modules of this version in place; at the end removes them, and all modules imported meanwhile."""
        sys.path.insert(0, str(self.root))
        sys.modules.update(self.modules)
        try:
            with mock.patch.object(distributed_c10d, "_get_default_store", return_value=self.store):
                yield
        finally:
            sys.path.remove(str(self.root))
            self.modules = take_modules()


def take_modules() -> dict[str, Any]:
    """Removes the package's modules from ``sys.modules``, but not the emulated device, which cannot be made twice."""
    names = [name for name in sys.modules if name.split(".")[0] == PACKAGE and "emulated" not in name.split(".")]
    return {name: sys.modules.pop(name) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=pathlib.Path, help="the directory that holds the other version's package")
    parser.add_argument("--device", choices=BACKENDS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=80)
    parser.add_argument("--repeat", type=int, default=15, help="calls of each version in each dtype")
    options = parser.parse_args()
    join_group(options.device)
    clock = Clock(options.device)
    model = sharded(options.device, options.hidden)
    time_first_uses(clock, options.device)

    # host_time and the emulated device have imported this version's package.
    take_modules()
    versions = {"this": Version(HERE), "other": Version(options.other)}
    for dtype in (None, torch.bfloat16):
        times: dict[str, list[float]] = {name: [] for name in versions}
        for turn in range(options.repeat + 1):
            for name in sorted(versions, reverse=bool(turn % 2)):
                with versions[name].use():
                    tensors = versions[name].full_tensors(model, dtype=dtype)
                    times[name].append(clock.measure(functools.partial(collections.deque, tensors, maxlen=0)))
        for name, (first, *rest) in times.items():
            report(f"dtype={dtype}, {name} version, ms", median=statistics.median(rest), least=min(rest), first=first)
        (_, *this), (_, *other) = times["this"], times["other"]
        report(
            f"dtype={dtype}, this divided by other",
            median=statistics.median(this) / statistics.median(other),
            least=min(this) / min(other),
        )
    dist.destroy_process_group()


class Clock:
    """A clock that starts when all ranks are ready.

    device: the type of the ranks' device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._ready = dist.new_group(backend="gloo")

    def measure(self, run: Callable[[], object]) -> float:
        """Returns the milliseconds of one run, until this rank's device has finished."""
        self._synchronize()
        dist.barrier(group=self._ready)
        start = time.perf_counter()
        run()
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.get_device_module(self._device).synchronize()


def time_first_uses(clock: Clock, device: str) -> None:
    """Times the first uses that a first extraction pays for in a process that has only built a model."""
    size = dist.get_world_size()
    memory: list[torch.Tensor] = []

    def allocate() -> None:
        memory.append(torch.empty((1 << 30) + (64 << 20), dtype=torch.uint8, device=device))

    def gather() -> None:
        whole = memory[0][: 256 << 20]
        dist.all_gather_into_tensor(whole, whole[: len(whole) // size].clone())

    def copy() -> None:
        torch._foreach_copy_([memory[0][:1024]], [memory[0][1024:2048]])

    for name, run in {"memory of 1 GiB": allocate, "all-gather of 256 MiB": gather, "copy kernel": copy}.items():
        report(f"{name}, ms", first=clock.measure(run), again=clock.measure(run))


def report(name: str, **values: float) -> None:
    """Prints one row on rank 0."""
    if dist.get_rank() == 0:
        print(f"{name:36}" + "".join(f"   {key} {value:7.3f}" for key, value in values.items()), flush=True)


if __name__ == "__main__":
    main()
