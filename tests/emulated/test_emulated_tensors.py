"""Tests what users do with tensors of the emulated device: keep, copy, move, print, resize and free them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.emulated_device import (
    BF16,
    DEVICE,
    Inputs,
    Op,
    Used,
    assert_as_on_cpu,
    bits,
    check_each,
    emulated,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

# Torch says once that it does not check indices, that it does at a load, and that compressed layouts are new.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
]


def saved(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_a_saved_tensor_loads_where_it_was_and_where_it_is_mapped() -> None:
    original = Inputs(DEVICE)(4, 6, dtype=BF16)
    file = saved({"weight": original, "part": original[1:, ::2]})
    for location, device in ((None, "emulated:0"), ("cpu", "cpu"), ("emulated:1", "emulated:1")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["weight"].device == torch.device(device)
        assert torch.equal(bits(loaded["weight"]), bits(original))
        assert torch.equal(bits(loaded["part"]), bits(original[1:, ::2]))
        assert loaded["part"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()
    assert torch.load(saved(torch.arange(5.0)), map_location=DEVICE).tolist() == [0, 1, 2, 3, 4]


def test_a_deep_copy_is_separate_and_equal_and_keeps_strides() -> None:
    linear = torch.nn.Linear(4, 3).to(DEVICE)
    other = copy.deepcopy(linear)
    assert torch.equal(bits(other.weight), bits(linear.weight))
    assert other.weight.device == linear.weight.device
    other.weight.data.zero_()
    assert linear.weight.abs().sum().item() > 0
    assert_as_on_cpu(lambda t: copy.deepcopy(t(4, 6).t()[1:, ::2]))


def test_data_can_be_replaced_by_data_of_another_device() -> None:
    """FSDP1's offload replaces data in this way."""
    for before, after in (("cpu", DEVICE), (DEVICE, "cpu"), ("emulated:0", "emulated:1")):
        parameter = torch.nn.Parameter(torch.ones(4, device=before))
        parameter.data = torch.full((6,), 2.0, device=after)
        assert parameter.device.type == torch.device(after).type
        (parameter * 3).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.device == parameter.device
        assert parameter.grad.tolist() == [3] * 6


def test_data_replaced_across_devices_frees_the_memory_of_the_device() -> None:
    used = Used()
    parameter = torch.nn.Parameter(torch.ones(1024, device=DEVICE))
    parameter.data = parameter.data.cpu()
    assert used.now() == 0


def test_a_module_moves_there_and_back_unchanged() -> None:
    linear = torch.nn.Linear(4, 3)
    before = [bits(parameter) for parameter in linear.parameters()]
    identities = [id(parameter) for parameter in linear.parameters()]
    assert {parameter.device.type for parameter in linear.to(DEVICE).parameters()} == {DEVICE}
    assert {parameter.device.type for parameter in linear.cpu().parameters()} == {"cpu"}
    assert [id(parameter) for parameter in linear.parameters()] == identities
    assert all(torch.equal(bits(p), b) for p, b in zip(linear.parameters(), before, strict=True))
    with torch.device("meta"):
        linear = torch.nn.Linear(4, 3)
    assert linear.to_empty(device=DEVICE).weight.device.type == DEVICE


HOST_VALUES: dict[str, tuple[Op, Any]] = {
    "floats": (lambda t: repr(t.of([1.5, float("nan")])), "tensor([1.5000,    nan], device='emulated:0')"),
    "bfloat16": (lambda t: repr(t.of([1.0], BF16)), "tensor([1.], device='emulated:0', dtype=torch.bfloat16)"),
    "item of bfloat16": (lambda t: t.of([1.0], BF16).item(), 1.0),
    "tolist": (lambda t: t.of([[1, 2], [3, 4]]).t().tolist(), [[1, 3], [2, 4]]),
    "tolist of an empty one": (lambda t: t.zeros(0, 3).tolist(), []),
    "int": (lambda t: int(t.of(2.9)), 2),
    "bool": (lambda t: bool(t.of(0)), False),
    "index": (lambda t: [5, 6, 7][t.of(1)], 6),
    "equal": (lambda t: torch.equal(t.of([1, 2]), t.of([1, 2])), True),
    "allclose": (lambda t: torch.allclose(t.of([1.0]), t.of([1.1])), False),
    "in": (lambda t: 3 in t.of([1, 3]), True),
    "iteration": (lambda t: [x.item() for x in t.of([1, 3])], [1, 3]),
    "is_set_to": (lambda t: (lambda x: x.is_set_to(x.view_as(x)))(t.of([1])), True),
}


def test_a_value_reaches_the_host_and_no_array_does() -> None:
    def check(entry: tuple[Op, Any]) -> None:
        assert entry[0](Inputs(DEVICE)) == entry[1]

    check_each(HOST_VALUES, check)
    with pytest.raises(TypeError, match=r"can't convert emulated:0 device type tensor to numpy"):
        torch.ones(2, device=DEVICE).numpy()


NEITHER: dict[str, Callable[[Tensor], Tensor]] = {
    "Mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", NEITHER)
def test_a_tensor_that_is_neither_dense_nor_sparse_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"has dense and sparse tensors alone, and this one is {name}"):
        NEITHER[name](torch.ones(3, device=DEVICE))


# Storages


def test_modes_without_memory_work_as_without_the_device() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with FakeTensorMode():
            assert emulated.get_rng_state().tolist() == emulated.get_rng_state().tolist()
            assert torch.randn(3, device=DEVICE).shape == (3,)
        whole = torch.arange(96.0).view(8, 12)
        with LocalTensorMode(4):
            sharded = distribute_tensor(whole, dist.init_device_mesh("cpu", (4,)), [Shard(0)])
            for view in (sharded.view(-1), sharded.t(), sharded.unsqueeze(1), sharded[:, 2]):
                assert view.full_tensor().numel() in (8, 96)
        mesh = dist.init_device_mesh(DEVICE, (4,))
        assert distribute_tensor(whole.to(DEVICE), mesh, [Shard(0)]).full_tensor().shape == whole.shape
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_what_cuda_refuses_is_refused() -> None:
    x, scalar = torch.ones(3, device=DEVICE), torch.tensor(2.0)
    index, values = torch.tensor([0, 1], device=DEVICE), torch.ones(2, device=DEVICE)
    for call in (lambda: torch.addcmul(scalar, x, x), lambda: torch.addcmul(x, scalar, x)):
        with pytest.raises(RuntimeError, match="CPU Scalar support for"):
            call()
    assert torch.addcmul(x, x, scalar).tolist() == [3, 3, 3]
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        x.to(torch.complex64).scatter_(0, index, values.to(torch.complex64), reduce="multiply")
    assert x.clone().scatter_(0, index, values * 2, reduce="multiply").tolist() == [2, 2, 1]


# Operations that CUDA has no deterministic kernel for, and the name in its message: here of all calls, below of some.
_ALERTS = {
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "_upsample_bilinear2d_aa_backward": "upsample_bilinear2d_aa_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "_upsample_bicubic2d_aa_backward": "upsample_bicubic2d_aa_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
}
_Call = Callable[[Tensor, Tensor, Tensor], Any]
_SOME_ALERTS: dict[str, tuple[_Call, _Call]] = {
    "put_": (lambda x, i, v: x.put_(i, v, accumulate=True), lambda x, i, v: x.index_put_((i,), v)),
    "_histc_cuda with floating point input": (lambda x, i, v: x.histc(2), lambda x, i, v: i.histc(2)),
    "_bincount_cuda": (lambda x, i, v: i.bincount(v), lambda x, i, v: i.bincount()),
    "index_reduce_cuda": (lambda x, i, v: x.index_reduce_(0, i, v, "prod"), lambda x, i, v: x.index_add_(0, i, v)),
    "scatter_reduce_cuda_kernel": (
        lambda x, i, v: x.scatter_(0, i, v, reduce="multiply"),
        lambda x, i, v: x.scatter_(0, i, 2.0, reduce="multiply"),
    ),
    "scatter_reduce_cuda_prod_": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "prod"),
        lambda x, i, v: x.scatter_reduce(0, i, v, "sum"),
    ),
    "nll_loss2d_forward_out_cuda_template": (
        lambda x, i, v: functional.nll_loss(v.view(1, 2, 1, 1), i[:1].view(1, 1, 1)),
        lambda x, i, v: functional.nll_loss(v.view(1, 2, 1, 1), i[:1].view(1, 1, 1), reduction="none"),
    ),
    "embedding_bag_backward_cuda_max": (
        lambda x, i, v: functional.embedding_bag(i, x.view(3, 1).requires_grad_(), i[:1], mode="max").sum().backward(),
        lambda x, i, v: functional.embedding_bag(i, x.view(3, 1).requires_grad_(), i[:1], mode="sum").sum().backward(),
    ),
}
if torch.__version__ < (2, 14):
    _SOME_ALERTS["median CUDA with indices output"] = (
        lambda x, i, v: x.nanmedian(0),
        lambda x, i, v: x.median(),
    )


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter", "ignore:index_reduce")
def test_operations_nondeterministic_only_on_cuda_are_refused_only_on_the_device() -> None:
    def alert(device: str, call: _Call) -> str:
        x, i, v = torch.ones(3), torch.tensor([0, 1]), torch.ones(2)
        try:
            call(x.to(device), i.to(device), v.to(device))
        except RuntimeError as error:
            return str(error).partition(" does not have a deterministic implementation")[0]
        return ""

    torch.use_deterministic_algorithms(True)
    try:
        for operation, kernel in _ALERTS.items():
            operator = getattr(torch.ops.aten, operation).default
            # The alert comes first, whatever the arguments are.
            given = {"Tensor": torch.ones(2, device=DEVICE), "List[int]": [1], "int": 1, "bool": False}
            given["List[bool]"] = [True, True]
            required = [
                given.get(str(each.type)) for each in operator._schema.arguments if not each.has_default_value()
            ]
            assert alert(DEVICE, lambda *_, call=operator, arguments=required: call(*arguments)) == kernel
        for kernel, (alerted, other) in _SOME_ALERTS.items():
            assert [alert(DEVICE, alerted), alert("cpu", alerted), alert(DEVICE, other)] == [kernel, "", ""]
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="_bincount_cuda does not have"):
            assert alert(DEVICE, _SOME_ALERTS["_bincount_cuda"][0]) == ""
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_storage_shrunk_to_nothing_and_back_keeps_tensor_and_views() -> None:
    """FSDP frees and refills its buffers in this way."""
    x = torch.ones(1024, device=DEVICE)
    part, used = x[2:4], Used()
    x.untyped_storage().resize_(0)
    assert (x.untyped_storage().size(), x.shape) == (0, (1024,))
    assert used.now() == -4096
    x.untyped_storage().resize_(4096)
    x.copy_(torch.arange(1024.0))
    assert used.now() == 0
    assert part.tolist() == [2, 3]


def test_a_resized_storage_keeps_the_bytes_that_fit() -> None:
    x = torch.arange(10, device=DEVICE)
    x.untyped_storage().resize_(32)
    x.untyped_storage().resize_(80)
    assert x[:4].tolist() == [0, 1, 2, 3]
    x.resize_(2, 100)
    assert x.view(-1)[:4].tolist() == [0, 1, 2, 3]
    assert x.untyped_storage().nbytes() == 1600


def test_set_shares_the_storage_of_the_other() -> None:
    x, y = torch.empty(0, device=DEVICE), torch.arange(6.0, device=DEVICE)
    x.set_(y.untyped_storage(), 2, (2, 2), (2, 1))
    y.mul_(2)
    assert x.tolist() == [[4, 6], [8, 10]]


# Sparse tensors: PyTorch's tables compare their operations


def coo(t: Inputs) -> Tensor:
    """Returns a sparse tensor that is not coalesced."""
    return torch.sparse_coo_tensor(t.of([[0, 1, 1, 0], [2, 0, 2, 2]]), t(4), (2, 4))


def parts(tensor: Tensor) -> Any:
    """A dense tensor as it is; of a sparse one, the dense ones that it consists of."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values(), tensor.shape
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values(), tensor.shape
    return tensor


def assert_same_parts(op: Op) -> None:
    assert_as_on_cpu(lambda t: tree_map_only(Tensor, parts, op(t)))


SPARSE: dict[str, Op] = {
    "of lists": lambda t: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], device=t.device),
    "of a dense one": lambda t: t.ints(3, 4, high=2).to_sparse(),
    "to_dense": lambda t: coo(t).to_dense(),
    "coalesce": lambda t: coo(t).coalesce(),
    "add_ to dense": lambda t: t(2, 4).add_(coo(t), alpha=2),
    "mm": lambda t: coo(t) @ t(4, 3),
    "mm of two": lambda t: torch.sparse.mm(coo(t), coo(t).t()),
    "sum": lambda t: (coo(t).sum(), torch.sparse.sum(coo(t), 0)),
    "deepcopy": lambda t: copy.deepcopy(coo(t)),
    "saved": lambda t: torch.load(saved(coo(t))),
    "to bfloat16": lambda t: coo(t).to(BF16),
    "copy_ from the host": lambda t: torch.zeros_like(coo(t)).copy_(coo(Inputs("cpu"))),
    "autocast": lambda t: torch.autocast(t.device, BF16)(lambda: coo(t) @ t(4, 3))(),
    **{
        str(layout): lambda t, layout=layout, block=block: (  # type: ignore[misc]
            (lambda x: [x, x * 2, x.clone(), x.to_dense(), x.sum(), x.clone().to("cpu").to(x.device)])(
                coo(t).to_dense().to_sparse(layout=layout, **block)
            )
        )
        for layout, block in (
            *((layout, {}) for layout in (torch.sparse_csr, torch.sparse_csc)),
            *((layout, {"blocksize": (2, 2)}) for layout in (torch.sparse_bsr, torch.sparse_bsc)),
        )
    },
}


def test_a_sparse_tensor_of_any_layout_is_that_of_the_cpu() -> None:
    check_each(SPARSE, assert_same_parts)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "SparseAdam": lambda weights: torch.optim.SparseAdam(weights, lr=0.1),
}


def test_an_embedding_with_sparse_gradients_trains_as_on_the_cpu() -> None:
    def trained(t: Inputs, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Any:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(6, 3, sparse=True).to(t.device)
        stepper = optimizer(list(embedding.parameters()))
        for _ in range(3):
            stepper.zero_grad()
            embedding(t.of([1, 1, 4])).square().sum().backward()
            stepper.step()
        assert embedding.weight.grad is not None
        return embedding.weight, embedding.weight.grad

    check_each(OPTIMIZERS, lambda optimizer: assert_same_parts(lambda t: trained(t, optimizer)))


def test_the_memory_of_a_sparse_tensor_is_shared_counted_and_freed() -> None:
    values = torch.ones(2, device=DEVICE)
    shared = torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=DEVICE), values, (3,))
    values.mul_(5)
    assert shared.to_dense().tolist() == [5, 5, 0]
    used = Used()
    sparse = coo(Inputs("cpu")).to(DEVICE)
    assert used.now() == 2 * 512
    del sparse
    assert used.now() == 0
    shared._values().untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
        shared.to_dense()


def test_a_sparse_tensor_stays_on_its_device() -> None:
    sparse = coo(Inputs("emulated:1"))
    assert (sparse * 2).coalesce().values().device == torch.device("emulated", 1)
    assert "device='emulated:1', size=(2, 4), nnz=4, layout=torch.sparse_coo" in str(sparse)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        sparse + coo(Inputs("emulated:0"))
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        sparse.pin_memory()


def test_a_sparse_tensor_comes_to_pinned_memory_late_and_its_values_race() -> None:
    late = coo(Inputs(DEVICE)).to("cpu", non_blocking=True)
    assert emulated.copies_in_flight() == 2
    emulated.synchronize()
    assert torch.equal(late.to_dense(), coo(Inputs("cpu")).to_dense())
    sparse = coo(Inputs(DEVICE)).coalesce()
    with emulated.race_detection():
        sparse.values().mul_(3)
        with emulated.stream(torch.Stream(DEVICE)):
            assert (sparse._nnz(), sparse.is_coalesced(), sparse.sparse_dim()) == (3, True, 2)
            assert emulated.data_races() == []
            sparse.values().mul_(2)
        races = emulated.data_races()
    assert any("aten::mul_ on stream" in race and "neither waits for the other" in race for race in races)


def beyond() -> Tensor:
    return torch.sparse_coo_tensor([[0, 50_000_000], [1, 70_000_000]], [1.0, 1.0], (3, 3), device=DEVICE)


def test_an_index_outside_of_a_sparse_tensor_does_not_end_the_process() -> None:
    for use in (lambda: beyond().to_sparse_csr(), lambda: torch.sparse.mm(beyond(), beyond())):
        with pytest.raises(torch.AcceleratorError, match=r"index .* is out of bounds in a sparse tensor of size"):
            use()
