"""Tensors of every kind as inputs, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import (
    BF16,
    FP32,
    Inputs,
    Op,
    assert_same,
    bits,
    both,
    cases,
)
from torch import Tensor
from torch.nn import functional

NON_CONTIGUOUS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "every second column": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(8, 8),
    "with an offset": lambda x: x[3:, 1:],
    "overlapping": lambda x: x.as_strided((8, 8), (3, 1)),
    "one column": lambda x: x[:, 3],
    "0-dim": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "empty columns": lambda x: x[:, 5:5],
}


UNARY: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda x: x * 3,
    "add itself": lambda x: x + x,
    "silu": functional.silu,
    "softmax": lambda x: functional.softmax(x, -1),
    "sum": torch.sum,
    "mean": torch.mean,
    "sum of a dimension": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous(),
    "to bfloat16": lambda x: x.to(BF16),
    "cat": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    "sort": lambda x: x.sort(-1),
    "norm": torch.linalg.vector_norm,
    "where": lambda x: torch.where(x > 0, x, 0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "empty_like": lambda x: torch.empty_like(x).fill_(1),
    "tolist": lambda x: x.tolist(),
    "numel, is_contiguous": lambda x: (x.numel(), x.is_contiguous(), x.nbytes),
    "foreach mul": lambda x: torch._foreach_mul([x], 2),
    "matmul": lambda x: x @ x.mT if x.dim() == 2 else x * x,
}


@pytest.mark.parametrize("view", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS)
@pytest.mark.parametrize("operation", UNARY.values(), ids=UNARY)
def test_an_operation_reads_any_strides(operation: Callable[[Tensor], Any], view: Callable[[Tensor], Tensor]) -> None:
    assert_same(*both(lambda t: operation(view(t(8, 8)))))


@pytest.mark.parametrize("view", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int64, torch.bool], ids=str)
def test_a_tensor_of_any_strides_and_dtype_moves_to_the_host_unchanged(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    host = view(Inputs("cpu")(8, 8).to(dtype))
    moved = view(Inputs(DEVICE)(8, 8).to(dtype))
    assert torch.equal(bits(moved.cpu()), bits(host))
    assert moved.cpu().stride() == host.clone().stride()


@pytest.mark.parametrize("view", [name for name in NON_CONTIGUOUS if name not in ("expanded", "overlapping")])
@pytest.mark.parametrize("source", [FP32, BF16], ids=str)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_copy_to_any_strides_and_dtype_reaches_them_alone(view: str, source: torch.dtype, pinned: bool) -> None:
    part = NON_CONTIGUOUS[view]
    there, expected = Inputs(DEVICE)(8, 8), Inputs("cpu")(8, 8)
    values = torch.randn(part(expected).shape).to(source)
    part(there).copy_(values.pin_memory() if pinned else values, non_blocking=True)
    part(expected).copy_(values)
    assert torch.equal(bits(there), bits(expected))


@pytest.mark.parametrize("view", [name for name in NON_CONTIGUOUS if name not in ("expanded", "overlapping")])
@pytest.mark.parametrize("target", [FP32, BF16], ids=str)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_copy_from_the_device_reaches_any_strides_and_dtype_alone(
    view: str, target: torch.dtype, pinned: bool
) -> None:
    part = NON_CONTIGUOUS[view]
    here = torch.zeros(8, 8, dtype=target, pin_memory=pinned)
    values = torch.randn(part(here).shape)
    expected = torch.zeros(8, 8, dtype=target)
    part(expected).copy_(values)
    part(here).copy_(values.to(DEVICE), non_blocking=True)
    torch.emulated.synchronize()
    assert torch.equal(bits(here), bits(expected))


def test_copies_between_two_devices_keep_the_bits() -> None:
    values = torch.randn(5, 6)
    there = values.to("emulated:0").t().to("emulated:1", BF16)
    assert there.device == torch.device("emulated", 1)
    assert torch.equal(bits(there), bits(values.t().to(BF16)))


# Random numbers: the first operation after a seed is the CPU's


RANDOM: dict[str, Op] = {
    "randn": lambda t: torch.randn(20, device=t.device),
    "rand": lambda t: torch.rand(20, device=t.device),
    "randint": lambda t: torch.randint(0, 100, (20,), device=t.device),
    "randperm": lambda t: torch.randperm(20, device=t.device),
    "randn_like": lambda t: torch.randn_like(t(20)),
    "rand_like in bfloat16": lambda t: torch.rand_like(t(20, dtype=BF16)),
    "normal_": lambda t: t.empty(20).normal_(0, 0.02),
    "normal_ in bfloat16": lambda t: t.empty(20, dtype=BF16).normal_(0, 0.02),
    "uniform_": lambda t: t.empty(20).uniform_(-1, 1),
    "kaiming_uniform_": lambda t: torch.nn.init.kaiming_uniform_(t.empty(4, 5)),
    "exponential_": lambda t: t.empty(20).exponential_(),
    "bernoulli": lambda t: torch.bernoulli(t(20).sigmoid()),
    "bernoulli_": lambda t: t.empty(20).bernoulli_(0.3),
    "random_": lambda t: t.empty(20, dtype=torch.int64).random_(10),
    "multinomial": lambda t: torch.multinomial(t.positive(8), 5, replacement=True),
    "dropout": lambda t: functional.dropout(t(20), 0.5),
    "normal": lambda t: torch.normal(t(20), t.positive(20)),
}


@cases(RANDOM)
def test_the_first_random_operation_after_a_seed_is_that_of_the_cpu(op: Op) -> None:
    def seeded(t: Inputs) -> Any:
        torch.manual_seed(11)
        return op(t)

    assert_same(*both(seeded))


@cases(RANDOM)
def test_a_random_operation_does_not_move_the_generator_of_the_cpu(op: Op) -> None:
    before = torch.get_rng_state()
    op(Inputs(DEVICE))
    assert torch.equal(torch.get_rng_state(), before)


@cases(RANDOM)
def test_two_random_operations_in_a_row_differ_and_are_repeatable(op: Op) -> None:
    def seeded() -> list[Tensor]:
        torch.manual_seed(11)
        return [op(Inputs(DEVICE)) for _ in range(2)]

    one, two = seeded()
    assert not torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(seeded(), [one, two], strict=True))


def test_a_generator_of_the_device_draws_what_a_generator_of_the_cpu_draws() -> None:
    def op(t: Inputs) -> Tensor:
        return torch.randn(9, device=t.device, generator=torch.Generator(t.device).manual_seed(5))

    assert_same(*both(op))


def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected an 'emulated' device type for generator but found 'cpu'"):
        torch.randn(9, device=DEVICE, generator=torch.Generator())
