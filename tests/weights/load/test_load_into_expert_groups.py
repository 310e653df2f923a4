"""Experts of which groups of ranks have others under one name are not written over, from whatever source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.expert_groups import (
    EVERY_OTHER,
    GATHERED,
    NAME,
    ON_MESHES,
    distributed,
    grid,
    half_of,
    on_four_devices,
    plain,
    reference,
    tensor_parallel,
)
from support.extraction import Tensors, assert_same, extracted
from support.loading import items_of, local_of, on_first
from support.ranks import of_all_ranks, this_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_doctor import LoadError, load_full_tensors, load_optimizer_state

SOURCES: dict[str, Callable[[Tensors], Any]] = {
    "mapping of all": lambda tensors: tensors,
    "iterator of all": items_of,
    "mapping of rank 0": on_first,
}


def _refused(call: Callable[[], object]) -> list[str]:
    """Returns what each rank said."""
    try:
        call()
    except LoadError as error:
        return of_all_ranks(str(error))
    return of_all_ranks("nothing")


def _experts(model: Any) -> torch.Tensor:
    """Takes this rank's experts, as they lie."""
    parameter = model.experts.up if isinstance(model.experts.up, nn.Parameter) else next(model.experts.parameters())
    return local_of(parameter).detach().cpu().clone()


@on_four_devices
def test_experts_on_meshes_of_some_ranks_are_left_or_refused() -> None:
    for groups, build in ON_MESHES.values():
        model = build()
        before = _experts(model)
        for source in (SOURCES["mapping of all"], SOURCES["iterator of all"]):
            said = _refused(lambda source=source, model=model: load_full_tensors(model, source(half_of(0))))
            assert all(word in one for one in said for word in (NAME, *(str(list(ranks)) for ranks in groups))), said
            assert torch.equal(_experts(model), before)


@on_four_devices
def test_plain_experts_are_left_as_they_are_and_refused_with_all_groups() -> None:
    """Loads the full state dict of such a model, which has the experts of rank 0."""
    for source in SOURCES.values():
        model = plain()
        before = _experts(model)
        said = _refused(lambda source=source, model=model: load_full_tensors(model, source(half_of(0))))
        assert all(word in one for one in said for word in (NAME, "[0, 2]", "[1, 3]")), said
        assert torch.equal(_experts(model), before)


@on_four_devices
def test_a_source_without_the_experts_is_loaded() -> None:
    rest = {name: tensor + 1 for name, tensor in reference().items() if name != NAME}
    for build in (plain, ON_MESHES["columns of a mesh"][1]):
        model: Any = build()
        before = _experts(model)
        assert load_full_tensors(model, rest, strict=False).missing == (NAME,)
        assert torch.equal(_experts(model), before)
        assert torch.equal(model.norm.weight.full_tensor().cpu(), rest["norm.weight"])


@on_four_devices
def test_plain_copies_of_other_values_are_loaded_once_they_are_made_alike() -> None:
    """Covers copies that each rank has made at random."""
    model: Any = plain()
    expected = half_of(1)
    assert all(NAME in one for one in _refused(lambda: load_full_tensors(model, expected)))
    dist.broadcast(model.experts.up.detach(), 0)
    load_full_tensors(model, expected)
    assert_same(extracted(model), expected)


@on_four_devices
def test_what_tensor_parallelism_copies_may_differ_before_a_load() -> None:
    """Covers a rank whose memory is empty until then; the load makes copies of it."""
    model: Any = tensor_parallel(((0, 1, 2, 3),))
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).fill_(this_rank())
    load_full_tensors(model, half_of(0))
    assert_same(extracted(model), half_of(0))
    assert grid("fsdp", "tp").size() == 4


@on_four_devices
def test_experts_are_loaded_along_the_mesh_that_the_caller_names() -> None:
    expected = {name: tensor * 2 + 1 for name, tensor in reference().items()}
    for name, (build, mesh) in GATHERED.items():
        for source in SOURCES.values():
            model, ep = build(), mesh()
            load_full_tensors(model, source(expected), experts=ep)
            assert_same(extracted(model, experts=ep), expected)
        if "plain" not in name:
            load_full_tensors(model.to_empty(device="meta"), expected, experts=ep)
            assert_same(extracted(model, experts=ep), expected)


@on_four_devices
def test_moments_of_experts_are_loaded_along_the_mesh_that_the_caller_names() -> None:
    moments = {key: torch.randn_like(reference()[NAME]) for key in ("exp_avg", "exp_avg_sq")}
    dist.broadcast_object_list(shared := [moments])
    for build, mesh in GATHERED.values():
        for holders in (lambda state: state, on_first):
            model: Any = build()
            optimizer = torch.optim.AdamW([model.experts.up], lr=0.1)
            state = {"step": torch.tensor(3.0), **shared[0]}
            groups = [{"params": [NAME], "lr": 0.2}]
            load_optimizer_state(
                model, optimizer, holders({"state": {NAME: state}, "param_groups": groups}), experts=mesh()
            )
            for key, expected in shared[0].items():
                of_parameter = _part_of(model, mesh(), expected)
                assert torch.equal(local_of(optimizer.state[model.experts.up][key]).cpu(), of_parameter), key


def _part_of(model: Any, mesh: DeviceMesh, full: torch.Tensor) -> torch.Tensor:
    """Takes this rank's part of what the experts' parameter is a part of, by its own mesh."""
    group = full.chunk(mesh.size())[mesh.get_local_rank()]
    return (
        distribute_tensor(group, up.device_mesh, up.placements, src_data_rank=None).to_local().cpu()
        if isinstance(up := model.experts.up, DTensor)
        else group
    )


@on_four_devices
def test_experts_that_are_distributed_over_all_ranks_are_loaded() -> None:
    expected = {name: tensor * 2 + 1 for name, tensor in reference().items()}
    for source in SOURCES.values():
        model = distributed()
        load_full_tensors(model, source(expected))
        assert_same(extracted(model), expected)


def _optimizers() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]]:
    """Makes optimizers with the state of the experts of rank 0, and of nothing else."""
    for build in (plain, ON_MESHES["columns of a mesh"][1]):
        model: Any = build()
        state = {key: torch.ones_like(half_of(0)[NAME]) for key in ("exp_avg", "exp_avg_sq")}
        groups = [{"params": [NAME], "lr": 0.1}]
        source = {"state": {NAME: {"step": torch.tensor(3.0), **state}}, "param_groups": groups}
        yield model, torch.optim.AdamW([model.experts.up], lr=0.1), source


@on_four_devices
def test_the_moments_of_such_experts_are_refused_too() -> None:
    for model, optimizer, source in _optimizers():
        said = _refused(lambda m=model, o=optimizer, s=source: load_optimizer_state(m, o, s))
        wanted = (NAME, *(str(list(ranks)) for ranks in EVERY_OTHER))
        assert all(word in one for one in said for word in wanted), said
        assert not optimizer.state
