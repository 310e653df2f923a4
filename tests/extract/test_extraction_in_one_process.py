"""full_tensors, full_state_dict and weights_info in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import full_state_dict, full_tensors, weights_info
from fsdp_doctor.extract.transfers import LocalCopy


def test_a_model_that_is_not_initialized_is_refused_before_any_collective() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="weight is on the meta device"):
        next(full_tensors(model))


def test_the_dtype_and_device_asked_for_are_delivered() -> None:
    (name, tensor), _ = full_tensors(nn.Linear(2, 2), device="cpu", dtype=torch.float16)
    assert (name, tensor.dtype, tensor.device.type) == ("weight", torch.float16, "cpu")


def test_the_callers_grad_mode_is_left_alone() -> None:
    entries = full_tensors(nn.Linear(2, 2))
    next(entries)
    assert torch.is_grad_enabled()


def test_one_tensor_is_held_at_a_time() -> None:
    """What was yielded and dropped is gone before the next is made."""
    entries = full_tensors(nn.Linear(2, 2))
    _, tensor = next(entries)
    held = weakref.ref(tensor)
    del tensor
    next(entries)
    assert held() is None


def test_who_stops_early_alone_loads_no_more() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    loaded: list[str] = []
    pieces = LocalCopy.pieces

    def counted(transfer: LocalCopy) -> Any:
        loaded.extend(transfer.names())
        return pieces(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCopy, "pieces", counted)
        entries = full_tensors(model, bucket_bytes=8 * 8 * 4)
        next(entries)
        before = len(loaded)
        entries.close()  # type: ignore[attr-defined]
    assert 0 < len(loaded) == before < 20


def test_a_submodule_that_has_moved_comes_under_its_new_name() -> None:
    model = nn.ModuleDict({"one": nn.ModuleDict({"x": nn.Linear(2, 2)}), "other": nn.ModuleDict()})
    assert [name for name, _ in full_tensors(model)] == ["one.x.weight", "one.x.bias"]
    model["other"]["x"] = model["one"].pop("x")  # type: ignore[operator, index]
    assert [name for name, _ in full_tensors(model)] == ["other.x.weight", "other.x.bias"]


def test_a_submodule_under_another_attribute_comes_under_its_new_name() -> None:
    model = nn.Module()
    model.one, model.other = nn.Linear(2, 2), None
    assert [name for name, _ in full_tensors(model)] == ["one.weight", "one.bias"]
    model.one, model.other = None, model.one
    assert [name for name, _ in full_tensors(model)] == ["other.weight", "other.bias"]


# Bad input, refused when the function is called


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3))


_FUNCTIONS: list[Callable[..., Any]] = [full_tensors, full_state_dict, weights_info]
_of_each_function = pytest.mark.parametrize("function", _FUNCTIONS, ids=lambda function: function.__name__)


@_of_each_function
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lora": "x"}, ValueError, "lora must be one of merged, adapter, base, not 'x'"),
        ({"lora": "adapter"}, ValueError, "the model has no adapters"),
        ({"dtype": torch.int8}, TypeError, "must be a floating-point dtype, not torch.int8"),
        ({"keep_dtype": ["nothing.*"]}, ValueError, r"no parameter and no buffer is called nothing\.\*"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_the_call(
    function: Callable[..., Any], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        function(_Counting(), **options)


@pytest.mark.parametrize("function", [full_tensors, full_state_dict])
@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_must_have_room(function: Callable[..., Any], bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes must be positive, not {bucket_bytes}"):
        function(nn.Linear(2, 2), bucket_bytes=bucket_bytes)


def test_ranks_of_a_state_dict_are_rank0_or_all() -> None:
    with pytest.raises(ValueError, match="ranks must be one of rank0, all, not 'x'"):
        full_state_dict(nn.Linear(2, 2), ranks="x")


@_of_each_function
def test_a_meta_model_is_refused_at_the_call(function: Callable[..., Any]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"0\.weight is on the meta device"):
        function(model)


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@_of_each_function
def test_a_sharded_model_without_its_process_group_is_refused(function: Callable[..., Any]) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    assert len(list(function(model))) == 2
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        function(model)


def test_keep_dtype_may_be_one_name() -> None:
    tensors = dict(full_tensors(_Counting(), dtype=torch.bfloat16, keep_dtype="count"))
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "linear.weight": torch.bfloat16,
        "linear.bias": torch.bfloat16,
        "count": torch.int64,
    }


def test_a_single_process_yields_copies() -> None:
    model = _Counting()
    for name, tensor in full_tensors(model):
        assert torch.equal(tensor, model.state_dict()[name])
        tensor.fill_(9)
        assert not torch.equal(tensor, model.state_dict()[name])
