"""What users do with tensors of the emulated device: keep, copy, move, print and resize them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE
from support.emulated_inputs import (
    BF16,
    NAN,
    Inputs,
    Op,
    assert_same,
    assert_same_tensor,
    bits,
    both,
)


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
