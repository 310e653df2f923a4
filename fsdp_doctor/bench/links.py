"""The ceilings: what the links carry when nothing but bytes is moved, all ranks at once."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fsdp_doctor.bench.measure import Clock
from fsdp_doctor.extract.host_copies import threads_of_a_rank
from fsdp_doctor.fsdp import private
from fsdp_doctor.matrix.contracts import Direction

_REPEAT = 5
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second of one rank, while all ranks do the same; None where there is no such link.

    all_gather: bytes that a rank receives. host_copy: within the host's memory, by the threads of a load;
    page_cache: from a file that is there, by the same; both are measured for the way in.
    """

    h2d_pinned: float | None
    h2d_pageable: float | None
    d2h_pinned: float | None
    d2h_pageable: float | None
    all_gather: float | None
    host_copy: float | None = None
    page_cache: float | None = None


def measure(clock: Clock, nbytes: int, direction: Direction) -> Links:
    """Every rank must call it. nbytes: of each copy, and of the gathered tensor."""
    links = _of_the_device(clock, nbytes)
    if direction == "out":
        return links
    return replace(links, host_copy=_host_copy(clock, nbytes), page_cache=_page_cache(clock, nbytes))


def _of_the_device(clock: Clock, nbytes: int) -> Links:
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


def _host_copy(clock: Clock, nbytes: int) -> float:
    source, target = (torch.empty(nbytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    with ThreadPoolExecutor(threads_of_a_rank()) as pool:
        parts = list(zip(target.split(_CHUNK_BYTES), source.split(_CHUNK_BYTES), strict=True))
        return _rate(clock, nbytes, lambda: list(pool.map(lambda part: part[0].copy_(part[1]), parts)))


def _page_cache(clock: Clock, nbytes: int) -> float:
    memory = bytearray(nbytes)
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(threads_of_a_rank()) as pool:
        file.write(memory)
        file.flush()
        whole = memoryview(memory)
        offsets = range(0, nbytes, _CHUNK_BYTES)
        read = functools.partial(_read, file.fileno(), whole)
        return _rate(clock, nbytes, lambda: list(pool.map(read, offsets)))


def _read(fd: int, whole: memoryview, offset: int) -> None:
    os.preadv(fd, [whole[offset : offset + _CHUNK_BYTES]], offset)


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
