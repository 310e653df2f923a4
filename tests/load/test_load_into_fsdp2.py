"""Full tensors into FSDP2 models, in every state: the shards are those of the model that they came from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.extraction import (
    EVEN,
    FEW_BYTES,
    UNEVEN,
    Tensors,
    assert_same,
    everywhere,
    extracted,
    fsdp2,
    mesh_over,
    new_net,
    tensors_of,
)
from support.ranks import Setting, on_ranks, this_device, this_rank
from torch.distributed.fsdp import CPUOffloadPolicy
from torch import nn

from fsdp_doctor import load_full_tensors


def other_tensors(**dims: Any) -> Tensors:
    torch.manual_seed(7)
    return tensors_of(type(new_net(**dims))(**dims))


def on_first(source: Any) -> Any:
    return source if this_rank() == 0 else None


def _items(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


SOURCES: dict[str, Callable[[Tensors], Any]] = {
    "mapping of all": lambda tensors: tensors,
    "mapping of rank 0": lambda tensors: on_first(tensors),
    "iterator of all": _items,
    "iterator of rank 0": lambda tensors: on_first(_items(tensors)),
    "on the device": lambda tensors: on_first({name: t.to(this_device()) for name, t in tensors.items()}),
}


@everywhere
def test_every_kind_of_source_fills_every_shard() -> None:
    for dims, kind, bucket_bytes in itertools.product((EVEN, UNEVEN), SOURCES, (FEW_BYTES, 1 << 20)):
        model = fsdp2(new_net(**dims))
        expected = other_tensors(**dims)
        report = load_full_tensors(model, SOURCES[kind](expected), bucket_bytes=bucket_bytes)
        assert (report.missing, report.superfluous) == ((), ()), report
        assert_same(extracted(model), expected)
