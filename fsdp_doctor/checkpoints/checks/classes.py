"""Compares names and shapes with the formulas of known model types, without importing transformers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fsdp_doctor.checkpoints.checks.evidence import LAYER, CheckpointEvidence
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.record import Arrangement, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble


class ShapeFormula(NamedTuple):
    """Shape of the tensors with a certain name: each dim is a sum of products of numbers and keys of the config."""

    name: re.Pattern[str]
    dims: tuple[str, ...]


class CrossAttention(NamedTuple):
    """Pattern of the layer names of an encoder-decoder model, and the name of the cross-attention in each decoder
    layer.
    """

    layer: re.Pattern[str]
    attention: str


def _write_formulas(*formulas: tuple[str, tuple[str, ...]]) -> tuple[ShapeFormula, ...]:
    return tuple(ShapeFormula(re.compile(rf"(?:.*\.)?{name}\.weight"), dims) for name, dims in formulas)


_POSITIONS = r"embeddings\.position_embeddings"
_BERT = _write_formulas(
    (_POSITIONS, ("max_position_embeddings", "hidden_size")),
    (r"embeddings\.token_type_embeddings", ("type_vocab_size", "hidden_size")),
)
_NARROW_BERT = _write_formulas(
    (_POSITIONS, ("max_position_embeddings", "embedding_size")),
    (r"embeddings\.token_type_embeddings", ("type_vocab_size", "embedding_size")),
)
_BART = _write_formulas((r"(?:encoder|decoder)\.embed_positions", ("max_position_embeddings + 2", "d_model")))
_T5 = _write_formulas(
    (r"SelfAttention\.relative_attention_bias", ("relative_attention_num_buckets", "num_heads")),
    (r"(?:SelfAttention|EncDecAttention)\.[qkv]", ("num_heads * d_kv", "d_model")),
    (r"(?:SelfAttention|EncDecAttention)\.o", ("d_model", "num_heads * d_kv")),
    (r"DenseReluDense\.wi(?:_\d)?", ("d_ff", "d_model")),
    (r"DenseReluDense\.wo", ("d_model", "d_ff")),
)
_PATCHES = ("hidden_size", "num_channels", "patch_size", "patch_size")
_VIT = _write_formulas((r"patch_embeddings\.projection", _PATCHES))
_CLIP_VISION = _write_formulas((r"vision_model\.embeddings\.patch_embedding", _PATCHES))
_CLIP_TEXT = _write_formulas(
    (r"text_model\.embeddings\.position_embedding", ("max_position_embeddings", "hidden_size"))
)
# transformers 5 writes either of the two keys.
_ROUTERS = _write_formulas(
    (r"(?:block_sparse_moe|mlp)\.gate", ("num_local_experts", "hidden_size")),
    (r"(?:block_sparse_moe|mlp)\.gate", ("num_experts", "hidden_size")),
)
# Formulas for each model type, as of the classes of transformers 5.23; tests compare them with the installed classes.
SHAPE_FORMULAS: dict[str, tuple[ShapeFormula, ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    **dict.fromkeys(("albert", "electra"), _NARROW_BERT),
    "distilbert": _write_formulas((_POSITIONS, ("max_position_embeddings", "dim"))),
    "gpt2": _write_formulas(
        (r"wpe", ("n_positions", "n_embd")),
        (r"h\.\d+\.attn\.c_attn", ("n_embd", "3 * n_embd")),
        (r"h\.\d+\.attn\.c_proj", ("n_embd", "n_embd")),
    ),
    "gpt_neo": _write_formulas((r"wpe", ("max_position_embeddings", "hidden_size"))),
    "gpt_neox": _write_formulas((r"attention\.query_key_value", ("3 * hidden_size", "hidden_size"))),
    "bloom": _write_formulas((r"self_attention\.query_key_value", ("3 * hidden_size", "hidden_size"))),
    "opt": _write_formulas((r"decoder\.embed_positions", ("max_position_embeddings + 2", "hidden_size"))),
    **dict.fromkeys(("bart", "mbart"), _BART),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "whisper": _write_formulas(
        (r"encoder\.embed_positions", ("max_source_positions", "d_model")),
        (r"decoder\.embed_positions", ("max_target_positions", "d_model")),
        (r"encoder\.conv1", ("d_model", "num_mel_bins", "3")),
        (r"encoder\.conv2", ("d_model", "d_model", "3")),
    ),
    **dict.fromkeys(("vit", "deit", "dinov2", "vit_mae", "vit_msn"), _VIT),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), _CLIP_VISION),
    **dict.fromkeys(("clip_text_model", "siglip_text_model"), _CLIP_TEXT),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), _ROUTERS),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"), _write_formulas((r"mlp\.gate", ("n_routed_experts", "hidden_size")))
    ),
}
_TABLES = r"embeddings\.position_embeddings\.weight", r"embeddings\.token_type_embeddings\.weight"
_IMAGES = r"embeddings\.cls_token", r"embeddings\.position_embeddings", r"patch_embeddings\.projection\.weight"
# Names of tensors that are outside of the layers and that every model of the type has.
OUTSIDE_LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "albert", "electra"), _TABLES),
    "distilbert": (_TABLES[0],),
    **dict.fromkeys(("gpt2", "gpt_neo"), (r"wpe\.weight",)),
    "opt": (r"decoder\.embed_positions\.weight",),
    "whisper": (r"encoder\.conv1\.weight", r"encoder\.conv2\.weight"),
    **dict.fromkeys(("vit", "dinov2"), _IMAGES),
    "deit": (*_IMAGES, r"embeddings\.distillation_token"),
}
_OF_T5 = CrossAttention(re.compile(r"(?P<place>(?:.*\.)?(?P<side>encoder|decoder)\.block\.\d+)\..+"), "EncDecAttention")
_OF_BART = CrossAttention(re.compile(r"(?P<place>(?:.*\.)?(?P<side>encoder|decoder)\.layers\.\d+)\..+"), "encoder_attn")
CROSS_ATTENTIONS: dict[str, CrossAttention] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), _OF_T5),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "whisper", "m2m_100", "blenderbot"), _OF_BART),
}


def compare_with_formulas(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds tensors whose shapes differ from the shapes that the model type's formulas yield with config.json."""
    is_cut = state.is_loose or state.is_incomplete or state.arrangement is Arrangement.SHARDED_SAFETENSORS
    for config in () if is_cut else _list_configs(evidence, state):
        for formula in SHAPE_FORMULAS.get(str(config["model_type"]), ()):
            expected = tuple(compute_dim(dim, config) for dim in formula.dims)
            named = (each for each in state.select("model") if formula.name.fullmatch(each.parameter))
            for tensor in named if None not in expected else ():
                if tensor.shape != expected and is_floating_point(tensor.dtype):
                    keys = re.findall(r"[a-z]\w+", " ".join(formula.dims))
                    values = ", ".join(f"{key} {config[key]}" for key in dict.fromkeys(keys))
                    what = f"the tensor is {list(tensor.shape)}, but must be {list(expected)} by config.json ({values})"
                    yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.parameter)


def find_lost_outside(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds missing tensors that are outside of the layers and that every model of config.json's type has."""
    config = evidence.checkpoint.find_setting(state.directory, "config.json")
    needed = OUTSIDE_LAYERS.get(str(config.get("model_type")), ())
    names = [tensor.parameter for tensor in state.select("model")]
    is_part = not any(map(LAYER.match, names)) or any("lora_" in name for name in names) or not state.files
    if "auto_map" in config or is_part or state.is_incomplete or state.is_loose:
        return
    for pattern in needed:
        # A class of the type may have the decoder alone.
        side = pattern.partition(r"\.")[0]
        is_without_side = side == "encoder" and not any(re.search(rf"(?:^|\.){side}\.", name) for name in names)
        if not is_without_side and not any(re.search(rf"(?:^|\.){pattern}$", name) for name in names):
            what = f"config.json says {config['model_type']}, which has this tensor, but it is missing"
            yield Symptom(Trouble.MISSING_TENSOR, what, state.files[0], pattern.replace("\\", ""))


def compare_sides(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds decoder layers without cross-attention and encoder layers with cross-attention, for known model types."""
    config = evidence.checkpoint.find_setting(state.directory, "config.json")
    form = CROSS_ATTENTIONS.get(str(config.get("model_type")))
    if form is None or "auto_map" in config or state.is_incomplete or state.is_loose:
        return
    layers: dict[tuple[str, str], SavedTensor] = {}
    crossed: set[str] = set()
    for tensor in state.select("model"):
        if (found := form.layer.fullmatch(tensor.parameter)) and "lora_" not in tensor.parameter:
            layers.setdefault((found["side"], found["place"]), tensor)
            crossed |= {found["place"]} if f".{form.attention}" in tensor.parameter else set()
    for (side, place), tensor in layers.items():
        if side == "decoder" and place not in crossed:
            what = f"this layer of the decoder has no {form.attention}"
            yield Symptom(Trouble.MISSING_TENSOR, what, tensor.file, place)
        elif side == "encoder" and place in crossed:
            what = f"this layer of the encoder has {form.attention}, which only a decoder has"
            yield Symptom(Trouble.OTHER_MODEL, what, tensor.file, place)


def _list_configs(evidence: CheckpointEvidence, state: State) -> list[dict[str, Any]]:
    """Lists the configs of the model and of the models nested in it.

    Configs with the same model type are left out. The list is empty for quantized models and for models with their own
    code.
    """
    config = evidence.checkpoint.find_setting(state.directory, "config.json")
    inner = [each for each in config.values() if isinstance(each, dict)]
    found = [each for each in (config, *inner) if isinstance(each.get("model_type"), str)]
    if any("auto_map" in each or "quantization_config" in each for each in (config, *found)):
        return []
    counts = Counter(each["model_type"] for each in found)
    return [each for each in found if counts[each["model_type"]] == 1]


def compute_dim(dim: str, config: Mapping[str, Any]) -> int | None:
    """Computes the size of a dim from its formula; None if the config has no integer for a key of the formula."""
    total = 0
    for term in dim.split(" + "):
        product = 1
        for factor in term.split(" * "):
            value = int(factor) if factor.isdecimal() else config.get(factor)
            if not isinstance(value, int) or isinstance(value, bool):
                return None
            product *= value
        total += product
    return total
