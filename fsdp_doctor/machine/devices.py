"""The device of a run: its name, the resolution of ``auto``, and its memory limit."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_doctor.errors import CannotRun, UsageError

if TYPE_CHECKING:
    import torch

NAMES = ("auto", "cuda", "xpu", "cpu", "emulated")


@dataclass(frozen=True, kw_only=True)
class RunDevice:
    """The device of a run, the same on all ranks.

    type: a type of ``torch.device``; ``auto`` until :func:`resolve` is called.
    memory: the bytes of memory that each device may use; None for no limit.
    late_completion: whether non-blocking copies of the emulated device finish as late as possible.
    """

    type: str = "auto"
    memory: int | None = None
    late_completion: bool = True


def resolve(asked: str) -> str:
    """Returns the type of device for a name: for ``auto`` the accelerator that torch finds, else the emulated device.

    Any other name is returned unchanged. Makes no CUDA context if PYTORCH_NVML_BASED_CUDA_CHECK=1 is set.
    """
    import torch

    if asked != "auto":
        return asked
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "emulated"


def load(device: RunDevice, asked: str) -> None:
    """Makes the device known to torch. Call this function before any process is forked.

    Raises CannotRun if the emulated device cannot be built, and UsageError if the device does not support a setting.

    asked: the device as the user named it, for the message of an error.
    """
    if device.type == "emulated":
        import torch

        if torch.cuda.is_available():
            # Parts of torch, such as its checkpoints, prefer CUDA to any other device.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            import fsdp_doctor.emulated  # noqa: F401, which registers the device
        except ImportError as reason:
            why = "torch sees no accelerator here, and " if asked == "auto" else ""
            raise CannotRun(
                f"{why}{reason}; --device cpu works without an accelerator, but offloading cannot break "
                "anything on the CPU"
            ) from None
    elif not device.late_completion:
        raise UsageError(f"--no-late-completion is for the emulated device, but the device is {device.type}")
    if device.type == "cpu" and device.memory is not None:
        raise UsageError("--device-memory is for an accelerator; on the CPU, use --host-memory to limit a worker")


def count(device_type: str) -> int:
    """Returns the number of ranks for which this node has a device. Any number of ranks can share the CPU."""
    import torch

    if device_type == "cpu":
        return sys.maxsize
    return int(torch.get_device_module(device_type).device_count())


def check_there_is_one(device_type: str, *, rank: int, local_rank: int) -> None:
    """Raises CannotRun if this node has no device for the rank."""
    num_devices = count(device_type)
    if num_devices == 0:
        raise CannotRun(f"torch sees no {device_type} on this node; give --device auto to use the available device")
    if local_rank >= num_devices:
        raise CannotRun(
            f"there are more ranks than devices on this node: rank {rank} is number {local_rank + 1} of this node, "
            f"and the number of {device_type} devices that torch sees is {num_devices}; start one rank per device"
        )


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Limits the memory of this process on ``device`` to ``nbytes``. A larger allocation is an out-of-memory error."""
    import torch

    module = torch.get_device_module(device)
    if device.type == "emulated":
        module.set_memory_limit(nbytes)
    else:
        total = module.mem_get_info(device)[1]
        module.set_per_process_memory_fraction(min(1.0, nbytes / total), device)
