"""LoRA adapters, against what peft itself merges and saves."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
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
from support.ranks import this_device, this_rank
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import PlanMismatch, full_tensors, local_shards, weights_info

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of everything that it is asked here


def _kinds() -> dict[str, Callable[[], Any]]:
    """Adapted models, by what is special about them."""

    def two() -> Any:
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


SHARDS: tuple[Callable[..., Any], ...] = (shard_qwen2, shard_qwen1)


@everywhere
def test_merged_base_and_adapter_are_what_peft_merges_was_given_and_saves() -> None:
    for kind, build in _kinds().items():
        plain = build()
        name = "other" if kind == "one of two active" else "default"
        saved = {key: tensor.detach().clone() for key, tensor in _saved(plain, name).items()}
        base = tensors_of(qwen(**{"vocab_size": 257, "intermediate_size": 131} if kind == "uneven" else {}))
        merged = tensors_of(plain.merge_and_unload())
        assert sorted(merged) == sorted(base)
        for shard in SHARDS:
            print(kind, shard.__name__)
            model = shard(build())
            for options in ({}, {"bucket_bytes": 64 << 10}):
                assert_close(extracted(model, lora="merged", **options), merged)
            assert_same(extracted(model, lora="base"), base)
            if kind == "two active":
                with raises_soon(ValueError, "exactly one active adapter", "default, other"):
                    extracted(model, lora="adapter")
            else:
                assert_same(extracted(model, lora="adapter"), saved)


def _saved(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    return peft.get_peft_model_state_dict(model, adapter_name=adapter)


@everywhere
def test_a_disabled_adapter_is_not_merged() -> None:
    for shard in SHARDS:
        model = shard(_changed_copies(adapted(modules_to_save=["lm_head"])))
        with model.disable_adapter() if hasattr(model, "disable_adapter") else model.module.disable_adapter():
            assert_same(extracted(model, lora="merged"), tensors_of(qwen()))
        assert not torch.equal(extracted(model)["lm_head.weight"].cpu(), qwen().lm_head.weight)


@everywhere
def test_merged_in_bfloat16_is_the_cast_of_the_merge_in_float32() -> None:
    for shard in SHARDS:
        expected = tensors_of(adapted().merge_and_unload())
        actual = extracted(shard(adapted()), dtype=torch.bfloat16)
        assert sorted(actual) == sorted(expected)
        for name, tensor in actual.items():
            assert tensor.dtype == torch.bfloat16
            wanted = expected[name].to(torch.bfloat16)
            near = (tensor.cpu().float() - wanted.float()).abs() <= 1e-8
            assert ((_ordinal(tensor.cpu()) - _ordinal(wanted)).abs().le(1) | near).all(), f"{name}: more than one ulp"


def _ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers a bfloat16 among all of them."""
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


# In one process


CPU = torch.device("cpu")


def _is_what_peft_saves(model: Any, adapter: str = "default") -> None:
    assert_same(extracted(model, lora="adapter"), _saved(model, adapter), CPU)


def test_dora_is_refused_where_it_would_have_to_be_merged() -> None:
    model = adapted(use_dora=True)
    with pytest.raises(NotImplementedError, match="Dora"):
        full_tensors(model)
    with pytest.raises(NotImplementedError, match="Dora"):
        weights_info(model)
    base = dict(full_tensors(model, lora="base"))
    assert_close(base, tensors_of(qwen()))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_name_of_a_tied_pair_is_refused(target: str) -> None:
    """The two names have different weights after a merge, and the model that is loaded has one."""
    model = adapted(qwen(tie_word_embeddings=True), target_modules=[target, "q_proj"])
    with pytest.raises(NotImplementedError, match="tied"):
        full_tensors(model)


def test_a_tied_base_is_yielded_under_both_names() -> None:
    model = adapted(qwen(tie_word_embeddings=True), target_modules=["embed_tokens", "q_proj"])
    base = dict(full_tensors(model, lora="base"))
    assert base["model.embed_tokens.weight"] is base["lm_head.weight"]
    assert_close(base, tensors_of(qwen(tie_word_embeddings=True)))


@pytest.mark.parametrize("name", ["default", "mod", "q", "self"])
def test_an_adapter_may_have_any_name(name: str) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(qwen(), config, adapter_name=name)
    _is_what_peft_saves(model, name)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": r".*\.(embed_tokens|q_proj)"},
        {"target_modules": r"lm_head|.*\.q_proj"},
        {"target_modules": ["model.embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_adapter_of_an_embedding_is_the_file_that_peft_writes(
    options: dict[str, Any], tied: bool, tmp_path: pathlib.Path
) -> None:
    model = adapted(qwen(tie_word_embeddings=tied), **options)
    model.save_pretrained(tmp_path)
    assert_same(extracted(model, lora="adapter"), load_file(tmp_path / "adapter_model.safetensors"), CPU)


def test_the_adapter_of_dora_is_what_peft_saves() -> None:
    _is_what_peft_saves(adapted(use_dora=True))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_the_adapter_has_the_biases_that_are_trained(bias: str) -> None:
    _is_what_peft_saves(adapted(qwen(attention_bias=True), bias=bias))


def test_weights_with_adapters_merged_in_place_are_yielded_as_they_are() -> None:
    model = adapted()
    expected = tensors_of(copy.deepcopy(model).merge_and_unload())
    model.merge_adapter()
    assert_close(dict(full_tensors(model, lora="merged")), expected)
    with pytest.raises(RuntimeError, match="adapters are merged into this weight"):
        full_tensors(model, lora="base")


class _WithAdapterInItsName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_adapter = nn.Linear(3, 3)
        self.linear = nn.Linear(3, 3)


def test_a_module_of_the_model_may_be_called_an_adapter() -> None:
    expected = tensors_of(_WithAdapterInItsName())
    model = adapted(_WithAdapterInItsName(), target_modules=["linear"])
    assert sorted(dict(full_tensors(model))) == sorted(expected)


@pytest.mark.parametrize("kind", ["IA3Config", "PromptTuningConfig", "PrefixTuningConfig"])
def test_kinds_other_than_lora_are_refused(kind: str) -> None:
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind == "IA3Config":
        options |= {"target_modules": ["q_proj"], "feedforward_modules": []}
    else:
        options |= {"num_virtual_tokens": 3}
    model = peft.get_peft_model(qwen(), getattr(peft, kind)(**options))
    with pytest.raises(NotImplementedError):
        full_tensors(model)


def test_lora_of_parameters_without_a_layer_is_refused() -> None:
    model = adapted(target_parameters=["q_proj.weight"], target_modules=[], r=2)
    with pytest.raises(NotImplementedError, match="ParamWrapper"):
        full_tensors(model)
