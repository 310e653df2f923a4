"""Memory that runs out on one rank is an error on every rank, wherever in a load it does, and nothing stands still."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from support.extraction import assert_same, extracted, fsdp2, mesh_over, new_net, raises_soon
from support.loading import everywhere, on_first, other_tensors
from support.ranks import of_all_ranks, this_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import LoadError, load_full_tensors

# Some 700 kB in buckets of 256.
_BUCKET_BYTES = 256 << 10
_ALLOCATIONS = ("empty", "empty_like", "cat")


class _Exhausted(RuntimeError):
    pass


@contextlib.contextmanager
def _memory_ends(after: int | None) -> Iterator[list[str]]:
    """At the allocation after so many; inside, the list is of those that there were."""
    seen: list[str] = []

    def limited(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*arguments: Any, **options: Any) -> Any:
            if not options.get("pin_memory"):
                seen.append(name)
                if after is not None and len(seen) == after + 1:
                    raise _Exhausted("out of memory")
            return original(*arguments, **options)

        return allocate

    with contextlib.ExitStack() as stack:
        for name in _ALLOCATIONS:
            stack.enter_context(mock.patch.object(torch, name, limited(name, getattr(torch, name))))
        yield seen


def _resident() -> nn.Module:
    return fsdp2(new_net())


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        net = new_net()
    return fully_shard(net, mesh=mesh_over())


def _load(model: nn.Module, source: Any) -> None:
    load_full_tensors(model, source, buffers={"scratch": torch.ones(2)}, bucket_bytes=_BUCKET_BYTES)


@everywhere
def test_memory_that_ends_on_one_rank_is_an_error_on_every_rank_wherever_it_ends() -> None:
    expected = other_tensors()
    for make, exhausted in itertools.product((_resident, _on_meta), (0, 1)):
        model = make()
        with _memory_ends(None) as seen:
            _load(model, on_first(expected))
        num_allocations = of_all_ranks(len(seen))[exhausted]
        assert num_allocations > 2
        for after in range(0, num_allocations, max(num_allocations // 6, 1)):
            model = make()
            here = this_rank() == exhausted
            kind, words = (_Exhausted, "out of memory") if here else (LoadError, f"rank {exhausted} failed")
            with raises_soon(kind, words), _memory_ends(after if here else None):
                _load(model, on_first(expected))
        # The ranks still understand one another.
        model = make()
        _load(model, on_first(expected))
        assert_same(extracted(model), expected)


@everywhere
def test_memory_for_the_buckets_is_taken_before_anything_is_written() -> None:
    expected = other_tensors()
    model = _resident()
    before = extracted(model)
    here = this_rank() == 1
    with (
        raises_soon(
            *((_Exhausted, "out of memory") if here else (LoadError, "written nothing; this rank had written nothing"))
        ),
        _memory_ends(0 if here else None),
    ):
        load_full_tensors(model, on_first(expected), bucket_bytes=_BUCKET_BYTES)
    assert_same(extracted(model), before)
