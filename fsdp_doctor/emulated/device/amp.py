"""``torch.emulated.amp``, the counterpart of ``torch.cuda.amp``: ``torch.amp`` for this device."""

from __future__ import annotations

import functools
from typing import Any

import torch

custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="emulated")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="emulated")


class autocast(torch.amp.autocast):  # noqa: N801, torch.cuda.amp's name
    """``torch.autocast`` for the emulated device."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("emulated", dtype, enabled, cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for the emulated device, with the same arguments except the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("emulated", *args, **kwargs)


def amp_definitely_not_available() -> bool:
    """Returns False, because autocast is available."""
    return False
