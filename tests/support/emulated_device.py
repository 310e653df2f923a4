"""The emulated device in this process. A test file that imports this is skipped where the device cannot be built."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

emulated: Any = pytest.importorskip("fsdp_doctor.emulated.device", exc_type=ImportError)

DEVICE = "emulated"
OTHER = "emulated:1"


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def on_device(*values: float, device: str = DEVICE) -> Tensor:
    """Made on the device alone: no copy of it is in flight."""
    made = torch.empty(len(values), device=device)
    for index, value in enumerate(values):
        made[index].fill_(value)
    return made


class Used:
    """Bytes of a device since this was made."""

    def __init__(self, device: int = 0) -> None:
        # A test that failed before may have left tensors in its traceback.
        gc.collect()
        self.device = device
        self.before = emulated.memory_allocated(device)
        emulated.reset_peak_memory_stats(device)

    def now(self) -> int:
        return emulated.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        return emulated.max_memory_allocated(self.device) - self.before


def in_stream(stream: torch.Stream, do: Callable[[], Any]) -> Any:
    with emulated.stream(stream):
        return do()
