"""Full tensors into FSDP1 models, whose shards are ranges of flat parameters, and may be in two memories.

Loads into two memories are verified by what torch does next, none of which is code of ours: a step's loss and its
weights, ``summon_full_params``, and the full state dict. Each of the three makes the two memories one, so each gets a
model of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.extraction import (
    Tensors,
    all_trainable,
    assert_same,
    extracted,
    fsdp1,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    tensors_of,
    train_step,
)
from support.loading import BUCKET_BYTES, items_of, on_first, other_tensors, reusing
from support.ranks import Setting, on_ranks, this_device, this_rank
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from fsdp_doctor import LoadError, examine, full_state_dict, full_tensors, load_full_tensors, local_shards
from fsdp_doctor.case.offloading import offload
from fsdp_doctor.weights.fsdp import reader

_NO_EMPTY = {"empty": False}


def _new(*, use_orig_params: bool = True, **options: Any) -> nn.Module:
    net = new_net(**_NO_EMPTY)
    return fsdp1(net if use_orig_params else all_trainable(net), use_orig_params=use_orig_params, **options)


def _trained(**options: Any) -> nn.Module:
    model = _new(**options)
    train_step(model)
    return model


def _by_hand(*, non_blocking: bool, **options: Any) -> nn.Module:
    model = _trained(**options)
    offload(model, non_blocking=non_blocking)
    return model


STATES: dict[str, Callable[..., nn.Module]] = {
    "new": _new,
    "trained": _trained,
    "by hand": lambda **options: _by_hand(non_blocking=False, **options),
    "left in flight": lambda **options: _by_hand(non_blocking=True, **options),
    "offloaded": lambda **options: _new(cpu_offload=CPUOffload(offload_params=True), **options),
    "offloaded, trained": lambda **options: _trained(cpu_offload=CPUOffload(offload_params=True), **options),
    "mixed precision": lambda **options: _new(mixed_precision=MixedPrecision(torch.bfloat16), **options),
    "not sharded": lambda **options: _new(sharding_strategy=ShardingStrategy.NO_SHARD, **options),
}


def _shards(model: nn.Module) -> list[tuple[torch.device, bool, int]]:
    units = reader.read(model).fsdp1_units
    return [(unit.shard.device, unit.shard.is_pinned(), unit.shard.data_ptr()) for unit in units]


def _assert_loads(model: nn.Module, source: Any, expected: Tensors) -> None:
    before = _shards(model)
    load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)
    assert _shards(model) == before
    assert_same(extracted(model), expected)


@on_the_device
def test_flat_shards_are_filled_where_they_lie() -> None:
    sources = itertools.cycle((on_first, items_of, lambda tensors: on_first(reusing(tensors, "emulated"))))
    for (state, original), source in zip(itertools.product(STATES, (True, False)), sources, strict=False):
        _assert_loads(STATES[state](use_orig_params=original), source, other_tensors(**_NO_EMPTY))


@on_the_device
def test_what_a_forward_left_unsharded_is_not_used_again() -> None:
    tokens = torch.arange(6).view(2, 3).to(this_device())
    for options in ({}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}):
        model, fresh = _new(**options), _new(**options)
        with torch.no_grad():
            model(tokens)
        for one in (model, fresh):
            load_full_tensors(one, other_tensors(**_NO_EMPTY))
        with torch.no_grad():
            assert torch.equal(model(tokens), fresh(tokens))


@on_the_device
def test_a_loaded_model_trains_like_a_model_that_began_with_the_weights() -> None:
    for original in (True, False):
        net = new_net(**_NO_EMPTY)
        net.load_state_dict(other_tensors(**_NO_EMPTY))
        fresh = fsdp1(net if original else all_trainable(net), use_orig_params=original)
        model = _new(use_orig_params=original)
        load_full_tensors(model, on_first(other_tensors(**_NO_EMPTY)))
        assert train_step(model) == train_step(fresh)
        assert_same(extracted(model), extracted(fresh))


@on_the_device
def test_a_parameter_with_strides_of_its_own_is_filled() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)

    expected = {
        name: torch.randn_like(t, memory_format=torch.contiguous_format) for name, t in net().state_dict().items()
    }
    for source in (lambda tensors: tensors, items_of):
        model = FullyShardedDataParallel(net(), device_id=this_device(), use_orig_params=True)
        load_full_tensors(model, source(expected))
        assert_same(extracted(model), expected)


@on_the_device
def test_inside_of_summon_full_params_nothing_is_loaded() -> None:
    model = _new()
    with (
        FullyShardedDataParallel.summon_full_params(model),
        raises_soon(LoadError, "summon_full_params", "written nothing"),
    ):
        load_full_tensors(model, other_tensors(**_NO_EMPTY))


@on_ranks(Setting("emulated", 4))
def test_every_replica_under_hybrid_sharding_is_filled() -> None:
    for original, source in itertools.product((True, False), (on_first, items_of)):
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_over(2, 2)}
        model = _new(use_orig_params=original, **options)
        _assert_loads(model, source, other_tensors(**_NO_EMPTY))


@on_ranks(Setting("emulated", 1))
def test_a_shard_group_of_one_is_filled() -> None:
    for original in (True, False):
        _assert_loads(_new(use_orig_params=original), items_of, other_tensors(**_NO_EMPTY))


# Units whose flat parameter and local shard are two memories

Options = dict[str, Any]
_ONE = "layers.0.up.bias"
_BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OFFLOAD: Options = {"cpu_offload": CPUOffload(offload_params=True)}
_EVERY_OPTION: tuple[Options, ...] = tuple(
    {"use_orig_params": original, **precision}
    for original, precision in itertools.product((False, True), ({}, {"mixed_precision": _BF16}))
)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class _Net(nn.Module):
    """A net without buffers, which FSDP1's mixed precision casts; of uneven sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(8, 23, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _other_weights() -> Tensors:
    return tensors_of(_Net(seed=7))


def _model(weights: Tensors | None = None, **options: Any) -> Any:
    net = _Net()
    if weights is not None:
        net.load_state_dict(weights)
    return fsdp1(net, **options)


def _assert_equal(actual: Tensors, expected: Tensors) -> None:
    """Bit by bit; both are on the host."""
    assert_same(actual, expected, torch.device("cpu"))


def _loss(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(this_rank())
    tokens = torch.randint(0, 20, (2, 5), generator=generator).to(this_device())
    return model(tokens).float().square().mean()


def _to_host_and_back(model: nn.Module) -> None:
    model.cpu()
    model.to(this_device())


def _initialized_by_no_sync(**options: Any) -> Any:
    model = _model(**options, **_OFFLOAD)
    with model.no_sync():
        pass
    return model


def _initialized_by_clipping(**options: Any) -> Any:
    model = _model(**options, **_OFFLOAD)
    model.clip_grad_norm_(1.0)
    return model


def _trained_and_moved(**options: Any) -> Any:
    model = _model(**options)
    _loss(model).backward()
    _to_host_and_back(model)
    model.zero_grad()
    return model


def _trained_and_on_the_host(**options: Any) -> Any:
    model = _model(**options)
    _loss(model).backward()
    model.cpu()
    model.zero_grad()
    return model


TWO_MEMORIES: dict[str, Callable[..., Any]] = {
    "no_sync under CPUOffload": _initialized_by_no_sync,
    "clip_grad_norm_ under CPUOffload": _initialized_by_clipping,
    "moved to the host and back": _trained_and_moved,
    "loaded on the host": _trained_and_on_the_host,
}


def _state_dict(model: Any) -> Tensors:
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    ):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _summoned(model: Any) -> Tensors:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): tensor.detach().cpu().clone()
            for name, tensor in model.named_parameters(remove_duplicate=False)
        }


def _stepped(model: Any) -> Tensors:
    """The loss of a training step and the weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = _loss(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach().cpu(), **_state_dict(model)}


def _loaded(state: str, options: Options, source: Any) -> Any:
    model = TWO_MEMORIES[state](**options)
    load_full_tensors(model, source(_other_weights()))
    if state == "loaded on the host":
        model.to(this_device())
    return model


def _loaded_by_torch(state: str, options: Options) -> Any:
    """Loads into the same state, whose gradients matter: a unit that is moved shows again what zero_grad() cleared."""
    model = TWO_MEMORIES[state](**options)
    if state == "loaded on the host":
        model.to(this_device())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(_other_weights())
    return model


@on_the_device
def test_torch_uses_what_was_loaded_whatever_memory_it_reads() -> None:
    weights = _other_weights()
    sources = itertools.cycle((on_first, items_of, items_of, on_first))
    for (state, options), source in zip(itertools.product(TWO_MEMORIES, _EVERY_OPTION), sources, strict=False):
        _assert_equal(_summoned(_loaded(state, options, source)), weights)
        _assert_equal(_state_dict(_loaded(state, options, source)), weights)
        _assert_equal(_stepped(_loaded(state, options, source)), _stepped(_loaded_by_torch(state, options)))


@on_the_device
def test_what_a_load_leaves_out_keeps_the_values_that_torch_would_unshard() -> None:
    for options in _EVERY_OPTION:
        model, same = _trained_and_moved(**options), _trained_and_moved(**options)
        for changed in (model, same):
            torch.optim.SGD(changed.parameters(), lr=0.1, weight_decay=0.5).step()
            for parameter in changed.parameters():
                parameter.data.add_(1)
        load_full_tensors(model, {_ONE: torch.zeros(15)}, strict=False)
        _assert_equal(_state_dict(model), {**_state_dict(same), _ONE: torch.zeros(15)})


def _after_a_step_on_moved_parameters(**options: Any) -> Any:
    """The optimizer writes to the flat parameter, which is not the local shard any more."""
    model = _model(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _loss(model).backward()
    _to_host_and_back(model)
    optimizer.step()
    return model


def _extractions(model: nn.Module) -> Iterator[Tensors]:
    yield {name: tensor.cpu() for name, tensor in full_tensors(model)}
    yield full_state_dict(model, ranks="all")
    # From the plan that was kept.
    yield {name: tensor.cpu() for name, tensor in full_tensors(model)}


@on_the_device
def test_an_extraction_matches_a_state_dict_after_a_step_on_moved_parameters() -> None:
    for options in _EVERY_OPTION:
        model = _after_a_step_on_moved_parameters(**options)
        expected = _state_dict(_after_a_step_on_moved_parameters(**options))
        assert not torch.equal(expected[_ONE], _Net().state_dict()[_ONE]), "the step changed nothing"
        for tensors in _extractions(model):
            _assert_equal(tensors, expected)
        flat = torch.cat([shard.tensor.reshape(-1).cpu() for shard in local_shards(model)])
        other = torch.cat([shard.tensor.reshape(-1).cpu() for shard in local_shards(_model(expected, **options))])
        assert torch.equal(flat, other)


@on_the_device
def test_an_original_parameter_in_other_memory_is_treated_as_torch_does() -> None:
    weights = _other_weights()

    def swapped() -> Any:
        """Swaps weights as an exponential moving average is swapped in, after a first extraction has kept its plan."""
        model = _model(use_orig_params=True)
        _loss(model).backward()
        model.zero_grad()
        list(full_tensors(model))
        for parameter in model.parameters():
            parameter.data = parameter.data * 2 + 1
        return model

    for tensors in _extractions(swapped()):
        _assert_equal(tensors, _state_dict(swapped()))
    model = swapped()
    load_full_tensors(model, weights)
    _assert_equal(_state_dict(model), weights)
    model = swapped()
    load_full_tensors(model, weights)
    _assert_equal(_stepped(model), _stepped(_model(weights, use_orig_params=True)))


@on_the_device
def test_examine_names_units_with_two_memories_until_they_are_one() -> None:
    for build in (_initialized_by_no_sync, _trained_and_moved):
        for original in (False, True):
            model = build(use_orig_params=original)
            (finding,) = [one for one in examine(model).findings if one.kind == "second-memory"]
            assert finding.names == ("_flat_param", "layers.0._flat_param", "layers.1._flat_param"), finding.names
            with FullyShardedDataParallel.summon_full_params(model):
                pass
            assert "second-memory" not in {one.kind for one in examine(model).findings}


@on_the_device
def test_a_unit_cast_after_its_first_forward_is_refused_by_name() -> None:
    model = _trained_and_moved(use_orig_params=False)
    model.bfloat16()
    for refused, error in (
        (lambda: list(full_tensors(model)), RuntimeError),
        (lambda: load_full_tensors(model, _other_weights()), LoadError),
    ):
        with raises_soon(error, "_flat_param"):
            refused()


class _Shared(nn.Module):
    """A parameter, or a whole module, in two FSDP1 units."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Embedding(8, 4))
        self.second = nn.Sequential(self.first[0] if what == "module" else nn.Linear(4, 8, bias=False))
        if what == "parameter":
            self.second[0].weight = self.first[0].weight
        self.twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.twice[1] = self.twice[0]


def _shared(what: str, original: bool) -> nn.Module:
    model = _Shared(what)
    options: Options = {"device_id": this_device(), "use_orig_params": original}
    for name in ("first", "second"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
    return FullyShardedDataParallel(model, **options)


@on_the_device
def test_a_module_in_two_places_is_extracted_and_loaded_under_both_names() -> None:
    expected = {name: tensor.clone() for name, tensor in _Shared("module").state_dict().items()}
    for original in (False, True):
        model = _shared("module", original)
        for tensors in _extractions(model):
            _assert_equal(tensors, expected)
        other = {name: tensor + 1 for name, tensor in expected.items()}
        load_full_tensors(model, other)
        _assert_equal(full_state_dict(model, ranks="all"), other)


@on_the_device
def test_a_parameter_tied_across_units_is_refused_by_name_on_every_rank() -> None:
    expected = {name: tensor.clone() for name, tensor in _Shared("parameter").state_dict().items()}
    model = _shared("parameter", True)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: list(full_tensors(model)),
        lambda: full_state_dict(model),
        lambda: list(local_shards(model)),
        lambda: load_full_tensors(model, expected),
    )
    for call in calls:
        with raises_soon(RuntimeError, "second.0.weight"):
            call()
    (finding,) = [one for one in examine(model).findings if one.kind == "stray-piece"]
    assert finding.names == ("second.0.weight",)
