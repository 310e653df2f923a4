"""What a device's allocator and its driver say of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.errors import CannotRun, first_line
from fsdp_doctor.fsdp import private
from fsdp_doctor.ledgers.stage_ledger import Bytes, DeviceLedger, with_unexplained

_NEEDED = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """In bytes. allocated, reserved: now. peak, peak_reserved: the most since the last reset.

    capacity: what the device has, or this process was limited to. elsewhere: in use, and not reserved by this process.
    """

    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    capacity: int
    elsewhere: int

    def ledger(self, held: Bytes, at_peak: Bytes) -> DeviceLedger:
        """Of what is held now and was held at the peak, as far as it is known whose it is."""
        return DeviceLedger(
            held=with_unexplained(held, self.allocated),
            at_peak=with_unexplained(at_peak, self.peak),
            allocated=self.allocated,
            peak=self.peak,
            reserved=self.reserved,
            peak_reserved=self.peak_reserved,
            capacity=self.capacity,
            elsewhere=self.elsewhere,
        )


def check_counted(device_type: str) -> None:
    """Raises CannotRun where nobody counts the memory of such devices. Makes no context on one."""
    if device_type == "cpu":
        raise CannotRun("torch does not count the memory of the CPU: use --device emulated, or an accelerator")
    module = torch.get_device_module(device_type)
    if missing := [name for name in _NEEDED if not hasattr(module, name)]:
        raise CannotRun(
            f"a device of type {device_type} cannot say what its memory holds: torch.{device_type} has no {missing[0]}"
        )


class DeviceCounters:
    """Those of one device. Raises CannotRun where it has none."""

    def __init__(self, device: torch.device) -> None:
        check_counted(device.type)
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def read(self) -> Counters:
        """Raises CannotRun where the driver does not answer."""
        try:
            free, total = self._module.mem_get_info(self._device)
        except RuntimeError as error:
            reason = first_line(error)
            raise CannotRun(f"the driver of {self._device} does not say how much memory is free: {reason}") from None
        reserved = int(self._module.memory_reserved(self._device))
        return Counters(
            allocated=int(self._module.memory_allocated(self._device)),
            peak=int(self._module.max_memory_allocated(self._device)),
            reserved=reserved,
            peak_reserved=int(self._module.max_memory_reserved(self._device)),
            capacity=int(total * self._fraction()),
            elsewhere=max(0, int(total) - int(free) - reserved),
        )

    def pinned_reserved(self) -> int:
        """Pinned host memory that this process's allocator of it has taken, used or kept; 0 where it does not say."""
        stats: dict[str, int] = getattr(self._module, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0))

    def give_back_workspaces(self) -> int:
        """Bytes of what cuBLAS kept for itself and no operator returns; its next product takes it anew."""
        before = int(self._module.memory_allocated(self._device))
        private.release_workspaces(self._device)
        return before - int(self._module.memory_allocated(self._device))

    def _fraction(self) -> float:
        """Of the device's memory, what this process may have; the emulated device's total is what it may have."""
        if self._device.type == "emulated" or not hasattr(self._module, "get_per_process_memory_fraction"):
            return 1.0
        return float(self._module.get_per_process_memory_fraction(self._device))
