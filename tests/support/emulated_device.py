"""The emulated device in this process. A test file that imports this module is skipped without the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

emulated: Any = pytest.importorskip("fsdp_doctor.emulated.device", exc_type=ImportError)

DEVICE, OTHER = "emulated", "emulated:1"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_Entry = TypeVar("_Entry")


def check_each(table: Mapping[str, _Entry], check: Callable[[_Entry], Any]) -> None:
    """Runs ``check`` for every entry, and fails with the names of the entries for which it raised."""
    failures = {}
    for name, entry in table.items():
        try:
            check(entry)
        except (Exception, pytest.fail.Exception) as error:
            failures[name] = f"{type(error).__name__}: {error}"
    assert not failures, "\n".join(f"{name}: {why}" for name, why in failures.items())


# Memory, streams


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, dtype=FP32).pin_memory()


def on_device(*values: float, device: str = DEVICE) -> Tensor:
    """Makes a tensor and fills it on the device, so that no copy into it is in flight."""
    made = torch.empty(len(values), device=device)
    for index, value in enumerate(values):
        made[index].fill_(value)
    return made


class Used:
    """Counts the bytes that were allocated on a device since this object was made."""

    def __init__(self, device: int = 0) -> None:
        # The traceback of an earlier failed test may still refer to tensors.
        gc.collect()
        self.device = device
        self.before = emulated.memory_allocated(device)
        emulated.reset_peak_memory_stats(device)

    def now(self) -> int:
        return emulated.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        return emulated.max_memory_allocated(self.device) - self.before


def in_stream(stream: torch.Stream, do: Callable[[], Any]) -> Any:
    with emulated.stream(stream):
        return do()


# The same computation on the device and on the CPU


class Inputs:
    """Random tensors that are the same on either device, because they are made on the CPU and then moved."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def leaf(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return self(*shape, dtype=dtype).requires_grad_()

    def positive(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return self(*shape, dtype=dtype).abs_() + 0.1

    def ints(self, *shape: int, high: int = 8) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def bools(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < 0.6).to(self.device)

    def list(self, *shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[Tensor]:
        return [self(*shape, dtype=dtype) for shape in shapes]

    def of(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)


Op = Callable[[Inputs], Any]


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def assert_same_tensor(here: Tensor, there: Tensor, where: str = "") -> None:
    """Asserts that ``here``, on the device, and ``there``, on the CPU, are equal in every property but the device."""
    assert (here.device.type, there.device.type) == (DEVICE, "cpu"), where
    for what in ("dtype", "shape", "requires_grad"):
        assert getattr(here, what) == getattr(there, what), f"{what} of {where}"
    assert (here.stride(), here.storage_offset()) == (there.stride(), there.storage_offset()), where
    assert torch.equal(bits(here), bits(there)), f"{where}\n{here}\n{there}"


def assert_as_on_cpu(op: Op) -> None:
    """Asserts that every tensor of the result has the same bits, strides and dtype as on the CPU.

    Other values must be equal.
    """
    here, there = tree_leaves(op(Inputs(DEVICE))), tree_leaves(op(Inputs("cpu")))
    assert len(here) == len(there)
    for index, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        if isinstance(ours, Tensor):
            assert_same_tensor(ours, theirs, f"result {index}")
        else:
            assert ours == theirs


def with_gradients(result: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.dtype)
    return result, *torch.autograd.grad(result, leaves, weights.to(result.device))
