"""Small Qwen models under test, and a user's configuration or checkpoint.

A model is built once for each worker, in float32 on the CPU and from one seed, so that every rank has the same weights;
each scenario shards a copy of it. A load starts from a model whose weights come from another seed, or from a model on
the meta device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import pathlib
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from typing_extensions import assert_never

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Dims, Model
from fsdp_doctor.text import read_first_line

NUM_LAYERS = 2
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_VOCABULARY: dict[Dims, int] = {Dims.EVEN: 256, Dims.UNEVEN: 257}
_INTERMEDIATE: dict[Dims, int] = {Dims.EVEN: 128, Dims.UNEVEN: 131}
_EXPERTS: dict[Dims, int] = {Dims.EVEN: 4, Dims.UNEVEN: 5}


Weights: TypeAlias = Literal["own", "other", "meta"]
SEED: dict[Weights, int] = {"own": 0, "other": 1, "meta": 0}


def build(name: Model, dims: Dims, custom: pathlib.Path | None, weights: Weights = "own") -> nn.Module:
    """Builds a causal language model in float32, the same on every rank, on the CPU or on the meta device.

    The ``own`` weights of a user's model are read from its directory if the directory has a checkpoint.
    """
    model = copy.deepcopy(_build_template(name, dims, custom, weights))
    for module in model.modules() if name.is_quantized else ():
        if hasattr(module, "quant_state"):
            # The copies of a parameter and of its module have two copies of the scales, of which ``to`` moves one.
            module.quant_state = module.get_parameter("weight").quant_state  # type: ignore[attr-defined]
    return model


def halve(model: nn.Module) -> None:
    """Casts every parameter to bfloat16, in place; buffers keep their dtypes, as when transformers loads a model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


@torch.no_grad()
def add_special_values(model: Any) -> None:
    """Writes values that a copy can change unnoticed (-0.0, subnormal, NaN, infinity) into a built-in model, in place.
    The model trains as before.

    In each dense MLP, two neurons get -0.0 and a subnormal number; they output zero and have no gradient. The rows of
    an untied embedding that no batch uses (:func:`choose_token_range`) also get NaN and both infinities. The first and
    the last neurons and rows are used, so that several ranks have such values.
    """
    subnormal = torch.finfo(torch.float32).tiny / 4
    layers: Any = find_decoder_layers(model)
    for layer in layers:
        # A quantization keeps none of them.
        if hasattr(layer.mlp, "gate_proj") and not hasattr(model, "hf_quantizer"):
            neurons = [0, -1]
            layer.mlp.gate_proj.weight[neurons] = -0.0
            layer.mlp.up_proj.weight[neurons] = subnormal
            layer.mlp.down_proj.weight[:, neurons] = -0.0
    if (embedding := find_input_embedding(model)) is not None:
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, subnormal, -subnormal])
        weight = embedding.get_parameter("weight")
        weight[[0, -1]] = special.to(weight.dtype).repeat(weight.shape[1])[: weight.shape[1]]


def choose_token_range(name: Model, model: Any) -> range:
    """Returns the token ids that batches use.

    These are all ids of a user's model, and all ids except the first and the last of a built-in model.
    """
    size = read_vocabulary_size(model)
    return range(size) if name.is_custom else range(1, size - 1)


def list_transient_buffers(name: Model, dims: Dims, custom: pathlib.Path | None) -> dict[str, torch.Tensor]:
    """Returns the non-persistent buffers, by name, on the CPU."""
    model = _build_template(name, dims, custom, "own")
    saved = model.state_dict().keys()
    return {key: buffer.clone() for key, buffer in model.named_buffers() if key not in saved}


@functools.cache
def _build_template(name: Model, dims: Dims, custom: pathlib.Path | None, weights: Weights) -> nn.Module:
    torch.manual_seed(SEED[weights])
    with torch.device("meta") if weights == "meta" else contextlib.nullcontext():
        return _build_new(name, dims, custom, weights)


def _build_new(name: Model, dims: Dims, custom: pathlib.Path | None, weights: Weights) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if name.is_custom:
        assert custom is not None
        if weights == "own" and _has_weights(custom):
            return _check_module(AutoModelForCausalLM.from_pretrained(custom, dtype=torch.float32))
        config: Any = AutoConfig.from_pretrained(custom)
    else:
        config = _make_config(name, dims)
    model = _check_module(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    if name.is_quantized:
        model = _quantize(model, torch.bfloat16 if name.is_in_bf16 else torch.float32)
    if name is Model.QWEN3_FLOAT8:
        model = _convert_to_float8(model)
    if name is Model.QWEN3_MXFP8:
        _convert_to_mxfp8(model)
    if name.has_buffers:
        add_buffers(model, SEED[weights])
    if name.has_adapters:
        import peft

        # Both factors random: peft's own start, where one is zero, would hide a merge that did nothing.
        adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        # Otherwise peft makes adapters in float32, which no unit of FSDP takes together with codes in bfloat16.
        return _check_module(peft.get_peft_model(model, adapters, autocast_adapter_dtype=not name.is_in_bf16))
    return model


def _quantize(model: Any, dtype: torch.dtype) -> nn.Module:
    """Quantizes the weights to 4 bits while transformers loads the model, as in a QLoRA job.

    dtype: the dtype of the other weights and of the computation, in which the codes are also stored.
    """
    from transformers import BitsAndBytesConfig

    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=dtype,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=dtype == torch.bfloat16,
    )
    how = {"dtype": dtype, "quantization_config": options, "device_map": "cpu"}
    return _check_module(type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **how))


def _convert_to_float8(model: nn.Module) -> nn.Module:
    """Makes the linear layers except the head gather and multiply their weights in float8, as torchtitan does.

    The multiplication is emulated, so no particular GPU is needed.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return _check_module(
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    )


def _convert_to_mxfp8(model: nn.Module) -> None:
    """Makes the linear layers except the head multiply their weights in MXFP8, which torchao emulates on any GPU."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")


def check_directory(directory: pathlib.Path) -> None:
    """Raises UsageError if transformers cannot build the model in the directory."""
    try:
        _build_template(Model.CUSTOM, Dims.EVEN, directory, "own")
    except Exception as error:
        raise UsageError(f"--model {directory}: transformers cannot build it: {read_first_line(error)}") from None


def _check_module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model.train()


def _has_weights(directory: pathlib.Path) -> bool:
    return any(directory.glob("*.safetensors")) or any(directory.glob("pytorch_model*.bin"))


def _make_config(name: Model, dims: Dims) -> Any:
    import transformers

    sizes = _SMALL | {"vocab_size": _VOCABULARY[dims], "intermediate_size": _INTERMEDIATE[dims]}
    match name:
        case (
            Model.QWEN3
            | Model.QWEN3_BUFFERS
            | Model.QWEN3_LORA
            | Model.QWEN3_QLORA
            | Model.QWEN3_QLORA_BF16
            | Model.QWEN3_FLOAT8
            | Model.QWEN3_MXFP8
        ):
            return transformers.Qwen3Config(**sizes, head_dim=16)
        case Model.QWEN3_TIED:
            return transformers.Qwen3Config(**(sizes | {"tie_word_embeddings": True}), head_dim=16)
        case Model.QWEN2:
            return transformers.Qwen2Config(**sizes)
        case Model.QWEN3_MOE:
            return transformers.Qwen3MoeConfig(
                **sizes,
                head_dim=16,
                num_experts=_EXPERTS[dims],
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                decoder_sparse_step=1,
            )
        case Model.QWEN3_5:
            return transformers.Qwen3_5TextConfig(
                **sizes,
                head_dim=16,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                layer_types=["linear_attention", "full_attention"],
            )
        case Model.CUSTOM:
            raise AssertionError("a user's model has its own configuration")
        case _:
            assert_never(name)


def explain_unsupported(name: Model, *, fused: bool = False) -> str:
    """Explains why the installed packages cannot build the model, with fused experts if asked; empty if they can."""
    import transformers

    config, packages = _list_needs(name)
    for package in packages:
        if importlib.util.find_spec(package) is None:
            extra = ": install fsdp-doctor[lora]" if package == "peft" else ""
            return f"a model {name} needs {package}, which is not installed{extra}"
    if fused and int(transformers.__version__.split(".")[0]) < 5:
        return f"transformers {transformers.__version__} does not fuse experts, which needs transformers 5.0 or newer"
    if config and not hasattr(transformers, config):
        return f"transformers {transformers.__version__} has no {config}"
    return ""


def _list_needs(name: Model) -> tuple[str, tuple[str, ...]]:
    """Returns (the model's configuration class in transformers, the additional packages that it needs)."""
    match name:
        case Model.QWEN3 | Model.QWEN3_TIED | Model.QWEN3_BUFFERS:
            return "Qwen3Config", ()
        case Model.QWEN3_LORA:
            return "Qwen3Config", ("peft",)
        case Model.QWEN3_QLORA | Model.QWEN3_QLORA_BF16:
            return "Qwen3Config", ("peft", "bitsandbytes", "accelerate")
        case Model.QWEN3_FLOAT8 | Model.QWEN3_MXFP8:
            return "Qwen3Config", ("torchao",)
        case Model.QWEN2:
            return "Qwen2Config", ()
        case Model.QWEN3_MOE:
            return "Qwen3MoeConfig", ()
        case Model.QWEN3_5:
            return "Qwen3_5TextConfig", ()
        case Model.CUSTOM:
            return "", ()
        case _:
            assert_never(name)


def checkpoint_activations(model: Any) -> None:
    """Enables activation checkpointing, as verl does: the backward recomputes each decoder layer's forward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def add_buffers(model: nn.Module, seed: int) -> None:
    """Registers a persistent float32 buffer in each layer, like e_score_correction_bias in MoE models."""
    for index, layer in enumerate(find_decoder_layers(model)):
        layer.register_buffer("score_bias", torch.arange(5, dtype=torch.float32) + index + 10 * seed)


def find_decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the classes in the model's ``_no_split_modules``: FSDP's units, as in verl."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def find_input_embedding(model: Any) -> nn.Module | None:
    """Returns the input embedding if it may be a separate FSDP unit; None if it is tied to the head or missing."""
    text = model.config.get_text_config()
    # For a model of images and text, transformers since 5 has it next to the text's configuration.
    tied = text.tie_word_embeddings if hasattr(text, "tie_word_embeddings") else model.config.tie_word_embeddings
    if model.get_input_embeddings() is None or tied:
        return None
    embedding: nn.Module = model.get_input_embeddings()
    return embedding


def read_vocabulary_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)
