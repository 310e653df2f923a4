"""What the emulated device refuses, in the words of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import (
    BF16,
    FP64,
    Inputs,
    Op,
    assert_same,
    both,
    cases,
    changed,
    with_gradients,
)
from torch import Tensor
from torch.nn import functional

MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda here, there: here + there,
    "add, the other way": lambda here, there: there + here,
    "in place": lambda here, there: there.add_(here),
    "in place on the host": lambda here, there: here.add_(there),
    "matmul": lambda here, there: here @ there,
    "linear": lambda here, there: functional.linear(there, here),
    "cat": lambda here, there: torch.cat([there, here]),
    "where": lambda here, there: torch.where(there > 0, there, here),
    "embedding": lambda here, there: functional.embedding(torch.tensor([1, 2]), there),
    "out": lambda here, there: torch.add(there, 1, out=here),
    "foreach": lambda here, there: torch._foreach_add_([there], [here]),
    "sdpa": lambda here, there: functional.scaled_dot_product_attention(there, here, there),
    "another device": lambda here, there: there + there.to("emulated:1"),
    "cross_entropy": lambda here, there: functional.cross_entropy(there, torch.tensor([1, 1, 2, 2])),
    "index_select": lambda here, there: there.index_select(0, torch.tensor([1])),
    "a host tensor indexed by the device's": lambda here, there: here[torch.tensor([1], device=DEVICE)],
    "index_put of the host's values": lambda here, there: there.index_put_((torch.tensor([0, 1]),), here[:2]),
    "index_put into a host tensor": lambda here, there: here.index_put_((torch.tensor([0, 1]),), there[:2]),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_are_refused(mix: Callable[[Tensor, Tensor], Any]) -> None:
    here = torch.ones(4, 4)
    with pytest.raises(
        RuntimeError,
        match=r"Expected all tensors to be on the same device|indices should be either on cpu or on the same device"
        r"|Expected query, key, and value to have the same device type",
    ):
        mix(here, here.to(DEVICE))


@pytest.mark.parametrize("name", ["add", "add, the other way", "in place", "matmul", "linear", "cat", "foreach"])
def test_the_refusal_is_in_the_words_of_torch(name: str) -> None:
    here = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        MIXED[name](here, here.to(DEVICE))


CPU_NUMBERS: dict[str, Op] = {
    "add": lambda t: t(4) + torch.tensor(2.0),
    "the other way": lambda t: torch.tensor(2.0) - t(4),
    "in place": lambda t: t(4).mul_(torch.tensor(2.0)),
    "where": lambda t: torch.where(t.bools(4), t(4), torch.tensor(0.0)),
    "masked_fill": lambda t: t(4).masked_fill(t.bools(4), torch.tensor(1.0)),
    "promotion": lambda t: t(4, dtype=BF16) * torch.tensor(2.0, dtype=FP64),
    "pow": lambda t: t(4).pow(torch.tensor(2)),
    "fill_": lambda t: t(4).fill_(torch.tensor(3.0)),
    "foreach": lambda t: torch._foreach_mul(t.list((2,), (3,)), torch.tensor(2.0)),
    "clamp": lambda t: t(4).clamp(torch.tensor(0.0)),
    "set": lambda t: changed(t(4), lambda x: x.__setitem__(1, torch.tensor(9.0))),
}


CPU_INDICES: dict[str, Op] = {
    "by a tensor": lambda t: t(6, 3)[torch.tensor([4, 1])],
    "by a mask": lambda t: t(3)[torch.tensor([True, False, True])],
    "by both": lambda t: t(6, 3)[torch.tensor([4, 1]), t.of([1, 2])],
    "set": lambda t: changed(t(6, 3), lambda x: x.__setitem__(torch.tensor([4, 1]), 0.0)),
    "index_put_": lambda t: t(6).index_put_((torch.tensor([4, 1]),), t(2), accumulate=True),
    "with a gradient": lambda t: (lambda x: with_gradients(x[torch.tensor([4, 4])], x))(t.leaf(6, 3)),
}


@cases(CPU_NUMBERS)
def test_a_cpu_tensor_without_dimensions_is_a_number(op: Op) -> None:
    assert_same(*both(op))


@cases(CPU_INDICES)
def test_an_index_may_be_on_the_cpu(op: Op) -> None:
    assert_same(*both(op))


WRONG: dict[str, Op] = {
    "out of another dtype": lambda t: torch.add(t(3), t(3), out=t.empty(3, dtype=torch.int64)),
    "mm out of another dtype": lambda t: torch.mm(t(3, 3), t(3, 3), out=t.empty(3, 3, dtype=BF16)),
    "shapes that do not fit": lambda t: t(3, 4) @ t(3, 4),
    "no broadcast": lambda t: t(3) + t(4),
    "dtypes that do not fit": lambda t: t(3, 3) @ t(3, 3, dtype=BF16),
    "a view that is none": lambda t: t(3, 4).t().view(12),
    "a storage that is too small": lambda t: t(3).as_strided((9,), (1,)),
    "item of many": lambda t: t(3).item(),
    "truth of many": lambda t: bool(t(3)),
    "in place on a leaf": lambda t: t.leaf(3).add_(1),
    "in place on an expanded": lambda t: t(1).expand(3).add_(1),
    "copy_ of another shape": lambda t: t(3).copy_(t(4)),
    "int from a fraction in place": lambda t: t.ints(3).add_(0.5),
    "backward of a changed tensor": lambda t: (lambda x: (x.exp() * (y := x.exp())).sum() + y.add_(1).sum())(
        t.leaf(3)
    ).backward(),
    "cat of other shapes": lambda t: torch.cat([t(2, 3), t(2, 4)]),
    "split that does not add up": lambda t: t(7).split([1, 2]),
    "narrow_copy beyond the end": lambda t: t(3).narrow_copy(0, 2, 5),
    "gradient of an integer": lambda t: t.ints(3).requires_grad_(),
    "foreach of other lengths": lambda t: torch._foreach_add(t.list((2,)), t.list((2,), (2,))),
}


NEITHER: dict[str, Callable[[Tensor], Tensor]] = {
    "Mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", NEITHER)
def test_a_tensor_that_is_neither_dense_nor_sparse_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"has dense and sparse tensors alone, and this one is {name}"):
        NEITHER[name](torch.ones(3, device=DEVICE))


def error_of(op: Op, device: str) -> str:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        op(Inputs(device))
    return f"{caught.type.__name__}: {caught.value}".split("\n")[0]


@cases(WRONG)
def test_a_mistake_is_told_in_the_words_of_the_cpu(op: Op) -> None:
    there, here = error_of(op, DEVICE), error_of(op, "cpu")
    assert there.replace("emulatedFloatType", "torch.FloatTensor").replace("emulated:0", "cpu") == here
