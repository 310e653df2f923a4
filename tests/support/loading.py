"""Code that the tests of loading share: new weights, ways to pass them, and checks of what must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support.extraction import Net, Tensors, assert_same, extracted, tensors_of
from support.ranks import Setting, on_ranks, this_rank

everywhere = on_ranks(Setting("emulated", 2), Setting("cpu", 3))
on_four = on_ranks(Setting("cpu", 4))
BUCKET_BYTES = 256 << 10


def other_tensors(**dims: Any) -> Tensors:
    """Makes the tensors of a ``new_net`` model with other weights and other buffers."""
    torch.manual_seed(7)
    net = Net(**dims)
    tensors = tensors_of(net)
    return tensors | {name: tensors[name] * 3 + 1 for name, _ in net.named_buffers() if name in tensors}


def on_first(source: Any) -> Any:
    return source if this_rank() == 0 else None


def items_of(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


def reusing(tensors: Tensors, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor in the same memory, which is pinned if ``device`` is not the CPU."""
    longest = max(tensor.nbytes for tensor in tensors.values())
    memory = torch.empty(longest, dtype=torch.uint8)
    if device != "cpu":
        memory = memory.pin_memory()
    for name, tensor in tensors.items():
        here = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        here.copy_(tensor)
        yield name, here


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def places_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Records for each parameter the identity of the object, and the places of the parameter and of its shard."""
    return {
        name: (id(p), p.device, local_of(p).device, local_of(p).is_pinned(), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    }


@contextlib.contextmanager
def filled_in_place(model: nn.Module, expected: Tensors) -> Iterator[None]:
    """Context in which the model must be loaded with ``expected``, into the same memory and the same objects."""
    before = places_of(model)
    yield
    after = places_of(model)
    assert after == before, [(name, before[name], after[name]) for name in before if before[name] != after[name]][:3]
    assert_same(extracted(model), expected)
