"""Finds the index of the device that an argument names."""

from __future__ import annotations

import torch

from fsdp_doctor.emulated.library import _C

NAME = "emulated"
Device = torch.device | str | int | None


def find_index(device: Device) -> int:
    """Returns the index of ``device``. For None, or a name without an index, returns the current device's index."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return int(_C.current_device()) if index is None else index
