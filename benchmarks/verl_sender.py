"""Counts the collectives and copies of verl's sender of weights and of the fix ``verl-sender``, on the emulated device.

    torchrun --nproc-per-node 2 benchmarks/verl_sender.py

For each offload, rank 0 prints a row for the installed verl's ``get_per_tensor_param`` and a row for the fix. A row has
rank 0's numbers of collectives and of copies, the bytes of their results, and the bytes of all sent tensors. Counts do
not depend on the machine. The model is the small Qwen3 of the matrix. verl_sync.py times both senders.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from ranks import join_group, make_shared_directory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_doctor.fixes.applying import hold_fix
from fsdp_doctor.frameworks.adapter import PlainModel, Shims
from fsdp_doctor.frameworks.framework_worker import find_adapter
from fsdp_doctor.machine.launch import Place, read_place
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix

_OFFLOADS = ("none", "param+optimizer", "policy")
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_OTHERS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::_foreach_copy_")


class Counter(TorchDispatchMode):
    """Counts the collectives and the copies of a block, with the bytes of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives = self.collected = self.copies = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        result = func(*args, **(kwargs or {}))
        if name.startswith(_COLLECTIVES) and not name.startswith(_OTHERS):
            self.collectives += 1
            # c10d's own collectives write what a rank receives into the first argument; functional ones return it.
            self.collected += count_bytes(args[0] if name.startswith("c10d::") else result)
        elif name.split(".")[0] in _COPIES:
            self.copies += 1
            self.copied += count_bytes(args[0] if "copy_" in name else result)
        return result


def count_bytes(tensors: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))


def count(send: Callable[[], tuple[Iterable[tuple[str, torch.Tensor]], Any]]) -> tuple[Counter, int]:
    """Counts a sender's collectives and copies while its tensors are read, and the bytes of the tensors."""
    sent = 0
    with Counter() as counter:
        for _, tensor in send()[0]:
            sent += tensor.nbytes
    return counter, sent


def main() -> None:
    join_group("emulated")
    place = read_place()
    find_adapter("verl").preload()
    find_adapter("verl").prepare_emulated_device(Shims("verl", read_matrix("verl").shims))
    version = read_installed_versions(["verl"])["verl"]
    with make_shared_directory(None) as directory:
        for strategy in ("fsdp2", "fsdp"):
            for offload in _OFFLOADS[: 3 if strategy == "fsdp2" else 2]:
                for fixed in (False, True):
                    measure(directory, place, version, strategy=strategy, offload=offload, fixed=fixed)


def measure(directory: pathlib.Path, place: Place, version: str, *, strategy: str, offload: str, fixed: bool) -> None:
    workspace = directory / f"{strategy}-{offload}-{fixed}"
    workspace.mkdir(exist_ok=True)
    plain = PlainModel(
        name="qwen3", weights="own", device=torch.device("emulated", place.local_rank), place=place, workspace=workspace
    )
    session: Any = find_adapter("verl").build({"strategy": strategy, "offload": offload, "lora": "apart"}, plain)
    session.step(plain.make_batch(0))
    session.offload()
    engine = session._engine
    who = "the fix" if fixed else f"verl {version}"
    try:
        with hold_fix("verl-sender") if fixed else contextlib.nullcontext():
            counter, sent = count(lambda: engine.get_per_tensor_param())
    except RuntimeError as error:
        # Up to 0.7.1, verl raises on every rank under the policy.
        if place.rank == 0:
            print(f"{strategy:6}{offload:16}{who:12} {type(error).__name__}: {str(error)[:60]}", flush=True)
        return
    if place.rank == 0:
        collected, copied = counter.collected / 2**10, counter.copied / 2**10
        print(
            f"{strategy:6}{offload:16}{who:12}{counter.collectives:4} collectives {collected:6.0f} KiB, "
            f"{counter.copies:4} copies {copied:6.0f} KiB, {sent / 2**10:.0f} KiB sent",
            flush=True,
        )


if __name__ == "__main__":
    main()
