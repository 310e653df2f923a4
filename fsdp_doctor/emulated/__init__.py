"""An accelerator in host memory. Importing this package registers it as ``torch.device("emulated")``.

PyTorch's own FSDP code works and fails on it as on CUDA: device memory is separate from host memory and counted, pinned
memory is distinguished from pageable memory, streams and events are torch's, non-blocking copies finish late, and the
process group backend ``emulated`` refuses CPU tensors. README.md in this directory lists the emulated features.

The import raises :class:`EmulationUnavailable` if the device cannot be built.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist

from fsdp_doctor.emulated.build import EmulationUnavailable

__all__ = ["EmulationUnavailable"]

_DEFAULT_DEVICES = 8
_SECONDS_FOR_AUTOGRAD = 0.05


def _register() -> None:
    from fsdp_doctor.emulated.library import _C

    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "emulated"):
        raise EmulationUnavailable(
            f"torch has room for only one device of this kind, and {taken} is already registered"
        )
    torch.utils.rename_privateuse1_backend("emulated")
    _C.register_device()
    _C.set_device_count(max(_DEFAULT_DEVICES, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
    # Imported here because the module needs the registration above.
    from fsdp_doctor.emulated import device

    torch._register_device_module("emulated", device)
    for name in ("amp", "memory", "random"):
        sys.modules[f"torch.emulated.{name}"] = getattr(device, name)
    torch.utils.generate_methods_for_privateuse1_backend()
    if dist.is_available():
        dist.Backend.register_backend("emulated", device.make_backend, devices=["emulated"])
        from torch.testing._internal.distributed import fake_pg  # noqa: F401, which registers the backend fake

        for backend in ("gloo", "fake"):
            dist.Backend.backend_capability[backend].append("emulated")


def _wait_for_autograd_threads() -> None:
    """Gives autograd's threads time to release the Python objects of the last backward.

    The threads release these objects after ``backward`` has returned. If the interpreter ended before that, torch would
    abort the process.
    """
    from fsdp_doctor.emulated.library import _C

    if _C.is_initialized():
        time.sleep(_SECONDS_FOR_AUTOGRAD)


_register()
atexit.register(_wait_for_autograd_threads)
