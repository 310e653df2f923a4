"""The ceilings: what the links carry when nothing but bytes is moved, all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_doctor.bench.measure import Clock
from fsdp_doctor.fsdp import private

_REPEAT = 5


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second of one rank, while all ranks do the same; None where there is no such link.

    all_gather: bytes that a rank receives.
    """

    h2d_pinned: float | None
    h2d_pageable: float | None
    d2h_pinned: float | None
    d2h_pageable: float | None
    all_gather: float | None


def measure(clock: Clock, nbytes: int) -> Links:
    """Every rank must call it. nbytes: of each copy, and of the gathered tensor."""
    if clock.device.type == "cpu":
        return Links(
            h2d_pinned=None, h2d_pageable=None, d2h_pinned=None, d2h_pageable=None, all_gather=_gather(clock, nbytes)
        )
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=clock.device).random_()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    return Links(
        h2d_pinned=_rate(clock, nbytes, lambda: on_device.copy_(pinned, non_blocking=True)),
        h2d_pageable=_rate(clock, nbytes, lambda: on_device.copy_(pageable)),
        d2h_pinned=_rate(clock, nbytes, lambda: pinned.copy_(on_device, non_blocking=True)),
        d2h_pageable=_rate(clock, nbytes, lambda: pageable.copy_(on_device)),
        all_gather=_gather(clock, nbytes),
    )


def _gather(clock: Clock, nbytes: int) -> float | None:
    size = dist.get_world_size()
    if size == 1:
        return None
    own = torch.empty(nbytes // size, dtype=torch.uint8, device=clock.device).random_()
    everyone = torch.empty(own.numel() * size, dtype=torch.uint8, device=clock.device)
    group = dist.group.WORLD
    assert group is not None
    received = own.numel() * (size - 1)
    return _rate(clock, received, lambda: private.all_gather(group, [everyone], [own]).wait())


def _rate(clock: Clock, nbytes: int, move: Callable[[], object]) -> float:
    move()
    return nbytes / statistics.median(clock.seconds(move) for _ in range(_REPEAT))
