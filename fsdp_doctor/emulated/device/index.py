"""The device that a caller means."""

from __future__ import annotations

import torch

from fsdp_doctor.emulated.library import _C

NAME = "emulated"
Device = torch.device | str | int | None


def find_index(device: Device) -> int:
    """The index of ``device``; that of the current one for None, or a name without an index."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return int(_C.current_device()) if index is None else index
