"""Tests that all ranks know what one refuses, and that the next call of the same model works."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.extraction import (
    adapted,
    assert_close,
    assert_same,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    new_net,
    on_the_device,
    raised_by,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    sharded_net,
    tensors_of,
)
from support.ranks import this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import (
    PlanMismatch,
    fingerprint,
    fingerprint_checkpoint,
    full_state_dict,
    full_tensors,
    local_shards,
    weights_info,
)
from fsdp_doctor.weights.extract import full
from fsdp_doctor.weights.transport.transfers import LocalCopy


@everywhere
def test_invalid_arguments_on_one_rank_are_refused_on_every_rank() -> None:
    refused = world_size() - 1
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
        expected = extracted(model)
        calls: tuple[tuple[type[BaseException], Callable[..., Any], dict[str, Any]], ...] = (
            (ValueError, extracted, {"bucket_bytes": 0}),
            (TypeError, extracted, {"bucket_bytes": "large"}),
            (ValueError, extracted, {"lora": "other"}),
            (TypeError, extracted, {"keep_dtype": 5}),
            (TypeError, extracted, {"keep_dtype": [[]]}),
            (ValueError, full_state_dict, {"ranks": "other"}),
            (ValueError, full_state_dict, {"bucket_bytes": -1}),
        )
        for kind, call, odd in calls:
            together()
            with raised_by(refused, kind):
                call(model, **(odd if this_rank() == refused else {}))
        assert_same(extracted(model), expected)


@everywhere
def test_ranks_with_shards_learn_what_a_rank_without_shards_refuses() -> None:
    """The model does not say who they are."""
    model, odd = fsdp2(new_net()), world_size() - 1
    expected = extracted(model)
    whole: Any = new_net().to(this_device())
    for kind, other, options in (
        (ValueError, whole, {"bucket_bytes": 0}),
        (RuntimeError, new_net().to("meta"), {}),
        (TypeError, "a model", {}),
    ):
        for call in (extracted, fingerprint):
            together()
            with raised_by(odd, kind):
                call(other if this_rank() == odd else model, **(options if this_rank() == odd else {}))
            assert_same(extracted(model), expected)
    with raises_soon(ValueError, "bucket_bytes"):
        extracted(whole, bucket_bytes=0)
    assert_same(extracted(model), expected)


@on_the_device
def test_arguments_of_another_type_are_refused_in_a_sentence() -> None:
    model = fsdp2(new_net())
    for odd, words in (
        ({"dtype": "bf16"}, "not 'bf16' (did you mean torch.bfloat16?)"),
        ({"bucket_bytes": None}, "not None"),
        ({"bucket_bytes": float("nan")}, "not nan"),
        ({"keep_dtype": None}, "not None"),
        ({"keep_dtype": [1]}, "not [1]"),
    ):
        for call in (extracted, full_state_dict, lambda model, **odd: list(local_shards(model, **odd)), fingerprint):
            together()
            with raises_soon(TypeError, *odd, words):
                call(model, **odd)  # type: ignore[operator]


@on_the_device
def test_what_is_no_model_is_refused_in_a_sentence() -> None:
    for call in (extracted, full_state_dict, weights_info, lambda model: list(local_shards(model)), fingerprint):
        for odd in ("a model", None, {}, nn.Linear):
            with raises_soon(TypeError, "the model must be a torch.nn.Module, not"):
                call(odd)  # type: ignore[operator]
            together()


@everywhere
def test_a_shard_of_one_rank_on_meta_is_reported_everywhere() -> None:
    model, expected = sharded_net()
    whole = model.large.weight._local_tensor
    if this_rank() == 1:
        model.large.weight._local_tensor = whole.to("meta")
    with raised_by(1, RuntimeError, "large.weight is on the meta device"):
        extracted(model)
    model.large.weight._local_tensor = whole
    assert_same(extracted(model), expected)


@on_the_device
def test_an_fsdp1_unit_of_one_rank_on_meta_is_reported_everywhere() -> None:
    model = fsdp1(new_net(empty=False))
    expected = extracted(model)
    shard = torch.nn.Parameter(model._handle.flat_param.data.to("meta"))
    on_meta = mock.patch("fsdp_doctor.weights.fsdp.private.fsdp1.read_flat_shard", return_value=shard)
    with on_meta if this_rank() == 1 else mock.MagicMock(), raised_by(1, RuntimeError, "is on the meta device"):
        extracted(model)
    assert_same(extracted(model), expected)


@everywhere
def test_a_pipeline_that_fails_on_one_rank_is_reported_on_all_ranks() -> None:
    """Covers a rank that can have no stream."""
    pytest.importorskip("peft")
    model, with_adapters = fsdp2(new_net()), shard_qwen2(adapted())
    expected = extracted(model)
    for call in (
        lambda: extracted(model),
        lambda: full_state_dict(model),
        lambda: list(local_shards(with_adapters)),
        lambda: fingerprint(with_adapters),
    ):
        together()
        failing = mock.patch.object(full, "Pipeline", side_effect=RuntimeError("no streams"))
        with failing if this_rank() == 0 else mock.MagicMock(), raised_by(0, RuntimeError, "no streams"):
            call()
        assert_same(extracted(model), expected)


@everywhere
def test_adapters_that_are_active_on_some_ranks_only_are_known_to_all() -> None:
    """A rank without an active one has no factors to gather; the others would wait for it."""
    pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    for shard in (shard_qwen2, shard_qwen1):
        model = shard(adapted())
        expected = tensors_of(adapted().merge_and_unload())
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        calls: tuple[Callable[[], Any], ...] = (
            lambda model=model: list(local_shards(model)),
            lambda model=model: fingerprint(model),
            lambda model=model: fingerprint(model, combined=False),
            lambda model=model: extracted(model),
        )
        for layer in layers:
            layer.enable_adapters(this_rank() != 0)
        for call in calls:
            together()
            with raises_soon(PlanMismatch, "rank 0 has nothing more"):
                call()
        for layer in layers:
            layer.enable_adapters(False)
        assert len(list(local_shards(model))) == len(expected)
        for layer in layers:
            layer.enable_adapters(True)
        assert_close(extracted(model), expected)


@on_the_device
def test_a_device_without_an_index_is_this_ranks() -> None:
    """A model without shards is then on the same device, too, and not on another one."""
    net = new_net().to(this_device())
    for model in (net, nn.Linear(3, 2), fsdp2(new_net())):
        for device in ("emulated", torch.device("emulated")):
            for tensor in extracted(model, device=device).values():
                assert tensor.device == this_device()
    assert full.get_plan(net, full.Arguments.check(device="emulated", bucket_bytes=1 << 20))[0].device == this_device()
    last = [name for name, _ in full_tensors(net, device="emulated")]
    assert last == list(weights_info(net))


def test_the_dtype_and_device_asked_for_are_delivered() -> None:
    (name, tensor), _ = full_tensors(nn.Linear(2, 2), device="cpu", dtype=torch.float16)
    assert (name, tensor.dtype, tensor.device.type) == ("weight", torch.float16, "cpu")


def test_one_tensor_is_held_at_a_time() -> None:
    """A tensor that was yielded and dropped is gone before the next is made."""
    entries = full_tensors(nn.Linear(2, 2))
    _, tensor = next(entries)
    held = weakref.ref(tensor)
    del tensor
    next(entries)
    assert held() is None


def test_who_stops_early_alone_loads_no_more() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    loaded: list[str] = []
    pieces = LocalCopy.list_pieces

    def counted(transfer: LocalCopy) -> Any:
        loaded.extend(transfer.names)
        return pieces(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalCopy, "list_pieces", counted)
        entries = full_tensors(model, bucket_bytes=8 * 8 * 4)
        next(entries)
        before = len(loaded)
        entries.close()  # type: ignore[attr-defined]
    assert 0 < len(loaded) == before < 20


def test_a_submodule_that_has_moved_comes_under_its_new_name() -> None:
    model: Any = nn.ModuleDict({"one": nn.ModuleDict({"x": nn.Linear(2, 2)}), "other": nn.ModuleDict()})
    assert [name for name, _ in full_tensors(model)] == ["one.x.weight", "one.x.bias"]
    model["other"]["x"] = model["one"].pop("x")
    assert [name for name, _ in full_tensors(model)] == ["other.x.weight", "other.x.bias"]
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


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *[(word, "torch.bfloat16") for word in ("bf16", "BF16", "bfloat16", "torch.bfloat16")],
        *[(word, "torch.float16") for word in ("fp16", "f16", "float16", "half")],
        *[(word, "torch.float32") for word in ("fp32", "float")],
        ("fp8_e4m3", "torch.float8_e4m3fn"),
    ],
)
def test_a_dtype_that_is_a_word_is_refused_with_the_dtype(word: str, meant: str) -> None:
    with pytest.raises(TypeError) as raised:
        weights_info(nn.Linear(1, 1), dtype=word)  # type: ignore[arg-type]
    assert str(raised.value) == f"dtype must be a torch.dtype, not {word!r} (did you mean {meant}?)"


@pytest.mark.parametrize("word", ["", "auto", "fp8", "nn", 16, float])
def test_what_no_dtype_resembles_is_refused_without_a_suggestion(word: Any) -> None:
    for call in (lambda: weights_info(nn.Linear(1, 1), dtype=word), lambda: fingerprint_checkpoint("none", dtype=word)):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == f"dtype must be a torch.dtype, not {word!r}"


@_of_each_function
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lora": "x"}, ValueError, "lora"),
        ({"lora": "adapter"}, ValueError, "no adapters"),
        ({"dtype": torch.int8}, TypeError, r"torch\.int8"),
        ({"keep_dtype": ["nothing.*"]}, ValueError, r"nothing\.\*"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_the_call(
    function: Callable[..., Any], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        function(_Counting(), **options)


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
