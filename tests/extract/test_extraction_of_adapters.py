"""LoRA adapters on several ranks, against what peft itself merges and saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from support.extraction import (
    adapted,
    assert_close,
    assert_same,
    everywhere,
    extracted,
    on_the_device,
    qwen,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    tensors_of,
)
from support.ranks import (
    this_device,
    this_rank,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import PlanMismatch, full_tensors, local_shards


def _kinds() -> dict[str, Callable[[], Any]]:
    """Adapted models, by what is special about them."""

    def two() -> Any:
        import peft

        model = adapted()
        other = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
        model.add_adapter("other", other)
        model.base_model.set_adapter(["default", "other"])
        return model

    def inactive() -> Any:
        model = two()
        model.set_adapter("other")
        return model

    return {
        "all linear layers": adapted,
        "rslora": lambda: adapted(use_rslora=True),
        "embedding": lambda: adapted(target_modules=["embed_tokens", "q_proj", "down_proj"]),
        "modules_to_save": lambda: _changed_copies(adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        "two active": two,
        "one of two active": inactive,
        "uneven": lambda: adapted(qwen(vocab_size=257, intermediate_size=131)),
    }


@torch.no_grad()
def _changed_copies(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model


_SHARDS: dict[str, Callable[..., Any]] = {"fsdp2": shard_qwen2, "fsdp1": shard_qwen1}


def _for_each_kind(compare: Callable[[str, Any, Any], None]) -> None:
    """compare: takes the kind, the unsharded model and a sharded one."""
    failures = []
    for kind, build in _kinds().items():
        for way, shard in _SHARDS.items():
            try:
                compare(kind, build(), shard(build()))
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{kind} under {way}: {error}")
    assert not failures, "; ".join(failures)


@everywhere
def test_merged_adapters_are_what_peft_merges() -> None:
    def compare(kind: str, plain: Any, model: Any) -> None:
        expected = tensors_of(plain.merge_and_unload())
        assert sorted(expected) == sorted(qwen().state_dict())
        for options in ({}, {"bucket_bytes": 64 << 10}):
            assert_close(extracted(model, lora="merged", **options), expected)

    _for_each_kind(compare)


@everywhere
def test_the_base_is_the_model_before_the_adapters() -> None:
    def compare(kind: str, plain: Any, model: Any) -> None:
        dims = {"vocab_size": 257, "intermediate_size": 131} if kind == "uneven" else {}
        assert_same(extracted(model, lora="base"), tensors_of(qwen(**dims)))

    _for_each_kind(compare)


@everywhere
def test_the_adapter_is_what_peft_saves() -> None:
    import peft

    def compare(kind: str, plain: Any, model: Any) -> None:
        if kind == "two active":
            with raises_soon(ValueError, "exactly one active adapter", "default, other"):
                extracted(model, lora="adapter")
            return
        name = "other" if kind == "one of two active" else "default"
        expected = peft.get_peft_model_state_dict(plain, adapter_name=name)
        assert_same(extracted(model, lora="adapter"), {name: tensor.detach() for name, tensor in expected.items()})

    _for_each_kind(compare)


@everywhere
def test_a_disabled_adapter_is_not_merged() -> None:
    for shard in _SHARDS.values():
        model = shard(_changed_copies(adapted(modules_to_save=["lm_head"])))
        with model.disable_adapter() if hasattr(model, "disable_adapter") else model.module.disable_adapter():
            assert_same(extracted(model, lora="merged"), tensors_of(qwen()))
        assert not torch.equal(extracted(model)["lm_head.weight"].cpu(), qwen().lm_head.weight)


@everywhere
def test_merged_in_bfloat16_is_the_cast_of_the_merge_in_float32() -> None:
    for shard in _SHARDS.values():
        expected = tensors_of(adapted().merge_and_unload())
        actual = extracted(shard(adapted()), dtype=torch.bfloat16)
        assert sorted(actual) == sorted(expected)
        for name, tensor in actual.items():
            assert tensor.dtype == torch.bfloat16
            wanted = expected[name].to(torch.bfloat16)
            near = (tensor.cpu().float() - wanted.float()).abs() <= 1e-8
            assert ((_ordinal(tensor.cpu()) - _ordinal(wanted)).abs().le(1) | near).all(), f"{name}: more than one ulp"


def _ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """Of a bfloat16 number among all of them."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@on_the_device
def test_offloaded_adapters_are_merged_on_the_device() -> None:
    expected = tensors_of(adapted().merge_and_unload())
    policy = CPUOffloadPolicy(pin_memory=True)
    assert_close(extracted(shard_qwen2(adapted(), offload_policy=policy)), expected)
    assert_close(extracted(shard_qwen1(adapted(), cpu_offload=CPUOffload(offload_params=True))), expected)


@everywhere
def test_adapters_under_ddp_are_merged() -> None:
    model = DistributedDataParallel(adapted().to(this_device()))
    assert_close(extracted(model), tensors_of(adapted().merge_and_unload()))


@everywhere
def test_adapters_of_a_transposed_weight_in_fsdp1_are_merged() -> None:
    """The flat parameter holds a weight in the order of its memory, which is not that of its rows."""

    def build() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10))
        net[0].weight = nn.Parameter(torch.randn(6, 10).t())
        return adapted(net, target_modules=["0"])

    expected = tensors_of(build().merge_and_unload())
    base = build().base_model.model[0].base_layer.weight.detach()
    model = FullyShardedDataParallel(build(), device_id=this_device(), use_orig_params=True)
    assert torch.equal(extracted(model, lora="base")["0.weight"].cpu(), base)
    assert_close(extracted(model), expected)


@everywhere
def test_adapters_that_are_not_understood_are_refused_on_every_rank() -> None:
    model = shard_qwen2(adapted(use_dora=True))
    with raises_soon(NotImplementedError, "Dora"):
        full_tensors(model, lora="merged")
    assert_same(extracted(model, lora="base"), tensors_of(qwen()))


@everywhere
def test_ranks_that_want_different_adapters_all_raise_plan_mismatch() -> None:
    model = shard_qwen2(adapted())
    with raises_soon(PlanMismatch, "lora=merged", "lora=base"):
        extracted(model, lora="base" if this_rank() == 0 else "merged")
    assert_same(extracted(model, lora="base"), tensors_of(qwen()))


@everywhere
def test_ranks_whose_adapters_are_not_scaled_alike_all_raise_plan_mismatch() -> None:
    model = shard_qwen2(adapted())
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    usual = dict(layer.scaling)
    if this_rank() == 1:
        layer.scaling = {name: 2 * value for name, value in usual.items()}
    for extraction in (full_tensors, local_shards):
        with raises_soon(PlanMismatch, f" += {usual['default']} * "):
            list(extraction(model))
    layer.scaling = usual
    assert_close(extracted(model), tensors_of(adapted().merge_and_unload()))
