"""What cannot be loaded is an error on every rank, soon, which says whether anything was written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.extraction import Tensors, assert_same, extracted, fsdp2, mesh_over, new_net, raises_soon, tensors_of
from support.loading import BUCKET_BYTES, everywhere, items_of, on_first, on_four, other_tensors
from support.ranks import this_rank, together, world_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import LoadError, full_tensors, load_full_tensors

SMALL = "layers.0.up.bias"


def _changed(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Tensors:
    tensors = other_tensors()
    for name, change in changes.items():
        name = name.replace("__", ".")
        value = change(tensors.pop(name, torch.ones(3)))
        if value is not None:
            tensors[name] = value
    return tensors


UNFIT: dict[str, tuple[Callable[[], Tensors], str]] = {
    "missing": (lambda: _changed(layers__0__up__bias=lambda t: None), f"lacks 1 of the model's tensors: {SMALL}"),
    "superfluous": (lambda: _changed(extra=lambda t: t), "has 1 that the model does not have: extra"),
    "shape": (lambda: _changed(layers__0__up__bias=lambda t: t[1:]), f"{SMALL} has the shape [13] in the source"),
    "dtype": (
        lambda: _changed(layers__0__up__bias=torch.Tensor.half),
        f"{SMALL} is torch.float16 in the source and torch.float32 in the model",
    ),
    "tie": (lambda: _changed(head__weight=lambda t: t + 1), "are tied in the model and have different values"),
    "meta": (lambda: _changed(layers__0__up__bias=lambda t: t.to("meta")), f"{SMALL} is on the meta device"),
    "all missing": (lambda: {"extra": torch.ones(1)}, "lacks 16 of the model's tensors"),
}


@everywhere
def test_a_mapping_that_does_not_fit_is_an_error_on_every_rank_and_nothing_is_written() -> None:
    for (make, message), source in itertools.product(UNFIT.values(), (on_first, lambda tensors: tensors)):
        model = fsdp2(new_net())
        before = extracted(model)
        with raises_soon(LoadError, message, "written nothing"):
            load_full_tensors(model, source(make()), bucket_bytes=BUCKET_BYTES)
        assert_same(extracted(model), before)


@everywhere
def test_what_fits_on_all_ranks_but_one_is_an_error_on_every_rank() -> None:
    model = fsdp2(new_net())
    before = extracted(model)
    tensors = other_tensors()
    if this_rank() == 1:
        del tensors[SMALL]
    with raises_soon(LoadError, "lacks 1 of the model's tensors", "written nothing", *_failed(1)):
        load_full_tensors(model, tensors)
    assert_same(extracted(model), before)


def _failed(rank: int) -> list[str]:
    """What the others are told."""
    return [f"rank {rank} failed"] if this_rank() != rank else []


@everywhere
def test_an_iterator_that_does_not_fit_is_an_error_on_every_rank_that_says_what_was_written() -> None:
    for name, (make, message) in UNFIT.items():
        if name == "all missing":
            continue
        for source in (lambda tensors: on_first(items_of(tensors)), items_of):
            model = fsdp2(new_net())
            with raises_soon(LoadError, message, "had begun to write"):
                load_full_tensors(model, source(make()), bucket_bytes=BUCKET_BYTES)


@everywhere
def test_not_strict_leaves_what_is_missing_and_skips_what_is_superfluous() -> None:
    for source in (on_first, lambda tensors: tensors, items_of, lambda tensors: on_first(items_of(tensors))):
        model = fsdp2(new_net())
        expected = other_tensors() | {SMALL: tensors_of(new_net())[SMALL]}
        tensors = {name: t for name, t in expected.items() if name != SMALL} | {"extra": torch.ones(1)}
        report = load_full_tensors(model, source(tensors), strict=False, bucket_bytes=BUCKET_BYTES)
        assert (report.missing, report.superfluous) == ((SMALL,), ("extra",))
        assert_same(extracted(model), expected)


class _Broken(Exception):
    pass


def _raises_after(count: int, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for number, item in enumerate(tensors.items()):
        if number == count:
            raise _Broken("the disk is gone")
        yield item


@everywhere
def test_a_generator_that_is_refused_is_closed() -> None:
    """While the error, and with it the frames of the load, is still held: others may wait for the generator's end."""
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


@everywhere
def test_an_iterator_that_raises_is_that_error_on_its_rank_and_a_load_error_on_the_others() -> None:
    for count, breaks in itertools.product((0, 3), (0, 1)):
        model = fsdp2(new_net())
        source: Any = items_of(other_tensors()) if breaks else None
        if this_rank() == breaks:
            source = _raises_after(count, other_tensors())
            with raises_soon(_Broken, "the disk is gone"):
                load_full_tensors(model, source, bucket_bytes=1 << 10)
        else:
            extent = "written nothing" if not count else f"had begun to write {count} tensors"
            with raises_soon(LoadError, f"rank {breaks} failed: _Broken: the disk is gone", extent):
                load_full_tensors(model, source, bucket_bytes=1 << 10)
        assert_loads_again(model)


def assert_loads_again(model: nn.Module) -> None:
    expected = other_tensors()
    load_full_tensors(model, on_first(expected), bucket_bytes=BUCKET_BYTES)
    assert_same(extracted(model), expected)


@everywhere
def test_what_yields_no_pairs_is_an_error_on_every_rank() -> None:
    tensor = torch.ones(1)
    yielded: dict[Any, str] = {
        (tensor,): "pairs of a name and a tensor",
        ("name",): "pairs of a name and a tensor",
        ((1, tensor),): "a name must be a string",
        (("name", 3),): "name must be a tensor, not int",
        ((SMALL, tensor, tensor),): "pairs of a name and a tensor",
    }
    for items, message in yielded.items():
        model = fsdp2(new_net())
        with raises_soon(TypeError if this_rank() == 0 else LoadError, message):
            load_full_tensors(model, on_first(iter(items)))
    model = fsdp2(new_net())
    with raises_soon(LoadError, "lacks 16 of the model's tensors", "written nothing"):
        load_full_tensors(model, on_first(iter(())))
    with raises_soon(TypeError if this_rank() == 0 else LoadError, "the source must be a mapping"):
        load_full_tensors(model, on_first(3))


@everywhere
def test_a_name_that_comes_twice_is_an_error_on_every_rank() -> None:
    model = fsdp2(new_net())
    twice = itertools.chain(items_of(other_tensors()), [(SMALL, other_tensors()[SMALL])])
    with raises_soon(LoadError, f"the source has {SMALL} twice"):
        load_full_tensors(model, on_first(twice))


@everywhere
def test_ranks_that_have_sources_of_different_kinds_are_told() -> None:
    tensors = other_tensors()
    last = this_rank() == world_size() - 1
    sources: list[tuple[Any, str]] = [
        (None, "no rank has a source"),
        (tensors if last else None, "1 of"),
        (tensors if last else items_of(tensors), "ranks have an iterable"),
    ]
    if world_size() > 2:
        sources.append((None if last else tensors, "2 of 3 ranks have a mapping"))
    for source, message in sources:
        model = fsdp2(new_net())
        before = extracted(model)
        together()
        with raises_soon(LoadError, message, "rank 0 alone must have one, or every rank", "written nothing"):
            load_full_tensors(model, source)
        assert_same(extracted(model), before)


@everywhere
def test_a_model_that_is_not_sharded_is_refused_on_every_rank() -> None:
    with raises_soon(LoadError, "the model is not sharded"):
        load_full_tensors(new_net(), on_first(other_tensors()))


@everywhere
def test_ranks_with_different_models_or_arguments_are_told_the_first_difference() -> None:
    with raises_soon(LoadError, "do not load the same", "large.weight"):
        load_full_tensors(fsdp2(new_net(large_rows=8 + this_rank())), None)
    with raises_soon(LoadError, "do not load the same", "strict=False"):
        load_full_tensors(fsdp2(new_net()), on_first(other_tensors()), strict=this_rank() == 1)
    with raises_soon(ValueError if this_rank() == 1 else LoadError, "dtype must be one of"):
        load_full_tensors(fsdp2(new_net()), on_first(other_tensors()), dtype="fp8" if this_rank() == 1 else "keep")


@on_four
def test_a_rank_that_fails_leaves_none_in_the_making_of_a_group() -> None:
    """No group is known of the ranks of a mesh of several dims that is a part of all ranks."""
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("half", "replicate", "shard"))
    model = fsdp2(new_net(), whole["replicate", "shard"])
    before = extracted(model)
    is_first = this_rank() % 2 == 0
    with raises_soon(LoadError if is_first else ValueError, "dtype must be one of"):
        load_full_tensors(model, other_tensors() if is_first else None, dtype="keep" if is_first else "fp8")
    with raises_soon(LoadError, f"lacks 1 of the model's tensors: {SMALL}", "written nothing"):
        load_full_tensors(model, UNFIT["missing"][0]() if is_first else None)
    assert_same(extracted(model), before)
    load_full_tensors(model, other_tensors() if is_first else None)
    assert_same(extracted(model), other_tensors())


@on_four
def test_a_mesh_in_another_order_is_filled_from_its_first_rank_or_refused() -> None:
    model = fsdp2(new_net(), DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("replicate", "shard")))
    load_full_tensors(model, other_tensors() if this_rank() == 2 else None)
    assert_same(extracted(model), other_tensors())
    model = fsdp2(new_net(), DeviceMesh("cpu", [3, 2, 1, 0]))
    with raises_soon(LoadError, "the mesh [3, 2, 1, 0] has its ranks in another order", "written nothing"):
        load_full_tensors(model, other_tensors())


@everywhere
def test_a_model_that_one_rank_alone_does_not_have_is_an_error_on_every_rank() -> None:
    here = this_rank() == 1
    with raises_soon(TypeError if here else LoadError, "the model must be a torch.nn.Module, not NoneType"):
        load_full_tensors(None if here else fsdp2(new_net()), on_first(other_tensors()))  # type: ignore[arg-type]


@everywhere
def test_a_transient_buffer_on_meta_that_nobody_supplies_is_an_error_before_anything_is_written() -> None:
    with torch.device("meta"):
        net = new_net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh_over())
    model = fully_shard(net, mesh=mesh_over())
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({}, "1 non-persistent buffers are on the meta device"),
        ({"scratch": torch.ones(3)}, "scratch is [3]"),
        ({"scratch": torch.ones(2), "scale": torch.ones(8)}, "no non-persistent buffers of these names: scale"),
    ]
    for buffers, message in wrong:
        with raises_soon(LoadError, message, "written nothing"):
            load_full_tensors(model, on_first(other_tensors()), buffers=buffers)
        assert all(parameter.is_meta for parameter in model.parameters())
    with raises_soon(LoadError, "scratch"):
        load_full_tensors(model, on_first(other_tensors()), buffers={"scratch": torch.ones(2 + (this_rank() == 1))})


@everywhere
def test_what_is_missing_stays_on_meta() -> None:
    with torch.device("meta"):
        net = new_net()
    model = fully_shard(net, mesh=mesh_over())
    tensors = {name: t for name, t in other_tensors().items() if name != SMALL}
    load_full_tensors(model, on_first(tensors), strict=False, buffers={"scratch": torch.ones(2)})
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == [SMALL]


@everywhere
def test_a_sharded_state_dict_is_refused_on_every_rank() -> None:
    model = fsdp2(new_net())
    with raises_soon(LoadError, "is a DTensor, not a full tensor"):
        load_full_tensors(model, model.state_dict())


@everywhere
def test_the_callers_mapping_stays_as_it_was() -> None:
    for source in (on_first, lambda tensors: tensors):
        tensors = other_tensors()
        before = {name: (id(tensor), tensor.clone()) for name, tensor in tensors.items()}
        load_full_tensors(fsdp2(new_net()), source(tensors))
        assert list(tensors) == list(before)
        assert all(id(t) == before[name][0] and torch.equal(t, before[name][1]) for name, t in tensors.items())
