"""Sparse tensors: their indices and values are on the device, and every operation is that of the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import BF16, FP64, Inputs, Op, assert_same, both, cases
from torch import Tensor
from torch.utils._pytree import tree_map_only

# Torch says once that it does not check indices, that it does at a load, and that compressed layouts are new.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
]

LAYOUTS = {
    str(layout)[6:]: layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def coo(t: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """Not coalesced."""
    return torch.sparse_coo_tensor(t.of([[0, 1, 1, 0], [2, 0, 2, 2]]), t(4, dtype=dtype), (2, 4))


def compressed(t: Inputs, layout: torch.layout) -> Tensor:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return coo(t).to_dense().to_sparse(layout=layout, **blocks)


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
    assert_same(*both(lambda t: tree_map_only(Tensor, parts, op(t))))


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(tensor)
    return tensor


COO: dict[str, Op] = {
    "as it is made": coo,
    "of lists": lambda t: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], device=t.device),
    "empty": lambda t: torch.sparse_coo_tensor(size=(2, 3), device=t.device),
    "zeros": lambda t: torch.zeros(2, 3, layout=torch.sparse_coo, device=t.device),
    "of a dense one": lambda t: t.ints(3, 4, high=2).to_sparse(),
    "with a dense dimension": lambda t: t(3, 4, 2).to_sparse(2),
    "to_dense": lambda t: coo(t).to_dense(),
    "coalesce": lambda t: coo(t).coalesce(),
    "indices, values": lambda t: (coo(t).coalesce().indices(), coo(t).coalesce().values()),
    "numbers": lambda t: (coo(t)._nnz(), coo(t).sparse_dim(), coo(t).dense_dim(), coo(t).is_sparse),
    "add": lambda t: coo(t) + coo(t),
    "add to dense": lambda t: t(2, 4) + coo(t),
    "add_ to dense": lambda t: t(2, 4).add_(coo(t), alpha=2),
    "add_": lambda t: coo(t).add_(coo(t)),
    "mul": lambda t: coo(t) * coo(t),
    "mul by dense": lambda t: coo(t) * t(2, 4),
    "mul_ by a number": lambda t: coo(t).mul_(3),
    "neg, div": lambda t: -coo(t) / 2,
    "zero_": lambda t: coo(t).zero_(),
    "mm": lambda t: coo(t) @ t(4, 3),
    "mm in float64": lambda t: coo(t, FP64) @ t(4, 3, dtype=FP64),
    "mm of two": lambda t: torch.sparse.mm(coo(t), coo(t).t()),
    "mm of a compressed one": lambda t: compressed(t, torch.sparse_csr) @ t(4, 3),
    "addmm": lambda t: torch.addmm(t(2, 3), coo(t), t(4, 3), beta=2),
    "sum": lambda t: (coo(t).sum(), torch.sparse.sum(coo(t), 0)),
    "softmax": lambda t: torch.sparse.softmax(coo(t).coalesce(), 1),
    "norm": lambda t: coo(t).norm(),
    "transpose": lambda t: coo(t).t(),
    "select": lambda t: coo(t)[1],
    "index_select": lambda t: coo(t).index_select(1, t.of([2, 0])),
    "narrow_copy": lambda t: coo(t).narrow_copy(1, 1, 2),
    "cat": lambda t: torch.cat([coo(t), coo(t)]),
    "sparse_mask": lambda t: t(2, 4).sparse_mask(coo(t).coalesce()),
    "sparse_resize_": lambda t: coo(t).sparse_resize_((5, 6), 2, 0),
    "transpose in place": lambda t: coo(t).t_(),
    "clone": lambda t: coo(t).clone(),
    "detach": lambda t: coo(t).detach(),
    "deepcopy": lambda t: copy.deepcopy(coo(t)),
    "zeros_like": lambda t: torch.zeros_like(coo(t)),
    "saved": lambda t: saved(coo(t)),
    "to bfloat16": lambda t: coo(t).to(BF16),
    "from the host": lambda t: coo(Inputs("cpu")).to(t.device),
    "copy_": lambda t: torch.zeros_like(coo(t)).copy_(coo(t)),
    "copy_ from the host": lambda t: torch.zeros_like(coo(t)).copy_(coo(Inputs("cpu"))),
    "values that are written": lambda t: changed(coo(t), lambda x: x._values().fill_(7)),
    "autocast": lambda t: torch.autocast(t.device, BF16)(lambda: coo(t) @ t(4, 3))(),
}


@cases(COO)
def test_a_sparse_tensor_is_that_of_the_cpu(op: Op) -> None:
    assert_same_parts(op)


COMPRESSED: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda x: x,
    "to_dense": lambda x: x.to_dense(),
    "mul": lambda x: x * 2,
    "clone": lambda x: x.clone(),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.clone().mul_(2).copy_(x),
    "sum": lambda x: x.sum(),
    "to another device": lambda x: x.clone().to("cpu").to(x.device),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("operation", COMPRESSED.values(), ids=COMPRESSED)
def test_a_compressed_tensor_is_that_of_the_cpu(operation: Callable[[Tensor], Any], layout: torch.layout) -> None:
    assert_same_parts(lambda t: operation(compressed(t, layout)))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "SparseAdam": lambda weights: torch.optim.SparseAdam(weights, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_embedding_with_sparse_gradients_trains_as_on_the_cpu(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
) -> None:
    def trained(t: Inputs) -> Any:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(6, 3, sparse=True).to(t.device)
        stepper = optimizer(list(embedding.parameters()))
        for _ in range(3):
            stepper.zero_grad()
            embedding(t.of([1, 1, 4])).square().sum().backward()
            stepper.step()
        assert embedding.weight.grad is not None
        return embedding.weight, embedding.weight.grad

    assert_same_parts(trained)


def test_gradients_flow_through_values_and_products() -> None:
    def gradients(t: Inputs) -> Any:
        values, dense = t.leaf(2), t.leaf(2, 3)
        sparse = torch.sparse_coo_tensor(t.of([[0, 1], [1, 0]]), values, (2, 2))
        torch.sparse.mm(sparse, dense).square().sum().backward()
        return values.grad, dense.grad

    assert_same_parts(gradients)


def test_it_shares_the_memory_of_its_values() -> None:
    values = torch.ones(2, device=DEVICE)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=DEVICE), values, (3,))
    values.mul_(5)
    assert sparse.to_dense().tolist() == [5, 5, 0]


def test_its_memory_is_counted_until_it_is_freed() -> None:
    before = torch.emulated.memory_allocated()
    sparse = coo(Inputs("cpu")).to(DEVICE)
    assert torch.emulated.memory_allocated() - before == 2 * 512
    del sparse
    assert torch.emulated.memory_allocated() == before


def test_it_stays_on_the_device_that_it_is_on() -> None:
    sparse = coo(Inputs("emulated:1"))
    assert (sparse * 2).coalesce().values().device == torch.device("emulated", 1)
    assert sparse.to("emulated:0").device == torch.device("emulated", 0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        sparse + coo(Inputs("emulated:0"))


def test_it_prints_its_device() -> None:
    assert "device='emulated:0', size=(2, 4), nnz=4, layout=torch.sparse_coo" in str(coo(Inputs(DEVICE)))


def test_it_comes_to_pinned_memory_late() -> None:
    late = coo(Inputs(DEVICE)).to("cpu", non_blocking=True)
    assert torch.emulated.copies_in_flight() == 2
    torch.emulated.synchronize()
    assert torch.equal(late.to_dense(), coo(Inputs("cpu")).to_dense())


def test_two_streams_that_use_its_values_race() -> None:
    sparse = coo(Inputs(DEVICE)).coalesce()
    with torch.emulated.race_detection():
        sparse.mul_(3)
        with torch.emulated.stream(torch.Stream(DEVICE)):
            sparse.mul_(2)
        races = torch.emulated.data_races()
    assert any("aten::mul_ on stream" in race and "neither waits for the other" in race for race in races)


def test_two_streams_that_ask_for_its_shape_do_not() -> None:
    sparse = coo(Inputs(DEVICE)).coalesce()
    torch.emulated.synchronize()
    with torch.emulated.race_detection():
        sparse.values().mul_(2)
        with torch.emulated.stream(torch.Stream(DEVICE)):
            assert (sparse._nnz(), sparse.is_coalesced(), sparse.sparse_dim()) == (3, True, 2)


OUTSIDE: dict[str, Callable[[], Any]] = {
    "to_sparse_csr": lambda: beyond().to_sparse_csr(),
    "mm of two": lambda: torch.sparse.mm(beyond(), beyond()),
    "mm of a compressed one": lambda: (
        torch.sparse_csr_tensor([0, 1, 2, 9], [0, 1, 7], [1.0, 1.0, 1.0], (3, 3), device=DEVICE)
        @ torch.ones(3, 2, device=DEVICE)
    ),
}


def beyond() -> Tensor:
    return torch.sparse_coo_tensor([[0, 50_000_000], [1, 70_000_000]], [1.0, 1.0], (3, 3), device=DEVICE)


@pytest.mark.parametrize("use", OUTSIDE.values(), ids=OUTSIDE)
def test_an_index_outside_of_it_does_not_end_the_process(use: Callable[[], Any]) -> None:
    with pytest.raises(torch.AcceleratorError, match=r"index .* is out of bounds in a sparse tensor of size"):
        use()


def test_values_that_were_freed_are_an_illegal_access() -> None:
    sparse = coo(Inputs(DEVICE))
    sparse._values().untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
        sparse.to_dense()


def test_it_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        coo(Inputs(DEVICE)).pin_memory()


def test_what_cuda_has_no_kernel_for_is_refused_in_torchs_words() -> None:
    product = torch.eye(3, device=DEVICE).to_sparse_csr()
    with pytest.raises(NotImplementedError, match="Could not run 'aten::_sparse_mm_reduce_impl'"):
        torch.sparse.mm(product, torch.ones(3, 2, device=DEVICE), reduce="amax")
