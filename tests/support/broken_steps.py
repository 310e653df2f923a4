"""Training steps that raise, as when memory runs out or a NaN is found, and the expected results of later steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from support.extraction import Tensors, tensors_of
from support.ranks import this_device, this_rank


class Raised(Exception):
    """The error that a step raises."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Raised


@contextlib.contextmanager
def raising(module: nn.Module, part: Literal["forward", "backward"]) -> Iterator[None]:
    """Makes a step raise after the module's forward or at the start of its backward.

    The error is caught at the end of the block.
    """

    def interrupt(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        if part == "forward":
            raise Raised
        return _RaiseInBackward.apply(output)  # type: ignore[no-any-return]

    hook = module.register_forward_hook(interrupt)
    with contextlib.suppress(Raised):
        yield
        raise AssertionError("the step did not raise")
    hook.remove()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), Layer(), Layer(), nn.Linear(6, 5))


class Job:
    """A model and its optimizer in a training loop, after ``steps`` steps."""

    def __init__(
        self,
        wrap: Callable[[Any], nn.Module],
        *,
        make: Callable[[], nn.Module] = make_net,
        steps: int = 2,
    ) -> None:
        net = make()
        self.net = net
        self.before = tensors_of(net)
        self.model: Any = wrap(net)
        self.make_optimizer()
        for _ in range(steps):
            self.step()

    def make_optimizer(self) -> None:
        """Makes an optimizer for the parameters that the model has now."""
        self.shards = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.shards.values(), lr=0.05)

    def find(self, name: str) -> nn.Module:
        """Finds a module of the model, without FSDP1's wrapper around it."""
        inner = self.net.get_submodule(name)
        return inner.module if isinstance(inner, FullyShardedDataParallel) else inner

    def compute_loss(self, seed: int = 0) -> torch.Tensor:
        """Computes the loss of this rank's batch."""
        generator = torch.Generator().manual_seed(10 * seed + this_rank())
        return self.model(torch.randn(4, 3, generator=generator).to(this_device())).square().sum()  # type: ignore[no-any-return]

    def finish_backward(self) -> None:
        """Does nothing; a job with work between the backward and the optimizer's step overrides this method."""

    def step(self, seed: int = 0) -> tuple[float, Tensors]:
        """Takes a step. Returns the loss and this rank's gradients."""
        loss = self.compute_loss(seed)
        loss.backward()
        self.finish_backward()
        gradients = {name: shard.grad for name, shard in self.shards.items() if shard.grad is not None}
        found = {n: (g.to_local() if isinstance(g, DTensor) else g).detach().clone() for n, g in gradients.items()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss), found

    def raise_in(self, name: str, part: Literal["forward", "backward"]) -> None:
        """Takes a step that raises, and clears the gradients of the parameters in the optimizer."""
        with raising(self.find(name), part):
            self.compute_loss().backward()
        self.optimizer.zero_grad()


def wrap_fsdp2(net: nn.Sequential, **options: Any) -> nn.Module:
    net.to(this_device())
    for name in ("1", "2"):
        fully_shard(net.get_submodule(name), **options)
    return fully_shard(net, **options)


def wrap_fsdp1(net: nn.Sequential, **options: Any) -> nn.Module:
    every: dict[str, Any] = {"device_id": this_device(), **options}
    for name in ("1", "2"):
        net[int(name)] = FullyShardedDataParallel(net[int(name)], **every)
    return FullyShardedDataParallel(net, **every)


def assert_same_steps(job: Job, twin: Job, count: int = 2) -> None:
    """Asserts that both jobs take the same steps, with the same bits in losses and gradients."""
    for seed in range(1, 1 + count):
        (loss, found), (right_loss, right) = job.step(seed), twin.step(seed)
        assert loss == right_loss, f"step {seed}: the loss is {loss}, not {right_loss}"
        assert found.keys() == right.keys(), f"step {seed}: gradients of {sorted(found)}, not of {sorted(right)}"
        wrong = [name for name in right if not torch.equal(found[name].cpu(), right[name].cpu())]
        assert not wrong, f"step {seed}: other gradients of {wrong}"
