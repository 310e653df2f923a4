"""The device and the processes that use it: what a fork may do, when the device is in use, which one a rank has."""

from __future__ import annotations

from program import python_prints

_FORK = """
import os, torch, fsdp_doctor.emulated
{use}
child = os.fork()
if child == 0:
    try: print(torch.ones(2, device="emulated").sum().item(), flush=True)
    except RuntimeError as error: print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_process_that_forks_after_the_device_was_used_is_told_in_the_words_of_cuda() -> None:
    assert python_prints(_FORK.format(use='torch.ones(1, device="emulated")')) == (
        "Cannot re-initialize the emulated device in forked subprocess. To use the emulated device with "
        "multiprocessing, you must use the 'spawn' start method\n"
    )


def test_a_process_that_forks_before_has_the_device() -> None:
    assert python_prints(_FORK.format(use="torch.emulated.device_count()")) == "2.0\n"


def test_the_device_is_initialized_when_it_is_used() -> None:
    code = (
        "import torch, fsdp_doctor.emulated; e = torch.emulated; print(e.is_initialized());"
        "e.memory_allocated(); e.device_count(); torch.manual_seed(0); print(e.is_initialized());"
        "torch.ones(1, device='emulated'); print(e.is_initialized(), e._initialized)"
    )
    assert python_prints(code) == "False\nFalse\nTrue True\n"


def test_a_mesh_chooses_the_device_by_local_rank() -> None:
    code = (
        "import torch, fsdp_doctor.emulated, torch.distributed as dist;"
        "dist.init_process_group('cpu:gloo,emulated:emulated', store=dist.HashStore(), rank=0, world_size=1);"
        "dist.init_device_mesh('emulated', (1,)); print(torch.emulated.current_device())"
    )
    assert python_prints(code, env={"LOCAL_RANK": "3"}) == "3\n"


_DESTROYED = """
import torch, torch.distributed as dist, fsdp_doctor.emulated
dist.init_process_group("cpu:gloo,emulated:emulated", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(2, device="emulated")
dist.all_reduce(tensor)
dist.destroy_process_group()
try: dist.all_reduce(tensor)
except ValueError as error: print(error)
print(tensor.sum().item())
"""


def test_a_tensor_outlives_its_process_group_and_a_collective_on_it_is_refused_by_torch() -> None:
    assert python_prints(_DESTROYED).splitlines() == [
        "Default process group has not been initialized, please make sure to call init_process_group.",
        "2.0",
    ]
