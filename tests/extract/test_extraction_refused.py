"""What is refused on one rank alone is known to all of them, and the next call of the same model works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
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
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    tensors_of,
)
from support.ranks import this_device, this_rank, together, world_size
from torch import nn

from fsdp_doctor import PlanMismatch, RankLeft, fingerprint, full_state_dict, full_tensors, local_shards, weights_info
from fsdp_doctor.extract import full


@everywhere
def test_arguments_that_make_no_sense_on_one_rank_are_refused_on_every_rank() -> None:
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
            if this_rank() == refused:
                with raises_soon(kind):
                    call(model, **odd)
            else:
                with raises_soon(RankLeft, f"rank {refused} left", kind.__name__):
                    call(model)
        assert_same(extracted(model), expected)


@everywhere
def test_what_is_refused_of_a_model_without_shards_is_known_to_the_ranks_that_wait_with_theirs() -> None:
    """Who they are is not in that model."""
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
            with raises_soon(
                kind if this_rank() == odd else RankLeft, *(() if this_rank() == odd else (kind.__name__,))
            ):
                call(other if this_rank() == odd else model, **(options if this_rank() == odd else {}))
            assert_same(extracted(model), expected)
    with raises_soon(ValueError, "bucket_bytes"):
        extracted(whole, bucket_bytes=0)
    assert_same(extracted(model), expected)


@on_the_device
def test_arguments_of_another_type_are_refused_in_a_sentence() -> None:
    model = fsdp2(new_net())
    for odd, words in (
        ({"dtype": "bfloat16"}, "dtype must be a torch.dtype, not 'bfloat16'"),
        ({"bucket_bytes": None}, "bucket_bytes must be an int, not None"),
        ({"bucket_bytes": float("nan")}, "bucket_bytes must be an int, not nan"),
        ({"keep_dtype": None}, "keep_dtype must be names, or patterns of them, not None"),
        ({"keep_dtype": [1]}, "keep_dtype must be names, or patterns of them, not [1]"),
    ):
        for call in (extracted, full_state_dict, lambda model, **odd: list(local_shards(model, **odd)), fingerprint):
            together()
            with raises_soon(TypeError, words):
                call(model, **odd)  # type: ignore[operator]


@on_the_device
def test_what_is_no_model_is_refused_in_a_sentence() -> None:
    for call in (extracted, full_state_dict, weights_info, lambda model: list(local_shards(model)), fingerprint):
        for odd in ("a model", None, {}, nn.Linear):
            with raises_soon(TypeError, "the model must be a torch.nn.Module, not"):
                call(odd)  # type: ignore[operator]
            together()


@everywhere
def test_a_shard_on_the_meta_device_of_one_rank_is_known_to_all() -> None:
    model = fsdp2(new_net())
    expected = extracted(model)
    whole = model.large.weight._local_tensor
    if this_rank() == 1:
        model.large.weight._local_tensor = whole.to("meta")
    with raises_soon(RuntimeError if this_rank() == 1 else RankLeft, "large.weight is on the meta device"):
        extracted(model)
    model.large.weight._local_tensor = whole
    assert_same(extracted(model), expected)


@on_the_device
def test_an_fsdp1_unit_on_the_meta_device_of_one_rank_is_known_to_all() -> None:
    model = fsdp1(new_net(empty=False))
    expected = extracted(model)
    flat = model._handle.flat_param
    whole = flat.data
    shard = torch.nn.Parameter(whole.to("meta"))
    with (
        mock.patch("fsdp_doctor.fsdp.private.flat_shard", return_value=shard) if this_rank() == 1 else mock.MagicMock(),
        raises_soon(RuntimeError if this_rank() == 1 else RankLeft, "is on the meta device"),
    ):
        extracted(model)
    assert_same(extracted(model), expected)


@everywhere
def test_a_pipeline_that_cannot_be_made_on_one_rank_is_known_to_all() -> None:
    """As where there is no stream to be had."""
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
        if this_rank() == 0:
            failing = mock.patch.object(full, "Pipeline", side_effect=RuntimeError("no streams"))
            with failing, raises_soon(RuntimeError, "no streams"):
                call()
        else:
            with raises_soon(RankLeft, "rank 0 left before the first bucket", "no streams"):
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
def test_a_word_that_is_none_refused_on_one_rank_is_known_to_all_where_adapters_are_merged() -> None:
    pytest.importorskip("peft")
    model = shard_qwen2(adapted())
    for call in (local_shards, lambda model, **options: fingerprint(model, combined=False, **options)):
        together()
        with raises_soon(ValueError if this_rank() == 0 else RankLeft, "lora"):
            list(call(model, **({"lora": "other"} if this_rank() == 0 else {})))  # type: ignore[operator]
    assert len(extracted(model)) == len(weights_info(model))


@on_the_device
def test_a_device_without_an_index_is_this_ranks() -> None:
    """Of a model without shards too, whose own is then the same device, and not another one."""
    net = new_net().to(this_device())
    for model in (net, nn.Linear(3, 2), fsdp2(new_net())):
        for device in ("emulated", torch.device("emulated")):
            for tensor in extracted(model, device=device).values():
                assert tensor.device == this_device()
    assert full.plan_of(net, full.Arguments.given("emulated", None, (), 1 << 20, "merged"))[0].device == this_device()
    last = [name for name, _ in full_tensors(net, device="emulated")]
    assert last == list(weights_info(net))
