"""A model that several ranks train on the emulated device, and the same training on the CPU in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.ranks import Setting, on_ranks, this_device, this_rank, world_size

Tensors = dict[str, torch.Tensor]
Losses = dict[tuple[int, int], float]  # of (step, rank)

STEPS = 3

on_the_device = on_ranks(Setting("emulated", 2), Setting("emulated", 3))


# The model, its data and its training


@dataclasses.dataclass(frozen=True)
class Dims:
    vocabulary: int
    width: int
    hidden: int


EVEN = Dims(vocabulary=24, width=12, hidden=18)
UNEVEN = Dims(vocabulary=11, width=7, hidden=5)


class Block(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dims.width)
        self.up = nn.Linear(dims.width, dims.hidden)
        self.down = nn.Linear(dims.hidden, dims.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self, dims: Dims, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(dims.vocabulary, dims.width)
        self.blocks = nn.ModuleList(Block(dims) for _ in range(3))
        self.head = nn.Linear(dims.width, dims.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(hidden)


def new_net(dims: Dims = EVEN, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(dims, **options)


def tokens_of(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (2, 5), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def backward(
    model: nn.Module, step: int, ranks: Sequence[int], device: torch.device, vocabulary: int = EVEN.vocabulary
) -> Losses:
    """Computes the gradient of the mean loss over the ranks' batches. A real rank computes only its own part."""
    losses: Losses = {}
    for rank in ranks:
        loss = loss_of(model, tokens_of(step, rank, vocabulary).to(device))
        (loss / len(ranks)).backward()
        losses[step, rank] = loss.item()
    return losses


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Sequence[int] = (),
    steps: Sequence[int] = range(STEPS),
    vocabulary: int = EVEN.vocabulary,
) -> Losses:
    """Trains on this rank's batches, on its device. If ``ranks`` are given, trains on their batches, on the CPU."""
    device = this_device() if not ranks else torch.device("cpu")
    losses: Losses = {}
    for step in steps:
        losses |= backward(model, step, ranks or [this_rank()], device, vocabulary)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@functools.cache
def trained_on_cpu(dims: Dims = EVEN, steps: int = STEPS) -> tuple[Tensors, Losses]:
    """Trains on the CPU, in one process, on the batches of all ranks."""
    net = new_net(dims)
    losses = train(net, adamw(net), ranks=all_ranks(), steps=range(steps), vocabulary=dims.vocabulary)
    return weights_of(net), losses


@functools.cache
def gradients_on_cpu(dims: Dims = EVEN, steps: int = 1) -> Tensors:
    """Computes the gradients of all ranks on the CPU, in one process, summed over the steps."""
    net = new_net(dims)
    for step in range(steps):
        backward(net, step, all_ranks(), torch.device("cpu"), dims.vocabulary)
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def weights_of(net: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def fsdp2_of(net: nn.Module, **options: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh_of_all(), **options)
    return fully_shard(net, mesh=mesh_of_all(), **options)


def check_training(model: nn.Module, dims: Dims = EVEN) -> None:
    losses = train(model, adamw(model), vocabulary=dims.vocabulary)
    expected, expected_losses = trained_on_cpu(dims)
    assert_close_losses(losses, expected_losses)
    assert_all(assert_close, shards_of(model), parts_of(expected))


def other_net(dims: Dims = EVEN) -> Net:
    torch.manual_seed(1)
    return Net(dims)


# The ranks


def all_ranks() -> range:
    return range(world_size())


@functools.cache
def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("emulated", (world_size(),))


@functools.cache
def group_of_the_device_alone() -> dist.ProcessGroup:
    """Makes a process group that has no backend for the CPU."""
    return dist.new_group(backend="emulated")


def allocated_bytes() -> int:
    """Returns the allocated bytes after a garbage collection, so that only the caller can change them."""
    gc.collect()
    return torch.get_device_module("emulated").memory_allocated()


@contextlib.contextmanager
def shared_directory() -> Iterator[str]:
    """Makes a directory that is the same for all ranks."""
    name = [tempfile.mkdtemp() if this_rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if this_rank() == 0:
        shutil.rmtree(name[0])


# Comparisons


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=0, atol=0)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=rtol, atol=atol)


def assert_all(compare: Callable[[torch.Tensor, torch.Tensor], None], actual: Tensors, expected: Tensors) -> None:
    assert sorted(actual) == sorted(expected), sorted(set(actual) ^ set(expected))
    for name, tensor in actual.items():
        try:
            compare(tensor, expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_close_losses(actual: Losses, expected: Losses) -> None:
    for key, loss in actual.items():
        assert_close(torch.tensor(loss), torch.tensor(expected[key]))


def part_of(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Returns this rank's shard, divided as torch.chunk does: the last ranks may get fewer rows or none."""
    chunks = tensor.chunk(world_size(), dim)
    return chunks[this_rank()] if this_rank() < len(chunks) else tensor.narrow(dim, 0, 0)


def parts_of(tensors: Tensors, dim: int = 0) -> Tensors:
    return {name: part_of(tensor, dim) for name, tensor in tensors.items()}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(model: nn.Module) -> Tensors:
    return {name: local_of(parameter.detach()) for name, parameter in model.named_parameters()}


def gradient_shards_of(model: nn.Module) -> Tensors:
    return {name: local_of(parameter.grad) for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def raises_saying(message: str) -> Iterator[None]:
    raised = "nothing was raised"
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raised = str(error)
    assert message in raised, f"{message!r} was expected: {raised}"
