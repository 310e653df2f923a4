"""Every operation on the emulated device gives bit for bit what the CPU's operation gives."""

from __future__ import annotations

import copy
import io
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import fsdp_doctor.emulated  # noqa: F401, which registers the device

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = "emulated"
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


# Arithmetic

DENSE: dict[str, Op] = {
    **each_dtype("matmul", lambda t, d: t(5, 6, dtype=d) @ t(6, 7, dtype=d)),
    **each_dtype("matmul 3d by 2d", lambda t, d: t(2, 5, 6, dtype=d) @ t(6, 7, dtype=d)),
    **each_dtype("matmul with a transposed", lambda t, d: t(5, 6, dtype=d) @ t(7, 6, dtype=d).t()),
    **each_dtype("mm larger", lambda t, d: torch.mm(t(70, 65, dtype=d), t(65, 33, dtype=d))),
    **each_dtype("bmm", lambda t, d: torch.bmm(t(3, 4, 5, dtype=d), t(3, 5, 6, dtype=d))),
    **each_dtype("baddbmm", lambda t, d: torch.baddbmm(t(3, 4, 6, dtype=d), t(3, 4, 5, dtype=d), t(3, 5, 6, dtype=d))),
    **each_dtype("addmm", lambda t, d: torch.addmm(t(6, dtype=d), t(4, 5, dtype=d), t(5, 6, dtype=d))),
    **each_dtype("linear", lambda t, d: functional.linear(t(2, 3, 8, dtype=d), t(6, 8, dtype=d))),
    **each_dtype(
        "linear with bias", lambda t, d: functional.linear(t(2, 3, 8, dtype=d), t(6, 8, dtype=d), t(6, dtype=d))
    ),
    **each_dtype("mv", lambda t, d: t(4, 5, dtype=d) @ t(5, dtype=d)),
    **each_dtype("dot", lambda t, d: t(9, dtype=d) @ t(9, dtype=d)),
    **each_dtype("softmax", lambda t, d: functional.softmax(t(3, 9, dtype=d), -1)),
    **each_dtype("softmax in float", lambda t, d: functional.softmax(t(3, 9, dtype=d), -1, dtype=FP32)),
    **each_dtype("log_softmax", lambda t, d: functional.log_softmax(t(3, 9, dtype=d), 0)),
    **each_dtype("silu", lambda t, d: functional.silu(t(3, 9, dtype=d))),
    **each_dtype("gelu", lambda t, d: functional.gelu(t(3, 9, dtype=d), approximate="tanh")),
    **each_dtype("sigmoid", lambda t, d: torch.sigmoid(t(3, 9, dtype=d))),
    **each_dtype("softplus", lambda t, d: functional.softplus(t(3, 9, dtype=d))),
    **each_dtype("tanh", lambda t, d: torch.tanh(t(3, 9, dtype=d))),
    **each_dtype("exp", lambda t, d: t(3, 9, dtype=d).exp()),
    **each_dtype("log", lambda t, d: t.positive(3, 9, dtype=d).log()),
    **each_dtype("pow", lambda t, d: t(3, 9, dtype=d).pow(2)),
    **each_dtype("pow of a number", lambda t, d: 1e6 ** t(9, dtype=d)),
    **each_dtype("mean", lambda t, d: t(3, 9, dtype=d).mean(-1, keepdim=True)),
    **each_dtype("mean of all", lambda t, d: t(3, 9, dtype=d).mean()),
    **each_dtype("sum", lambda t, d: t(30, 90, dtype=d).sum((0, 1))),
    **each_dtype("rsqrt", lambda t, d: torch.rsqrt(t.positive(3, 9, dtype=d))),
    **each_dtype("rms_norm", lambda t, d: functional.rms_norm(t(3, 8, dtype=d), (8,), t(8, dtype=d), 1e-6)),
    **each_dtype(
        "layer_norm", lambda t, d: functional.layer_norm(t(3, 8, dtype=d), (8,), t(8, dtype=d), t(8, dtype=d))
    ),
    **each_dtype("add with alpha", lambda t, d: torch.add(t(3, 4, dtype=d), t(4, dtype=d), alpha=2)),
    **each_dtype("mul by a column", lambda t, d: t(3, 4, dtype=d) * t(3, 1, dtype=d)),
    **each_dtype("div by a number", lambda t, d: t(3, 4, dtype=d) / 3),
    **each_dtype("number minus", lambda t, d: 1 - t(3, 4, dtype=d)),
    **each_dtype("addcmul", lambda t, d: torch.addcmul(t(5, dtype=d), t(5, dtype=d), t(5, dtype=d), value=0.3)),
    **each_dtype("addcdiv", lambda t, d: torch.addcdiv(t(5, dtype=d), t(5, dtype=d), t.positive(5, dtype=d))),
    **each_dtype("lerp", lambda t, d: torch.lerp(t(5, dtype=d), t(5, dtype=d), 0.1)),
    **each_dtype("vector_norm", lambda t, d: torch.linalg.vector_norm(t(30, dtype=d))),
    **each_dtype("clamp", lambda t, d: t(3, 9, dtype=d).clamp(-0.5, max=0.5)),
    **each_dtype("maximum", lambda t, d: torch.maximum(t(9, dtype=d), t(9, dtype=d))),
    "mixed dtypes promote": lambda t: t(4, dtype=BF16) + t(4),
    "int by float": lambda t: t.ints(4) * t(4, dtype=FP16),
    "einsum": lambda t: torch.einsum("bhqd,bhkd->bhqk", t(2, 3, 4, 5), t(2, 3, 6, 5)),
    "outer": lambda t: torch.outer(t(5), t(4)),
    "logsumexp": lambda t: torch.logsumexp(t(3, 5), -1, keepdim=True),
    "std": lambda t: t(3, 9).std(-1),
    "prod": lambda t: t(3, 9).prod(-1),
    "triu and tril": lambda t: (t(5, 5).triu(1), t(5, 5).tril(-1)),
    "abs, neg, sign, floor, round": lambda t: [
        f(t(9)) for f in (torch.abs, torch.neg, torch.sign, torch.floor, torch.round)
    ],
    "erf, log1p, expm1, sqrt, reciprocal": lambda t: [
        f(t.positive(9)) for f in (torch.erf, torch.log1p, torch.expm1, torch.sqrt, torch.reciprocal)
    ],
    "isnan, isinf, isfinite": lambda t: [f(t.of([1.0, INF, NAN])) for f in (torch.isnan, torch.isinf, torch.isfinite)],
    "not-a-number keeps its bits": lambda t: t.of([0x7FC00001, -1, 0x7F800001], torch.int32).view(FP32).clone(),
    "max and min with positions": lambda t: (*t(3, 5).max(-1), *t(3, 5).min(0)),
    "argmax, amax, any, all": lambda t: (
        t(3, 5).argmax(-1),
        t(3, 5).amax(0),
        t.bools(3, 5).any(-1),
        t.bools(3, 5).all(),
    ),
    "double": lambda t: t(9, dtype=FP64).exp().sum(),
    "complex product": lambda t: torch.view_as_real(torch.view_as_complex(t(3, 2)) * torch.view_as_complex(t(3, 2))),
    "complex conjugate": lambda t: torch.view_as_real((torch.view_as_complex(t(3, 2)).conj() * 1j).resolve_conj()),
    "imaginary part of a conjugate": lambda t: torch.view_as_complex(t(3, 2)).conj().imag + 1,
    "clone of a conjugate": lambda t: torch.view_as_complex(t(3, 2)).conj().clone().real,
    "polar": lambda t: torch.polar(t.positive(4), t(4)),
}

MODEL_PARTS: dict[str, Op] = {
    "rotary angles": lambda t: [
        f(torch.outer(torch.arange(6, device=t.device).float(), 1e4 ** -(torch.arange(0, 8, 2, device=t.device) / 8)))
        for f in (torch.sin, torch.cos)
    ],
    "rotate half": lambda t: (lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1))(t(2, 3, 8, dtype=BF16)),
    "repeat_kv": lambda t: t(1, 2, 3, 4)[:, :, None].expand(1, 2, 2, 3, 4).reshape(1, 4, 3, 4),
    "repeat_interleave": lambda t: t(2, 3).repeat_interleave(2, dim=1),
    "repeat_interleave by counts": lambda t: t(3, 2).repeat_interleave(t.of([2, 0, 3]), dim=0),
    "embedding": lambda t: functional.embedding(t.ints(2, 5), t(8, 4)),
    "index_select": lambda t: t(8, 4).index_select(0, t.ints(5)),
    "gather": lambda t: t(4, 8).gather(1, t.ints(4, 3)),
    "take_along_dim": lambda t: torch.take_along_dim(t(4, 8), t.ints(4, 3), 1),
    "scatter": lambda t: t.zeros(4, 8).scatter(1, t.ints(4, 1), t(4, 1)),
    "scatter a number": lambda t: t.zeros(4, 8).scatter_(1, t.ints(4, 1), 1.0),
    "scatter_add": lambda t: t.zeros(4, 8).scatter_add(1, t.ints(4, 5), t(4, 5)),
    "scatter_reduce": lambda t: t(4, 8).scatter_reduce(1, t.ints(4, 5), t(4, 5), "amax"),
    "index_add": lambda t: t(8, 4).index_add(0, t.ints(5), t(5, 4)),
    "index_add_ in bfloat16": lambda t: t(8, 4, dtype=BF16).index_add_(0, t.ints(5), t(5, 4, dtype=BF16)),
    "index_copy": lambda t: t(8, 4).index_copy(0, t.of([3, 1]), t(2, 4)),
    "index_fill": lambda t: t(8, 4).index_fill(0, t.of([3, 1]), 2.0),
    "index by a tensor": lambda t: t(8, 4)[t.ints(3)],
    "index by two tensors": lambda t: t(8, 4)[t.ints(3), t.ints(3, high=4)],
    "index by a mask": lambda t: t(8, 4)[t.bools(8)],
    "index with None and a slice": lambda t: t(8, 4, 3)[None, t.ints(3), :, 1:],
    "set by a tensor": lambda t: changed(t(8, 4), lambda x: x.__setitem__(t.ints(2), 5.0)),
    "set by a mask": lambda t: changed(t(8, 4), lambda x: x.__setitem__(t.bools(8, 4), t.of(0.0))),
    "index_put accumulating": lambda t: t(8).index_put((t.ints(20),), t(20), accumulate=True),
    "nonzero": lambda t: t.bools(4, 5).nonzero(),
    "nonzero as a tuple": lambda t: torch.where(t.bools(4, 5)),
    "masked_select": lambda t: t(4, 5).masked_select(t.bools(4, 5)),
    "masked_scatter": lambda t: t(4, 5).masked_scatter(t.bools(4, 5), t(20)),
    "topk": lambda t: t(6, 8).topk(3, dim=-1),
    "topk unsorted of bfloat16": lambda t: t(6, 8, dtype=BF16).topk(2, dim=-1, sorted=False),
    "sort": lambda t: t(6, 8).sort(descending=True),
    "stable sort of integers": lambda t: t.ints(20).sort(stable=True),
    "argsort": lambda t: t.ints(20).argsort(stable=True),
    "cumsum": lambda t: t(6, 8).cumsum(-1),
    "cumsum in another dtype": lambda t: t.bools(6).cumsum(0, dtype=torch.int32),
    "cumprod": lambda t: t(6, 8).cumprod(0),
    "one_hot": lambda t: functional.one_hot(t.ints(6), num_classes=8),
    "one_hot without a number of classes": lambda t: functional.one_hot(t.ints(6)),
    "histc": lambda t: torch.histc(t(40), bins=8, min=-1, max=1),
    "histc of integers is that of doubles": lambda t: (
        t.ints(40).histc(8, 0, 7) if t.device != "cpu" else t.ints(40).double().histc(8, 0, 7).long()
    ),
    "bincount": lambda t: t.ints(40).bincount(minlength=10),
    "unique": lambda t: torch.unique(t.ints(20), return_inverse=True, return_counts=True),
    "where": lambda t: torch.where(t.bools(4, 5), t(4, 5), t(5)),
    "where with numbers": lambda t: torch.where(t.bools(4, 5), t(4, 5), -INF),
    "masked_fill": lambda t: t(4, 5).masked_fill(t.bools(4, 5), -INF),
    "masked_fill by a tensor": lambda t: t(4, 5).masked_fill_(t.bools(5), t.of(2.0)),
    "causal mask": lambda t: torch.full((5, 5), -INF, device=t.device).triu(diagonal=1),
    "comparison of ranges": lambda t: torch.arange(5, device=t.device)[:, None] >= torch.arange(5, device=t.device),
    "bool arithmetic": lambda t: (t.bools(9) & ~t.bools(9) | t.bools(9) ^ t.bools(9)).logical_not(),
    "integer arithmetic": lambda t: (t.ints(9) // 3, t.ints(9) % 3, t.ints(9) << 2, -t.ints(9), t.ints(9).sum()),
    "small integers": lambda t: t.ints(9, dtype=torch.uint8) + t.ints(9, dtype=torch.int8),
    "comparisons": lambda t: [f(t.ints(9), 3) for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)],
    "pad": lambda t: (functional.pad(t(3, 4), (1, 2)), functional.pad(t(3, 4), (0, -1), value=2.0)),
    "roll and flip": lambda t: (t(3, 4).roll(1, 0), t(3, 4).flip(-1)),
    "conv1d depthwise and causal": lambda t: functional.conv1d(t(2, 6, 9), t(6, 1, 4), t(6), padding=3, groups=6)[
        ..., :9
    ],
    "conv1d in bfloat16": lambda t: functional.conv1d(
        t(2, 6, 9, dtype=BF16), t(6, 1, 4, dtype=BF16), padding=3, groups=6
    ),
    "conv1d dense": lambda t: functional.conv1d(t(2, 6, 9), t(5, 6, 3), t(5)),
    "solve_triangular": lambda t: torch.linalg.solve_triangular(
        t(4, 4).tril() + 5 * torch.eye(4, device=t.device), t(4, 2), upper=False
    ),
    "meshgrid": lambda t: torch.meshgrid(t(3), t(4), indexing="ij"),
    "searchsorted": lambda t: torch.searchsorted(t.of([1, 3, 5]), t.ints(6)),
    "baddbmm with beta 0": lambda t: torch.baddbmm(t.zeros(2, 3, 3), t(2, 3, 4), t(2, 4, 3), beta=0, alpha=0.5),
    "grouped products in a loop": lambda t: torch.cat([x @ t(4, 3) for x in t(6, 4).split([1, 0, 5])]),
}

FACTORIES: dict[str, Op] = {
    "zeros, ones, full": lambda t: (
        torch.zeros(2, 3, device=t.device),
        torch.ones(2, dtype=BF16, device=t.device),
        torch.full((2,), 7, device=t.device),
    ),
    "like": lambda t: (torch.zeros_like(t(2, 3).t()), torch.ones_like(t(2)), torch.full_like(t.ints(2), 3)),
    "new": lambda t: (
        t(2).new_zeros(3),
        t(2).new_ones(2, dtype=torch.bool),
        t(2).new_full((2,), 4.0),
        t(2).new_tensor([1]),
    ),
    "arange, linspace, eye": lambda t: (
        torch.arange(2, 9, 3, device=t.device),
        torch.linspace(0, 1, 5, device=t.device),
        torch.eye(3, device=t.device),
    ),
    "arange of floats": lambda t: torch.arange(0, 1, 0.1, dtype=BF16, device=t.device),
    "tensor": lambda t: (torch.tensor([[1.0, 2.0]], device=t.device), torch.tensor(3, device=t.device)),
    "as_tensor of an array": lambda t: torch.as_tensor([1, 2], device=t.device),
    "scalar_tensor": lambda t: torch.scalar_tensor(2.5, device=t.device),
    "tril_indices": lambda t: torch.tril_indices(3, 3, device=t.device),
    "zeros with requires_grad": lambda t: torch.zeros(2, device=t.device, requires_grad=True),
    "empty_strided filled": lambda t: torch.empty_strided((2, 3), (1, 2), device=t.device).fill_(2.0),
    "full of infinity": lambda t: torch.full((), -INF, dtype=BF16, device=t.device),
}

CASTS: dict[str, Op] = {
    f"{str(one)[6:]} to {str(other)[6:]}": lambda t, one=one, other=other: (t(3, 7) * 40).to(one).to(other)  # type: ignore[misc]
    for one in (*FLOATS, FP64, torch.int64, torch.bool)
    for other in (*FLOATS, FP64, torch.int32, torch.bool, torch.float8_e4m3fn)
    if one != other
}

SHAPES: dict[str, Op] = {
    "cat": lambda t: torch.cat([t(2, 3), t(4, 3)]),
    "cat of nothing": lambda t: torch.cat([t(0), t(4)]),
    "cat promotes": lambda t: torch.cat([t(2, dtype=BF16), t(2)]),
    "stack": lambda t: torch.stack([t(2, 3), t(2, 3)], -1),
    "hstack and tile": lambda t: (torch.hstack([t(2, 3), t(2, 1)]), t(2, 1).tile(2, 3)),
    "chunk": lambda t: t(7, 3).chunk(3),
    "split": lambda t: t(7, 3).split(2, dim=0),
    "split_with_sizes": lambda t: t(7, 3).split([1, 2, 4]),
    "tensor_split": lambda t: t(7, 3).tensor_split(3),
    "tensor_split by a CPU tensor": lambda t: t(7, 3).tensor_split(torch.tensor([1, 3])),
    "unbind": lambda t: t(3, 4).unbind(1),
    "split_with_sizes_copy": lambda t: torch.split_with_sizes_copy(t(7, 3), [3, 4]),
    "split_with_sizes_copy into outs": lambda t: changed(
        [t.empty(2, 3), t.empty(2, 4)],  # type: ignore[arg-type]
        lambda outs: torch.split_with_sizes_copy(t(2, 7), [3, 4], dim=1, out=outs),
    )[0],
    "_chunk_cat": lambda t: torch._chunk_cat([t(7, 3), t(4, 2)], dim=0, num_chunks=2),
    "_chunk_cat into out": lambda t: changed(
        t.empty(2, 16), lambda out: torch._chunk_cat([t(7, 3), t(4, 2)], dim=0, num_chunks=2, out=out)
    ),
    "_chunk_cat of bfloat16 into a float out": lambda t: changed(
        t.empty(2, 16), lambda out: torch._chunk_cat([t(7, 3, dtype=BF16), t(4, 2, dtype=BF16)], 0, 2, out=out)
    ),
    "contiguous of a transposed": lambda t: t(3, 4, 5).transpose(0, 2).contiguous(),
    "clone keeps strides": lambda t: t(3, 4).t().clone(),
    "clone contiguous": lambda t: t(3, 4).t().clone(memory_format=torch.contiguous_format),
    "reshape of a transposed": lambda t: t(3, 4).t().reshape(6, 2),
    "flatten": lambda t: t(2, 3, 4).flatten(1),
    "repeat": lambda t: t(2, 3).repeat(2, 1),
    "to channels_last": lambda t: t(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "diff": lambda t: t(9).diff(),
}

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

# In place, out=, and what changes a tensor's own sizes

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

# Autograd

BACKWARD: dict[str, Callable[[Inputs, torch.dtype], tuple[Tensor, ...]]] = {
    "linear": lambda t, d: (lambda x, w, b: with_gradients(functional.linear(x, w, b), x, w, b))(
        t.leaf(2, 3, 8, dtype=d), t.leaf(6, 8, dtype=d), t.leaf(6, dtype=d)
    ),
    "matmul": lambda t, d: (lambda x, y: with_gradients(x @ y, x, y))(
        t.leaf(2, 3, 4, dtype=d), t.leaf(2, 4, 5, dtype=d)
    ),
    "embedding": lambda t, d: (lambda w: with_gradients(functional.embedding(t.ints(3, 5), w), w))(
        t.leaf(8, 4, dtype=d)
    ),
    "embedding with padding": lambda t, d: (
        lambda w: with_gradients(functional.embedding(t.ints(30), w, padding_idx=1), w)
    )(t.leaf(8, 4, dtype=d)),
    "silu": lambda t, d: (lambda x: with_gradients(functional.silu(x), x))(t.leaf(3, 9, dtype=d)),
    "softmax": lambda t, d: (lambda x: with_gradients(functional.softmax(x, -1, dtype=FP32).to(d), x))(
        t.leaf(3, 9, dtype=d)
    ),
    "rms norm by hand": lambda t, d: (
        lambda x, w: with_gradients(
            w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(d), x, w
        )
    )(t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d)),
    "rms_norm": lambda t, d: (lambda x, w: with_gradients(functional.rms_norm(x, (8,), w), x, w))(
        t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d)
    ),
    "layer_norm": lambda t, d: (lambda x, w, b: with_gradients(functional.layer_norm(x, (8,), w, b), x, w, b))(
        t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d), t.leaf(8, dtype=d)
    ),
    "cross_entropy": lambda t, d: (lambda x: with_gradients(functional.cross_entropy(x, t.of([1, -100, 3])), x))(
        t.leaf(3, 9, dtype=d)
    ),
    "cross_entropy summed and smoothed": lambda t, d: (
        lambda x: with_gradients(functional.cross_entropy(x, t.ints(3), reduction="sum", label_smoothing=0.1), x)
    )(t.leaf(3, 9, dtype=d)),
    "index": lambda t, d: (lambda x: with_gradients(x[t.ints(20)], x))(t.leaf(8, 4, dtype=d)),
    "gather": lambda t, d: (lambda x: with_gradients(x.gather(1, t.ints(4, 3)), x))(t.leaf(4, 8, dtype=d)),
    "index_add": lambda t, d: (lambda x, y: with_gradients(x.index_add(0, t.ints(5), y), x, y))(
        t.leaf(8, 4, dtype=d), t.leaf(5, 4, dtype=d)
    ),
    "topk": lambda t, d: (lambda x: with_gradients(x.topk(3).values, x))(t.leaf(6, 8, dtype=d)),
    "cat and split": lambda t, d: (lambda x, y: with_gradients(torch.cat([y, x]).split([1, 4])[1], x, y))(
        t.leaf(3, 2, dtype=d), t.leaf(2, 2, dtype=d)
    ),
    "as_strided": lambda t, d: (lambda x: with_gradients(x.as_strided((3, 3), (1, 1)), x))(t.leaf(8, dtype=d)),
    "expand": lambda t, d: (lambda x: with_gradients(x.expand(4, 3) * 2, x))(t.leaf(1, 3, dtype=d)),
    "where": lambda t, d: (lambda x, y: with_gradients(torch.where(t.bools(3, 4), x, y), x, y))(
        t.leaf(3, 4, dtype=d), t.leaf(4, dtype=d)
    ),
    "cumsum": lambda t, d: (lambda x: with_gradients(x.cumsum(-1), x))(t.leaf(3, 4, dtype=d)),
    "norm": lambda t, d: (lambda x: with_gradients(torch.linalg.vector_norm(x, dim=-1), x))(t.leaf(3, 4, dtype=d)),
    "cast": lambda t, d: (lambda x: with_gradients(x.to(d).float(), x))(t.leaf(3, 4)),
    "conv1d depthwise and causal": lambda t, d: (
        lambda x, w, b: with_gradients(functional.conv1d(x, w, b, padding=3, groups=6)[..., :9], x, w, b)
    )(t.leaf(2, 6, 9, dtype=d), t.leaf(6, 1, 4, dtype=d), t.leaf(6, dtype=d)),
    "conv1d of a transposed": lambda t, d: (
        lambda x, w: with_gradients(functional.silu(functional.conv1d(x.transpose(1, 2), w, groups=6)), x, w)
    )(t.leaf(2, 9, 6, dtype=d), t.leaf(6, 1, 4, dtype=d)),
}

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "bool mask": {"mask": torch.bool},
    "float mask": {"mask": FP32},
    "grouped": {"kv_heads": 2, "enable_gqa": True},
    "grouped and causal": {"kv_heads": 2, "enable_gqa": True, "is_causal": True},
    "own scale": {"scale": 0.3},
    "longer keys": {"keys": 11},
    "longer keys and bool mask": {"keys": 11, "mask": torch.bool},
    "long": {"queries": 70, "keys": 70, "is_causal": True},
}

CASES = {
    **DENSE,
    **MODEL_PARTS,
    **FACTORIES,
    **{f"cast {name}": op for name, op in CASTS.items()},
    **{f"shape {name}": op for name, op in SHAPES.items()},
}


@cases(CASES)
def test_an_operation_gives_the_bits_of_the_cpu(op: Op) -> None:
    assert_same(*both(op))


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


@pytest.mark.parametrize("compute", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_those_of_the_cpu(compute: Callable[..., Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: compute(t, dtype)))


def attend(
    t: Inputs,
    dtype: torch.dtype,
    queries: int = 7,
    keys: int = 7,
    kv_heads: int = 4,
    mask: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    query = t.leaf(2, 4, queries, 16, dtype=dtype)
    key, value = t.leaf(2, kv_heads, keys, 16, dtype=dtype), t.leaf(2, kv_heads, keys, 16, dtype=dtype)
    allowed = torch.ones(queries, keys).tril().bool()
    added = torch.zeros(queries, keys).masked_fill(~allowed, -INF)
    if mask is not None:
        options["attn_mask"] = (allowed if mask == torch.bool else added.to(dtype)).to(t.device)
    return with_gradients(functional.scaled_dot_product_attention(query, key, value, **options), query, key, value)


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_and_its_gradients_are_those_of_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: attend(t, dtype, **options)))


def test_attention_with_a_mask_that_wants_a_gradient_is_that_of_the_cpu() -> None:
    def op(t: Inputs) -> tuple[Tensor, ...]:
        query, mask = t.leaf(1, 2, 5, 8), t.leaf(5, 5)
        return with_gradients(
            functional.scaled_dot_product_attention(query, t(1, 2, 5, 8), t(1, 2, 5, 8), mask), query, mask
        )

    assert_same(*both(op))


def test_attention_under_no_grad_is_that_of_the_cpu() -> None:
    def op(t: Inputs) -> Tensor:
        with torch.no_grad():
            return functional.scaled_dot_product_attention(t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8), is_causal=True)

    assert_same(*both(op))


def test_attention_with_dropout_is_reproducible() -> None:
    x = Inputs(DEVICE)(1, 2, 5, 8)
    torch.manual_seed(1)
    first = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5))


# Tensors of every kind as inputs

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


# Storages


def test_a_storage_shrunk_to_nothing_and_back_is_that_of_the_same_tensor() -> None:
    x = torch.ones(1024, device=DEVICE)
    before = torch.emulated.memory_allocated()
    x.untyped_storage().resize_(0)
    assert (x.untyped_storage().size(), x.shape) == (0, (1024,))
    assert torch.emulated.memory_allocated() == before - 4096
    x.untyped_storage().resize_(4096)
    x.fill_(3)
    assert torch.emulated.memory_allocated() == before
    assert x.sum().item() == 3072


def test_a_resized_storage_keeps_the_bytes_that_fit() -> None:
    x = torch.arange(10, device=DEVICE)
    x.untyped_storage().resize_(32)
    x.untyped_storage().resize_(80)
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_a_view_of_a_storage_that_came_back_sees_it() -> None:
    whole = torch.zeros(8, device=DEVICE)
    part = whole[2:4]
    whole.untyped_storage().resize_(0)
    whole.untyped_storage().resize_(32)
    whole.copy_(torch.arange(8.0))
    assert part.tolist() == [2, 3]


def test_resize_grows_a_tensor_and_keeps_its_values() -> None:
    x = torch.arange(4.0, device=DEVICE)
    address = x.untyped_storage()._cdata
    x.resize_(2, 100)
    assert x.untyped_storage()._cdata == address
    assert x.view(-1)[:4].tolist() == [0, 1, 2, 3]
    assert x.untyped_storage().nbytes() == 800


def test_set_shares_the_storage_of_the_other() -> None:
    x, y = torch.empty(0, device=DEVICE), torch.arange(6.0, device=DEVICE)
    x.set_(y.untyped_storage(), 2, (2, 2), (2, 1))
    y.mul_(2)
    assert x.tolist() == [[4, 6], [8, 10]]


FREED: dict[str, str] = {
    "add": "x + 1",
    "sum": "x.sum()",
    "clone": "x.clone()",
    "cpu": "x.cpu()",
    "item": "x[0].item()",
    "tolist": "x.tolist()",
    "print": "repr(x)",
    "cast": "x.to(torch.bfloat16)",
    "matmul": "x.view(2, 4) @ x.view(4, 2)",
    "cat": "torch.cat([x, x])",
    "index": "x[torch.tensor([1])]",
    "foreach": "torch._foreach_add([x], 1)",
    "attention": "functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 4)] * 3)",
    "histc": "torch.histc(x)",
    "a view that was made before": "view + 1",
    "contiguous of a transposed view": "transposed.contiguous()",
    "a copy to another tensor": "y.copy_(x)",
    "a copy to the host": "host.copy_(x)",
    "a late copy to the host": "pinned.copy_(x, non_blocking=True)",
    "a copy to another device": "x.to('emulated:1')",
    "a foreach copy to another": "torch._foreach_copy_([y], [x])",
    "a write by a kernel": "x.zero_()",
    "a write by a copy within the device": "x.copy_(y)",
    "a write by a copy from the host": "x.copy_(host)",
    "a write by a late copy from the host": "x.copy_(pinned, non_blocking=True); torch.emulated.synchronize()",
    "a write by a foreach copy": "torch._foreach_copy_([x], [y])",
    "a write by a view's copy": "transposed.copy_(y.view(4, 2))",
    "a write by out=": "torch.add(y, 1, out=view)",
    "a write by split_with_sizes_copy": "torch.split_with_sizes_copy(y, [8], out=[x])",
}

# Each statement in a process of its own, forked from one that has imported torch.
_FREE = """
import os, sys, torch, fsdp_doctor.emulated
from torch.nn import functional
x, y = (torch.ones(8, device="emulated") for _ in range(2))
host, pinned = torch.ones(8), torch.ones(8).pin_memory()
view, transposed = x[:], x.view(2, 4).t()
x.untyped_storage().resize_(0)
for statement in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(statement)
            os._exit(1)
        except RuntimeError:
            os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print({0: "raised", 1: "nothing was raised"}.get(end, f"died with {end}"), flush=True)
"""


@pytest.fixture(scope="module")
def ends_of_freed() -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-c", _FREE, *FREED.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    return dict(zip(FREED, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", FREED)
def test_touching_a_tensor_whose_storage_is_gone_raises(name: str, ends_of_freed: dict[str, str]) -> None:
    assert ends_of_freed[name] == "raised"


# What users do with tensors


def test_a_saved_tensor_loads_where_it_was_and_where_it_is_mapped() -> None:
    original = Inputs(DEVICE)(4, 6, dtype=BF16)
    file = io.BytesIO()
    torch.save({"weight": original, "part": original[1:, ::2]}, file)
    for location, type_ in ((None, DEVICE), ("cpu", "cpu"), ("emulated:1", DEVICE)):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["weight"].device.type == type_
        assert torch.equal(bits(loaded["weight"]), bits(original))
        assert torch.equal(bits(loaded["part"]), bits(original[1:, ::2]))
        assert loaded["part"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()
    assert loaded["weight"].device == torch.device("emulated", 1)


def test_a_tensor_saved_on_the_cpu_is_mapped_to_the_device() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(5.0), file)
    file.seek(0)
    assert_same_tensor(torch.load(file, map_location=DEVICE), torch.arange(5.0))


def test_a_deep_copy_is_apart_and_equal() -> None:
    linear = torch.nn.Linear(4, 3).to(DEVICE)
    other = copy.deepcopy(linear)
    assert torch.equal(bits(other.weight), bits(linear.weight))
    assert other.weight.device == linear.weight.device
    other.weight.data.zero_()
    assert linear.weight.abs().sum().item() > 0


def test_a_deep_copy_of_a_non_contiguous_tensor_keeps_its_strides() -> None:
    assert_same(*both(lambda t: copy.deepcopy(t(4, 6).t()[1:, ::2])))


@pytest.mark.parametrize(("before", "after"), [("cpu", DEVICE), (DEVICE, "cpu"), ("emulated:0", "emulated:1")])
def test_data_can_be_replaced_by_data_of_another_device(before: str, after: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device=before))
    parameter.data = torch.full((6,), 2.0, device=after)
    assert parameter.device.type == torch.device(after).type
    assert parameter.shape == (6,)
    (parameter * 3).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.device == parameter.device
    assert parameter.grad.tolist() == [3] * 6


def test_data_replaced_across_devices_frees_the_memory_of_the_device() -> None:
    before = torch.emulated.memory_allocated()
    parameter = torch.nn.Parameter(torch.ones(1024, device=DEVICE))
    parameter.data = parameter.data.cpu()
    assert torch.emulated.memory_allocated() == before


def test_a_module_moves_there_and_back_unchanged() -> None:
    linear = torch.nn.Linear(4, 3)
    before = [bits(parameter) for parameter in linear.parameters()]
    identities = [id(parameter) for parameter in linear.parameters()]
    assert {parameter.device.type for parameter in linear.to(DEVICE).parameters()} == {DEVICE}
    assert {parameter.device.type for parameter in linear.cpu().parameters()} == {"cpu"}
    assert [id(parameter) for parameter in linear.parameters()] == identities
    assert all(torch.equal(bits(p), b) for p, b in zip(linear.parameters(), before, strict=True))


def test_a_meta_module_is_made_empty_on_the_device() -> None:
    with torch.device("meta"):
        linear = torch.nn.Linear(4, 3)
    assert linear.to_empty(device=DEVICE).weight.device.type == DEVICE


PRINTED: dict[str, tuple[Op, str]] = {
    "floats": (lambda t: t.of([1.5, NAN]), "tensor([1.5000,    nan], device='emulated:0')"),
    "an integer": (lambda t: t.of(3), "tensor(3, device='emulated:0')"),
    "bools": (lambda t: t.of([True]), "tensor([True], device='emulated:0')"),
    "empty": (lambda t: t.empty(0), "tensor([], device='emulated:0')"),
    "bfloat16": (lambda t: t.of([1.0], BF16), "tensor([1.], device='emulated:0', dtype=torch.bfloat16)"),
}


@pytest.mark.parametrize(("make", "text"), PRINTED.values(), ids=PRINTED)
def test_a_tensor_is_printed_with_its_device(make: Op, text: str) -> None:
    assert repr(make(Inputs(DEVICE))) == text


def test_a_parameter_is_printed_with_its_device() -> None:
    text = repr(torch.nn.Parameter(torch.ones(2, device=DEVICE)))
    assert text == "Parameter containing:\ntensor([1., 1.], device='emulated:0', requires_grad=True)"


def test_a_tensor_of_the_device_does_not_become_an_array() -> None:
    with pytest.raises(TypeError, match=r"can't convert emulated:0 device type tensor to numpy"):
        torch.ones(2, device=DEVICE).numpy()


HOST_VALUES: dict[str, tuple[Op, Any]] = {
    "item": (lambda t: t.of(2.5).item(), 2.5),
    "item of bfloat16": (lambda t: t.of([1.0], BF16).item(), 1.0),
    "item of an integer": (lambda t: t.of(7).item(), 7),
    "tolist": (lambda t: t.of([[1, 2], [3, 4]]).t().tolist(), [[1, 3], [2, 4]]),
    "tolist of an empty one": (lambda t: t.empty(0, 3).tolist(), []),
    "float": (lambda t: float(t.of(2)), 2.0),
    "int": (lambda t: int(t.of(2.9)), 2),
    "bool": (lambda t: bool(t.of(0)), False),
    "index": (lambda t: [5, 6, 7][t.of(1)], 6),
    "equal": (lambda t: torch.equal(t.of([1, 2]), t.of([1, 2])), True),
    "allclose": (lambda t: torch.allclose(t.of([1.0]), t.of([1.1])), False),
    "in": (lambda t: 3 in t.of([1, 3]), True),
    "len": (lambda t: len(t.of([1, 3])), 2),
    "iteration": (lambda t: [x.item() for x in t.of([1, 3])], [1, 3]),
    "is_nonzero": (lambda t: t.of([1.0]).is_nonzero(), True),
    "is_same_size": (lambda t: t.of([1.0]).is_same_size(t.of([1])), True),
    "is_set_to": (lambda t: (lambda x: x.is_set_to(x.view_as(x)))(t.of([1])), True),
}


@pytest.mark.parametrize(("read", "value"), HOST_VALUES.values(), ids=HOST_VALUES)
def test_a_value_reaches_the_host(read: Op, value: Any) -> None:
    assert read(Inputs(DEVICE)) == value


# Errors

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
        match=r"Expected all tensors to be on the same device|indices should be either on cpu or on the same device",
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
    "an index out of range": lambda t: t(3)[t.of([5])],
    "embedding out of range": lambda t: functional.embedding(t.of([9]), t(8, 2)),
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
    "gradient of an integer": lambda t: t.ints(3).requires_grad_(),
    "foreach of other lengths": lambda t: torch._foreach_add(t.list((2,)), t.list((2,), (2,))),
}


def error_of(op: Op, device: str) -> str:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        op(Inputs(device))
    return f"{caught.type.__name__}: {caught.value}".split("\n")[0]


@cases(WRONG)
def test_a_mistake_is_told_in_the_words_of_the_cpu(op: Op) -> None:
    there, here = error_of(op, DEVICE), error_of(op, "cpu")
    assert there.replace("emulatedFloatType", "torch.FloatTensor").replace("emulated:0", "cpu") == here


# Optimizers and clipping

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "amsgrad": {"foreach": True, "amsgrad": True},
    "maximize": {"foreach": True, "maximize": True},
    "tensor lr": {"foreach": False, "lr": torch.tensor(0.01)},
}


def trained(t: Inputs, dtype: torch.dtype, options: dict[str, Any], steps: int = 3) -> list[Any]:
    parameters = [torch.nn.Parameter(x) for x in t.list((5, 4), (7,), (), dtype=dtype)]
    optimizer = torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **options})
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = t(*parameter.shape, dtype=dtype)
        optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return [parameter.detach() for parameter in parameters] + states


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_adamw_updates_to_the_bits_of_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: trained(t, dtype, options)))


def test_adamw_chooses_foreach_for_the_device() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameters = [torch.nn.Parameter(torch.ones(2, device=DEVICE))]
    assert _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False) == (False, True)


@pytest.mark.parametrize("foreach", [None, True, False], ids=["default", "foreach", "for-loop"])
@pytest.mark.parametrize("norm_type", [2.0, INF], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_clipped_gradients_are_those_of_the_cpu(foreach: bool | None, norm_type: float, dtype: torch.dtype) -> None:
    def op(t: Inputs) -> list[Tensor]:
        parameters = [torch.nn.Parameter(x) for x in t.list((5, 4), (7,), (30,), dtype=dtype)]
        for parameter in parameters:
            parameter.grad = t(*parameter.shape, dtype=dtype)
        # The CPU's default is the loop, an accelerator's is foreach.
        own = foreach if foreach is not None else (None if t.device == DEVICE else True)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type, foreach=own)
        return [norm, *(parameter.grad for parameter in parameters if parameter.grad is not None)]

    assert_same(*both(op))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype) -> None:
    def op(t: Inputs) -> tuple[Tensor, ...]:
        x, w = t.leaf(3, 4), t.leaf(4, 5)
        with torch.autocast(t.device, dtype=dtype):
            y = x @ w
        return with_gradients(y, x, w)

    assert_same(*both(op))


# Whole models

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3 tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR_ATTENTION),
}


def model_of(name: str, attention: str, dtype: torch.dtype) -> torch.nn.Module:
    config_name, options = MODELS[name]
    config = getattr(transformers, config_name, None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(
        config(**SMALL, **options), attn_implementation=attention, dtype=dtype
    )
    return made.train()


def one_step(model: torch.nn.Module, device: str) -> dict[str, Tensor]:
    model = copy.deepcopy(model).to(device)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    weights = {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **gradients, "norm": norm, **weights}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_a_model_is_that_of_the_cpu(name: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(name, attention, dtype)
    there, here = one_step(model, DEVICE), one_step(model, "cpu")
    assert there.keys() == here.keys()
    assert sum(key.startswith("gradient") for key in there) >= 20
    for key in there:
        assert_same_tensor(there[key], here[key], key)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_is_that_of_the_cpu(attention: str) -> None:
    model = model_of("qwen3", attention, FP32)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    here = model(input_ids=tokens, attention_mask=mask).logits.detach()
    there = model.to(DEVICE)(input_ids=tokens.to(DEVICE), attention_mask=mask.to(DEVICE)).logits.detach()
    assert_same_tensor(there, here)


def test_a_model_generates_the_tokens_of_the_cpu() -> None:
    model = model_of("qwen3", "sdpa", FP32).eval()
    tokens = torch.randint(0, 128, (1, 5), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    here = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    there = model.to(DEVICE).generate(tokens.to(DEVICE), attention_mask=torch.ones_like(tokens).to(DEVICE), **options)
    assert there.tolist() == here.tolist()
