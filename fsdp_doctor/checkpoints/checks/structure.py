"""Checks a checkpoint's names, shapes and settings against those of a model of the same type."""

from __future__ import annotations

import math
import pathlib
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import (
    EXPERT,
    LAYER,
    LORA,
    MATRIX,
    CheckpointEvidence,
    group_families,
)
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.model_types import find_marks, has_last_norm
from fsdp_doctor.checkpoints.names import EMBEDDING, strip_wrappers
from fsdp_doctor.checkpoints.record import Arrangement, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

# Tensors that every layer of a class has if one layer has them.
_OF_EVERY_LAYER = re.compile(
    r"(^|\.)((q|k|v|o|out|gate|up|down)_proj|fc[12]|c_(attn|proj|fc)|query|key|value|dense|\w*norm|ln_\d)\.(weight|bias)$"
)
# One tensor with a projection of all experts, as transformers 5 has them.
_ALL_EXPERTS = re.compile(r"\bexperts\.(?:gate_up|gate|up|down)_proj$")
# Matches a key of config.json that gives the embedding a different width from the layers.
_TOKEN_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|shared|embed_in)\.weight$")
# Layers of the text model in a model that also has encoders, whose layers are of other classes.
_TEXT_STACK = re.compile(r"(?:^|\.)(?:language_model|text_model)\.|^(?:model\.)?layers$")
# In some classes, such as BLIP-2's, only every second layer attends to the image.
_CROSS_ATTENTION = re.compile(r"^cross_?att(?:entio)?n\b")
_EMBEDDING_WIDTH = re.compile(r"embed\w*_(?:size|dim)$")
_PROJECTION = re.compile(
    r"(model\.|model\.language_model\.|language_model\.model\.)?layers\.\d+\."
    r"(self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>(gate|up|down)_proj))\.weight"
)
# Keys of config.json with which projections have other shapes, or shapes that vary between layers.
_OTHER_SHAPES = frozenset(
    {
        *("kv_lora_rank", "attn_output_gate", "global_head_dim", "num_global_key_value_heads", "layer_config"),
        *("intermediate_size_mlp", "block_configs", "hybrid_override_pattern", "swa_num_key_value_heads"),
        *("swa_head_dim", "num_kv_shared_layers", "linear_num_key_heads", "first_k_dense_replace"),
    }
)


def find_wrapped_names(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    names = {state.get_saved_name(tensor): tensor.parameter for tensor in state.select("model")}
    wrapped = [name for name, parameter in names.items() if parameter != name or strip_wrappers(name) != name]
    if wrapped:
        is_hub = evidence.checkpoint.find_setting(state.directory, "config.json") or ".safetensors" in state.files[0]
        is_hub = is_hub and state.arrangement is Arrangement.WHOLE
        trouble = Trouble.PREFIX if is_hub else Trouble.WRAPPED
        what = f"{len(wrapped)} of {len(names)} names have a wrapper's prefix, such as {wrapped[0]}"
        yield Symptom(trouble, what, state.files[0])


def find_flat_shards(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds local FSDP shards, flat or empty, that were saved instead of whole weights."""
    if state.arrangement is Arrangement.RANK_FILES:
        return
    num_empty = sum(not tensor.numel and len(tensor.shape) > 0 for tensor in state.select("model"))
    shapes = {tensor.parameter: tensor.shape for tensor in state.select("model")}
    of_matrices = {_name_place(tensor.name) for tensor in state.select("model") if len(tensor.shape) > 1}
    for tensor in state.select("model"):
        name = tensor.parameter
        is_like_matrices = _name_place(tensor.name) in of_matrices or MATRIX.search(name)
        if "flat_param" in name:
            yield Symptom(Trouble.FLAT, "this tensor is a flat parameter of FSDP1, not a weight", state.files[0], name)
        elif not tensor.numel and name.endswith("weight"):
            # Some classes have a matrix that pads the width of another one; it may be empty.
            trouble = Trouble.FLAT if LAYER.match(name) or EMBEDDING.search(name) or num_empty > 1 else Trouble.UNUSUAL
            yield Symptom(trouble, "the tensor has no elements", tensor.file, name)
        elif len(tensor.shape) == 1 and "float" in tensor.dtype and is_like_matrices and not _is_norm(name, shapes):
            what = f"the tensor is flat, with {tensor.shape[0]} elements, but must be a matrix"
            yield Symptom(Trouble.FLAT, what, tensor.file, name)


def _is_norm(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether a flat weight has as many elements as its bias, and so belongs to a norm. In a list of modules,
    norms may have the same names as convolutions.
    """
    return shapes[name] == shapes.get(f"{name.removesuffix('weight')}bias")


def _name_place(name: str) -> str:
    """Replaces layer numbers in a name, so that the same tensor of all layers gets the same name.

    A number just before the last part stays, since it is the index in a Sequential.
    """
    return re.sub(r"\d+(?!\d*\.\w+$)", "#", name)


def compare_with_config(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    if state.is_loose:
        return
    config = evidence.find_model_config(state)
    vocabulary, hidden = config.get("vocab_size"), config.get("hidden_size", config.get("n_embd"))
    has_projection = any(_EMBEDDING_WIDTH.search(key) for key in config)
    for tensor in state.select("model"):
        name, file = tensor.parameter, tensor.file
        if len(tensor.shape) == 2 and EMBEDDING.search(name):
            rows, columns = tensor.shape
            if isinstance(hidden, int) and columns != hidden and not has_projection:
                yield Symptom(
                    Trouble.SHAPE, f"the tensor has {columns} columns, but hidden_size is {hidden}", file, name
                )
            # The start token, which is the last one, is never predicted.
            has_no_start = config.get("model_type") == "imagegpt" and name == "lm_head.weight"
            if isinstance(vocabulary, int) and rows != vocabulary - has_no_start:
                is_larger = rows > vocabulary and (rows % 8 == 0 or find_marks(config) is None)
                trouble = Trouble.PADDED if is_larger else Trouble.SHAPE
                what = f"the tensor has {rows} rows, but vocab_size is {vocabulary}"
                if state.arrangement is Arrangement.SHARDED_SAFETENSORS and rows < vocabulary:
                    trouble, what, file = (
                        Trouble.MISSING_RANK,
                        f"{what}: the last shards are missing",
                        _name_next(max(state.files)),
                    )
                yield Symptom(trouble, what, file, name)
    embedding = next(
        (t for t in state.select("model") if re.search(r"(?:^|\.)(embed_tokens|wte)\.weight$", t.parameter)), None
    )
    head = next((t for t in state.select("model") if t.parameter == "lm_head.weight"), None)
    if not isinstance(vocabulary, int) and head and embedding and not has_projection and head.shape != embedding.shape:
        what = f"the head is {list(head.shape)}, but {embedding.parameter} is {list(embedding.shape)}"
        is_padded = head.shape[1:] == embedding.shape[1:] and abs(head.shape[0] - embedding.shape[0]) < 1024
        yield Symptom(Trouble.PADDED if is_padded else Trouble.SHAPE, what, head.file, head.parameter)
    yield from _compare_projections(state, config)


def _name_next(shard: str) -> str:
    """Returns the file name of the shard after ``shard``."""
    return re.sub(r"shard-(\d+)", lambda found: f"shard-{int(found[1]) + 1:0{len(found[1])}}", shard)


def _compare_projections(state: State, config: dict[str, Any]) -> Iterator[Symptom]:
    """Compares the shapes of the text model's projections with the shapes that config.json implies."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or config.keys() & _OTHER_SHAPES:
        return
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    expected: dict[str, tuple[int, int]] = {}
    if isinstance(groups, int) and isinstance(width, int):
        of_queries, of_keys = heads * width, groups * width
        expected |= {"q_proj": (of_queries, hidden), "k_proj": (of_keys, hidden), "v_proj": (of_keys, hidden)}
        expected["o_proj"] = hidden, of_queries
    if isinstance(inner := config.get("intermediate_size"), int) and not config.get("moe_intermediate_size"):
        expected |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    found: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in state.select("model"):
        match = _PROJECTION.fullmatch(tensor.parameter)
        kind = (match["attention"] or match["mlp"]) if match else ""
        if kind in expected and len(tensor.shape) == 2 and is_floating_point(tensor.dtype):
            found[kind].append(tensor)
    of_mlp = {kind: {tensor.shape for tensor in found[kind]} for kind in ("gate_proj", "up_proj", "down_proj")}
    is_pruned = all(len(shapes) == 1 for shapes in of_mlp.values()) and (
        of_mlp["gate_proj"] == of_mlp["up_proj"] == {shape[::-1] for shape in of_mlp["down_proj"]}
    )
    for kind, tensors in found.items():
        odd = [tensor for tensor in tensors if tensor.shape != expected[kind]]
        # The layers are of two kinds, and config.json describes one of them in keys that are not known here.
        is_of_two_kinds = 1 < len(odd) < len(tensors)
        # Encoders of images and sound may ignore keys of config.json, or have another width before the first layer.
        may_be_other = "vocab_size" not in config and find_marks(config) is None and "model_type" in config
        for tensor in odd:
            what = f"the tensor is {list(tensor.shape)}, but must be {list(expected[kind])} according to config.json"
            is_smaller = kind in of_mlp and is_pruned and math.prod(tensor.shape) < math.prod(expected[kind])
            trouble = Trouble.PRUNED if is_smaller and hidden in tensor.shape else Trouble.SHAPE
            trouble = Trouble.UNUSUAL if is_of_two_kinds or may_be_other else trouble
            if state.arrangement is Arrangement.SHARDED_SAFETENSORS and tensor.shape[0] < expected[kind][0]:
                what, lost = f"{what}: the last shards are missing", _name_next(max(state.files))
                yield Symptom(Trouble.MISSING_RANK, what, lost, tensor.parameter)
                continue
            yield Symptom(trouble, what, tensor.file, tensor.parameter)


def find_odd_shapes(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds tensors whose shape fits neither the other layers nor the rest of their own layer.

    In a pruned layer, several tensors differ from other layers but fit each other, so they are not reported. Shards of
    safetensors are not checked: the files do not say how many shards there were, and a missing shard makes a shape
    smaller.
    """
    if state.is_loose or state.arrangement is Arrangement.SHARDED_SAFETENSORS:
        return
    tensors = {each.parameter: each for each in state.select("model") if each.numel and is_floating_point(each.dtype)}
    of_layers: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    odd: dict[str, list[tuple[SavedTensor, tuple[int, ...]]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if found := LAYER.match(name):
            of_layers[f"{found['stack']}.{found['number']}"][found["rest"]] = tensor
    projections = (each for name, each in tensors.items() if LAYER.match(name) and _OF_EVERY_LAYER.search(name))
    for members in group_families(projections):
        (common, count), *others = Counter(tensor.shape for tensor in members).most_common()
        for tensor in members if others and count > len(members) // 2 else ():
            if tensor.shape != common and (found := LAYER.match(tensor.parameter)):
                odd[f"{found['stack']}.{found['number']}"].append((tensor, common))
    for of_layer in odd.values():
        if len(of_layer) == 1:
            tensor, common = of_layer[0]
            what = f"the tensor is {list(tensor.shape)}, but {list(common)} in the other layers"
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.parameter)
    for layer, by_rest in of_layers.items():
        if layer not in odd:
            yield from _compare_within_layer(by_rest)


def _compare_within_layer(by_rest: dict[str, SavedTensor]) -> Iterator[Symptom]:
    """Compares the sizes of one layer's matrices that are used together, such as a weight and its bias."""
    for rest, tensor in by_rest.items():
        module, _, kind = rest.rpartition(".")
        place, _, name = module.rpartition(".")
        weight = by_rest.get(f"{module}.weight")
        is_bias = kind == "bias" and len(tensor.shape) == 1 and bool(_OF_EVERY_LAYER.search(rest))
        if is_bias and weight is not None and len(weight.shape) == 2 and tensor.shape[0] not in weight.shape:
            what = f"the bias has {tensor.shape[0]} elements, but the weight is {list(weight.shape)}"
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.parameter)
        queries = by_rest.get(f"{place}.{name.replace('_norm', '_proj')}.weight")
        is_of_heads = name in ("q_norm", "k_norm") and queries is not None and len(queries.shape) == 2
        if is_of_heads and queries is not None and queries.shape[0] % tensor.shape[0]:
            what = (
                f"the tensor has {tensor.shape[0]} elements, and the {queries.shape[0]} rows are not a multiple of "
                "this number"
            )
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.parameter)
        up, down = by_rest.get(f"{place}.up_proj.weight"), by_rest.get(f"{place}.down_proj.weight")
        if name == "gate_proj" and kind == "weight" and up is not None and down is not None:
            shapes = [each.shape for each in (tensor, up, down)]
            if all(len(shape) == 2 for shape in shapes) and not shapes[0] == shapes[1] == shapes[2][::-1]:
                what = f"gate_proj, up_proj and down_proj are {list(map(list, shapes))}, which do not fit each other"
                yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.parameter)


def compare_with_class(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds tensor names that contradict the model type in config.json: required names that are missing, and names that
    only other types have.
    """
    config = evidence.find_model_config(state)
    marks = find_marks(config)
    layers = [found for tensor in state.select("model") if (found := LAYER.match(tensor.parameter))]
    is_composed = isinstance(evidence.checkpoint.find_setting(state.directory, "config.json").get("text_config"), dict)
    rests = {found["rest"] for found in layers if not is_composed or _TEXT_STACK.search(found["stack"])}
    is_adapted = any("lora_" in rest or "base_layer" in rest for rest in rests)
    if marks is None or not rests or is_adapted or state.is_incomplete:
        return
    what = ""
    if missing := [mark for mark in marks.needed if not any(mark.search(rest) for rest in rests)]:
        what = (
            f"config.json says {config['model_type']}, whose layers have {missing[0].pattern}, but no layer here has it"
        )
    elif other := [rest for mark in marks.foreign for rest in sorted(rests) if mark.search(rest)]:
        what = f"config.json says {config['model_type']}, whose layers have no {other[0]}, but the layers here have it"
    if what:
        yield Symptom(Trouble.OTHER_MODEL, what.replace("\\", ""), state.files[0])


def find_missing_tensors(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds missing layers, tensors that only one layer lacks, and a missing head, embedding or last norm.

    Also finds layers beyond the number of layers in config.json.
    """
    config = evidence.find_model_config(state)
    outer = evidence.checkpoint.find_setting(state.directory, "config.json")
    names = {tensor.parameter: tensor for tensor in state.select("model")}
    if any(LORA.match(name) for name in names) or not state.files or state.is_incomplete:
        return
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    shapes: dict[str, dict[str, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for name, tensor in names.items():
        if found := LAYER.match(name):
            stacks[found["stack"]][int(found["number"])].add(re.sub(r"\d+", "#", found["rest"]))
            if len(tensor.shape) > 1:
                shapes[found["stack"]][found["rest"]].append(tensor.shape)
    for stack, layers in stacks.items():
        said = config.get("num_hidden_layers", config.get("n_layer")) if len(stacks) == 1 else None
        # The stages of a vision model differ in shapes and modules, and a number in their names may not be the number
        # of a layer.
        of_several = [each for each in shapes[stack].values() if len(each) > 1]
        is_staged = 2 * sum(len(set(each)) > 1 for each in of_several) > len(of_several)
        expected = max(said if isinstance(said, int) else 0, max(layers) + 1)
        beyond = sorted(number for number in layers if isinstance(said, int) and number >= said)
        if beyond and not config.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}:
            what = f"layer {join_some(list(map(str, beyond)))} exists, but num_hidden_layers is {said}"
            yield Symptom(Trouble.UNUSUAL if is_staged else Trouble.EXTRA_LAYERS, what, state.files[0], stack)
        missing = sorted(set(range(expected)) - layers.keys())
        # The ranks of a pipeline may number their layers each from 0.
        if missing and not state.is_loose and (isinstance(said, int) or not _is_sequential(layers)):
            what = f"{len(missing)} of {expected} layers are missing: number {join_some(list(map(str, missing)))}"
            yield Symptom(Trouble.UNUSUAL if is_staged else Trouble.MISSING_TENSOR, what, state.files[0], stack)
        forms = Counter(frozenset(rests) for rests in layers.values())
        small, *more = sorted(forms, key=len)
        lacking = [*more, small][0] - small
        is_of_all = len(layers) == 2 and all(_is_of_every_layer(rest, small, bool(config)) for rest in lacking)
        if len(more) == 1 and small < more[0] and forms[small] == 1 and (forms[more[0]] > 1 or is_of_all):
            (number,) = (number for number, rests in layers.items() if rests == small)
            # In some classes the first layer has no norm before it, or has different parts.
            may_differ = number == min(layers) and find_marks(config) is None
            for rest in sorted(more[0] - small):
                is_unusual = is_staged or (may_differ and not MATRIX.search(rest))
                is_unusual |= _CROSS_ATTENTION.search(rest) is not None and find_marks(outer) is None
                yield Symptom(
                    Trouble.UNUSUAL if is_unusual else Trouble.MISSING_TENSOR,
                    "this layer lacks the tensor, but the other layers have it",
                    state.files[0],
                    f"{stack}.{number}.{rest}",
                )
    embedding = next((names[name] for name in names if re.search(r"(?:^|\.)(embed_tokens|wte)\.weight$", name)), None)
    head, ties = names.get("lm_head.weight"), config.get("tie_word_embeddings")
    is_causal = any(str(kind).endswith("ForCausalLM") for kind in config.get("architectures") or ())
    of_its_shape = [each for name, each in names.items() if not LAYER.match(name) and each is not embedding]
    has_other_head = embedding is not None and any(each.shape == embedding.shape for each in of_its_shape)
    if ties is False and head is None and embedding is not None and is_causal and not has_other_head:
        what = "the head is missing, and config.json does not tie it to the embedding"
        yield Symptom(Trouble.MISSING_TENSOR, what, state.files[0], "lm_head.weight")
    outside = [name for name in names if not LAYER.match(name)]
    has_norm = "norm" not in "".join(names) or any(re.search(r"norm|ln_", name) for name in outside)
    parts = {"embedding": any(re.search(r"emb|wte", name) for name in outside), "norm after the layers": has_norm}
    has_projection = any(_EMBEDDING_WIDTH.search(key) for key in config)
    for part, is_there in parts.items() if is_causal and stacks and not has_projection else ():
        if not is_there:
            trouble = Trouble.MISSING_TENSOR if has_last_norm(config) else Trouble.UNUSUAL
            yield Symptom(trouble, f"no tensor is named as the {part}", state.files[0])
    if ties is True and head is not None and embedding is not None:
        sums = evidence.find_checksum(head), evidence.find_checksum(embedding)
        if None not in sums and sums[0] != sums[1]:
            what = f"the head differs from {embedding.parameter}, but config.json ties the two"
            # Not every class honours this setting.
            trouble = Trouble.TIED if find_marks(config) is not None else Trouble.UNUSUAL
            yield Symptom(trouble, what, head.file, "lm_head.weight")


def _is_sequential(layers: Mapping[int, Collection[str]]) -> bool:
    """Returns whether most layers are single modules, so that their numbers are probably indexes in a Sequential.

    In a Sequential, modules without parameters leave gaps in the numbers.
    """
    end = re.compile(r"\.parametrizations\..*|\.?\w+$")
    num_modules = [len({end.sub("", rest) for rest in rests}) for rests in layers.values()]
    return statistics.median_low(num_modules) < 2


def find_experts(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds missing experts, experts with equal weights, and fused tensors with a wrong number of experts."""
    config = evidence.find_model_config(state)
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    said = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    # LongCat's number omits the experts that return their input.
    has_one_number = said is not None and "zero_expert_num" not in config
    experts: dict[tuple[str, str], dict[int, SavedTensor]] = defaultdict(dict)
    is_cut = state.is_loose or state.is_incomplete or state.arrangement is Arrangement.SHARDED_SAFETENSORS
    for tensor in state.select("model"):
        if found := EXPERT.match(tensor.parameter):
            experts[found["layer"], found["rest"]][int(found["number"])] = tensor
        elif has_one_number and not is_cut and _holds_all_experts(tensor) and tensor.shape[0] != said:
            what = f"the tensor has {tensor.shape[0]} experts, but config.json says {said}"
            yield Symptom(Trouble.EXPERTS, what, tensor.file, tensor.parameter)
    for (layer, rest), by_number in experts.items():
        name, file = f"{layer}.*.{rest}", next(iter(by_number.values())).file
        expected = said or max(by_number) + 1
        # The ranks of a loose state may number their experts each from 0.
        if not state.is_loose and (missing := sorted(set(range(expected)) - by_number.keys())):
            what = f"{len(missing)} of {expected} experts are missing: {join_some(list(map(str, missing)))}"
            yield Symptom(Trouble.EXPERTS, what, file, name)
        matrices = [tensor for tensor in by_number.values() if len(tensor.shape) > 1 and not evidence.is_zero(tensor)]
        sums = [evidence.find_checksum(tensor) for tensor in matrices]
        if None not in sums and len(set(sums)) < len(sums):
            what = f"{len(sums)} of its experts have {len(set(sums))} different values"
            # Experts that were initialized from others are all copies; a single pair is damage.
            is_pair = len(set(sums)) == len(sums) - 1 and len(sums) > 2
            yield Symptom(Trouble.COPIED_TENSOR if is_pair else Trouble.EQUAL_EXPERTS, what, file, name)


def _holds_all_experts(tensor: SavedTensor) -> bool:
    is_named = _ALL_EXPERTS.search(tensor.parameter) is not None
    return is_named and len(tensor.shape) == 3 and is_floating_point(tensor.dtype)


def find_missing_from_part(state: State, part: State) -> Iterator[Symptom]:
    """Finds tensors of the model that another copy of the model lacks.

    A tensor is reported only if the copy has other tensors of its layer, and the same tensor in other layers.
    """
    names = {tensor.parameter for tensor in part.select("model")}
    families = {re.sub(r"\d+", "#", name) for name in names}
    layers = {found.group(1, 2) for name in names if (found := LAYER.match(name))}
    for tensor in state.select("model"):
        name, found = tensor.parameter, LAYER.match(tensor.parameter)
        is_expected = found is not None and found.group(1, 2) in layers and re.sub(r"\d+", "#", name) in families
        if name not in names and len(tensor.shape) > 1 and is_expected:
            what = "the tensor is missing here: the model has it, and this part has it for other layers"
            yield Symptom(Trouble.MISSING_TENSOR, what, state.files[0], ".".join((*(part.head or ()), name)))


def _is_of_every_layer(rest: str, others: frozenset[str], has_config: bool) -> bool:
    """Returns whether every layer must have this tensor, judged by its name and by the other tensors of the layer."""
    place, _, kind = rest.removesuffix(".weight").rpartition(".")
    beside = [each for each in others if each.startswith(f"{place}.") and each.endswith("_proj.weight")]
    # Layers that share keys and values lack both projections.
    is_of_group = rest.endswith("_proj.weight") and len(beside) >= (3 if kind in ("q_proj", "k_proj", "v_proj") else 2)
    return bool(_OF_EVERY_LAYER.search(rest)) and (has_config or is_of_group)


def find_mixed_dtypes(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    for members in group_families(tensor for tensor in state.select("model") if len(tensor.shape) > 1):
        (common, count), *others = Counter(tensor.dtype for tensor in members).most_common()
        for tensor in members if others and count * 3 >= len(members) * 2 else ():
            if tensor.dtype != common:
                what = f"the tensor is {tensor.dtype}, but {count} similar tensors are {common}"
                yield Symptom(Trouble.DTYPES, what, tensor.file, tensor.name)


def find_missing_settings(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    settings = {pathlib.PurePath(path) for path in evidence.checkpoint.settings}
    for state in evidence.checkpoint.states:
        here = pathlib.PurePath(state.directory)
        is_model = state.label == "model" and any(file.endswith(".safetensors") for file in state.files)
        others = {here / "tokenizer.json", here / "generation_config.json"} & settings
        if is_model and others and here / "config.json" not in settings:
            yield Symptom(Trouble.SETTINGS, "config.json is missing", state.directory)
        has_model = any(each.roles.get(path) == "model" for each in evidence.checkpoint.states for path in each.tensors)
        is_resume = here / "trainer_state.json" in settings or any("extra_state" in file for file in state.files)
        if not has_model and state.label != "extra_state" and any(True for _ in state.select("optimizer")):
            trouble = Trouble.NO_MODEL if is_resume else Trouble.NO_MODEL_HERE
            yield Symptom(trouble, "there is an optimizer, but no model", state.directory)
        if state.label == "adapter_model" and here / "adapter_config.json" not in settings:
            yield Symptom(Trouble.SETTINGS, "adapter_config.json is missing", state.directory)


def compare_with_tokenizer(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Finds tokens of tokenizer.json whose ids are beyond the rows of the embedding."""
    for state in evidence.checkpoint.states:
        tokens = _list_tokens(evidence.checkpoint.find_setting(state.directory, "tokenizer.json"))
        tables = [t for t in state.select("model") if _TOKEN_TABLE.search(t.parameter) and len(t.shape) == 2]
        whole = [] if state.is_loose or state.is_incomplete or not tokens else tables
        if whole and (beyond := [name for name, number in tokens.items() if number >= max(t.shape[0] for t in whole)]):
            what = f"{len(beyond)} tokens of tokenizer.json have no row here: {join_some(beyond, 3)}"
            yield Symptom(Trouble.TOKENS, what, whole[0].file, whole[0].parameter)


def _list_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):
        found = {str(each[0]): number for number, each in enumerate(vocabulary) if isinstance(each, list) and each}
    more = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    tokens = {**found, **{str(each.get("content")): each.get("id") for each in more}}
    return {str(name): number for name, number in tokens.items() if isinstance(number, int)}


def compare_with_shards(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Compares files that HuggingFaceStorageWriter has consolidated with the shards in ``sharded``, if they exist."""
    states = {(state.directory, state.label): state for state in evidence.checkpoint.states}
    for (directory, label), shards in states.items():
        place = pathlib.PurePath(directory)
        made = states.get((str(place.parent), "model"))
        if label != "shards" or place.name != "sharded" or made is None:
            continue
        for path, tensor in made.tensors.items():
            other = shards.tensors.get(path, SavedTensor(path, tensor.dtype, ()))
            sums = {evidence.find_checksum(each) for each in (tensor, other)}
            if other.shape != tensor.shape or (None not in sums and len(sums) > 1):
                yield Symptom(
                    Trouble.DIFFERS, f"the tensor differs from the one in {directory}", tensor.file, tensor.name
                )
        for path in shards.tensors.keys() - made.tensors.keys():
            yield Symptom(Trouble.MISSING_TENSOR, f"only {directory} has the tensor", made.files[0], ".".join(path))
