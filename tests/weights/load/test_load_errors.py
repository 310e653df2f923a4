"""Tests that what cannot be loaded is soon an error on every rank, which says whether anything was written."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from support.extraction import Tensors, assert_same, extracted, fsdp2, mesh_over, new_net, raises_soon, tensors_of
from support.loading import BUCKET_BYTES, everywhere, items_of, on_first, on_four, other_tensors
from support.ranks import Setting, of_all_ranks, on_ranks, this_rank, together, world_size
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import LoadError, full_tensors, load_full_tensors

SMALL = "layers.0.up.bias"


def _with(value: torch.Tensor | None, name: str = SMALL) -> Tensors:
    tensors = other_tensors()
    del tensors[name]
    return tensors if value is None else tensors | {name: value}


def _of_rank(rank: int, its: Any, others: Any) -> Any:
    return its if this_rank() == rank else others


UNFIT: dict[str, Callable[[], Tensors]] = {
    f"lacks 1 of the model's tensors: {SMALL}": lambda: _with(None),
    "has 1 tensor that the model does not have: extra": lambda: other_tensors() | {"extra": torch.ones(3)},
    f"{SMALL} has the shape [13] in the source": lambda: _with(torch.ones(13)),
    f"{SMALL} is torch.float16 in the source and torch.float32 in the model": lambda: _with(torch.ones(14).half()),
    "are tied in the model, but have different values": lambda: _with(torch.ones(23, 8), "head.weight"),
    f"{SMALL} is on the meta device": lambda: _with(torch.ones(14, device="meta")),
}


@everywhere
def test_a_source_that_does_not_fit_is_an_error_on_every_rank() -> None:
    model = fsdp2(new_net())
    before = extracted(model)
    for (message, make), source in itertools.product(UNFIT.items(), (on_first, lambda tensors: tensors)):
        with raises_soon(LoadError, message, "written nothing"):
            load_full_tensors(model, source(make()), bucket_bytes=BUCKET_BYTES)
    with raises_soon(LoadError, f"lacks {len(before) - 1} of the model's tensors", "written nothing"):
        load_full_tensors(model, {"extra": torch.ones(1)})
    assert_same(extracted(model), before)
    for (message, make), source in itertools.product(
        UNFIT.items(), (lambda items: on_first(items), lambda items: items)
    ):
        with raises_soon(LoadError, message, "had begun to write"):
            load_full_tensors(model, source(items_of(make())), bucket_bytes=BUCKET_BYTES)


Call = Callable[[nn.Module], object]


def _load(source: Callable[[], Any], **options: Any) -> Call:
    return lambda model: load_full_tensors(model, source(), **options)


def _fake() -> Tensors:
    with FakeTensorMode():
        return _with(torch.empty(14))


# By what the error says on every rank.
REFUSED: dict[str, Call] = {
    "the model is not sharded": lambda model: load_full_tensors(new_net(), on_first(other_tensors())),
    "is a DTensor, not a full tensor": lambda model: load_full_tensors(model, model.state_dict()),
    "in the layout sparse_coo": _load(lambda: _with(torch.ones(14).to_sparse())),
    "is a FakeTensor in the source": _load(_fake),
    "lacks 16 of the model's tensors": _load(lambda: on_first(iter(()))),
    "no rank has a source": _load(lambda: None),
    f"lacks 1 of the model's tensors: {SMALL}": _load(lambda: _of_rank(1, _with(None), other_tensors())),
    "1 of": _load(lambda: _of_rank(1, other_tensors(), None)),
    "ranks have an iterable": _load(lambda: _of_rank(1, other_tensors(), items_of(other_tensors()))),
    "large.weight": lambda model: load_full_tensors(fsdp2(new_net(large_rows=8 + this_rank())), None),
    "strict=False": lambda model: load_full_tensors(model, on_first(other_tensors()), strict=this_rank() == 1),
}
# By what the error says on every rank: the rank on which it is raised, the type there, the call.
RAISED: dict[str, tuple[int, type[Exception], Call]] = {
    "model must be a tensor, not dict": (0, TypeError, _load(lambda: on_first({"model": other_tensors()}))),
    "the source must be a mapping": (0, TypeError, _load(lambda: on_first(3))),
    "pairs of a name and a tensor": (0, TypeError, _load(lambda: on_first(iter((torch.ones(1),))))),
    "pairs of a name and a tensor, not str": (0, TypeError, _load(lambda: on_first(iter(("name",))))),
    "pairs of a name and a tensor, not tuple": (0, TypeError, _load(lambda: on_first(iter(((SMALL, 1, 2),))))),
    "a name must be a string": (0, TypeError, _load(lambda: on_first(iter(((1, torch.ones(1)),))))),
    "name must be a tensor, not int": (0, TypeError, _load(lambda: on_first(iter((("name", 3),))))),
    "buffers must be a mapping": (1, TypeError, lambda model: _load_with(model, "buffers", [1])),
    "must be a whole number": (1, TypeError, lambda model: _load_with(model, "bucket_bytes", 1e6)),
    "bucket_bytes must be positive": (1, ValueError, lambda model: _load_with(model, "bucket_bytes", 0)),
    "dtype must be one of": (1, ValueError, lambda model: _load_with(model, "dtype", "fp8")),
    "the model must be a torch.nn.Module, not NoneType": (
        1,
        TypeError,
        lambda model: load_full_tensors(_of_rank(1, None, model), on_first(other_tensors())),
    ),
}


def _load_with(model: nn.Module, option: str, wrong: Any) -> None:
    load_full_tensors(model, on_first(other_tensors()), **({option: wrong} if this_rank() == 1 else {}))


@everywhere
def test_nonsense_on_any_rank_is_an_error_everywhere_and_writes_nothing() -> None:
    model = fsdp2(new_net())
    before = extracted(model)
    for words, call in REFUSED.items():
        together()
        with raises_soon(LoadError, words):
            call(model)
    for words, (rank, kind, call) in RAISED.items():
        together()
        here = this_rank() == rank
        with raises_soon(kind if here else LoadError, words, *([] if here else [f"rank {rank} failed"])):
            call(model)
    assert_same(extracted(model), before)


@on_ranks(Setting("cpu", 2))
def test_an_expanded_buffer_is_refused_before_anything_is_written() -> None:
    model: Any = fsdp2(new_net())
    before = extracted(model)
    model.scale = torch.ones(1).expand(8)
    for source in (other_tensors(), on_first(other_tensors())):
        with raises_soon(LoadError, "scale is expanded: several of its elements share memory", "written nothing"):
            load_full_tensors(model, source)
    assert_same(extracted(model), before | {"scale": torch.ones(8)})


@everywhere
def test_a_name_that_comes_twice_is_an_error_on_every_rank() -> None:
    twice = itertools.chain(items_of(other_tensors()), [(SMALL, other_tensors()[SMALL])])
    with raises_soon(LoadError, f"the source has {SMALL} twice"):
        load_full_tensors(fsdp2(new_net()), on_first(twice))


@everywhere
def test_not_strict_leaves_what_is_missing_and_skips_what_is_superfluous() -> None:
    for source in (on_first, lambda tensors: tensors, items_of, lambda tensors: on_first(items_of(tensors))):
        model = fsdp2(new_net())
        expected = _with(tensors_of(new_net())[SMALL])
        tensors = {name: t for name, t in expected.items() if name != SMALL} | {"extra": torch.ones(1)}
        report = load_full_tensors(model, source(tensors), strict=False, bucket_bytes=BUCKET_BYTES)
        assert (report.missing, report.superfluous) == ((SMALL,), ("extra",))
        assert_same(extracted(model), expected)


class _Broken(Exception):
    pass


def _breaks_after(count: int, error: type[BaseException] = _Broken) -> Iterator[tuple[str, torch.Tensor]]:
    for number, item in enumerate(other_tensors().items()):
        if number == count:
            raise error("the disk is gone")
        yield item


class _BreaksWhenAsked(dict[str, torch.Tensor]):
    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "scale":
            raise OSError("the disk is gone")
        return super().__getitem__(name)


@everywhere
def test_a_breaking_source_is_a_load_error_on_the_other_ranks() -> None:
    # (the rank that breaks, its source, the others' sources, the error, what had been written)
    whole = lambda: items_of(other_tensors())  # noqa: E731
    broken: list[tuple[int, Any, Any, type[BaseException], str]] = [
        (0, lambda: _breaks_after(0), lambda: None, _Broken, "written nothing"),
        (0, lambda: _breaks_after(3), lambda: None, _Broken, "had begun to write 3 tensors"),
        (1, lambda: _breaks_after(0), whole, _Broken, "written nothing"),
        (1, lambda: _breaks_after(3), whole, _Broken, "had begun to write 3 tensors"),
        (
            1,
            lambda: _breaks_after(2, KeyboardInterrupt),
            lambda: items_of(other_tensors()),
            KeyboardInterrupt,
            "write 2 tensors",
        ),
        (1, lambda: _BreaksWhenAsked(other_tensors()), other_tensors, OSError, "had begun to write"),
    ]
    for rank, its, others, kind, extent in broken:
        model = fsdp2(new_net())
        together()
        here = this_rank() == rank
        words = ["the disk is gone"] if here else [f"rank {rank} failed: {kind.__name__}", "the disk is gone", extent]
        with raises_soon(kind if here else LoadError, *words):
            load_full_tensors(model, (its if here else others)(), bucket_bytes=1 << 10)
        # The ranks still understand one another.
        load_full_tensors(model, on_first(other_tensors()), bucket_bytes=BUCKET_BYTES)
        assert_same(extracted(model), other_tensors())


@everywhere
def test_a_generator_that_is_refused_is_closed() -> None:
    """The error still exists, and with it the frames of the load: others may wait for the generator's end."""
    model = fsdp2(new_net())
    unknown = {"unknown": torch.ones(1), **other_tensors()}
    calls: list[Callable[[Any], Any]] = [
        lambda source: load_full_tensors(model, source),
        lambda source: load_full_tensors(model, source, dtype="x"),
        lambda source: load_full_tensors(nn.Linear(2, 2), source),
        lambda source: load_full_tensors("a model", source),
        lambda source: load_full_tensors(model, source if this_rank() == 0 else source.close() or other_tensors()),
    ]
    for call in calls:
        source = items_of(unknown)
        error = None
        try:
            call(source)
        except (LoadError, ValueError, TypeError) as raised:
            error = raised
        assert error is not None
        assert source.gi_frame is None, error
        together()
    # A second extraction of the model is refused on a rank that is still in the first.
    source = full_tensors(model)
    with raises_soon(ValueError, "dtype must be one of"):
        load_full_tensors(model, source, dtype="x")
    assert_same(extracted(model), extracted(model))


@on_four
def test_a_rank_that_fails_leaves_none_in_the_making_of_a_group() -> None:
    """The ranks of a mesh of several dims that is a part of all ranks have no group that is known."""
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("half", "replicate", "shard"))
    model = fsdp2(new_net(), whole["replicate", "shard"])
    before = extracted(model)
    is_first = this_rank() % 2 == 0
    with raises_soon(LoadError if is_first else ValueError, "dtype must be one of"):
        load_full_tensors(model, other_tensors() if is_first else None, dtype="keep" if is_first else "fp8")
    with raises_soon(LoadError, f"lacks 1 of the model's tensors: {SMALL}", "written nothing"):
        load_full_tensors(model, _with(None) if is_first else None)
    assert_same(extracted(model), before)
    load_full_tensors(model, other_tensors() if is_first else None)
    assert_same(extracted(model), other_tensors())


@on_four
def test_a_reordered_mesh_is_filled_from_its_first_rank_or_refused() -> None:
    model = fsdp2(new_net(), DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("replicate", "shard")))
    load_full_tensors(model, other_tensors() if this_rank() == 2 else None)
    assert_same(extracted(model), other_tensors())
    model = fsdp2(new_net(), DeviceMesh("cpu", [3, 2, 1, 0]))
    with raises_soon(LoadError, "the mesh [3, 2, 1, 0] has its ranks in another order", "written nothing"):
        load_full_tensors(model, other_tensors())
    if world_size() > 2:
        with raises_soon(LoadError, f"{world_size() - 1} of {world_size()} ranks have a mapping"):
            load_full_tensors(fsdp2(new_net()), _of_rank(3, None, other_tensors()))


@everywhere
def test_a_missing_transient_buffer_on_meta_is_an_error_before_any_write() -> None:
    with torch.device("meta"):
        net = new_net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh_over())
    model = fully_shard(net, mesh=mesh_over())
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({}, "1 non-persistent buffers are on the meta device"),
        ({"scratch": torch.ones(3)}, "scratch is [3]"),
        ({"scratch": torch.ones(2), "scale": torch.ones(8)}, "no non-persistent buffers of these names: scale"),
        ({"scratch": torch.ones(2 + (this_rank() == 1))}, "scratch"),
    ]
    for buffers, message in wrong:
        with raises_soon(LoadError, message, "written nothing"):
            load_full_tensors(model, on_first(other_tensors()), buffers=buffers)
        assert all(parameter.is_meta for parameter in model.parameters())
    load_full_tensors(model, on_first(_with(None)), strict=False, buffers={"scratch": torch.ones(2)})
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == [SMALL]


@everywhere
def test_the_callers_mapping_stays_as_it_was() -> None:
    for source in (on_first, lambda tensors: tensors):
        tensors = other_tensors()
        before = {name: (id(tensor), tensor.clone()) for name, tensor in tensors.items()}
        load_full_tensors(fsdp2(new_net()), source(tensors))
        assert list(tensors) == list(before)
        assert all(id(t) == before[name][0] and torch.equal(t, before[name][1]) for name, t in tensors.items())


# Memory that runs out on one rank

_ALLOCATIONS = ("empty", "empty_like", "cat")


class _Exhausted(RuntimeError):
    pass


@contextlib.contextmanager
def _memory_ends(after: int | None) -> Iterator[list[str]]:
    """Makes the allocation after so many fail; yields the list of the allocations that were made."""
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


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        net = new_net()
    return fully_shard(net, mesh=mesh_over())


def _load_all(model: nn.Module, source: Any) -> None:
    load_full_tensors(model, source, buffers={"scratch": torch.ones(2)}, bucket_bytes=BUCKET_BYTES)


@everywhere
def test_exhausted_memory_on_one_rank_is_an_error_on_every_rank() -> None:
    expected = other_tensors()
    for make, exhausted in itertools.product((lambda: fsdp2(new_net()), _on_meta), (0, 1)):
        model = make()
        with _memory_ends(None) as seen:
            _load_all(model, on_first(expected))
        num_allocations = of_all_ranks(len(seen))[exhausted]
        assert num_allocations > 2
        for after in range(0, num_allocations, max(num_allocations // 6, 1)):
            model = make()
            here = this_rank() == exhausted
            kind, words = (_Exhausted, "out of memory") if here else (LoadError, f"rank {exhausted} failed")
            with raises_soon(kind, words), _memory_ends(after if here else None):
                _load_all(model, on_first(expected))
        # The ranks still understand one another.
        model = make()
        _load_all(model, on_first(expected))
        assert_same(extracted(model), expected)


@everywhere
def test_memory_for_the_buckets_is_taken_before_anything_is_written() -> None:
    expected = other_tensors()
    model = fsdp2(new_net())
    before = extracted(model)
    here = this_rank() == 1
    with (
        raises_soon(
            *((_Exhausted, "out of memory") if here else (LoadError, "written nothing; this rank had written nothing"))
        ),
        _memory_ends(0 if here else None),
    ):
        load_full_tensors(model, on_first(expected), bucket_bytes=BUCKET_BYTES)
    assert_same(extracted(model), before)
