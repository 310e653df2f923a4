"""Groups of ranks with other values under one name are refused on every rank; copies are extracted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.expert_groups import (
    EVERY_OTHER,
    GATHERED,
    NAME,
    NEIGHBOURS,
    ON_MESHES,
    distributed,
    grid,
    group_of,
    mesh_apart,
    moe,
    on_four_devices,
    plain,
    reference,
    tensor_parallel,
    world,
)
from support.extraction import assert_same, cast_of, extracted, tensors_of
from support.ranks import of_all_ranks, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import (
    PlanMismatch,
    examine,
    fingerprint,
    fingerprint_tensors,
    full_state_dict,
    load_full_tensors,
    local_shards,
    weights_info,
)
from fsdp_doctor.weights.engines import verl_weights
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.rank_groups import Comparison

GATHERING: dict[str, Callable[[nn.Module], Any]] = {
    "full_tensors": extracted,
    "full_state_dict": full_state_dict,
    "fingerprint": fingerprint,
    "verl": lambda model: list(verl_weights(model)[0]),
}


def _refused(call: Callable[[nn.Module], Any], model: nn.Module) -> list[str]:
    """Returns what each rank said."""
    try:
        call(model)
    except PlanMismatch as error:
        said = str(error)
    else:
        said = "nothing"
    return of_all_ranks(said)


def _assert_names(said: list[str], groups: tuple[tuple[int, ...], ...]) -> None:
    wanted = [NAME, *(str(list(ranks)) for ranks in groups)]
    assert all(word in one for one in said for word in wanted), said


@on_four_devices
def test_experts_on_partial_meshes_are_refused_on_every_rank_with_all_groups() -> None:
    for groups, build in ON_MESHES.values():
        model = build()
        for call in GATHERING.values():
            _assert_names(_refused(call, model), groups)
        # By itself a rank knows the ranks that it has no mesh with.
        for call in (lambda one: list(local_shards(one)), lambda one: fingerprint(one, combined=False)):
            _assert_names(_refused(call, model), groups)
        assert NAME in weights_info(model)
        assert [finding.names for finding in examine(model).findings if finding.kind == "experts-hidden"] == [(NAME,)]


@on_four_devices
def test_groups_with_equal_values_are_refused_where_no_mesh_relates_them() -> None:
    """Experts that all groups began with from one seed are equal until they train."""
    model: Any = moe(4)
    fully_shard(model.experts, mesh=mesh_apart(*NEIGHBOURS))
    _assert_names(_refused(extracted, fully_shard(model, mesh=world())), NEIGHBOURS)


@on_four_devices
def test_plain_experts_with_other_values_are_refused_on_every_rank() -> None:
    model = plain()
    for call in GATHERING.values():
        _assert_names(_refused(call, model), EVERY_OTHER)


@on_four_devices
def test_refusals_leave_no_keys_in_the_store() -> None:
    model = plain()
    counts = []
    for _ in range(5):
        _refused(extracted, model)
        together()
        counts.append(private.find_default_store().num_keys())
        together()
    assert counts[-1] == counts[1], counts


@on_four_devices
def test_experts_on_the_fsdp_dim_with_tensor_parallelism_are_refused_by_value() -> None:
    """The experts' mesh is the norm's there, of which the other ranks have copies."""
    for call in GATHERING.values():
        _assert_names(_refused(call, tensor_parallel(EVERY_OTHER)), EVERY_OTHER)


@on_four_devices
def test_experts_are_gathered_along_the_mesh_that_the_caller_names() -> None:
    expected = reference()
    for build, mesh in GATHERED.values():
        model, ep = build(), mesh()
        assert_same(extracted(model, experts=ep), expected)
        assert_same(
            extracted(model, experts={"experts.u*": ep}, dtype=torch.bfloat16), cast_of(expected, torch.bfloat16)
        )
        assert weights_info(model, experts=ep)[NAME].shape == expected[NAME].shape
        of_rank_0 = full_state_dict(model, experts=ep)
        assert_same(of_rank_0, expected if this_rank() == 0 else {}, torch.device("cpu"))
        assert fingerprint(model, experts=ep) == fingerprint_tensors(expected.items())
        for shard in local_shards(model, experts=ep):
            assert torch.equal(shard.tensor.cpu(), shard.place.of(expected[shard.name]).view(shard.tensor.shape))
        assert_same(dict(verl_weights(model, names="model", experts=ep)[0]), expected)


@on_four_devices
def test_a_mesh_that_does_not_divide_the_experts_is_refused_everywhere() -> None:
    hidden, all_of_them = ON_MESHES["columns of a mesh"][1](), distributed()
    numbered = nn.Sequential(OrderedDict(experts=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))).to(this_device())
    mesh = grid("efsdp", "ep")
    wrong: list[tuple[nn.Module, Any, type[Exception], tuple[str, ...]]] = [
        (hidden, mesh["efsdp"], ValueError, (NAME, "slice")),
        (hidden, mesh, ValueError, ("2 dims",)),
        (hidden, {"expert.*": mesh["ep"]}, ValueError, ("expert.*", "no parameter")),
        (hidden, "ep", TypeError, ("DeviceMesh",)),
        (all_of_them, mesh["ep"], ValueError, (NAME, "already")),
        (ON_MESHES["fsdp1"][1](), mesh["ep"], ValueError, (NAME, "FSDP1")),
        (fully_shard(numbered, mesh=world()), mesh["ep"], ValueError, ("experts.0.weight", "number")),
    ]
    for model, experts, kind, words in wrong:
        for call in (extracted, fingerprint, lambda m, **o: load_full_tensors(m, reference(), **o)):
            with pytest.raises(kind) as raised:
                call(model, experts=experts)
            assert all(word in str(raised.value) for word in words), raised.value
            together()


@on_four_devices
def test_experts_that_one_rank_alone_is_told_of_are_refused_everywhere() -> None:
    model, ep = plain(), grid("efsdp", "ep")["ep"]
    with pytest.raises(PlanMismatch):
        extracted(model, experts=ep if this_rank() == 1 else None)


@on_four_devices
def test_experts_that_are_distributed_over_all_ranks_are_extracted() -> None:
    model = distributed()
    assert_same(extracted(model), reference())
    assert "experts-hidden" not in [finding.kind for finding in examine(model).findings]


@on_four_devices
def test_copies_under_tensor_parallelism_are_extracted_although_they_have_drifted() -> None:
    model = tensor_parallel(((0, 1, 2, 3),))
    norm = model.norm.weight
    with torch.no_grad():
        private.read_local_tensor(norm).mul_(1 + 1e-3 * grid("fsdp", "tp")["tp"].get_local_rank())
    assert sorted(extracted(model)) == sorted(reference())


@on_four_devices
def test_what_only_the_replicas_of_hsdp_shard_is_extracted() -> None:
    """Covers a frozen tower, whose gradients are not reduced, in a model under HSDP."""
    model: Any = moe(4)
    expected = tensors_of(model)
    mesh = grid("replicate", "shard")
    model.experts.requires_grad_(False)
    fully_shard(model.experts, mesh=mesh["shard"])
    assert_same(extracted(fully_shard(model, mesh=mesh)), expected)


@on_four_devices
def test_replicated_and_plain_copies_are_extracted() -> None:
    if not private.has_placements_on_meshes():
        pytest.skip("replicate() on FSDP2's code is of torch 2.12 and newer")
    model: Any = moe(4)
    expected = tensors_of(model)
    private.replicate(model.router, mesh=world())
    ignored = set(model.experts.parameters())
    assert_same(extracted(fully_shard(model, mesh=world(), ignored_params=ignored)), expected)


@on_four_devices
def test_stages_of_a_pipeline_are_extracted_each_by_its_own_ranks() -> None:
    stage = group_of(NEIGHBOURS)
    torch.manual_seed(stage)
    net = nn.Sequential(OrderedDict({f"stage{stage}": nn.Linear(6, 4)})).to(this_device())
    expected = tensors_of(net)
    assert_same(extracted(fully_shard(net, mesh=mesh_apart(*NEIGHBOURS))), expected)


@on_four_devices
def test_ranks_compare_once_for_each_plan_also_where_one_remakes_it() -> None:
    model = tensor_parallel(((0, 1, 2, 3),))
    expected = extracted(model)
    with mock.patch.object(
        Comparison, "make_statement", autospec=True, side_effect=Comparison.make_statement
    ) as statement:
        assert_same(extracted(model), expected)
        assert not statement.called
        if this_rank() == 1:
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
                weights_info(model, dtype=dtype)
        assert_same(extracted(model), expected)
        assert statement.call_count == 1
        assert_same(extracted(model), expected)
        assert statement.call_count == 1
