"""Run under torchrun by test_extraction.py: the extraction library on several ranks, on the device that is named.

Argument: ``cpu`` or ``emulated``. Every rank runs the checks that suit the device and the number of ranks,
in one order; rank 0 prints a line for each, with the reason on every rank where it failed. Ends with 1
if any failed. Expected values are those of the model before it was sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import PlanMismatch, RankLeft, full_state_dict, full_tensors, weights_info
from fsdp_doctor.extract import agreement
from fsdp_doctor.fsdp import private

Tensors = dict[str, torch.Tensor]

MIB = 1 << 20
SECONDS_FOR_A_CHECK = 40
# What "nobody hangs" means: less than the process group's timeout.
SECONDS_TO_NOTICE = 8
SECONDS_OF_THE_GROUP = 15
FEW_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Check:
    run: Callable[[], None]
    device: str | None
    ranks: int | None

    def suits(self, device: str, ranks: int) -> bool:
        return self.device in (None, device) and self.ranks in (None, ranks)


CHECKS: dict[str, Check] = {}


def check(device: str | None = None, ranks: int | None = None) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Only on that device, only with so many ranks."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = Check(function, device, ranks)
        return function

    return register


def names_of_checks(device: str, ranks: int) -> list[str]:
    return [name for name, one in CHECKS.items() if one.suits(device, ranks)]


# The ranks


def _device_type() -> str:
    return sys.argv[1]


def _rank() -> int:
    return dist.get_rank()


def _world() -> int:
    return dist.get_world_size()


def _device() -> torch.device:
    return torch.device("cpu") if _device_type() == "cpu" else torch.device("emulated", _rank())


def _accelerator() -> Any:
    return torch.get_device_module("emulated")


@functools.cache
def _mesh(*shape: int) -> DeviceMesh:
    dims = shape or (_world(),)
    return init_device_mesh(_device_type(), dims, mesh_dim_names=("outer", "inner")[: len(dims)])


@functools.cache
def _control() -> dist.ProcessGroup:
    """What keeps the ranks at the same check; the library never uses it."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=4 * SECONDS_FOR_A_CHECK))


def _together() -> None:
    dist.barrier(_control())


def _of_all(said: Any) -> list[Any]:
    everyone: list[Any] = [None] * _world()
    dist.all_gather_object(everyone, said, _control())
    return everyone


# The model


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Parameter(torch.randn(1, width))
        self.frozen = nn.Parameter(torch.randn(hidden), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.gate * self.down(torch.tanh(self.up(hidden)) * self.frozen)


class Net(nn.Module):
    """Rows that divide by the ranks or not, one row alone, a tied pair, frozen parameters, buffers of each kind."""

    def __init__(self, rows: int = 23, hidden: int = 14, large_rows: int = 1031, *, empty: bool = True) -> None:
        super().__init__()
        width = 8
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(2))
        # More than 1 MiB in bfloat16 too.
        self.large = nn.Linear(512, large_rows, bias=False)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight
        if empty:
            self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("table", torch.arange(12).view(3, 4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) + self.large(torch.ones(512, device=hidden.device)).mean()


EVEN = {"rows": 24, "hidden": 12, "large_rows": 1032}
UNEVEN = {"rows": 23, "hidden": 14, "large_rows": 1031}
INTEGERS = ("steps", "table")


def _net(**dims: Any) -> Net:
    torch.manual_seed(0)
    return Net(**dims)


def tensors_of(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _fsdp2(net: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    net = net.to(_device())
    mesh = mesh or _mesh()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def _fsdp1(net: nn.Module, *, use_orig_params: bool = True, **options: Any) -> nn.Module:
    """The integers stay out of the flat parameter, being buffers; frozen and trained parameters do not."""
    every = {"device_id": _device(), "use_orig_params": use_orig_params, **options}
    for index, layer in enumerate(net.layers):
        net.layers[index] = FullyShardedDataParallel(layer, **every)
    return FullyShardedDataParallel(net, **every)


def _all_train(net: nn.Module) -> nn.Module:
    """FSDP1 without use_orig_params has no frozen parameter beside a trained one."""
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    return net


def _step(model: nn.Module, seed: int = 0) -> float:
    """One step of SGD, whose only state is in the parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(10 * seed + _rank())
    tokens = torch.randint(0, 20, (2, 5), generator=generator).to(_device())
    loss = model(tokens).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# Comparisons


def _extracted(model: nn.Module, **options: Any) -> Tensors:
    pairs = list(full_tensors(model, **options))
    doubled = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
    assert not doubled, f"yielded more than once: {doubled}"
    return dict(pairs)


def _same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], device: Any = None) -> None:
    """Names, shapes, dtypes and bits."""
    assert sorted(actual) == sorted(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in actual.items():
        wanted = expected[name]
        assert tensor.shape == wanted.shape, f"{name}: {tuple(tensor.shape)} instead of {tuple(wanted.shape)}"
        assert tensor.dtype == wanted.dtype, f"{name}: {tensor.dtype} instead of {wanted.dtype}"
        assert tensor.device == (device or _device()), f"{name} is on {tensor.device}"
        assert torch.equal(tensor.cpu(), wanted.cpu()), f"{name}: values differ"


def _close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(actual) == sorted(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.cpu(), expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextlib.contextmanager
def _raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Soon, and with these words."""
    begin = time.monotonic()
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    took = time.monotonic() - begin
    missing = [word for word in words if word not in said]
    assert not missing, f"{kind.__name__} does not say {missing}: {said} (after {took:.1f} seconds)"
    assert took < SECONDS_TO_NOTICE, f"{kind.__name__} only after {took:.1f} seconds"


# FSDP2


@check()
def fsdp2_even_and_uneven_rows_are_as_before_sharding() -> None:
    for dims in (EVEN, UNEVEN):
        net = _net(**dims)
        expected = tensors_of(net)
        model = _fsdp2(net)
        for options in ({}, {"bucket_bytes": FEW_BYTES}, {"bucket_bytes": 1}, {"bucket_bytes": 3 * MIB}):
            _same(_extracted(model, **options), expected)


@check()
def fsdp2_after_training_it_is_what_the_shards_hold() -> None:
    model = _fsdp2(_net())
    _step(model)
    expected = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        expected[name] = parameter.detach().full_tensor()
    _same({name: tensor for name, tensor in _extracted(model).items() if name in expected}, expected)


@check()
def a_parameter_sharded_by_columns_is_as_before_sharding() -> None:
    net = _net(rows=24, hidden=12, large_rows=1032)
    expected = tensors_of(net)
    by_columns = {parameter for parameter in net.parameters() if parameter.ndim == 2 and parameter.shape[1] == 12}
    assert by_columns
    model = _fsdp2(net, shard_placement_fn=lambda parameter: Shard(1) if parameter in by_columns else None)
    placed = [p for p in model.parameters() if isinstance(p, DTensor) and p.placements == (Shard(1),)]
    assert len(placed) == len(by_columns)
    _same(_extracted(model), expected)
    _same(_extracted(model, dtype=torch.bfloat16, keep_dtype=INTEGERS), _cast(expected, torch.bfloat16))


@check(ranks=4)
def hsdp_gathers_each_replica() -> None:
    for dims in (EVEN, UNEVEN):
        net = _net(**dims)
        expected = tensors_of(net)
        model = _fsdp2(net, _mesh(2, 2))
        for options in ({}, {"bucket_bytes": FEW_BYTES}):
            _same(_extracted(model, **options), expected)


@check(ranks=4)
def under_hsdp_a_rank_that_leaves_stops_its_own_replica_only() -> None:
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net, _mesh(2, 2))
    _together()
    if _rank() == 1:
        _take_one(model)
    elif _rank() == 0:
        with _raises(RankLeft, "rank 1 left"):
            _extracted(model, bucket_bytes=FEW_BYTES)
    else:
        _same(_extracted(model, bucket_bytes=FEW_BYTES), expected)
    _same(_extracted(model), expected)


@check(ranks=4)
def tensor_parallel_layers_are_as_before_sharding() -> None:
    """Norms of the layers are on one dim of the mesh, the linears on both."""
    for width, hidden in ((16, 32), (8, 20)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width))
        expected = tensors_of(net)
        mesh = _mesh(2, 2)
        parallelize_module(net, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["outer"])
        _same(_extracted(net), expected)
        _same(_extracted(net, bucket_bytes=64), expected)
        _same(_extracted(net, dtype=torch.bfloat16), _cast(expected, torch.bfloat16))


@check()
def an_ignored_parameter_is_yielded_too() -> None:
    net = _net().to(_device())
    expected = tensors_of(net)
    model = _fsdp2(net, ignored_params={net.large.weight})
    assert not isinstance(model.large.weight, DTensor)
    _same(_extracted(model), expected)
    assert _extracted(model)["large.weight"].data_ptr() != model.large.weight.data_ptr()


@check()
def tied_names_share_one_tensor() -> None:
    for model in (_fsdp2(_net()), _fsdp1(_net(empty=False))):
        for options in ({}, {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}):
            tensors = _extracted(model, **options)
            assert tensors["embed.weight"] is tensors["head.weight"]


@check()
def after_a_forward_without_a_backward_it_is_the_masters() -> None:
    """Torch leaves the root's parameters gathered, in the dtype of the computation."""
    for build in (_mixed_fsdp1, _mixed_fsdp2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        expected = tensors_of(net)
        model = build(net)
        with torch.no_grad():
            model(torch.ones(2, 7, device=_device()))
        _same(_extracted(model), expected)


def _mixed_fsdp2(net: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = net.to(_device())
    fully_shard(net[0], mesh=_mesh(), mp_policy=policy)
    return fully_shard(net, mesh=_mesh(), mp_policy=policy)


def _mixed_fsdp1(net: nn.Module) -> nn.Module:
    options = {"device_id": _device(), "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    net[0] = FullyShardedDataParallel(net[0], **options)
    return FullyShardedDataParallel(net, **options)


@check(device="emulated")
def shards_under_a_policy_are_gathered_on_the_device() -> None:
    for pin_memory in (True, False):
        for dims in (EVEN, UNEVEN):
            net = _net(**dims)
            expected = tensors_of(net)
            model = _fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
            assert model.embed.weight.device.type == "cpu"
            assert model.embed.weight.to_local().is_pinned() == pin_memory
            _same(_extracted(model), expected)
            _same(_extracted(model, bucket_bytes=FEW_BYTES), expected)
            assert model.embed.weight.device.type == "cpu"
            _step(model)


@check(device="emulated")
def a_model_moved_to_the_cpu_by_hand_is_gathered_on_the_device() -> None:
    # Of uneven shards that were moved without waiting torch itself makes something else.
    for dims, non_blocking in ((EVEN, False), (UNEVEN, False), (EVEN, True)):
        net = _net(**dims)
        expected = tensors_of(net)
        model = _fsdp2(net)
        model.to("cpu", non_blocking=non_blocking)
        if non_blocking:
            _accelerator().synchronize()
        _same(_extracted(model), expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


@check(device="emulated")
def a_half_moved_model_is_gathered() -> None:
    """``model.to(device)`` under a pinned policy moves the local tensors and leaves torch's own references behind."""
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    model.to(_device())
    _same(_extracted(model), expected)
    _same(_extracted(model, dtype=torch.bfloat16, keep_dtype=INTEGERS), _cast(expected, torch.bfloat16))


# FSDP1, DDP, nothing


@check()
def fsdp1_is_as_before_sharding() -> None:
    for use_orig_params in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            for dims in (EVEN, UNEVEN):
                net = _net(**dims, empty=False)
                net = net if use_orig_params else _all_train(net)
                expected = tensors_of(net)
                model = _fsdp1(net, use_orig_params=use_orig_params, sharding_strategy=strategy)
                _same(_extracted(model), expected)


@check()
def an_fsdp1_unit_larger_than_the_bucket_comes_in_strips() -> None:
    for use_orig_params in (False, True):
        net = _all_train(_net(empty=False))
        expected = tensors_of(net)
        model = _fsdp1(net, use_orig_params=use_orig_params)
        for bucket_bytes in (64 << 10, 1_000_003, 3 * MIB):
            _same(_extracted(model, bucket_bytes=bucket_bytes), expected)
            cast = _extracted(model, bucket_bytes=bucket_bytes, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "embed*"))
            _same(cast, _cast(expected, torch.bfloat16, "embed.weight", "head.weight"))


@check()
def an_empty_parameter_in_an_fsdp1_unit_is_yielded_once() -> None:
    """In the middle of the unit, and at its end, which is the end of the last rank's shard."""
    long, empty = 16 * _world(), 0
    for lengths in ((long, empty, long), (long, empty)):
        for use_orig_params in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.ParameterList(nn.Parameter(torch.randn(length)) for length in lengths))
            expected = tensors_of(net)
            model = FullyShardedDataParallel(net, device_id=_device(), use_orig_params=use_orig_params)
            for bucket_bytes in (MIB, 64 * _world()):
                _same(_extracted(model, bucket_bytes=bucket_bytes), expected)


@check(device="emulated")
def fsdp1_under_an_offload_is_gathered_on_the_device() -> None:
    for use_orig_params in (False, True):
        net = _all_train(_net(empty=False))
        expected = tensors_of(net)
        model = _fsdp1(net, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_params=True))
        _same(_extracted(model), expected)
        _step(model)
        changed = _extracted(model, bucket_bytes=64 << 10)
        assert sorted(changed) == sorted(expected)
        assert not torch.equal(changed["embed.weight"].cpu(), expected["embed.weight"])
        _same(_extracted(model), changed)


@check()
def ddp_and_no_wrapper_yield_plain_names() -> None:
    net = _net(empty=False).to(_device())
    expected = tensors_of(net)
    _same(_extracted(net), expected)
    _same(_extracted(DistributedDataParallel(net, find_unused_parameters=True)), expected)


@check()
def a_compiled_ddp_yields_plain_names() -> None:
    net = _net(empty=False).to(_device())
    expected = tensors_of(net)
    _same(_extracted(torch.compile(DistributedDataParallel(net))), expected)


# dtypes


def _cast(tensors: Tensors, dtype: torch.dtype, *kept: str) -> Tensors:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in kept else tensor
        for name, tensor in tensors.items()
    }


@check()
def a_cast_of_shards_is_the_cast_of_the_whole() -> None:
    expected = tensors_of(_net())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for model in (_fsdp2(_net()), _fsdp1(_net(empty=False))):
            actual = _extracted(model, dtype=dtype, keep_dtype=INTEGERS)
            _same(actual, {name: tensor for name, tensor in _cast(expected, dtype).items() if name in actual})
            assert set(expected) - set(actual) <= {"empty"}


@check()
def tensors_of_several_dtypes_in_one_bucket_are_as_before_sharding() -> None:
    """Of their own, and by keep_dtype."""
    for group, shard in (("fsdp2", _whole_fsdp2), ("fsdp1", _whole_fsdp1)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6))
        if group == "fsdp2":
            net[1].to(torch.bfloat16)
        expected = tensors_of(net)
        model = shard(net)
        _same(_extracted(model), expected)
        cast = _cast(expected, torch.float16, "1.weight", "1.bias")
        _same(_extracted(model, dtype=torch.float16, keep_dtype="1.*"), cast)


def _whole_fsdp2(net: nn.Module) -> nn.Module:
    return fully_shard(net.to(_device()), mesh=_mesh())


def _whole_fsdp1(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=_device(), use_orig_params=True)


@check()
def keep_dtype_takes_names_and_patterns() -> None:
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    frozen = [f"layers.{index}.frozen" for index in range(2)]
    for keep, kept in (
        (("large.weight",), ["large.weight"]),
        (("layers.*.frozen",), frozen),
        # The second name of a tied pair keeps the first.
        (("head.weight",), ["embed.weight", "head.weight"]),
        (("layers.?.frozen", "scale"), [*frozen, "scale"]),
    ):
        actual = _extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, *keep), bucket_bytes=FEW_BYTES)
        _same(actual, _cast(expected, torch.bfloat16, *kept))


@check(device="emulated")
def a_cast_of_offloaded_shards_is_the_cast_of_the_whole() -> None:
    net = _net()
    expected = _cast(tensors_of(net), torch.bfloat16, "scale")
    model = _fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    _same(_extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "sc*")), expected)
    net = _net(empty=False)
    model = _fsdp1(net, cpu_offload=CPUOffload(offload_params=True))
    del expected["empty"]
    _same(_extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "sc*")), expected)


# What the model and the caller keep


def _state(model: nn.Module) -> list[tuple[str, Any, torch.Tensor, bool, torch.device, int]]:
    return [
        (name, type(tensor), _local(tensor).clone(), tensor.requires_grad, tensor.device, _local(tensor).data_ptr())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@check()
def the_live_model_and_its_training_are_left_alone() -> None:
    builders: list[Callable[[], nn.Module]] = [
        lambda: _fsdp2(_net()),
        lambda: _fsdp1(_net(empty=False)),
        lambda: _fsdp1(_all_train(_net(empty=False)), use_orig_params=False),
    ]
    if _device_type() != "cpu":
        builders.append(lambda: _fsdp2(_net(), offload_policy=CPUOffloadPolicy(pin_memory=True)))
    for build in builders:
        left_alone, model = build(), build()
        assert _step(left_alone) == _step(model)
        before = _state(model)
        for _, tensor in full_tensors(model, dtype=torch.bfloat16, keep_dtype=INTEGERS, bucket_bytes=64 << 10):
            tensor.fill_(1)
        for _, tensor in full_tensors(model):
            tensor.fill_(1)
        for one, other in zip(before, _state(model), strict=True):
            assert one[:2] + one[3:] == other[:2] + other[3:], f"{one[0]} is not what it was"
            assert torch.equal(one[2].cpu(), other[2].cpu()), f"{one[0]} has other values"
        losses = [(_step(left_alone, seed), _step(model, seed)) for seed in (1, 2)]
        assert all(one == other for one, other in losses), losses


@check()
def a_kept_tensor_does_not_change_when_training_goes_on() -> None:
    for model in (_fsdp2(_net()), _fsdp1(_net(empty=False)), _fsdp1(_net(empty=False), use_orig_params=True)):
        kept = _extracted(model)
        copies = {name: tensor.clone() for name, tensor in kept.items()}
        _step(model)
        later = _extracted(model)
        _same(kept, copies)
        assert not torch.equal(later["embed.weight"], kept["embed.weight"])


@check()
def grad_and_inference_modes_make_no_difference() -> None:
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            tensors = _extracted(model)
        assert not any(tensor.requires_grad for tensor in tensors.values())
        _same(tensors, expected)
    _step(model)


@check()
def wrapped_layers_have_plain_names() -> None:
    for wrap in (checkpoint_wrapper, torch.compile, lambda layer: torch.compile(checkpoint_wrapper(layer))):
        for shard in (_fsdp2, _fsdp1):
            net = _net(empty=False)
            expected = tensors_of(net)
            for index, layer in enumerate(net.layers):
                net.layers[index] = wrap(layer)
            _same(_extracted(shard(net)), expected)


@check()
def a_transformer_with_gradient_checkpointing_is_as_before_sharding() -> None:
    model = qwen()
    expected = tensors_of(model)
    model.gradient_checkpointing_enable()
    model = _shard_qwen2(model.train())
    _same(_extracted(model), expected)
    tokens = torch.arange(8, device=_device()).view(1, 8)
    model(tokens, labels=tokens).loss.backward()
    _same(_extracted(model), expected)


# Ranks that leave or disagree


def _take_one(model: nn.Module) -> None:
    for _ in full_tensors(model, bucket_bytes=FEW_BYTES):
        break


def _raise_after_one(model: nn.Module) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in full_tensors(model, bucket_bytes=FEW_BYTES):
            raise ZeroDivisionError


def _drop_unstarted(model: nn.Module) -> None:
    full_tensors(model, bucket_bytes=FEW_BYTES)


def _close_after_one(model: nn.Module) -> None:
    tensors = full_tensors(model, bucket_bytes=FEW_BYTES)
    next(tensors)
    tensors.close()


@check()
def when_a_rank_leaves_the_others_are_told_which() -> None:
    for build in (lambda: _fsdp2(_net()), lambda: _fsdp1(_net(empty=False))):
        model = build()
        expected = _extracted(model)
        for leave in (_take_one, _raise_after_one, _drop_unstarted, _close_after_one):
            leaver = _world() - 1
            _together()
            if _rank() == leaver:
                leave(model)
            else:
                with _raises(RankLeft, f"rank {leaver} left"):
                    _extracted(model, bucket_bytes=FEW_BYTES)
            _same(_extracted(model), expected)


@check()
def when_the_extraction_fails_on_a_rank_the_others_are_told_which() -> None:
    """A shard that is not as long as it must be is found when its bucket is loaded."""
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    whole = model.large.weight._local_tensor
    if _rank() == 1:
        model.large.weight._local_tensor = whole[:-1]
        with _raises(RuntimeError, "large.weight", "elements where"):
            _extracted(model, bucket_bytes=FEW_BYTES)
        model.large.weight._local_tensor = whole
    else:
        with _raises(RankLeft, "rank 1 left", "large.weight"):
            _extracted(model, bucket_bytes=FEW_BYTES)
    _same(_extracted(model), expected)


@check()
def ranks_with_different_arguments_all_raise_plan_mismatch() -> None:
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    bfloat16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for odd in (0, _world() - 1):
        for usual, other, words in (
            ({}, bfloat16, ("dtype=None", "dtype=torch.bfloat16")),
            ({}, {"bucket_bytes": FEW_BYTES}, ("bucket_bytes=4096",)),
            (bfloat16, {**bfloat16, "keep_dtype": (*INTEGERS, "scale")}, ("scale", "float32", "bfloat16")),
        ):
            with _raises(PlanMismatch, *words):
                _extracted(model, **(other if _rank() == odd else usual))
            _same(_extracted(model), expected)


@check()
def ranks_with_different_models_all_raise_plan_mismatch() -> None:
    for net, words in (
        (nn.Linear(4, 13 if _rank() == 1 else 12), ("weight", "12, 4", "13, 4")),
        (nn.Linear(4, 12, bias=_rank() != 1), ("bias", "nothing more")),
    ):
        with _raises(PlanMismatch, *words):
            _extracted(fully_shard(net.to(_device()), mesh=_mesh()))
    assert len(_extracted(fully_shard(nn.Linear(4, 12).to(_device()), mesh=_mesh()))) == 2


# weights_info, full_state_dict, the store, memory


@check()
def weights_info_is_what_full_tensors_yields() -> None:
    bfloat16 = {"dtype": torch.bfloat16, "keep_dtype": (*INTEGERS, "scale")}
    for model in (_fsdp2(_net()), _fsdp1(_net(empty=False)), _net().to(_device())):
        for options in ({}, bfloat16):
            info = [(name, one.shape, one.dtype) for name, one in weights_info(model, **options).items()]
            yielded = [(name, one.shape, one.dtype) for name, one in full_tensors(model, **options)]
            assert info == yielded
            small = [name for name, _ in full_tensors(model, bucket_bytes=64 << 10, **options)]
            assert small == [name for name, *_ in info], "the order depends on the bucket"


@check()
def weights_info_needs_no_other_rank() -> None:
    """The others wait for the one rank; in a collective they would meet it in the wrong one."""
    model = _fsdp2(_net())
    if _rank() == 1:
        assert sorted(weights_info(model)) == sorted(_net().state_dict())
    _together()
    assert len(_extracted(model)) == len(_net().state_dict())


@check()
def full_state_dict_is_on_the_cpu_of_rank_0_or_all() -> None:
    cpu = torch.device("cpu")
    for shard, empty in ((_fsdp2, True), (_fsdp1, False)):
        net = _net(empty=empty)
        expected = tensors_of(net)
        model = shard(net)
        for options in ({}, {"bucket_bytes": 64 << 10}):
            state = full_state_dict(model, **options)
            _same(state, expected if _rank() == 0 else {}, cpu)
            state = full_state_dict(model, ranks="all", **options)
            _same(state, expected, cpu)
            assert state["embed.weight"] is state["head.weight"]
            assert not any(tensor.is_pinned() for tensor in state.values())
        cast = full_state_dict(model, ranks="all", dtype=torch.bfloat16, keep_dtype=INTEGERS)
        _same(cast, _cast(expected, torch.bfloat16), cpu)


@check()
def a_state_dict_outlives_training() -> None:
    model = _fsdp2(_net())
    state = full_state_dict(model, ranks="all")
    copies = _clones(state)
    _step(model)
    _same(state, copies, torch.device("cpu"))


def _clones(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@check()
def extractions_leave_no_keys_in_the_store() -> None:
    model = _fsdp2(_net())
    for bucket_bytes in (8 * MIB, FEW_BYTES):
        counts = []
        for _ in range(21):
            for _ in full_tensors(model, bucket_bytes=bucket_bytes):
                pass
            _together()
            counts.append(private.default_store().num_keys())
            _together()
        assert counts[-1] == counts[0], f"bucket_bytes={bucket_bytes}: keys after each: {counts}"


@check()
def extractions_that_failed_leave_no_keys_in_the_store() -> None:
    """As many keys after the tenth as after the first, each followed by one that succeeded."""
    model = _fsdp2(_net())
    counts = []
    for _ in range(10):
        _together()
        if _rank() == 0:
            _take_one(model)
        else:
            with _raises(RankLeft):
                _extracted(model, bucket_bytes=FEW_BYTES)
        _extracted(model, bucket_bytes=FEW_BYTES)
        _together()
        counts.append(private.default_store().num_keys())
        _together()
    assert counts[-1] == counts[0], f"keys after each: {counts}"


class Wide(nn.Module):
    """80 MiB in tensors of 2 MiB and one of 8, with small ones between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024) for _ in range(36))
        self.head = nn.Linear(1024, 2048)


@check(device="emulated")
def device_memory_stays_within_two_buckets_and_a_tensor() -> None:
    bucket, largest = 4 * MIB, 8 * MIB
    builders: dict[str, Callable[[], nn.Module]] = {
        "fsdp2": lambda: fully_shard(Wide().to(_device()), mesh=_mesh()),
        "fsdp2 with a policy": lambda: fully_shard(
            Wide().to(_device()), mesh=_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=True)
        ),
        "fsdp1": lambda: FullyShardedDataParallel(Wide(), device_id=_device(), use_orig_params=True),
    }
    for name, build in builders.items():
        model = build()
        gc.collect()
        _accelerator().synchronize()
        before = _accelerator().memory_allocated()
        _accelerator().reset_peak_memory_stats()
        total = 0
        for _, tensor in full_tensors(model, bucket_bytes=bucket):
            total += tensor.cpu().nbytes
            del tensor
        used = _accelerator().max_memory_allocated() - before
        assert total > 64 * MIB
        assert used >= largest, f"{name}: {used} bytes cannot be"
        assert used <= 2 * bucket + largest, f"{name}: {used / MIB:.1f} MiB at once"
        assert _accelerator().memory_allocated() == before, f"{name}: memory is not given back"


# LoRA


def qwen(**options: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **options}))


def adapted(model: Any = None, **options: Any) -> Any:
    """Both factors random: peft's own start, where one is zero, would hide a merge that did nothing."""
    import peft

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    model = model if model is not None else qwen()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **options}))


def _layers(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def _shard_qwen2(model: Any, **options: Any) -> Any:
    model = model.to(_device())
    for layer in _layers(model):
        fully_shard(layer, mesh=_mesh(), **options)
    return fully_shard(model, mesh=_mesh(), **options)


def _shard_qwen1(model: Any, **options: Any) -> Any:
    layers = _layers(model)
    every = {"device_id": _device(), "use_orig_params": True, **options}
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(layer, **every)
    return FullyShardedDataParallel(model, **every)


def _kinds() -> dict[str, Callable[[], Any]]:
    """Adapted models, by what is special about them."""

    def two() -> Any:
        import peft

        model = adapted()
        other = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
        model.add_adapter("other", other)
        model.base_model.set_adapter(["default", "other"])
        return model

    def inactive() -> Any:
        model = two()
        model.set_adapter("other")
        return model

    return {
        "all linear layers": adapted,
        "rslora": lambda: adapted(use_rslora=True),
        "embedding": lambda: adapted(target_modules=["embed_tokens", "q_proj", "down_proj"]),
        "modules_to_save": lambda: _changed_copies(adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        "two active": two,
        "one of two active": inactive,
        "uneven": lambda: adapted(qwen(vocab_size=257, intermediate_size=131)),
    }


@torch.no_grad()
def _changed_copies(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model


_SHARDS: dict[str, Callable[..., Any]] = {"fsdp2": _shard_qwen2, "fsdp1": _shard_qwen1}


def _for_each_kind(compare: Callable[[str, Any, Any], None]) -> None:
    """compare: takes the kind, the unsharded model and a sharded one."""
    failures = []
    for kind, build in _kinds().items():
        for way, shard in _SHARDS.items():
            try:
                compare(kind, build(), shard(build()))
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{kind} under {way}: {error}")
    assert not failures, "; ".join(failures)


@check()
def merged_adapters_are_what_peft_merges() -> None:
    def compare(kind: str, plain: Any, model: Any) -> None:
        expected = tensors_of(plain.merge_and_unload())
        assert sorted(expected) == sorted(qwen().state_dict())
        for options in ({}, {"bucket_bytes": 64 << 10}):
            _close(_extracted(model, lora="merged", **options), expected)

    _for_each_kind(compare)


@check()
def the_base_is_the_model_before_the_adapters() -> None:
    def compare(kind: str, plain: Any, model: Any) -> None:
        dims = {"vocab_size": 257, "intermediate_size": 131} if kind == "uneven" else {}
        _same(_extracted(model, lora="base"), tensors_of(qwen(**dims)))

    _for_each_kind(compare)


@check()
def the_adapter_is_what_peft_saves() -> None:
    import peft

    def compare(kind: str, plain: Any, model: Any) -> None:
        if kind == "two active":
            with _raises(ValueError, "exactly one active adapter", "default, other"):
                _extracted(model, lora="adapter")
            return
        name = "other" if kind == "one of two active" else "default"
        expected = peft.get_peft_model_state_dict(plain, adapter_name=name, save_embedding_layers=False)
        _same(_extracted(model, lora="adapter"), {name: tensor.detach() for name, tensor in expected.items()})

    _for_each_kind(compare)


@check()
def a_disabled_adapter_is_not_merged() -> None:
    for shard in _SHARDS.values():
        model = shard(_changed_copies(adapted(modules_to_save=["lm_head"])))
        with model.disable_adapter() if hasattr(model, "disable_adapter") else model.module.disable_adapter():
            _same(_extracted(model, lora="merged"), tensors_of(qwen()))
        assert not torch.equal(_extracted(model)["lm_head.weight"].cpu(), qwen().lm_head.weight)


@check()
def merged_in_bfloat16_is_the_cast_of_the_merge_in_float32() -> None:
    for shard in _SHARDS.values():
        expected = tensors_of(adapted().merge_and_unload())
        actual = _extracted(shard(adapted()), dtype=torch.bfloat16)
        assert sorted(actual) == sorted(expected)
        for name, tensor in actual.items():
            assert tensor.dtype == torch.bfloat16
            wanted = expected[name].to(torch.bfloat16)
            near = (tensor.cpu().float() - wanted.float()).abs() <= 1e-8
            assert ((_ordinal(tensor.cpu()) - _ordinal(wanted)).abs().le(1) | near).all(), f"{name}: more than one ulp"


def _ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """Of a bfloat16 number among all of them."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@check(device="emulated")
def offloaded_adapters_are_merged_on_the_device() -> None:
    expected = tensors_of(adapted().merge_and_unload())
    policy = CPUOffloadPolicy(pin_memory=True)
    _close(_extracted(_shard_qwen2(adapted(), offload_policy=policy)), expected)
    _close(_extracted(_shard_qwen1(adapted(), cpu_offload=CPUOffload(offload_params=True))), expected)


@check()
def adapters_under_ddp_are_merged() -> None:
    model = DistributedDataParallel(adapted().to(_device()))
    _close(_extracted(model), tensors_of(adapted().merge_and_unload()))


@check()
def adapters_of_a_transposed_weight_in_fsdp1_are_merged() -> None:
    """The flat parameter holds a weight in the order of its memory, which is not that of its rows."""

    def build() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10))
        net[0].weight = nn.Parameter(torch.randn(6, 10).t())
        return adapted(net, target_modules=["0"])

    expected = tensors_of(build().merge_and_unload())
    base = build().base_model.model[0].base_layer.weight.detach()
    model = FullyShardedDataParallel(build(), device_id=_device(), use_orig_params=True)
    assert torch.equal(_extracted(model, lora="base")["0.weight"].cpu(), base)
    _close(_extracted(model), expected)


@check()
def adapters_that_are_not_understood_are_refused_on_every_rank() -> None:
    model = _shard_qwen2(adapted(use_dora=True))
    with _raises(NotImplementedError, "Dora"):
        full_tensors(model, lora="merged")
    _same(_extracted(model, lora="base"), tensors_of(qwen()))


@check()
def ranks_that_want_different_adapters_all_raise_plan_mismatch() -> None:
    model = _shard_qwen2(adapted())
    with _raises(PlanMismatch, "lora=merged", "lora=base"):
        _extracted(model, lora="base" if _rank() == 0 else "merged")
    _same(_extracted(model, lora="base"), tensors_of(qwen()))


@check()
def a_device_of_another_kind_is_refused_before_anything_is_sent() -> None:
    model = _fsdp2(_net())
    with _raises(ValueError, "are gathered on"):
        full_tensors(model, device="meta")
    with _raises(ValueError, "are gathered on"):
        full_tensors(model, device="cuda:0" if _device_type() == "cpu" else "cpu")
    assert len(_extracted(model, device=_device_type())) == len(_net().state_dict())


@check(device="emulated")
def a_group_without_a_backend_for_the_device_is_refused() -> None:
    group = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(group, "emulated", list(range(_world())))
    model = fully_shard(nn.Linear(4, 4).to(_device()), mesh=mesh)
    with _raises(RuntimeError, "no backend for emulated"):
        full_tensors(model)


# The last two: where they fail, the ranks no longer count the same extractions, or one stands still.
@check()
def a_rank_that_comes_after_the_others_gave_up_is_told() -> None:
    """They wait as long as the store does."""
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    late = _world() - 1
    store = agreement._connection(private.default_store())
    if _rank() != late:
        usual = store.timeout
        store.set_timeout(datetime.timedelta(seconds=1))
        error = _error(RankLeft, lambda: _extracted(model), "ranks came to bucket 0 in time")
        store.set_timeout(usual)
        _together()
    else:
        _together()
        error = _error(RankLeft, lambda: _extracted(model))
    _no_errors(error)
    _same(_extracted(model), expected)


@check()
def a_rank_whose_arguments_are_refused_does_not_hold_up_the_others() -> None:
    """Nor the next extraction."""
    net = _net()
    expected = tensors_of(net)
    model = _fsdp2(net)
    refused = _world() - 1
    if _rank() == refused:
        error = _error(TypeError, lambda: _extracted(model, dtype=torch.int8))
    else:
        error = _error(RankLeft, lambda: _extracted(model), f"rank {refused} left")
    _no_errors(error)
    _same(_extracted(model), expected)


def _error(kind: type[BaseException], call: Callable[[], Any], *words: str) -> str:
    """What is wrong with the exception that ``call`` is to raise."""
    try:
        with _raises(kind, *words):
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _no_errors(error: str) -> None:
    """So that all ranks end the check where one fails."""
    errors = _of_all(error)
    assert not any(errors), errors


# The program


def _give_up(name: str, thread: int) -> None:
    place = "".join(traceback.format_stack(sys._current_frames()[thread])[-4:]).replace("\n", " ")
    _say(f"FAILED {name}: rank {_rank()}: no end within {SECONDS_FOR_A_CHECK} seconds: {place}")
    os._exit(1)


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _error_of(name: str) -> str:
    try:
        CHECKS[name].run()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        here = [frame.lineno for frame in frames if frame.filename == __file__]
        last = frames[-1]
        where = f"lines {here}, {os.path.basename(last.filename)}:{last.lineno}"
        return f"{type(error).__name__}: {error} ({where})".replace("\n", " ")[:1500]
    return ""


def _run(name: str) -> bool:
    """Whether it held on every rank."""
    watch = threading.Timer(SECONDS_FOR_A_CHECK, _give_up, (name, threading.get_ident()))
    watch.daemon = True
    watch.start()
    begin = time.monotonic()
    errors = _of_all(_error_of(name))
    watch.cancel()
    failed = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
    if _rank() == 0:
        _say(f"FAILED {name}: {failed}" if failed else f"ok {name} ({time.monotonic() - begin:.1f} s)")
    return not failed


def main() -> None:
    device, *only = sys.argv[1:]
    timeout = datetime.timedelta(seconds=SECONDS_OF_THE_GROUP)
    if device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401, which registers the device

        dist.init_process_group("cpu:gloo,emulated:emulated", timeout=timeout)
        _accelerator().set_device(_rank())
    else:
        dist.init_process_group("gloo", timeout=timeout)
    _control()
    held = [_run(name) for name in names_of_checks(device, _world()) if not only or name in only]
    # A thread of gloo that still holds a tensor may abort the interpreter's own exit.
    os._exit(not all(held))


if __name__ == "__main__":
    main()
