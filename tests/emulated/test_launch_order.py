"""RLinf issue 1539: trainers gather, and rank 0 broadcasts to a receiver that uses another trainer's device."""

from __future__ import annotations

import datetime
import itertools
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import forked
from support.emulated_device import emulated
from support.emulation import needs_emulation
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_TIMEOUT = datetime.timedelta(seconds=60)
_WIDTH, _LAYERS = 32, 6


def _take_part(role: str, in_step: bool, directory: str) -> None:
    store: Any = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    device = 0 if role == "sends" else 1
    torch.accelerator.set_device_index(device)
    with emulated.note_launch_order(directory):
        if role == "receives":
            _receive(store, in_step)
        else:
            _train(store, device, in_step)
    store.set(f"end/{role}", "")
    for each in ("sends", "gathers", "receives"):
        store.get(f"end/{each}")
    os._exit(0)


def _transfer_group(store: dist.Store, rank: int) -> Any:
    return emulated.make_backend(dist.PrefixStore("transfer", store), rank, 2, _TIMEOUT)


def _train(store: dist.Store, rank: int, in_step: bool) -> None:
    from fsdp_doctor import full_tensors

    dist.init_process_group(
        "cpu:gloo,emulated:emulated", store=dist.PrefixStore("trainers", store), rank=rank, world_size=2
    )
    mesh = init_device_mesh("emulated", (2,))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False, device="emulated") for _ in range(_LAYERS)))
    fully_shard(model, mesh=mesh)
    transfer = _transfer_group(store, 0) if rank == 0 else None
    sent = []
    for number, (_, tensor) in enumerate(full_tensors(model, bucket_bytes=_WIDTH * _WIDTH * 4, in_step=in_step)):
        if transfer is not None:
            store.set(f"sent/{number}", "")
            sent.append(transfer.broadcast(tensor, 0))
            if in_step:
                # On a GPU full_tensors waits for it with the device; here it is the host that waits for a collective.
                sent[-1].wait()
    store.set(f"gathered/{rank}", "")
    for work in sent:
        work.wait()


def _receive(store: dist.Store, in_step: bool) -> None:
    transfer = _transfer_group(store, 1)
    works = []
    for number in range(_LAYERS):
        store.get(f"sent/{number}")
        if not in_step:
            # It is late: what the trainer on its device may do meanwhile is done.
            store.get("gathered/1")
        works.append(transfer.broadcast(torch.zeros(_WIDTH, _WIDTH, device="emulated"), 0))
    for work in works:
        work.wait()


@pytest.mark.processes
@pytest.mark.parametrize("in_step", [False, True])
def test_launch_orders_that_deadlock_two_devices_are_found_without_a_timeout(
    tmp_path: pathlib.Path, in_step: bool
) -> None:
    needs_emulation()
    roles = ("sends", "gathers", "receives")
    with forked.job(_take_part, [(role, in_step, str(tmp_path)) for role in roles]) as job:
        for process in job.ranks:
            process.join(90)
        assert [process.exitcode for process in job.ranks] == [0, 0, 0], job.printed()
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    found = emulated.find_order_cycle(tmp_path)
    if in_step:
        assert found == ""
        return
    (one, here), (other, there) = (text.removeprefix("device ").split(" launches ") for text in found.split("; "))
    assert {one, other} == {"0", "1"}
    before, after = here.split(" before ")
    assert there == f"{after} before {before}"
    assert {before.split()[0], after.split()[0]} == {"BROADCAST", "_ALLGATHER_BASE"}


def test_a_cycle_is_found_over_three_devices_but_not_in_compatible_orders(tmp_path: pathlib.Path) -> None:
    def write(*devices: str) -> str:
        for number, names in enumerate(devices):
            (tmp_path / str(number)).write_text("".join(f"{name} 1 BROADCAST\n" for name in names))
        return str(emulated.find_order_cycle(tmp_path))

    for orders in (("abc", "abc", "abc"), ("ab", "bc", "ac"), ("ac", "ab", "")):
        assert write(*orders) == ""
    assert len(write("ab", "bc", "ca").split("; ")) == 3
    assert all(write(*orders) for orders in itertools.permutations(("abc", "cb", "")))
