"""Tensors whose elements are put off until they are read: conjugated, negated, known to be zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import Inputs, Op, assert_same, both, cases
from torch.nn import functional

C64 = torch.complex64


def hermitian_solution(t: Inputs) -> Any:
    factors, pivots = torch.linalg.lu_factor(t(3, 3, dtype=C64))
    right = t(3, 3, dtype=C64)
    return [torch.linalg.lu_solve(factors, pivots, right, left=left, adjoint=True) for left in (True, False)]


def copied(target: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    """The base of a lazy target after a copy from the host into it."""

    def copy(t: Inputs) -> torch.Tensor:
        base = t.zeros(3, dtype=C64)
        values = torch.tensor([1 + 2j, 3 - 4j, 5j])
        target(base).copy_(values if target(base).is_complex() else values.real)
        return base

    return copy


LAZY: dict[str, Op] = {
    "vdot with a conjugate": lambda t: torch.vdot(t(3, dtype=C64), t(3, dtype=C64).conj()),
    "vdot of a conjugate": lambda t: torch.vdot(t(3, dtype=C64).conj(), t(3, dtype=C64)),
    "lu_solve": hermitian_solution,
    "a copy into a conjugate": copied(torch.Tensor.conj),
    "a copy into an imaginary part of a conjugate": copied(lambda base: base.conj().imag),
    "a conjugate in place": lambda t: t(3, dtype=C64).conj_physical_(),
    "a copy of a conjugate": lambda t: t(3, dtype=C64).conj().to(torch.complex128),
    "matmul of conjugates": lambda t: t(3, 3, dtype=C64).conj() @ t(3, 3, dtype=C64).mH,
}


@cases(LAZY)
def test_a_lazy_conjugate_or_negative_is_that_of_the_cpu(op: Op) -> None:
    assert_same(*both(op))


def test_a_conjugate_is_copied_to_the_host_as_what_it_is() -> None:
    values = torch.tensor([1 + 2j, -3j])
    assert values.to(DEVICE).conj().cpu().tolist() == values.conj().tolist()


def test_a_tensor_known_to_be_zero_has_no_memory_and_is_zero() -> None:
    zero = torch._efficientzerotensor((3,), device=DEVICE)
    assert zero._is_zerotensor()
    assert zero.cpu().tolist() == [0.0] * 3
    assert (zero + torch.ones(3, device=DEVICE)).tolist() == [1.0] * 3
    assert zero.reshape(3, 1).clone().tolist() == [[0.0]] * 3
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zero.copy_(torch.ones(3))


def gradient_of_sgn(t: Inputs) -> torch.Tensor:
    x = t.leaf(3)
    torch.sgn(x).sum().backward()
    assert x.grad is not None
    return x.grad


DERIVATIVES: dict[str, Op] = {
    "sgn backward": gradient_of_sgn,
    "hessian": lambda t: torch.func.hessian(lambda a: (a**3).sum())(t(3)),
    "jvp through linear": lambda t: torch.func.jvp(lambda a: functional.linear(a, t(4, 3)), (t(2, 3),), (t(2, 3),)),
    "jvp with respect to one of two": lambda t: torch.func.jvp(
        lambda a: torch.where(a > 0, a * 2, torch.zeros_like(a)), (t(5),), (t(5),)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@cases(DERIVATIVES)
def test_derivatives_that_are_zero_are_those_of_the_cpu(op: Op) -> None:
    assert_same(*both(op))
