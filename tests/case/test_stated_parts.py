"""DTensors in parts of a framework's own, which it states to distributed checkpoints: read, compared and yielded."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from support.ranks import Setting, on_ranks, this_device, this_rank, world_size
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_doctor.case import local_pieces, reference, yielded
from fsdp_doctor.case.findings import compare
from fsdp_doctor.case.loaded_state import find_optimizer_problems, read_options
from fsdp_doctor.case.runtime import Runtime, make_for_present_group
from fsdp_doctor.frameworks.built_session import find_mismatches
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.frameworks.framework_matrix import ConfiguredBuild
from fsdp_doctor.weights.fsdp.shards import LayoutError

on_two = on_ranks(Setting("cpu", 2))

# The number of rows on each of two ranks.
_ROWS = {"weight": (1, 4), "bias": (0, 5)}


@functools.cache
def _runtime() -> Runtime:
    place = Place(rank=this_rank(), world_size=world_size(), local_rank=this_rank(), num_nodes=1)
    return make_for_present_group(place, this_device(), pathlib.Path("/dev/null/nowhere"))


def _plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5)


def _divide(*, states: bool = True) -> tuple[nn.Linear, torch.optim.AdamW]:
    """Divides the rows as in the table, and trains a step on each rank with what it holds."""
    model, mesh = _plain(), init_device_mesh("cpu", (2,))
    for name, parameter in list(model.named_parameters()):
        rows = _ROWS[name]
        begin = sum(rows[: this_rank()])
        local = parameter.detach()[begin : begin + rows[this_rank()]].clone()
        shape, stride = parameter.shape, parameter.stride()
        shard = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride))
        if states:
            chunk = ChunkStorageMetadata(torch.Size([begin, *[0] * (len(shape) - 1)]), local.shape)
            held: Any = shard._local_tensor
            held.__create_chunk_list__ = lambda chunk=chunk: [chunk]
        setattr(model, name, shard)
        if len(local):
            # Such a framework assigns gradients from its own buffers: torch's backward divides the rows in another way.
            shard.grad = torch.ones_like(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    return model, optimizer


@on_two
def test_the_reference_joins_parts_as_they_are_stated() -> None:
    model, optimizer = _divide()
    truth = reference.take(model, optimizer, _runtime())
    plain = _plain().state_dict()
    assert {name: compare(value, plain[name]) for name, value in truth.full.items()} == {"weight": "", "bias": ""}
    shapes = {name: tuple(value.shape) for name, value in truth.optimizer.items()}
    assert shapes == {
        **{f"weight.{key}": (5, 3) for key in ("exp_avg", "exp_avg_sq")},
        **{f"bias.{key}": (5,) for key in ("exp_avg", "exp_avg_sq")},
        **{f"{name}.step": () for name in ("weight", "bias")},
    }
    assert torch.equal(truth.optimizer["bias.exp_avg"], torch.full((5,), 0.1))


@on_two
def test_each_part_is_compared_with_what_is_stated() -> None:
    model, optimizer = _divide()
    for piece in local_pieces.list_model_pieces(model, _plain().state_dict()):
        assert piece.expected is not None
        assert torch.equal(piece.held, piece.expected)
    moments = reference.take(model, optimizer, _runtime()).optimizer
    options = read_options(optimizer)
    assert find_optimizer_problems(model, optimizer, moments, options) == ()
    optimizer.state[model.weight]["exp_avg"].to_local().add_(1)
    (problem,) = find_optimizer_problems(model, optimizer, moments, options)
    assert "weight.exp_avg" in problem.detail


@on_two
def test_a_yielded_tensor_has_the_part_that_it_states() -> None:
    model, _ = _divide()
    whole = _plain().bias.detach()
    entry = yielded.read("bias", model.bias.data)
    # The statement is one of the parameter's memory, and what is made of it has none.
    assert entry.rank_part is None
    entry = yielded.read("bias", model.bias)
    assert entry.data is not None
    assert torch.equal(entry.data, entry.find_part(this_rank()).read(whole))


@on_two
def test_parts_that_nothing_states_are_refused() -> None:
    model, _ = _divide(states=False)
    with pytest.raises(LayoutError, match="gives it"):
        reference.take(model, None, _runtime())


@on_two
def test_a_session_with_own_sharding_has_dtensors_and_no_fsdp_unit() -> None:
    class Session:
        state_dict_type = None

    session: Any = Session()
    own = [ConfiguredBuild(only={}, own_sharding=True)]
    session.model, _ = _divide()
    assert list(find_mismatches(session, own)) == []
    assert list(find_mismatches(session, [])) == ["0 FSDP units, but the root and each of 2 layers must be a unit"]
    session.model = _plain()
    (sentence,) = find_mismatches(session, own)
    assert sentence.endswith("sharding: weight, bias")
