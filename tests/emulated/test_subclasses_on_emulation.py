"""Collectives of tensor subclasses: the class says what is sent, its own tensor has no memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.collectives import input_of
from support.ranks import this_device, world_size
from support.training import assert_same, on_the_device
from torch.utils._pytree import tree_map_only


class Wrapped(torch.Tensor):
    """A tensor around another one, with no memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(cls, lambda wrapped: wrapped.inner, args), **(kwargs or {}))


def _check_collectives(group: dist.ProcessGroup | None) -> None:
    tensor = Wrapped(input_of().to(this_device()))
    dist.broadcast(tensor, 0, group)
    assert_same(tensor.inner, input_of(0))
    pieces = [Wrapped(input_of(rank).to(this_device())) for rank in range(world_size())]
    received = Wrapped(torch.zeros_like(pieces[0].inner))
    dist.scatter(received, pieces if dist.get_rank() == 0 else None, 0, group)
    assert_same(received.inner, input_of())


@on_the_device
def test_a_collective_of_a_subclass_sends_what_the_class_says() -> None:
    _check_collectives(None)


@on_the_device
def test_a_group_of_gloo_sends_what_the_class_says() -> None:
    group = dist.new_group(backend="gloo")
    _check_collectives(group)
    dist.destroy_process_group(group)
