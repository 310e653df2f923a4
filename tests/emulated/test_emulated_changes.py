"""Views, and operations in place, with ``out=`` and on lists of tensors, are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import (
    BF16,
    FLOATS,
    FP32,
    INF,
    NAN,
    Inputs,
    assert_same,
    both,
)
from torch import Tensor
from torch.nn import functional

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(3, 8),
    "view of a part": lambda x: x[1:].view(2, 8),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 5), 1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "select": lambda x: x.select(0, 2),
    "index": lambda x: x[1, ..., None, ::2],
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(3, 5, 4),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "view as a smaller dtype": lambda x: x.view(torch.uint8),
    "view as a larger dtype": lambda x: x.view(torch.float64),
    "view as the same size": lambda x: x.view(torch.int32),
    "t": lambda x: x[0].t(),
    "detach": lambda x: x.detach(),
    "squeeze and unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "view_as": lambda x: x.view_as(x.reshape(6, 4)),
    "alias": lambda x: torch.ops.aten.alias(x),
    "flatten and unflatten": lambda x: x.flatten(0, 1).unflatten(0, (3, 2)),
    "movedim": lambda x: x.movedim(0, -1),
    "swapaxes of a slice": lambda x: x[1:, :, 1:].swapaxes(0, 1),
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "split": lambda x: x.split([1, 2])[1],
    "unbind": lambda x: x.unbind(-1)[3],
    "data": lambda x: x.data,
    "numpy-like T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
}


IN_PLACE: dict[str, Callable[[Inputs, Tensor], Any]] = {
    "add_": lambda t, x: x.add_(t(4), alpha=0.1),
    "sub_": lambda t, x: x.sub_(1),
    "mul_": lambda t, x: x.mul_(t(3, 1)),
    "div_": lambda t, x: x.div_(3),
    "pow_": lambda t, x: x.pow_(2),
    "neg_": lambda t, x: x.neg_(),
    "zero_": lambda t, x: x.zero_(),
    "fill_": lambda t, x: x.fill_(2.5),
    "fill_ by a tensor": lambda t, x: x.fill_(t.of(2.5)),
    "copy_": lambda t, x: x.copy_(t(3, 4)),
    "copy_ from another dtype": lambda t, x: x.copy_(t(3, 4, dtype=BF16)),
    "copy_ from a row": lambda t, x: x.copy_(t(4)),
    "copy_ from a transposed": lambda t, x: x.copy_(t(4, 3).t()),
    "lerp_": lambda t, x: x.lerp_(t(3, 4), 0.1),
    "addcmul_": lambda t, x: x.addcmul_(t(3, 4), t(3, 4), value=0.1),
    "addcdiv_": lambda t, x: x.addcdiv_(t(3, 4), t.positive(3, 4), value=-0.1),
    "sqrt_": lambda t, x: x.abs_().sqrt_(),
    "clamp_": lambda t, x: x.clamp_(max=0.2),
    "masked_fill_": lambda t, x: x.masked_fill_(t.bools(3, 4), 0),
    "silu_": lambda t, x: functional.silu(x, inplace=True),
    "addmm_": lambda t, x: x.addmm_(t(3, 5), t(5, 4)),
    "scatter_add_": lambda t, x: x.scatter_add_(1, t.ints(3, 2, high=4), t(3, 2)),
    "squeeze_": lambda t, x: x.unsqueeze_(0).squeeze_(),
    "unsqueeze_": lambda t, x: x.unsqueeze_(1),
    "t_": lambda t, x: x.t_(),
    "transpose_": lambda t, x: x.transpose_(0, 1),
    "swapaxes_": lambda t, x: x.swapaxes_(0, 1),
    "as_strided_": lambda t, x: x.as_strided_((2, 2), (1, 3), 1),
    "resize_ smaller": lambda t, x: x.resize_(2, 3),
    "resize_as_": lambda t, x: x.resize_as_(t(2, 2)),
    "set_ to another": lambda t, x: x.set_(t(2, 5)),
    "set_ to nothing": lambda t, x: x.set_(),
    "set_ to a storage": lambda t, x: x.set_(t(9).untyped_storage(), 1, (2, 3), (3, 1)),
    "set_ to its own storage": lambda t, x: x.set_(x.untyped_storage(), 4, (8,), (1,)),
    "detach_": lambda t, x: x.detach_(),
    "requires_grad_": lambda t, x: x.requires_grad_(),
    "a slice": lambda t, x: x[:, 1:3].mul_(2),
    "a transposed": lambda t, x: x.t().copy_(t(4, 3)),
    "a column set": lambda t, x: x.__setitem__((slice(None), 1), t(3)),
    "+= by a CPU number": lambda t, x: x.__iadd__(torch.tensor(2.0)),
}


OUTS: dict[str, Callable[[Inputs, Tensor], Any]] = {
    "add": lambda t, out: torch.add(t(3, 4), t(3, 4), out=out),
    "mul": lambda t, out: torch.mul(t(3, 4), 2, out=out),
    "mm": lambda t, out: torch.mm(t(3, 5), t(5, 4), out=out),
    "addmm": lambda t, out: torch.addmm(t(4), t(3, 5), t(5, 4), out=out),
    "matmul": lambda t, out: torch.matmul(t(3, 5), t(5, 4), out=out),
    "cat": lambda t, out: torch.cat([t(1, 4), t(2, 4)], out=out),
    "stack": lambda t, out: torch.stack([t(4), t(4), t(4)], out=out),
    "mean": lambda t, out: torch.mean(t(3, 4, 2), -1, out=out),
    "sum": lambda t, out: torch.sum(t(3, 4, 2), -1, out=out),
    "index_select": lambda t, out: torch.index_select(t(5, 4), 0, t.ints(3, high=5), out=out),
    "gather": lambda t, out: torch.gather(t(3, 8), 1, t.ints(3, 4), out=out),
    "where": lambda t, out: torch.where(t.bools(3, 4), t(3, 4), t(3, 4), out=out),
    "cumsum": lambda t, out: torch.cumsum(t(3, 4), 1, out=out),
    "softmax": lambda t, out: torch.softmax(t(3, 4), 1, out=out),
    "clamp": lambda t, out: torch.clamp(t(3, 4), 0, 1, out=out),
    "outer": lambda t, out: torch.outer(t(3), t(4), out=out),
    "zeros": lambda t, out: torch.zeros(3, 4, out=out),
    "full": lambda t, out: torch.full((3, 4), 2.0, out=out),
    "arange": lambda t, out: torch.arange(12, out=out),
    "linspace": lambda t, out: torch.linspace(0, 1, 12, out=out),
}


FOREACH: dict[str, Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]] = {
    "_foreach_norm": lambda x, y, z: torch._foreach_norm(x, 2.0),
    "_foreach_norm of infinity": lambda x, y, z: torch._foreach_norm(x, INF),
    "_foreach_norm in float": lambda x, y, z: torch._foreach_norm(x, 2.0, dtype=FP32),
    "_foreach_mul": lambda x, y, z: torch._foreach_mul(x, y),
    "_foreach_add": lambda x, y, z: torch._foreach_add(x, 2),
    "_foreach_sqrt": lambda x, y, z: torch._foreach_sqrt(z),
    "_foreach_pow": lambda x, y, z: torch._foreach_pow(x, 2),
    "_foreach_neg": lambda x, y, z: torch._foreach_neg(x),
    "_foreach_abs": lambda x, y, z: torch._foreach_abs(x),
    "_foreach_mul_ by a number": lambda x, y, z: torch._foreach_mul_(x, 0.9),
    "_foreach_mul_ by numbers": lambda x, y, z: torch._foreach_mul_(x, [0.9, 0.8, 0.7, 1.0]),
    "_foreach_mul_ by a tensor": lambda x, y, z: torch._foreach_mul_(x, y[0][0, 0]),
    "_foreach_mul_ by tensors": lambda x, y, z: torch._foreach_mul_(x, y),
    "_foreach_add_ of tensors": lambda x, y, z: torch._foreach_add_(x, y, alpha=0.5),
    "_foreach_add_ of a number": lambda x, y, z: torch._foreach_add_(x, 1),
    "_foreach_add_ of a CPU number": lambda x, y, z: torch._foreach_add_(x, torch.tensor(1.0)),
    "_foreach_sub_": lambda x, y, z: torch._foreach_sub_(x, y),
    "_foreach_lerp_": lambda x, y, z: torch._foreach_lerp_(x, y, 0.1),
    "_foreach_addcmul_": lambda x, y, z: torch._foreach_addcmul_(x, y, y, 0.1),
    "_foreach_addcmul_ by numbers": lambda x, y, z: torch._foreach_addcmul_(x, y, y, [0.1, 0.2, 0.3, 0.4]),
    "_foreach_addcdiv_": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, -0.01),
    "_foreach_addcdiv_ by numbers": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, [0.1, 0.2, 0.3, 0.4]),
    "_foreach_sqrt_": lambda x, y, z: torch._foreach_sqrt_(z),
    "_foreach_div_ by tensors": lambda x, y, z: torch._foreach_div_(x, z),
    "_foreach_div_ by numbers": lambda x, y, z: torch._foreach_div_(x, [2.0, 3.0, 4.0, 5.0]),
    "_foreach_reciprocal_": lambda x, y, z: torch._foreach_reciprocal_(z),
    "_foreach_maximum_": lambda x, y, z: torch._foreach_maximum_(x, y),
    "_foreach_clamp_max_": lambda x, y, z: torch._foreach_clamp_max_(x, 0.1),
    "_foreach_zero_": lambda x, y, z: torch._foreach_zero_(x),
    "_foreach_copy_": lambda x, y, z: torch._foreach_copy_(x, y),
    "_foreach_copy_ across dtypes": lambda x, y, z: torch._foreach_copy_(x, [tensor.double() for tensor in y]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_has_the_strides_of_the_cpu_and_shares_memory(view: Callable[[Tensor], Tensor]) -> None:
    def op(t: Inputs) -> list[Tensor]:
        base = t(3, 2, 4)
        seen = view(base)
        before = seen.clone()
        base.mul_(2)
        seen[(0,) * seen.dim()] = 5
        assert seen.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        return [before, seen, base]

    assert_same(*both(op))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_known_as_a_view_as_on_the_cpu(view: Callable[[Tensor], Tensor]) -> None:
    def op(t: Inputs) -> tuple[bool, bool]:
        base = t(3, 2, 4)
        seen = view(base)
        return seen._is_view(), seen._base is base

    assert_same(*both(op))


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operation_in_place_leaves_the_bits_of_the_cpu(change: Callable[[Inputs, Tensor], Any]) -> None:
    def op(t: Inputs) -> list[Any]:
        x = t(3, 4)
        returned = change(t, x)
        return [x, returned]

    assert_same(*both(op))


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operation_in_place_returns_the_tensor_that_it_changed(change: Callable[[Inputs, Tensor], Any]) -> None:
    t = Inputs(DEVICE)
    x = t(3, 4)
    returned = change(t, x)
    assert returned is None or returned is x or returned._base is x


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operation_in_place_counts_a_version_as_on_the_cpu(change: Callable[[Inputs, Tensor], Any]) -> None:
    def op(t: Inputs) -> int:
        x = t(3, 4)
        change(t, x)
        return x._version

    assert_same(*both(op))


@pytest.mark.parametrize("compute", OUTS.values(), ids=OUTS)
@pytest.mark.parametrize("shape", [(3, 4), (0,), "of its own result"], ids=str)
def test_an_out_is_filled_and_resized_as_on_the_cpu(compute: Callable[[Inputs, Tensor], Any], shape: Any) -> None:
    def op(t: Inputs) -> list[Tensor]:
        out = t.empty(*shape) if isinstance(shape, tuple) else compute(t, t.empty(0)).clone().fill_(NAN)
        returned = compute(t, out)
        assert returned is out
        return [out]

    assert_same(*both(op))


@pytest.mark.parametrize("compute", OUTS.values(), ids=OUTS)
def test_an_out_with_other_strides_is_filled_as_on_the_cpu(compute: Callable[[Inputs, Tensor], Any]) -> None:
    def op(t: Inputs) -> list[Tensor]:
        shape = compute(t, t.empty(0)).shape
        whole = t.zeros(*(2 * size for size in shape))
        out = whole[tuple(slice(None, None, 2) for _ in shape)]
        compute(t, out)
        return [out, whole]

    assert_same(*both(op))


def test_an_out_that_grows_is_counted_on_its_device() -> None:
    out = torch.empty(0, device=DEVICE)
    before = torch.emulated.memory_allocated()
    torch.add(torch.ones(1024, device=DEVICE), 1, out=out)
    assert torch.emulated.memory_allocated() - before == 4096


def test_an_out_of_another_size_is_resized_with_the_warning_of_the_cpu() -> None:
    for device in (DEVICE, "cpu"):
        out = torch.empty(3, device=device)
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            torch.add(torch.ones(2, 2, device=device), 1, out=out)
        assert out.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("operation", FOREACH.values(), ids=FOREACH)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_foreach_operation_gives_the_bits_of_the_cpu(operation: Callable[..., Any], dtype: torch.dtype) -> None:
    def op(t: Inputs) -> list[Any]:
        shapes = ((3, 4), (5, 1), (4,), (0, 2))
        x, y = t.list(*shapes, dtype=dtype), t.list(*shapes, dtype=dtype)
        z = [t.positive(*shape, dtype=dtype) for shape in shapes]
        if operation is FOREACH["_foreach_norm of infinity"]:
            x, y, z = x[:3], y[:3], z[:3]
        return [operation(x, y, z), x, y, z]

    assert_same(*both(op))


@pytest.mark.parametrize("operation", FOREACH.values(), ids=FOREACH)
def test_a_foreach_operation_on_slices_leaves_the_rest_alone(operation: Callable[..., Any]) -> None:
    def op(t: Inputs) -> list[Any]:
        wholes = t.list((4, 6), (4, 6), (4, 6), (4, 6))
        y = t.list((4, 3), (4, 3), (4, 3), (4, 3))
        z = [t.positive(4, 3) for _ in y]
        return [operation([whole[:, ::2] for whole in wholes], y, z), wholes]

    assert_same(*both(op))
