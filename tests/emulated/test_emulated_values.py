"""Every operation on the emulated device gives bit for bit what the CPU's operation gives."""

from __future__ import annotations

import torch
from support.emulated_inputs import (
    BF16,
    FLOATS,
    FP16,
    FP32,
    FP64,
    INF,
    NAN,
    Op,
    assert_same,
    both,
    cases,
    changed,
    each_dtype,
)
from torch.nn import functional

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
