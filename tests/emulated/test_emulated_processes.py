"""The emulated device in processes of their own: its life in one, and what cannot be shown in a process of tests."""

from __future__ import annotations

import json
import pathlib
import sys

from program import Started, python_prints, run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped

MIB = 2**20

_BACKWARD = """
import torch, fsdp_doctor.emulated
model = torch.nn.Linear(4, 4, device="emulated")
model(torch.ones(2, 4, device="emulated")).sum().backward()
"""


def test_a_program_may_end_right_after_a_backward() -> None:
    ends = [started.wait() for started in [Started(sys.executable, "-W", "ignore", "-c", _BACKWARD) for _ in range(3)]]
    assert [(end.code, end.stderr) for end in ends] == [(0, "")] * 3


_ANOTHER_DEVICE = """
import torch
torch.utils.rename_privateuse1_backend("other")
try: import fsdp_doctor.emulated
except ImportError as error: print(f"{type(error).__name__}: {error}")
"""


def test_a_device_of_another_name_in_its_place_is_named() -> None:
    assert python_prints(_ANOTHER_DEVICE) == (
        "EmulationUnavailable: torch has room for only one device of this kind, and other is already registered\n"
    )


_LIFE = """
import json, os, torch, fsdp_doctor.emulated, torch.distributed as dist
device, seen = torch.emulated, {"devices": torch.accelerator.device_count()}

def in_a_fork():
    read, write = os.pipe()
    if os.fork() == 0:
        try: said = str(torch.ones(2, device="emulated").sum().item())
        except RuntimeError as error: said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()

seen["forked before use"] = in_a_fork()
device.memory_allocated(), torch.manual_seed(0)
seen["before use"] = device.is_initialized()
dist.init_process_group("cpu:gloo,emulated:emulated", store=dist.HashStore(), rank=0, world_size=1)
dist.init_device_mesh("emulated", (1,))
seen["device of the mesh"] = device.current_device()
tensor = torch.ones(2, device="emulated")
seen["after use"] = [device.is_initialized(), device._initialized]
seen["forked after use"] = in_a_fork()
dist.all_reduce(tensor)
dist.destroy_process_group()
try: dist.all_reduce(tensor)
except ValueError as error: seen["without a group"] = str(error)
seen["tensor"] = tensor.sum().item()
torch.accelerator.empty_host_cache()
print(json.dumps(seen))
"""


def test_a_process_and_its_forks_have_the_device_from_its_first_use() -> None:
    assert json.loads(python_prints(_LIFE, env={"LOCAL_WORLD_SIZE": "12", "LOCAL_RANK": "3"})) == {
        "devices": 12,
        "forked before use": "2.0",
        "before use": False,
        "device of the mesh": 3,
        "after use": [True, True],
        "forked after use": (
            "Cannot re-initialize the emulated device in forked subprocess. To use the emulated device with "
            "multiprocessing, you must use the 'spawn' start method"
        ),
        "without a group": (
            "Default process group has not been initialized, please make sure to call init_process_group."
        ),
        "tensor": 2.0,
    }


# In a process of its own: the allocator cannot be changed while there are tensors.
_CACHING = """
import torch, fsdp_doctor.emulated
from torch import emulated
MIB = 2**20
emulated.use_caching_allocator()
def block(mib): return torch.empty(int(mib * MIB), dtype=torch.uint8, device="emulated")
def say():
    kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    print(*(emulated.memory_stats()[f"{kind}.all.current"] / MIB for kind in kinds))
a = block(0.5); say()
b, c, d = block(4), block(4), block(4); say()
del c; say()
e = block(12); say()
del e; say(); emulated.empty_cache(); say()
emulated.set_memory_limit(30 * MIB)
try: block(11)
except torch.OutOfMemoryError as error: print(error)
"""


def test_memory_is_reserved_in_segments_that_fragment_as_those_of_cuda() -> None:
    lines = python_prints(_CACHING).splitlines()
    assert lines[:-1] == [
        "0.5 2.0 1.5",
        "12.5 22.0 9.5",
        "8.5 22.0 13.5",
        "20.5 34.0 13.5",
        "8.5 34.0 13.5",
        "8.5 22.0 13.5",
    ]
    assert "8.50 MiB is allocated by PyTorch, and 13.50 MiB is reserved by PyTorch but unallocated" in lines[-1]


# A process forked before either has used the device; each waits for what the other says.
_TWO_PROCESSES = """
import json, os, sys, torch
import fsdp_doctor.emulated

def used_by(nbytes):
    device.share_devices({file!r})
    device.set_memory_limit(64 << 20)
    return torch.empty(nbytes, dtype=torch.uint8, device="emulated")

device = torch.emulated
to_child, from_child = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    held = used_by(40 << 20)
    os.write(from_child[1], b".")
    os.read(to_child[0], 1)
    os._exit(0)
os.read(from_child[0], 1)
found = {{"with both": None}}
held = used_by(8 << 20)
found["with both"] = device.mem_get_info()
try:
    torch.empty(20 << 20, dtype=torch.uint8, device="emulated")
except torch.OutOfMemoryError as error:
    found["refused"] = str(error)
found["allocated"] = device.memory_allocated()
os.write(to_child[1], b".")
os.waitpid(child, 0)
found["when the other has ended"] = device.mem_get_info()
try:
    device.share_devices({file!r})
except RuntimeError as error:
    found["twice"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


def test_devices_that_processes_share_have_one_memory_and_one_limit(tmp_path: pathlib.Path) -> None:
    seen = json.loads(python_prints(_TWO_PROCESSES.format(file=str(tmp_path / "shared"))))
    assert seen["with both"] == [16 * MIB, 64 * MIB]
    assert seen["allocated"] == 8 * MIB
    assert "Tried to allocate 20.00 MiB" in seen["refused"]
    assert "16.00 MiB is free" in seen["refused"]
    assert seen["when the other has ended"] == [56 * MIB, 64 * MIB]
    assert seen["twice"] == "this process shares its devices already"


# Every one of these reads or writes a tensor whose storage has been freed.
USES_OF_FREED_MEMORY = (
    *("x + 1", "x.sum()", "x.clone()", "x.cpu()", "x[0].item()", "x.tolist()", "repr(x)", "x.to(torch.bfloat16)"),
    *("x.view(2, 4) @ x.view(4, 2)", "torch.cat([x, x])", "x[torch.tensor([1])]", "torch._foreach_add([x], 1)"),
    "torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 4)] * 3)",
    *("view + 1", "transposed.contiguous()", "y.copy_(x)", "host.copy_(x)", "pinned.copy_(x, non_blocking=True)"),
    *("x.to('emulated:1')", "torch._foreach_copy_([y], [x])", "x.zero_()", "x.copy_(y)", "x.copy_(host)"),
    "x.copy_(pinned, non_blocking=True); torch.emulated.synchronize()",
    *("torch._foreach_copy_([x], [y])", "transposed.copy_(y.view(4, 2))", "torch.add(y, 1, out=view)"),
    "torch.split_with_sizes_copy(y, [8], out=[x])",
)


# Each statement in a process of its own, forked from one that has imported torch.
_USE_FREED_MEMORY = """
import os, sys, torch, fsdp_doctor.emulated
x, y = (torch.ones(8, device="emulated") for _ in range(2))
host, pinned = torch.ones(8), torch.ones(8).pin_memory()
view, transposed = x[:], x.view(2, 4).t()
x.untyped_storage().resize_(0)
for statement in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(statement)
            os._exit(1)
        except RuntimeError:
            os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print({0: "raised", 1: "nothing was raised"}.get(end, f"died with {end}"), flush=True)
"""


def test_touching_a_tensor_whose_storage_is_gone_raises() -> None:
    done = run(sys.executable, "-W", "ignore", "-c", _USE_FREED_MEMORY, *USES_OF_FREED_MEMORY)
    assert done.code == 0, done.stderr
    ends = dict(zip(USES_OF_FREED_MEMORY, done.stdout.splitlines(), strict=True))
    assert {use: end for use, end in ends.items() if end != "raised"} == {}
