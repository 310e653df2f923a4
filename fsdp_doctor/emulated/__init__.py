"""An accelerator in host memory. Importing this package registers it as ``torch.device("emulated")``.

PyTorch's own FSDP code runs on it and fails on it as it does on CUDA: device memory is apart from
host memory and counted, pinned memory is told from pageable memory, streams and events are
torch's, non-blocking copies are late, and the process group backend ``emulated`` refuses CPU
tensors. See README.md beside this file for what is emulated and what is not.

Raises :class:`EmulationUnavailable` where the device cannot be built.
"""

from __future__ import annotations

import atexit
import datetime
import os
import time

import torch
import torch.distributed as dist

from fsdp_doctor.emulated import shared_memory
from fsdp_doctor.emulated.build import EmulationUnavailable

__all__ = ["EmulationUnavailable"]

_DEFAULT_DEVICES = 8
_SECONDS_TO_LET_GO = 0.05


def _register() -> None:
    from fsdp_doctor.emulated.library import _C

    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "emulated"):
        raise EmulationUnavailable(f"torch has room for one device of this kind, and {taken} has taken it")
    torch.utils.rename_privateuse1_backend("emulated")
    _C.register_device()
    _C.set_device_count(max(_DEFAULT_DEVICES, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
    # Streams of the device can be made from here on, and the module makes one.
    from fsdp_doctor.emulated import device

    torch._register_device_module("emulated", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    if dist.is_available():
        dist.Backend.register_backend("emulated", _backend, devices=["emulated"])
        dist.Backend.backend_capability["gloo"].append("emulated")


def _backend(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    from fsdp_doctor.emulated.library import _C

    store = dist.PrefixStore("emulated", store)
    host = dist.ProcessGroupGloo(store, rank, size, timeout)
    file = shared_memory.of_group(store, rank, size, _C.shared_bytes(size))
    backend: dist.Backend = _C.make_backend(host, file, timeout, _backend)
    return backend


def _let_go_of_the_last_backward() -> None:
    """Gives autograd's threads a moment without the interpreter's lock, before Python ends.

    Such a thread drops the context of a backward, a Python object, only after ``backward`` has returned. If the
    interpreter ends in between, torch aborts the process.
    """
    from fsdp_doctor.emulated.library import _C

    if _C.is_initialized():
        time.sleep(_SECONDS_TO_LET_GO)


_register()
atexit.register(_let_go_of_the_last_backward)
