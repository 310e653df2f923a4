"""Operations, gradients, optimizers and whole models on the emulated device give the bits of the CPU.

PyTorch's own tables of operators, modules and errors are compared in ``test_torch_tables.py``. Here is what they leave
out: other strides, ``out=``, lists of tensors, tensors of the host among the arguments, random numbers, and models.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.emulated_device import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Inputs,
    Op,
    assert_as_on_cpu,
    assert_same_tensor,
    bits,
    check_each,
    with_gradients,
)
from torch import Tensor, nn
from torch.nn import functional

INF, NAN, C64 = float("inf"), float("nan"), torch.complex64
View = Callable[[Tensor], Tensor]


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """Returns what is left in ``tensor`` after ``change``, and what that returned."""
    returned = change(tensor)
    return tensor, returned


# Strides

STRIDES: dict[str, View] = {
    "transposed": lambda x: x.transpose(0, 1),
    "every second column": lambda x: x[:, ::2],
    "with an offset": lambda x: x[3:, 1:],
    "one column": lambda x: x[:, 3],
    "0-dim": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}
OVERLAPPING: dict[str, View] = {
    "expanded": lambda x: x[:1].expand(8, 8),
    "overlapping": lambda x: x.as_strided((8, 8), (3, 1)),
}
UNARY: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x * 3,
    functional.silu,
    lambda x: functional.softmax(x, -1),
    torch.sum,
    lambda x: x.sum(-1),
    torch.clone,
    lambda x: x.contiguous(),
    lambda x: x.to(BF16),
    lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    lambda x: torch.where(x > 0, x, 0),
    lambda x: torch.empty_like(x).fill_(1),
    lambda x: x.tolist(),
    lambda x: torch._foreach_mul([x], 2),
)


def test_an_operation_reads_any_strides() -> None:
    def check(view: View) -> None:
        for operation in UNARY:
            assert_as_on_cpu(lambda t: operation(view(t(8, 8))))  # noqa: B023

    check_each(STRIDES | OVERLAPPING, check)


def test_a_tensor_of_any_strides_and_dtype_moves_to_the_host_unchanged() -> None:
    def check(view: View) -> None:
        for dtype in (FP32, BF16, torch.int64, torch.bool):
            host, moved = (view(Inputs(device)(8, 8).to(dtype)) for device in ("cpu", DEVICE))
            assert torch.equal(bits(moved.cpu()), bits(host))
            assert moved.cpu().stride() == host.clone().stride()

    check_each(STRIDES | OVERLAPPING, check)


def test_a_copy_to_or_from_the_device_changes_only_the_named_part() -> None:
    def check(part: View) -> None:
        for dtype, pin, to_device in itertools.product((FP32, BF16), (False, True), (False, True)):
            if to_device:
                target, source = Inputs(DEVICE)(8, 8), torch.randn(part(torch.zeros(8, 8)).shape).to(dtype)
                expected = target.cpu()
                part(target).copy_(source.pin_memory() if pin else source, non_blocking=True)
            else:
                target, expected = torch.zeros(8, 8, dtype=dtype, pin_memory=pin), torch.zeros(8, 8, dtype=dtype)
                source = torch.randn(part(expected).shape)
                part(target).copy_(source.to(DEVICE), non_blocking=True)
            part(expected).copy_(source)
            torch.emulated.synchronize()
            assert torch.equal(bits(target), bits(expected)), (dtype, pin, to_device)

    check_each(STRIDES, check)


def test_copies_between_two_devices_keep_the_bits() -> None:
    values = torch.randn(5, 6)
    there = values.to("emulated:0").t().to("emulated:1", BF16)
    assert there.device == torch.device("emulated", 1)
    assert torch.equal(bits(there), bits(values.t().to(BF16)))


VIEWS: dict[str, View] = {
    "view of a part": lambda x: x[1:].view(2, 8),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 5), 1),
    "index": lambda x: x[1, ..., None, ::2],
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(3, 5, 4),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "view as a smaller dtype": lambda x: x.view(torch.uint8),
    "view as a larger dtype": lambda x: x.view(torch.float64),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "split": lambda x: x.split([1, 2])[1],
    "data": lambda x: x.data,
}


def test_a_view_has_the_strides_of_the_cpu_and_shares_memory() -> None:
    def check(view: View) -> None:
        def op(t: Inputs) -> list[Any]:
            base = t(3, 2, 4)
            seen = view(base)
            before = seen.clone()
            base.mul_(2)
            seen[(0,) * seen.dim()] = 5
            assert seen.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
            return [before, seen, base, seen._is_view(), seen._base is base]

        assert_as_on_cpu(op)

    check_each(VIEWS, check)


# In place, out=, lists of tensors

IN_PLACE: dict[str, Callable[[Inputs, Tensor], Any]] = {
    "add_": lambda t, x: x.add_(t(4), alpha=0.1),
    "fill_ by a tensor": lambda t, x: x.fill_(t.of(2.5)),
    "copy_ from another dtype": lambda t, x: x.copy_(t(3, 4, dtype=BF16)),
    "copy_ from a row": lambda t, x: x.copy_(t(4)),
    "copy_ from a transposed": lambda t, x: x.copy_(t(4, 3).t()),
    "masked_fill_": lambda t, x: x.masked_fill_(t.bools(3, 4), 0),
    "silu_": lambda t, x: functional.silu(x, inplace=True),
    "unsqueeze_": lambda t, x: x.unsqueeze_(1),
    "t_": lambda t, x: x.t_(),
    "as_strided_": lambda t, x: x.as_strided_((2, 2), (1, 3), 1),
    "resize_ smaller": lambda t, x: x.resize_(2, 3),
    "set_ to another": lambda t, x: x.set_(t(2, 5)),
    "set_ to a storage": lambda t, x: x.set_(t(9).untyped_storage(), 1, (2, 3), (3, 1)),
    "detach_": lambda t, x: x.detach_(),
    "a slice": lambda t, x: x[:, 1:3].mul_(2),
    "a column set": lambda t, x: x.__setitem__((slice(None), 1), t(3)),
    "+= by a CPU number": lambda t, x: x.__iadd__(torch.tensor(2.0)),
}


def test_an_operation_in_place_equals_the_cpus_and_counts_a_version() -> None:
    def check(change: Callable[[Inputs, Tensor], Any]) -> None:
        def op(t: Inputs) -> list[Any]:
            x = t(3, 4)
            returned = change(t, x)
            assert returned is None or returned is x or returned._base is x
            return [x, returned, x._version]

        assert_as_on_cpu(op)

    check_each(IN_PLACE, check)


OUTS: dict[str, Callable[[Inputs, Tensor], Any]] = {
    "add": lambda t, out: torch.add(t(3, 4), t(3, 4), out=out),
    "mm": lambda t, out: torch.mm(t(3, 5), t(5, 4), out=out),
    "cat": lambda t, out: torch.cat([t(1, 4), t(2, 4)], out=out),
    "sum": lambda t, out: torch.sum(t(3, 4, 2), -1, out=out),
    "index_select": lambda t, out: torch.index_select(t(5, 4), 0, t.ints(3, high=5), out=out),
    "softmax": lambda t, out: torch.softmax(t(3, 4), 1, out=out),
    "full": lambda t, out: torch.full((3, 4), 2.0, out=out),
    "arange": lambda t, out: torch.arange(12, out=out),
}


def test_an_out_is_filled_and_resized_as_on_the_cpu() -> None:
    def check(compute: Callable[[Inputs, Tensor], Any]) -> None:
        def op(t: Inputs) -> list[Tensor]:
            shape = compute(t, t.zeros(0)).shape
            whole = t.zeros(*(2 * size for size in shape))
            strided = whole[tuple(slice(None, None, 2) for _ in shape)]
            outs = [t.zeros(0), t.zeros(*shape), strided]
            for out in outs:
                assert compute(t, out) is out
            return [*outs, whole]

        assert_as_on_cpu(op)

    check_each(OUTS, check)


def test_an_out_that_grows_is_counted_on_its_device() -> None:
    out = torch.empty(0, device=DEVICE)
    before = torch.emulated.memory_allocated()
    torch.add(torch.ones(1024, device=DEVICE), 1, out=out)
    assert torch.emulated.memory_allocated() - before == 4096


Lists = Callable[[list[Tensor], list[Tensor], list[Tensor]], Any]
FOREACH: dict[str, Lists] = {
    "_foreach_norm": lambda x, y, z: torch._foreach_norm(x, 2.0),
    "_foreach_norm of infinity": lambda x, y, z: torch._foreach_norm(x[:3], INF),
    "_foreach_norm in float": lambda x, y, z: torch._foreach_norm(x, 2.0, dtype=FP32),
    "_foreach_mul": lambda x, y, z: torch._foreach_mul(x, y),
    "_foreach_sqrt": lambda x, y, z: torch._foreach_sqrt(z),
    "_foreach_mul_ by a number": lambda x, y, z: torch._foreach_mul_(x, 0.9),
    "_foreach_mul_ by numbers": lambda x, y, z: torch._foreach_mul_(x, [0.9, 0.8, 0.7, 1.0]),
    "_foreach_mul_ by a tensor": lambda x, y, z: torch._foreach_mul_(x, y[0][0, 0]),
    "_foreach_add_ of tensors": lambda x, y, z: torch._foreach_add_(x, y, alpha=0.5),
    "_foreach_add_ of a CPU number": lambda x, y, z: torch._foreach_add_(x, torch.tensor(1.0)),
    "_foreach_lerp_": lambda x, y, z: torch._foreach_lerp_(x, y, 0.1),
    "_foreach_addcmul_": lambda x, y, z: torch._foreach_addcmul_(x, y, y, 0.1),
    "_foreach_addcdiv_ by numbers": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, [0.1, 0.2, 0.3, 0.4]),
    "_foreach_maximum_": lambda x, y, z: torch._foreach_maximum_(x, y),
    "_foreach_zero_": lambda x, y, z: torch._foreach_zero_(x),
    "_foreach_copy_ across dtypes": lambda x, y, z: torch._foreach_copy_(x, [tensor.double() for tensor in y]),
}


def test_a_foreach_operation_equals_the_cpus_and_leaves_other_elements_alone() -> None:
    def check(operation: Lists) -> None:
        def on_tensors(t: Inputs, dtype: torch.dtype) -> list[Any]:
            shapes = ((3, 4), (5, 1), (4,), (0, 2))
            x, y = t.list(*shapes, dtype=dtype), t.list(*shapes, dtype=dtype)
            z = [t.positive(*shape, dtype=dtype) for shape in shapes]
            return [operation(x, y, z), x, y, z]

        def on_slices(t: Inputs) -> list[Any]:
            wholes, y = t.list(*[(4, 6)] * 4), t.list(*[(4, 3)] * 4)
            z = [t.positive(4, 3) for _ in y]
            return [operation([whole[:, ::2] for whole in wholes], y, z), wholes]

        for dtype in (FP32, BF16, FP16):
            assert_as_on_cpu(lambda t: on_tensors(t, dtype))  # noqa: B023
        assert_as_on_cpu(on_slices)

    check_each(FOREACH, check)


# Tensors of the host among the arguments

OF_THE_HOST: dict[str, Op] = {
    "add a number": lambda t: t(4) + torch.tensor(2.0),
    "a number minus": lambda t: torch.tensor(2.0) - t(4),
    "where": lambda t: torch.where(t.bools(4), t(4), torch.tensor(0.0)),
    "promotion": lambda t: t(4, dtype=BF16) * torch.tensor(2.0, dtype=torch.float64),
    "foreach": lambda t: torch._foreach_mul(t.list((2,), (3,)), torch.tensor(2.0)),
    "set to a number": lambda t: changed(t(4), lambda x: x.__setitem__(1, torch.tensor(9.0))),
    "index by a tensor": lambda t: t(6, 3)[torch.tensor([4, 1])],
    "index by a mask": lambda t: t(3)[torch.tensor([True, False, True])],
    "index by both": lambda t: t(6, 3)[torch.tensor([4, 1]), t.of([1, 2])],
    "index_put_": lambda t: t(6).index_put_((torch.tensor([4, 1]),), t(2), accumulate=True),
    "index with a gradient": lambda t: (lambda x: with_gradients(x[torch.tensor([4, 4])], x))(t.leaf(6, 3)),
}


def test_numbers_and_indices_may_be_on_the_host() -> None:
    check_each(OF_THE_HOST, assert_as_on_cpu)


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda host, there: host + there,
    "in place": lambda host, there: there.add_(host),
    "in place on the host": lambda host, there: host.add_(there),
    "linear": lambda host, there: functional.linear(there, host),
    "cat": lambda host, there: torch.cat([there, host]),
    "where": lambda host, there: torch.where(there > 0, there, host),
    "embedding": lambda host, there: functional.embedding(torch.tensor([1, 2]), there),
    "out": lambda host, there: torch.add(there, 1, out=host),
    "foreach": lambda host, there: torch._foreach_add_([there], [host]),
    "attention": lambda host, there: functional.scaled_dot_product_attention(there, host, there),
    "another device": lambda host, there: there + there.to("emulated:1"),
    "cross_entropy": lambda host, there: functional.cross_entropy(there, torch.tensor([1, 1, 2, 2])),
    "a host tensor indexed by the device's": lambda host, there: host[torch.tensor([1], device=DEVICE)],
    "index_put_ of the host's values": lambda host, there: there.index_put_((torch.tensor([0, 1]),), host[:2]),
}


def test_tensors_of_two_devices_are_refused_in_the_words_of_torch() -> None:
    words = (
        r"Expected all tensors to be on the same device|indices should be either on cpu or on the same device"
        r"|Expected query, key, and value to have the same device type"
    )

    def check(mix: Callable[[Tensor, Tensor], Any]) -> None:
        host = torch.ones(4, 4)
        with pytest.raises(RuntimeError, match=words):
            mix(host, host.to(DEVICE))

    check_each(MIXED, check)


WRONG: dict[str, Op] = {
    "out of another dtype": lambda t: torch.add(t(3), t(3), out=t.zeros(3, dtype=torch.int64)),
    "shapes that do not fit": lambda t: t(3, 4) @ t(3, 4),
    "dtypes that do not fit": lambda t: t(3, 3) @ t(3, 3, dtype=BF16),
    "a view that is none": lambda t: t(3, 4).t().view(12),
    "a storage that is too small": lambda t: t(3).as_strided((9,), (1,)),
    "truth of many": lambda t: bool(t(3)),
    "in place on a leaf": lambda t: t.leaf(3).add_(1),
    "in place on an expanded": lambda t: t(1).expand(3).add_(1),
    "copy_ of another shape": lambda t: t(3).copy_(t(4)),
    "backward of a changed tensor": lambda t: (lambda x: (x.exp() * (y := x.exp())).sum() + y.add_(1).sum())(
        t.leaf(3)
    ).backward(),
    "foreach of other lengths": lambda t: torch._foreach_add(t.list((2,)), t.list((2,), (2,))),
}


def test_a_mistake_is_reported_in_the_words_of_the_cpu() -> None:
    def error_of(op: Op, device: str) -> str:
        with pytest.raises((RuntimeError, IndexError)) as caught:
            op(Inputs(device))
        return f"{caught.type.__name__}: {caught.value}".split("\n")[0]

    def check(op: Op) -> None:
        here, there = error_of(op, DEVICE), error_of(op, "cpu")
        assert here.replace("emulatedFloatType", "torch.FloatTensor").replace("emulated:0", "cpu") == there

    check_each(WRONG, check)


def test_an_index_beyond_the_end_is_an_assertion_on_the_device() -> None:
    beyond, table = torch.tensor([7], device=DEVICE), torch.ones(3, 2, device=DEVICE)
    for read in (
        lambda: table[beyond],
        lambda: table.index_select(0, beyond),
        lambda: table.gather(0, beyond[:, None]),
        lambda: functional.embedding(beyond, table),
    ):
        with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
            read()
    with pytest.raises(IndexError):
        table[7]


# Conjugates, zeros, and CUDA's own kernels


def lazy_copy(target: View) -> Op:
    """The base of a lazy target after a copy from the host into it."""

    def copy_to(t: Inputs) -> Tensor:
        base, values = t.zeros(3, dtype=C64), torch.tensor([1 + 2j, 3 - 4j, 5j])
        target(base).copy_(values if target(base).is_complex() else values.real)
        return base

    return copy_to


SPECIAL: dict[str, Op] = {
    "vdot with a conjugate": lambda t: torch.vdot(t(3, dtype=C64), t(3, dtype=C64).conj()),
    "a copy into a conjugate": lazy_copy(torch.Tensor.conj),
    "a copy into an imaginary part of a conjugate": lazy_copy(lambda base: base.conj().imag),
    "a copy of a conjugate": lambda t: t(3, dtype=C64).conj().to(torch.complex128),
    "not-a-number keeps its bits": lambda t: t.of([0x7FC00001, -1, 0x7F800001], torch.int32).view(FP32).clone(),
    "hessian": lambda t: torch.func.hessian(lambda a: (a**3).sum())(t(3)),
    "histc of integers is that of doubles": lambda t: (
        t.ints(40).histc(8, 0, 7) if t.device != "cpu" else t.ints(40).double().histc(8, 0, 7).long()
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_conjugates_nans_and_derivatives_of_zero_are_those_of_the_cpu() -> None:
    check_each(SPECIAL, assert_as_on_cpu)
    assert torch.tensor([1 + 2j, -3j]).to(DEVICE).conj().cpu().tolist() == [1 - 2j, 3j]


def test_a_tensor_known_to_be_zero_is_zero_and_immutable() -> None:
    zero = torch._efficientzerotensor((3,), device=DEVICE)
    assert zero.cpu().tolist() == [0.0] * 3
    assert (zero + torch.ones(3, device=DEVICE)).tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zero.copy_(torch.ones(3))


def test_recurrent_networks_train_as_on_the_cpu() -> None:
    """Fused cells, which only CUDA has, add the biases in another order: not the same bits."""
    inputs, lengths = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 3])

    def trained(module: nn.Module, device: str) -> list[Tensor]:
        module = copy.deepcopy(module).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(inputs.to(device), lengths)
        output = module(packed)[0].data
        output.square().sum().backward()
        return [output.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]

    def check(kind: type[nn.RNNBase]) -> None:
        for bias in (True, False):
            torch.manual_seed(0)
            module = kind(4, 3, 2, bias=bias, bidirectional=True)
            here = trained(module, DEVICE)
            assert len(here) == len(list(module.parameters())) + 1
            torch.testing.assert_close(here, trained(module, "cpu"))

    check_each({"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}, check)


def test_batch_norm_takes_weights_in_half_precision_beside_buffers_in_float32() -> None:
    for dtype in (BF16, FP16):
        torch.manual_seed(0)
        module = nn.BatchNorm1d(4).to(DEVICE)
        reference = copy.deepcopy(module)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        inputs = torch.randn(6, 4, device=DEVICE, dtype=dtype)
        output, expected = module(inputs), reference(inputs.float())
        torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
        output.float().square().sum().backward()
        expected.square().sum().backward()
        assert output.dtype == module.weight.grad.dtype == dtype
        torch.testing.assert_close(module.running_var, reference.running_var)
        torch.testing.assert_close(module.weight.grad.float(), reference.weight.grad, atol=5e-2, rtol=5e-2)


# Random numbers

RANDOM: dict[str, Op] = {
    "randn": lambda t: torch.randn(20, device=t.device),
    "randint": lambda t: torch.randint(0, 100, (20,), device=t.device),
    "randperm": lambda t: torch.randperm(20, device=t.device),
    "rand_like in bfloat16": lambda t: torch.rand_like(t(20, dtype=BF16)),
    "normal_": lambda t: t.zeros(20).normal_(0, 0.02),
    "kaiming_uniform_": lambda t: torch.nn.init.kaiming_uniform_(t.zeros(4, 5)),
    "bernoulli": lambda t: torch.bernoulli(t(20).sigmoid()),
    "multinomial": lambda t: torch.multinomial(t.positive(8), 5, replacement=True),
    "dropout": lambda t: functional.dropout(t(20), 0.5),
}


def test_random_operations_match_the_cpu_and_leave_its_generator_unchanged() -> None:
    def seeded(op: Op, t: Inputs) -> Any:
        torch.manual_seed(11)
        return op(t)

    def check(op: Op) -> None:
        assert_as_on_cpu(lambda t: seeded(op, t))
        before = torch.get_rng_state()
        torch.emulated.manual_seed(11)
        first, second = op(Inputs(DEVICE)), op(Inputs(DEVICE))
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(first, second)
        torch.emulated.manual_seed(11)
        assert torch.equal(op(Inputs(DEVICE)), first)

    check_each(RANDOM, check)


def test_a_generator_is_one_of_its_device() -> None:
    assert_as_on_cpu(lambda t: torch.randn(9, device=t.device, generator=torch.Generator(t.device).manual_seed(5)))
    with pytest.raises(RuntimeError, match="Expected an 'emulated' device type for generator but found 'cpu'"):
        torch.randn(9, device=DEVICE, generator=torch.Generator())


# Attention, optimizers, models

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "bool mask": {"mask": torch.bool},
    "float mask": {"mask": FP32},
    "grouped and causal": {"kv_heads": 2, "enable_gqa": True, "is_causal": True},
    "another scale": {"scale": 0.3},
    "longer keys and bool mask": {"keys": 11, "mask": torch.bool},
    "long": {"queries": 70, "keys": 70, "is_causal": True},
}


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


def test_attention_and_its_gradients_are_those_of_the_cpu() -> None:
    def check(options: dict[str, Any]) -> None:
        for dtype in (FP32, BF16, FP16):
            assert_as_on_cpu(lambda t: attend(t, dtype, **options))  # noqa: B023

    check_each(ATTENTION, check)


def test_attention_with_dropout_is_reproducible() -> None:
    x = Inputs(DEVICE)(1, 2, 5, 8)
    torch.manual_seed(1)
    first = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "amsgrad": {"foreach": True, "amsgrad": True},
    "tensor lr": {"foreach": False, "lr": torch.tensor(0.01)},
}


def test_adamw_and_clipping_update_to_the_bits_of_the_cpu() -> None:
    def trained(t: Inputs, dtype: torch.dtype, options: dict[str, Any], norm_type: float) -> list[Any]:
        parameters = [nn.Parameter(x) for x in t.list((5, 4), (7,), (), dtype=dtype)]
        optimizer = torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **options})
        norms = []
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = t(*parameter.shape, dtype=dtype)
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.5, norm_type, foreach=options.get("foreach")))
            optimizer.step()
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        return [*norms, *(parameter.detach() for parameter in parameters), *states]

    def check(options: dict[str, Any]) -> None:
        for dtype, norm_type in itertools.product((FP32, BF16), (2.0, INF)):
            assert_as_on_cpu(lambda t: trained(t, dtype, {"foreach": False} | options, norm_type))  # noqa: B023

    check_each({name: options for name, options in OPTIMIZERS.items() if name != "fused"}, check)
    assert_as_on_cpu(lambda t: trained(t, FP32, OPTIMIZERS["fused"] | {"foreach": None}, INF)[3:])


def test_adamw_chooses_foreach_for_the_device() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameters = [nn.Parameter(torch.ones(2, device=DEVICE))]
    assert _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False) == (False, True)


def test_autocast_computes_in_its_dtype() -> None:
    def op(t: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, w = t.leaf(3, 4), t.leaf(4, 5)
        with torch.autocast(t.device, dtype=dtype):
            y = x @ w
        assert y.dtype == dtype
        return with_gradients(y, x, w)

    for dtype in (BF16, FP16):
        assert_as_on_cpu(lambda t: op(t, dtype))  # noqa: B023


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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


def model_of(name: str, attention: str, dtype: torch.dtype) -> nn.Module:
    config_name, options = MODELS[name]
    config = getattr(transformers, config_name, None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**SMALL, **options), attn_implementation=attention, dtype=dtype
    )
    return model.train()


def one_step(model: nn.Module, device: str) -> dict[str, Tensor]:
    model = copy.deepcopy(model).to(device)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    weights = {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **gradients, "norm": norm, **weights}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_a_model_is_that_of_the_cpu(name: str) -> None:
    for attention, dtype in (("eager", FP32), ("sdpa", FP32), ("sdpa", BF16)):
        model = model_of(name, attention, dtype)
        here, there = one_step(model, DEVICE), one_step(model, "cpu")
        assert here.keys() == there.keys()
        assert sum(key.startswith("gradient") for key in here) >= 20
        for key in here:
            assert_same_tensor(here[key], there[key], f"{key} with {attention}, {dtype}")


def test_a_model_generates_the_tokens_of_the_cpu() -> None:
    model = model_of("qwen3", "sdpa", FP32).eval()
    tokens = torch.randint(0, 128, (1, 5), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    here = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    there = model.to(DEVICE).generate(tokens.to(DEVICE), attention_mask=torch.ones_like(tokens).to(DEVICE), **options)
    assert there.tolist() == here.tolist()
