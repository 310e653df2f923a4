"""Adapters in one process: what each kind becomes, and which are refused."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.extraction import adapted, qwen, tensors_of
from torch import nn

from fsdp_doctor import full_tensors, weights_info

_quietly = pytest.mark.filterwarnings("ignore")  # peft warns of everything that it is asked here


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def _is_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert not set(actual) ^ set(expected)
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def _is_what_peft_saves(peft: Any, model: Any, **options: Any) -> None:
    expected = peft.get_peft_model_state_dict(model, **options)
    actual = dict(full_tensors(model, lora="adapter"))
    assert not set(actual) ^ set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@_quietly
def test_dora_is_refused_where_it_would_have_to_be_merged(peft: Any) -> None:
    model = adapted(use_dora=True)
    with pytest.raises(NotImplementedError, match="Dora"):
        full_tensors(model)
    with pytest.raises(NotImplementedError, match="Dora"):
        weights_info(model)
    base = dict(full_tensors(model, lora="base"))
    _is_close(base, tensors_of(qwen()))


@_quietly
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_name_of_a_tied_pair_is_refused(peft: Any, target: str) -> None:
    """Merged, the two names have different weights, and the model that is loaded has one."""
    model = adapted(qwen(tie_word_embeddings=True), target_modules=[target, "q_proj"])
    with pytest.raises(NotImplementedError, match="tied"):
        full_tensors(model)


@_quietly
def test_a_tied_base_is_yielded_under_both_names(peft: Any) -> None:
    model = adapted(qwen(tie_word_embeddings=True), target_modules=["embed_tokens", "q_proj"])
    base = dict(full_tensors(model, lora="base"))
    assert base["model.embed_tokens.weight"] is base["lm_head.weight"]
    _is_close(base, tensors_of(qwen(tie_word_embeddings=True)))


@_quietly
@pytest.mark.parametrize("name", ["default", "mod", "q", "self"])
def test_an_adapter_may_have_any_name(peft: Any, name: str) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(qwen(), config, adapter_name=name)
    _is_what_peft_saves(peft, model, adapter_name=name)


@_quietly
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
    peft: Any, options: dict[str, Any], tied: bool, tmp_path: pathlib.Path
) -> None:
    model = adapted(qwen(tie_word_embeddings=tied), **options)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "adapter_model.safetensors")
    actual = dict(full_tensors(model, lora="adapter"))
    assert not set(actual) ^ set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@_quietly
def test_the_adapter_of_dora_is_what_peft_saves(peft: Any) -> None:
    _is_what_peft_saves(peft, adapted(use_dora=True))


@_quietly
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_the_adapter_has_the_biases_that_are_trained(peft: Any, bias: str) -> None:
    _is_what_peft_saves(peft, adapted(qwen(attention_bias=True), bias=bias))


@_quietly
def test_weights_with_adapters_merged_in_place_are_yielded_as_they_are(peft: Any) -> None:
    model = adapted()
    expected = tensors_of(copy.deepcopy(model).merge_and_unload())
    model.merge_adapter()
    _is_close(dict(full_tensors(model, lora="merged")), expected)
    with pytest.raises(RuntimeError, match="adapters are merged into it"):
        full_tensors(model, lora="base")


class _WithAdapterInItsName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_adapter = nn.Linear(3, 3)
        self.linear = nn.Linear(3, 3)


@_quietly
def test_a_module_of_the_model_may_be_called_an_adapter(peft: Any) -> None:
    expected = tensors_of(_WithAdapterInItsName())
    model = adapted(_WithAdapterInItsName(), target_modules=["linear"])
    assert sorted(dict(full_tensors(model))) == sorted(expected)


@_quietly
@pytest.mark.parametrize("kind", ["IA3Config", "PromptTuningConfig", "PrefixTuningConfig"])
def test_kinds_other_than_lora_are_refused(peft: Any, kind: str) -> None:
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind == "IA3Config":
        options |= {"target_modules": ["q_proj"], "feedforward_modules": []}
    else:
        options |= {"num_virtual_tokens": 3}
    model = peft.get_peft_model(qwen(), getattr(peft, kind)(**options))
    with pytest.raises(NotImplementedError):
        full_tensors(model)


@_quietly
def test_lora_of_parameters_without_a_layer_is_refused(peft: Any) -> None:
    model = adapted(target_parameters=["q_proj.weight"], target_modules=[], r=2)
    with pytest.raises(NotImplementedError, match="ParamWrapper"):
        full_tensors(model)
