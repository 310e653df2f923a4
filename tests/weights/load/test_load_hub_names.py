"""A checkpoint in the Hub's names fills a model that has fused its experts; each rank reads its own rows."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.extraction import Tensors, assert_same, extracted, layers_of, raises_soon, shard_qwen1, shard_qwen2
from support.families import new_family
from support.loading import everywhere, filled_in_place, items_of, on_first, on_four
from support.ranks import device_type, of_all_ranks, this_rank, together, world_size
from support.training import shared_directory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from fsdp_doctor import LoadError, load_full_tensors
from fsdp_doctor.weights.load import full_load
from fsdp_doctor.weights.load.safetensors_files import SafetensorsFile
from fsdp_doctor.weights.names import TensorView, read_hub_view

FAMILY = "qwen3-moe"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def _tensors(model: nn.Module) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _read(directory: pathlib.Path) -> Tensors:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@contextlib.contextmanager
def _saved(family: str = FAMILY, **options: Any) -> Iterator[tuple[pathlib.Path, Tensors]]:
    """(what save_pretrained writes on rank 0, the tensors of the saved model), the same for all ranks."""
    with shared_directory() as name:
        model = new_family(family, seed=7)
        if this_rank() == 0:
            model.save_pretrained(name, **options)
        together()
        yield pathlib.Path(name), _tensors(model)
        together()


@everywhere
def test_every_source_in_hub_names_fills_fused_experts_wherever_their_shards_lie() -> None:
    offloaded: Callable[[Any], Any] = lambda model: shard_qwen2(model, offload_policy=CPUOffloadPolicy())  # noqa: E731
    on_devices = [] if device_type() == "cpu" else [offloaded, shard_qwen1, lambda model: shard_qwen2(model).to("cpu")]
    with _saved(max_shard_size="20KB") as (directory, expected):
        hub = _read(directory)
        assert FUSED not in hub
        backwards = dict(reversed(hub.items()))
        for shard in (shard_qwen2, *on_devices):
            for source, options in (
                (directory, {}),
                (on_first(str(directory)), {"bucket_bytes": 1 << 12}),
                (hub, {"names": "hub"}),
                (on_first(backwards), {}),
                (items_of(backwards), {"names": "hub"}),
                (on_first(items_of(hub)), {"names": "hub"}),
            ):
                model = shard(new_family(FAMILY))
                with filled_in_place(model, expected):
                    report = load_full_tensors(model, source, **options)
                assert report.loaded == len(hub)


@everywhere
def test_a_source_in_the_models_own_names_is_taken_as_such() -> None:
    expected = _tensors(new_family(FAMILY, seed=7))
    for names in ("auto", "model"):
        model = shard_qwen2(new_family(FAMILY))
        assert load_full_tensors(model, expected, names=names).loaded == len(expected)
        assert_same(extracted(model), expected)


@everywhere
def test_cast_models_and_models_on_meta_are_filled_from_hub_names() -> None:
    with _saved() as (directory, expected):
        model = shard_qwen2(new_family(FAMILY).to(torch.bfloat16))
        load_full_tensors(model, directory, dtype="cast")
        assert_same(extracted(model), {name: tensor.to(torch.bfloat16) for name, tensor in expected.items()})
        with torch.device("meta"):
            model = new_family(FAMILY)
        for layer in layers_of(model):
            fully_shard(layer)
        buffers = dict(new_family(FAMILY).named_buffers())
        load_full_tensors(fully_shard(model), directory, buffers=buffers)
        assert_same(extracted(model), expected)


@on_four
def test_experts_that_are_sharded_along_any_dims_are_filled_in_hub_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    apart: list[tuple[Placement, Callable[[nn.Parameter], Shard | None]]] = [
        (Shard(0), lambda _: None),
        (Shard(0), lambda parameter: Shard(1) if parameter.ndim == 3 else None),
        (Shard(1), lambda _: None),
        (Shard(2), lambda parameter: Shard(1) if parameter.ndim == 3 else None),
    ]
    with _saved() as (directory, expected):
        for placement, placement_fn in apart:
            model: Any = new_family(FAMILY)
            for layer in layers_of(model):
                for name, experts in list(layer.mlp.experts.named_parameters()):
                    setattr(layer.mlp.experts, name, nn.Parameter(distribute_tensor(experts, mesh["ep"], [placement])))
                fully_shard(layer, mesh=mesh["fsdp"], shard_placement_fn=placement_fn)
            fully_shard(model, mesh=mesh["fsdp"])
            load_full_tensors(model, directory)
            assert_same(extracted(model), expected)


@everywhere
def test_each_rank_reads_its_own_rows_of_the_files() -> None:
    with _saved() as (directory, expected), pytest.MonkeyPatch.context() as patch:
        model, read, write = shard_qwen2(new_family(FAMILY)), SafetensorsFile.read, full_load.fill_targets
        num_read = 0

        def count(self: SafetensorsFile, offset: int, into: memoryview) -> None:
            nonlocal num_read
            num_read += len(into)
            read(self, offset, into)

        def run(*arguments: Any) -> Any:
            # Not what is read to compare the ranks' files.
            patch.setattr(SafetensorsFile, "read", count)
            return write(*arguments)

        patch.setattr(full_load, "fill_targets", run)
        load_full_tensors(model, directory)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert num_read == held
    assert sum(of_all_ranks(num_read)) == sum(tensor.nbytes for tensor in expected.values())


# Bad input: on every rank, before anything is written.


def _spoil(change: Callable[[Tensors], Tensors]) -> Callable[[pathlib.Path], None]:
    def spoil(directory: pathlib.Path) -> None:
        tensors = change(_read(directory))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return spoil


def _without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _half_converted(tensors: Tensors) -> Tensors:
    parts = {name for expert in range(4) for name in (EXPERT.format(expert, "gate"), EXPERT.format(expert, "up"))}
    return _without(tensors, *parts) | {FUSED: torch.zeros(4, 32, 32)}


def _counted_from_one(tensors: Tensors) -> Tensors:
    return {
        name.replace(f"experts.{n}.", f"experts.{n + 1}.") if f"experts.{n}." in name else name: tensor
        for n in reversed(range(4))
        for name, tensor in tensors.items()
        if (f"experts.{n}." in name) or (n == 0 and "experts." not in name)
    }


def _index_of_other_files(directory: pathlib.Path) -> None:
    weight_map = dict.fromkeys(_read(directory), "model-00001-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


SPOILED: dict[str, tuple[Callable[[pathlib.Path], None], tuple[str, ...]]] = {
    "a missing expert": (
        _spoil(lambda tensors: _without(tensors, *(name for name in tensors if ".experts.2." in name))),
        ("lacks 6 of the model's tensors", "experts.2."),
    ),
    "half converted": (_spoil(_half_converted), ("half converted", "1 by the model's names", FUSED)),
    "both": (
        _spoil(lambda tensors: tensors | {FUSED: torch.zeros(4, 32, 32)}),
        ("half converted", "1 by the model's names", FUSED),
    ),
    "experts counted from 1": (
        _spoil(_counted_from_one),
        ("lacks 6", "has 6 tensors that the model does not have", "rts.4."),
    ),
    "an expert that is transposed": (
        _spoil(lambda t: t | {EXPERT.format(3, "up"): t[EXPERT.format(3, "up")].t().contiguous()}),
        (EXPERT.format(3, "up"), "[32, 16] in the source and [16, 32] in the model"),
    ),
    "an index that names other files": (_index_of_other_files, ("names missing files", "00001-of-00002")),
}


@everywhere
def test_a_directory_that_does_not_fit_is_an_error_and_writes_nothing() -> None:
    model = shard_qwen2(new_family(FAMILY))
    before = extracted(model)
    for spoil, words in SPOILED.values():
        with _saved() as (directory, _):
            if this_rank() == 0:
                spoil(directory)
            together()
            for source in (directory, on_first(directory)):
                with raises_soon(LoadError, *words, "written nothing"):
                    load_full_tensors(model, source)
    with _saved("gpt2") as (directory, _):
        for names in ("auto", "model", "hub"):
            with raises_soon(LoadError, "lacks", "has 28 tensors that the model does not have", "written nothing"):
                load_full_tensors(model, directory, names=names)
    with _saved("mixtral") as (directory, _), raises_soon(LoadError, "lacks", "written nothing"):
        load_full_tensors(model, directory)
    assert_same(extracted(model), before)


@everywhere
def test_exchanged_experts_in_the_files_of_one_rank_fail_on_every_rank() -> None:
    model = shard_qwen2(new_family(FAMILY))
    before = extracted(model)
    one, other = EXPERT.format(0, "down"), EXPERT.format(1, "down")
    with _saved() as (directory, _), shared_directory() as shared:
        tensors = _read(directory)
        own = pathlib.Path(shared) / f"of rank {this_rank()}.safetensors"
        is_other = this_rank() == world_size() - 1
        save_file(tensors | {one: tensors[other], other: tensors[one]} if is_other else tensors, own)
        with raises_soon(LoadError, "have other values", "written nothing"):
            load_full_tensors(model, own)
        together()
    assert_same(extracted(model), before)


@everywhere
def test_names_of_the_callers_own_fill_what_they_say_or_are_refused() -> None:
    whole = _tensors(new_family(FAMILY, seed=7))
    model = shard_qwen2(new_family(FAMILY))
    views = {f"theirs.{name}": view for name, view in read_hub_view(model).items()}
    theirs = {name: view.read(whole[view.name]) for name, view in views.items()}
    load_full_tensors(model, theirs, names=views)
    assert_same(extracted(model), whole)
    one, other = (f"theirs.{EXPERT.format(expert, 'down')}" for expert in (0, 1))
    wrong: dict[str, dict[str, TensorView]] = {
        "is not covered exactly once": {**views, one: views[other]},
        f"{one} is not a part of": {**views, one: views[one]._replace(name="elsewhere")},
        "differ here from those on rank 0": views
        if this_rank() == 0
        else {**views, one: views[other], other: views[one]},
    }
    for words, mapping in wrong.items():
        with raises_soon(LoadError, words, "written nothing"):
            load_full_tensors(model, theirs, names=mapping)
    assert_same(extracted(model), whole)


@everywhere
def test_requesting_hub_names_fails_everywhere_for_a_model_without_hub_names() -> None:
    net = nn.Sequential(nn.Linear(6, 6))
    model = fully_shard(net.to(device_type()))
    with raises_soon(LoadError, "not a model of transformers", "written nothing"):
        load_full_tensors(model, {"0.weight": torch.ones(6, 6), "0.bias": torch.ones(6)}, names="hub")
    with raises_soon((ValueError if this_rank() else LoadError), "names must be one of"):  # type: ignore[arg-type]
        load_full_tensors(model, None, names="theirs" if this_rank() else "model")  # type: ignore[arg-type]
