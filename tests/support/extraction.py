"""Code that the tests of the extraction share: models, ways to shard them, comparisons.

Expected values are those of the model before it was sharded.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_doctor import RankLeft, full_tensors
from fsdp_doctor.weights.extract.plan import Arguments, Plan, get_plan
from support.ranks import Setting, device_type, on_ranks, this_device, this_rank, world_size

Tensors = dict[str, torch.Tensor]

MIB = 1 << 20
FEW_BYTES = 1024
# A check that ends within this time counts as not hanging. It is much less than the timeout of a collective.
SECONDS_TO_NOTICE = 20

everywhere = on_ranks(Setting("emulated", 2), Setting("cpu", 3))
at_any_size = on_ranks(Setting("emulated", 2), Setting("cpu", 1), Setting("cpu", 3), Setting("cpu", 4))
on_the_device = on_ranks(Setting("emulated", 2))


@functools.cache
def mesh_over(*shape: int) -> DeviceMesh:
    """Makes a mesh of all ranks with one dimension, or with the dimensions of ``shape``."""
    dims = shape or (world_size(),)
    return init_device_mesh(device_type(), dims, mesh_dim_names=("outer", "inner")[: len(dims)])


# Models


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
    """A model with the kinds of tensors that extractions must handle.

    It has matrices whose rows divide by the ranks and others whose rows do not, a single row, a tied pair, frozen
    parameters, and all kinds of buffers.
    """

    def __init__(self, rows: int = 23, hidden: int = 14, large_rows: int = 1031, *, empty: bool = True) -> None:
        super().__init__()
        width = 8
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(2))
        # Larger than 1 MiB even in bfloat16.
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


class Many(nn.Module):
    """A model of many tensors of 25 kB, so that an FSDP1 unit of it fills more than two small buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(97 + index, 64)) for index in range(24))


EVEN = {"rows": 24, "hidden": 12, "large_rows": 1032}
UNEVEN = {"rows": 23, "hidden": 14, "large_rows": 1031}
INTEGERS = ("steps", "table")


def new_net(**dims: Any) -> Net:
    torch.manual_seed(0)
    return Net(**dims)


def tensors_of(model: nn.Module) -> Tensors:
    state = model.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in state if isinstance(tensor, torch.Tensor)}


def fsdp2(net: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    net = net.to(this_device())
    mesh = mesh or mesh_over()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


Sharded = tuple[Any, Tensors]


def sharded_net(mesh: DeviceMesh | None = None, *, dims: Mapping[str, Any] = UNEVEN, **options: Any) -> Sharded:
    """Returns a Net under FSDP2, and its tensors before it was sharded."""
    net = new_net(**dims)
    expected = tensors_of(net)
    return fsdp2(net, mesh, **options), expected


def fsdp1(net: nn.Module, *, use_orig_params: bool = True, **options: Any) -> nn.Module:
    """Wraps a Net with FSDP1.

    Its integer tensors are buffers, so that they are not in the flat parameter, which holds frozen and trained
    parameters.
    """
    every = {"device_id": this_device(), "use_orig_params": use_orig_params, **options}
    for index, layer in enumerate(net.layers):
        net.layers[index] = FullyShardedDataParallel(layer, **every)
    return FullyShardedDataParallel(net, **every)


def sharded_net1(*, dims: Mapping[str, Any] = UNEVEN, **options: Any) -> Sharded:
    """Returns a Net under FSDP1, and its tensors before it was sharded."""
    net = new_net(**dims, empty=False)
    net = net if options.get("use_orig_params", True) else all_trainable(net)
    expected = tensors_of(net)
    return fsdp1(net, **options), expected


def all_trainable(net: nn.Module) -> nn.Module:
    """Makes all parameters trainable, because FSDP1 without use_orig_params cannot mix them with frozen parameters."""
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    return net


def train_step(model: nn.Module, seed: int = 0) -> float:
    """Takes a step of SGD, which has no state besides the parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(10 * seed + this_rank())
    tokens = torch.randint(0, 20, (2, 5), generator=generator).to(this_device())
    loss = model(tokens).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


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
    """Adds adapters with random factors.

    With peft's initial values, of which one factor is zero, a merge that does nothing would pass.
    """
    import peft

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    model = model if model is not None else qwen()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **options}))


def layers_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def shard_qwen2(model: Any, **options: Any) -> Any:
    model = model.to(this_device())
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh_over(), **options)
    return fully_shard(model, mesh=mesh_over(), **options)


def shard_qwen1(model: Any, **options: Any) -> Any:
    layers = layers_of(model)
    every = {"device_id": this_device(), "use_orig_params": True, **options}
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(layer, **every)
    return FullyShardedDataParallel(model, **every)


def plan_for(model: nn.Module, bucket_bytes: int = 256 << 20) -> Plan:
    return get_plan(model, Arguments.check(bucket_bytes=bucket_bytes))[0]


# Comparisons


def extracted(model: nn.Module, **options: Any) -> Tensors:
    pairs = list(full_tensors(model, **options))
    doubled = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
    assert not doubled, f"yielded more than once: {doubled}"
    return dict(pairs)


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], device: Any = None) -> None:
    """Asserts equal names, shapes, dtypes and bits."""
    assert sorted(actual) == sorted(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in actual.items():
        wanted = expected[name]
        assert tensor.shape == wanted.shape, f"{name}: {tuple(tensor.shape)} instead of {tuple(wanted.shape)}"
        assert tensor.dtype == wanted.dtype, f"{name}: {tensor.dtype} instead of {wanted.dtype}"
        assert tensor.device == (device or this_device()), f"{name} is on {tensor.device}"
        assert torch.equal(tensor.cpu(), wanted.cpu()), f"{name}: values differ"


def assert_close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(actual) == sorted(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor.cpu(), expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def take_some(tensors: Iterator[Any], raises_at: int | None) -> None:
    """Takes all tensors, or raises ZeroDivisionError at the tensor with the index ``raises_at``.

    The error's traceback keeps a reference to the iterator.
    """
    for place, _ in enumerate(tensors):
        if place == raises_at:
            raise ZeroDivisionError


@contextlib.contextmanager
def raises_soon(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Context that must raise ``kind`` soon, with all of these words in its message."""
    begin = time.monotonic()
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    took = time.monotonic() - begin
    missing = [word for word in words if word not in message]
    assert not missing, f"{kind.__name__} does not say {missing}: {message} (after {took:.1f} seconds)"
    assert took < SECONDS_TO_NOTICE, f"{kind.__name__} only after {took:.1f} seconds"


def raised_by(rank: int, kind: type[BaseException], *words: str) -> contextlib.AbstractContextManager[None]:
    """Asserts that this rank raises ``kind``, and that every other rank soon raises RankLeft, with these words."""
    if this_rank() == rank:
        return raises_soon(kind, *words)
    return raises_soon(RankLeft, f"rank {rank} left", *words)


def cast_of(tensors: Tensors, dtype: torch.dtype, *kept: str) -> Tensors:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in kept else tensor
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
