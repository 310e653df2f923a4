"""Full tensors into FSDP2 models, in every state: the shards are those of the model that they came from."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.extraction import (
    EVEN,
    UNEVEN,
    Tensors,
    assert_same,
    extracted,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    train_step,
)
from support.loading import (
    BUCKET_BYTES,
    everywhere,
    filled_in_place,
    items_of,
    local_of,
    on_first,
    on_four,
    other_tensors,
    reusing,
)
from support.ranks import Setting, device_type, on_ranks, this_device, this_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_doctor import LoadError, load_full_tensors, load_optimizer_state

SOURCES: dict[str, Callable[[Tensors], Any]] = {
    "mapping of all": lambda tensors: tensors,
    "mapping of rank 0": on_first,
    "iterator of all": items_of,
    "iterator of rank 0": lambda tensors: on_first(items_of(tensors)),
    "iterator that fills its memory again": lambda tensors: on_first(reusing(tensors, device_type())),
    "the same, of all": lambda tensors: reusing(tensors, device_type()),
    "on the device": lambda tensors: on_first({name: t.to(this_device()) for name, t in tensors.items()}),
    "pinned": lambda tensors: on_first({name: pinned(t) for name, t in tensors.items()}),
}


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if device_type() == "cpu" else tensor.pin_memory()


@everywhere
def test_every_kind_of_source_fills_every_shard() -> None:
    for dims, kind in itertools.product((EVEN, UNEVEN), SOURCES):
        model = fsdp2(new_net(**dims))
        expected = other_tensors(**dims)
        with filled_in_place(model, expected):
            report = load_full_tensors(model, SOURCES[kind](expected), bucket_bytes=BUCKET_BYTES)
        assert (report.missing, report.superfluous) == ((), ()), kind


def _policy(**options: Any) -> nn.Module:
    return fsdp2(new_net(), offload_policy=CPUOffloadPolicy(**options))


def _by_hand() -> nn.Module:
    return fsdp2(new_net()).to("cpu")


def _half_moved() -> nn.Module:
    return _policy().to(this_device())


def _left_in_flight() -> nn.Module:
    return fsdp2(new_net()).to("cpu", non_blocking=True)


def _trained() -> nn.Module:
    model = fsdp2(new_net())
    train_step(model)
    return model


STATES: dict[str, Callable[[], nn.Module]] = {
    "policy": lambda: _policy(),
    "policy, unpinned": lambda: _policy(pin_memory=False),
    "by hand": _by_hand,
    "half-moved": _half_moved,
    "left in flight": _left_in_flight,
    "trained": _trained,
}


@on_the_device
def test_shards_are_filled_where_they_lie() -> None:
    for state, source in itertools.product(STATES, (on_first, items_of)):
        model = STATES[state]()
        expected = other_tensors()
        with filled_in_place(model, expected):
            load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)


@everywhere
def test_what_a_forward_left_unsharded_is_not_used_again() -> None:
    tokens = torch.arange(6).view(2, 3).to(this_device())
    model = fsdp2(new_net())
    with torch.no_grad():
        model(tokens)
    load_full_tensors(model, other_tensors())
    fresh = fsdp2(new_net())
    load_full_tensors(fresh, other_tensors())
    with torch.no_grad():
        assert torch.equal(model(tokens), fresh(tokens))


@everywhere
def test_a_loaded_model_trains_like_a_model_that_began_with_the_weights() -> None:
    net = new_net()
    net.load_state_dict(other_tensors())
    expected = fsdp2(net)
    for source in (on_first, items_of):
        model = fsdp2(new_net())
        load_full_tensors(model, source(other_tensors()), bucket_bytes=BUCKET_BYTES)
        fresh = fsdp2(new_net())
        fresh.load_state_dict(expected.state_dict())
        assert train_step(model) == train_step(fresh)
        assert_same(extracted(model), extracted(fresh))


def _on_meta(**options: Any) -> nn.Module:
    with torch.device("meta"):
        net = new_net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh_over(), **options)
    return fully_shard(net, mesh=mesh_over(), **options)


@everywhere
def test_a_model_on_meta_receives_memory_and_its_optimizer_keeps_the_parameters() -> None:
    policies = [{}] if device_type() == "cpu" else [{}, {"offload_policy": CPUOffloadPolicy()}]
    for source, policy in itertools.product((on_first, items_of), policies):
        model = _on_meta(**policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        expected = other_tensors()
        scratch = torch.ones(2)
        load_full_tensors(model, source(expected), buffers={"scratch": scratch}, bucket_bytes=BUCKET_BYTES)
        assert_same(extracted(model), expected)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert model.head.weight is model.embed.weight
        where = torch.device("cpu") if policy else this_device()
        assert {local_of(p).device for p in model.parameters()} == {where}
        assert all(local_of(p).is_pinned() == bool(policy) for p in model.parameters() if local_of(p).numel())
        assert torch.equal(model.scratch.cpu(), scratch)
        assert model.scratch.device == this_device()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        model(torch.arange(6).view(2, 3).to(this_device())).sum().backward()
        optimizer.step()


@everywhere
def test_a_tie_may_come_under_one_name_or_both() -> None:
    expected = other_tensors()
    for left_out, source in itertools.product(("head.weight", "embed.weight"), (on_first, items_of)):
        model = fsdp2(new_net())
        given = {name: tensor for name, tensor in expected.items() if name != left_out}
        with filled_in_place(model, expected):
            load_full_tensors(model, source(given))
        model = fsdp2(new_net())
        twice = expected | {left_out: expected[left_out].clone()}
        with filled_in_place(model, expected):
            load_full_tensors(model, source(twice))


@on_four
def test_every_replica_of_hsdp_is_filled() -> None:
    for source in (on_first, items_of, lambda tensors: tensors):
        model = fsdp2(new_net(), mesh_over(2, 2))
        expected = other_tensors()
        with filled_in_place(model, expected):
            load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)


def _tensor_parallel(*, all_of_it: bool) -> nn.Module:
    """FSDP over one dim of the mesh, tensor parallelism over the other; ``norm`` is divided by FSDP alone."""
    mesh = mesh_over(2, 2)
    modules = {"up": nn.Linear(8, 12, bias=False), "down": nn.Linear(12, 8, bias=False)}
    net = nn.Sequential(OrderedDict(modules if all_of_it else modules | {"norm": nn.LayerNorm(8)}))
    parallelize_module(net, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["outer"])


@on_four
def test_a_model_under_tensor_parallelism_is_filled() -> None:
    expected = {"up.weight": torch.arange(96.0).view(12, 8), "down.weight": torch.arange(96.0).view(8, 12) + 0.5}
    for source in (on_first, items_of):
        model = _tensor_parallel(all_of_it=True)
        load_full_tensors(model, source(expected))
        assert_same(extracted(model), expected)


def _own_part(full: torch.Tensor, mesh: torch.Tensor, placements: Sequence[Any]) -> torch.Tensor:
    """Takes the part by torch.chunk: tensor parallelism, over the mesh's last dim, divides first, FSDP the rest."""
    here = (mesh == this_rank()).nonzero()[0].tolist()
    for size, place, placement in reversed(list(zip(mesh.shape, here, placements, strict=True))):
        chunks = [*full.chunk(size, placement.dim), *[full.narrow(placement.dim, 0, 0)] * size]
        full = chunks[place]
    return full


class _Mixed(nn.Module):
    """A model with buffers, and parameters that tensor parallelism or FSDP divides, evenly or not, tied, or small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.one = nn.Parameter(torch.randn(1, 3))
        self.large = nn.Linear(30, 31)
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(self.up(self.embed(tokens)))) * self.scale
        return self.head(hidden) + self.large(torch.ones(30, device=hidden.device)).mean() + self.one.sum()


def _mixed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    net, mesh = _Mixed(), mesh_over(2, 2)
    if not options:
        net.to(this_device())
    parallelize_module(net, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (net.up, net.large):
        fully_shard(part, mesh=mesh["outer"], **options)
    return fully_shard(net, mesh=mesh["outer"], **options)


def _assert_filled(model: nn.Module, expected: Tensors) -> None:
    """Every rank's own shard, bit by bit, by arithmetic of the test's own."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = _own_part(expected[name], parameter.device_mesh.mesh, parameter.placements)
        assert torch.equal(local_of(parameter).cpu(), wanted), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.cpu(), expected[name]), name


@on_ranks(Setting("cpu", 4), Setting("emulated", 4))
def test_rank_0_fills_what_tensor_parallelism_does_not_divide_on_every_rank() -> None:
    """A tensor that FSDP alone divides is there once for each rank of the tensor parallelism."""
    torch.manual_seed(1)
    expected = {name: tensor + 1 for name, tensor in _Mixed().state_dict().items()}
    policies = [{}] if device_type() == "cpu" else [{}, {"offload_policy": CPUOffloadPolicy()}]
    for options in policies:
        sources = (on_first, lambda tensors: on_first(items_of(tensors)), lambda tensors: tensors)
        for source, bucket_bytes in zip(sources, (1, 1 << 10, BUCKET_BYTES), strict=True):
            model = _mixed(**options)
            meshes = {parameter.device_mesh.ndim for parameter in model.parameters()}
            assert meshes == {1, 2}
            load_full_tensors(model, source(expected), bucket_bytes=bucket_bytes)
            _assert_filled(model, expected)
        assert_same(extracted(model), expected)


@on_ranks(Setting("cpu", 4))
def test_rank_0_fills_the_optimizer_of_what_tensor_parallelism_does_not_divide() -> None:
    trained = []
    for tokens in (torch.arange(10), torch.arange(5, 20)):
        model = _mixed()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(tokens).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append((model, optimizer))
    state = get_optimizer_state_dict(*trained[0], options=StateDictOptions(full_state_dict=True))
    model, optimizer = trained[1]
    load_optimizer_state(model, optimizer, on_first(state))
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            wanted = _own_part(state["state"][name][key], parameter.device_mesh.mesh, parameter.placements)
            assert torch.equal(local_of(optimizer.state[parameter][key]), wanted), (name, key)


@on_ranks(Setting("cpu", 4))
def test_a_parameter_on_a_foreign_mesh_of_some_ranks_is_not_filled() -> None:
    """Covers experts divided over other ranks than the rest: nothing says whether each group has the same."""
    net = nn.Sequential(OrderedDict(all=nn.Linear(8, 8, bias=False), some=nn.Linear(8, 8, bias=False)))
    fully_shard(net.all, mesh=mesh_over())
    half = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("groups", "half"))["half"]
    fully_shard(net.some, mesh=half)
    full = {f"{name}.weight": torch.arange(64.0).view(8, 8) + index for index, name in enumerate(("all", "some"))}
    before = {name: local_of(parameter).clone() for name, parameter in net.named_parameters()}
    for source in (on_first(full), full):
        with raises_soon(LoadError, "some.weight", "written nothing"):
            load_full_tensors(net, source)
        for name, parameter in net.named_parameters():
            assert torch.equal(local_of(parameter), before[name])


@on_the_device
def test_shards_of_another_dim_are_filled() -> None:
    model = fsdp2(new_net(empty=False, **EVEN), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    expected = other_tensors(empty=False, **EVEN)
    for source in (on_first, items_of):
        load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)
        assert_same(extracted(model), expected)


@on_ranks(Setting("emulated", 1), Setting("cpu", 1))
def test_a_shard_group_of_one_is_filled() -> None:
    for source in (on_first, items_of):
        model = fsdp2(new_net())
        expected = other_tensors()
        with filled_in_place(model, expected):
            load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)
