"""The Hub's names, asked of transformers: the same for every wrapper, and refused where there are none."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest
import torch
import transformers
from support.extraction import adapted, layers_of, shard_qwen1, shard_qwen2
from support.families import new_family
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from fsdp_doctor.weights.names import HubNamesUnknown, NamesError, read_hub_view
from fsdp_doctor.weights.names.hub_names import HubNames, choose_names, revert_names

CHANGED = ("qwen3-moe", "llava", "gemma3-vision")


def _sharded(model: Any) -> Any:
    for module in model.modules():
        for layer in module if isinstance(module, nn.ModuleList) else ():
            fully_shard(layer)
    return fully_shard(model)


def _checkpointed(model: Any) -> Any:
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(checkpoint_wrapper(layer))
    return torch.compile(model)


@on_ranks(Setting("emulated", 2))
def test_every_wrapper_has_the_views_of_the_plain_model() -> None:
    for family in CHANGED:
        expected = read_hub_view(new_family(family))
        assert any(name != view.name for name, view in expected.items())
        with torch.device("meta"):
            assert read_hub_view(new_family(family)) == expected
        # FSDP2 gives each class another name, by which transformers would look for its conversions.
        assert read_hub_view(_sharded(new_family(family).to(this_device()))) == expected
    expected = read_hub_view(new_family("qwen3-moe"))
    assert read_hub_view(_checkpointed(new_family("qwen3-moe"))) == expected
    assert read_hub_view(shard_qwen2(_checkpointed(new_family("qwen3-moe")))) == expected
    for use_orig_params in (True, False):
        wrapped = shard_qwen1(_checkpointed(new_family("qwen3-moe")), use_orig_params=use_orig_params)
        assert read_hub_view(wrapped) == expected


def test_a_fused_tensor_is_a_view_for_each_projection_of_each_expert() -> None:
    views = read_hub_view(new_family("qwen3-moe"))
    fused = [name for name, view in views.items() if view.name == "model.layers.1.mlp.experts.gate_up_proj"]
    assert sorted(fused) == [
        f"model.layers.1.mlp.experts.{expert}.{projection}_proj.weight"
        for expert in range(4)
        for projection in ("gate", "up")
    ]
    assert views["model.layers.1.mlp.experts.3.up_proj.weight"][1:] == ((16, 32), (32, 1), (3 * 2 + 1) * 16 * 32)


def test_a_tied_tensor_has_the_names_of_both_places() -> None:
    model = new_family("gemma3-vision")
    names = ("model.language_model.embed_tokens.weight", "lm_head.weight")
    ((together, view),) = HubNames(read_hub_view(model)).list_parts(names)
    assert together == ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")
    assert view.name == names[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_a_model_with_adapters_has_the_names_of_the_one_below() -> None:
    plain = new_family("qwen3-moe")
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    expected = read_hub_view(plain)
    assert revert_names(adapted(plain, target_modules=["q_proj"]), shapes) == expected


class _Quantized:
    pass


def test_a_model_without_hub_names_is_refused_or_keeps_its_own_names() -> None:
    quantized = new_family("llama")
    quantized.hf_quantizer = _Quantized()
    for model, why in ((nn.Linear(2, 2), "not a model of transformers"), (quantized, "quantized")):
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        with pytest.raises(HubNamesUnknown, match=why):
            choose_names("hub", model, shapes)
        assert choose_names("auto", model, shapes) is None
        assert choose_names("model", model, shapes) is None


def test_an_older_transformers_is_refused_with_the_version_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(HubNamesUnknown, match=r"transformers .* 5\.0\.0 or newer"):
        read_hub_view(new_family("llama"))


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.models.nomic_bert") is None, reason="transformers has no NomicBert"
)
def test_tensors_fused_only_on_the_hub_are_refused_by_name() -> None:
    small = {"num_hidden_layers": 12, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("nomic_bert", vocab_size=64, **small))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for names in ("hub", "auto"):
        with pytest.raises(NamesError) as raised:
            choose_names(names, model, shapes)  # type: ignore[arg-type]
        listed = re.findall(r"\S*Wqkv\S*", str(raised.value))
        assert len(listed) == 10, raised.value
        assert "12 tensors" in str(raised.value)


def test_names_are_one_of_three_words_or_a_mapping() -> None:
    with pytest.raises(ValueError, match="auto, model, hub"):
        choose_names("theirs", nn.Linear(2, 2), {})  # type: ignore[arg-type]
