"""Groups that are used after their end, and groups that not all ranks make."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from support.ranks import Setting, on_ranks, this_device, this_rank, together

on_two = on_ranks(Setting("emulated", 2))


@on_two
def test_ranks_that_disagree_about_a_split_are_told_after_the_timeout() -> None:
    together()  # which makes the group that it needs before the ranks disagree
    world = dist.group.WORLD
    world.bound_device_id = this_device()
    ranks = [[0, 1]] if this_rank() == 0 else [[0], [1]]
    soon = datetime.timedelta(seconds=2)
    try:
        group = dist.split_group(split_ranks=ranks, timeout=soon)
        dist.all_reduce(torch.ones(1, device=this_device()), group=group)
        said = ""
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        world.bound_device_id = None
    print(this_rank(), said, flush=True)
    together()


@on_two
def test_a_group_that_was_destroyed_is_refused_and_the_tensors_stay() -> None:
    tensor = torch.ones(2, device=this_device())
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    try:
        dist.all_reduce(tensor, group=group)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(this_rank(), said, flush=True)
    assert tensor.tolist() == [2.0, 2.0]
    together()
