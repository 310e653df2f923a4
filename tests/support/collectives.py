"""What each rank brings to a collective, and what becomes of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from support.ranks import this_device, this_rank
from support.training import all_ranks


def input_of(rank: int | None = None, numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings, on the CPU: different everywhere, small enough to be exact in bfloat16."""
    return (torch.arange(1, numel + 1) + 4 * (this_rank() if rank is None else rank)).to(dtype)


def inputs_of_all(dtype: torch.dtype = torch.float32, numel: int = 4) -> torch.Tensor:
    return torch.stack([input_of(rank, numel, dtype) for rank in all_ranks()])


def unfilled(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, -1, dtype=dtype, device=this_device())


def completes(work: dist.Work, seconds: float = 2) -> bool:
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    return work.is_completed()
