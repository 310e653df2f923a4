"""The same computation on the emulated device and on the CPU, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.emulated_device import DEVICE

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (FP32, BF16, FP16)
INF, NAN = float("inf"), float("nan")


class Inputs:
    """The same random tensors on either device: made on the CPU, then moved."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def leaf(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return self(*shape, dtype=dtype).requires_grad_()

    def positive(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return self(*shape, dtype=dtype).abs_() + 0.1

    def ints(self, *shape: int, high: int = 8, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(dtype).to(self.device)

    def bools(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < 0.6).to(self.device)

    def list(self, *shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[Tensor]:
        return [self(*shape, dtype=dtype) for shape in shapes]

    def of(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)


Op = Callable[[Inputs], Any]


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def assert_same_tensor(emulated: Tensor, host: Tensor, where: str = "") -> None:
    assert (emulated.device.type, host.device.type) == (DEVICE, "cpu"), where
    assert emulated.dtype == host.dtype, where
    assert emulated.shape == host.shape, where
    assert emulated.stride() == host.stride(), where
    assert emulated.storage_offset() == host.storage_offset(), where
    assert emulated.requires_grad == host.requires_grad, where
    assert torch.equal(bits(emulated), bits(host)), f"{where}\n{emulated}\n{host}"


def assert_same(emulated: Any, host: Any) -> None:
    ours, theirs = tree_leaves(emulated), tree_leaves(host)
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, Tensor):
            assert_same_tensor(one, other, f"result {index}")
        else:
            assert one == other


def both(op: Op) -> tuple[Any, Any]:
    return op(Inputs(DEVICE)), op(Inputs("cpu"))


def cases(table: dict[str, Op]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in table.items()])


def with_gradients(result: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
    return result, *torch.autograd.grad(result, leaves, weights.to(result.device))


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """What is left in ``tensor`` after ``change``, and what that returned."""
    returned = change(tensor)
    return tensor, returned


def each_dtype(name: str, op: Callable[[Inputs, torch.dtype], Any]) -> dict[str, Op]:
    return {f"{name} {str(dtype)[6:]}": lambda t, dtype=dtype: op(t, dtype) for dtype in FLOATS}  # type: ignore[misc]
