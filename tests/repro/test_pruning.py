"""What a script does not use is taken out of it."""

from __future__ import annotations

import ast

import pytest

from fsdp_doctor.repro.pruning import prune

_SOURCE = '''\
"""What it is for.

    a command
"""
import os, re
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

WIDTH = 2  # wide
HEIGHT = 3

"""A module that was pasted in."""
from __future__ import annotations
from collections.abc import Iterator
from torch.distributed.tensor import DTensor

def unused():
    return re, HEIGHT

@torch.no_grad()
def used(tensor: DTensor) -> Iterator[int]:

    yield helper(tensor)

def helper(tensor):
    return WIDTH * dist.get_rank()

if __name__ == "__main__":
    used(torch.ones(1))
'''
_PRUNED = '''\
"""What it is for.

    a command
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

WIDTH = 2  # wide

@torch.no_grad()
def used(tensor: DTensor) -> Iterator[int]:
    yield helper(tensor)

def helper(tensor):
    return WIDTH * dist.get_rank()

if __name__ == "__main__":
    used(torch.ones(1))
'''


def test_what_the_main_block_uses_directly_or_through_others_is_left_in_the_usual_order() -> None:
    assert prune(_SOURCE) == _PRUNED
    ast.parse(_PRUNED)


def test_what_is_pruned_once_stays_as_it_is() -> None:
    assert prune(_PRUNED) == _PRUNED


def test_two_definitions_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="defined twice: used"):
        prune(_SOURCE.replace("def unused", "def used"))
