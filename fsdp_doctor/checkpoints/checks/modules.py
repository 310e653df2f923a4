"""Checks modules whose tensors depend on each other: norm statistics, cells, convolutions, positions, tied copies."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy

from fsdp_doctor.checkpoints.checks.evidence import LAYER, CheckpointEvidence, name_family
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.model_types import find_marks
from fsdp_doctor.checkpoints.record import Arrangement, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

_MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"
# Fewest similar tensors that establish what is usual.
_FEWEST_LIKE = 3
_CELL = re.compile(
    r"(?P<module>(?:.*\.)?)(?P<kind>(?:weight|bias)_(?:ih|hh)|weight_hr)"
    r"(?P<layer>(?:_l(?P<number>\d+)(?P<reverse>_reverse)?)?)"
)
# Numbers of gates in torch's RNN, GRU and LSTM.
_GATES = frozenset({1, 3, 4})
_CONVOLUTION = re.compile(r"(?P<parent>.*\d.*\.)conv(?P<long>olution)?(?P<number>\d*)\.weight")
_POSITION_BIAS = re.compile(
    r"(?P<side>(?:.*\.)?(?:encoder|decoder))\.block\.\d+\.layer\.0\.SelfAttention\.(?P<part>q|relative_attention_bias)\.weight"
)
_EMBEDDING = re.compile(r"(?:^|\.)(?:shared|embed_tokens|wte)\.weight$")
_POSITIONS = re.compile(r"(?!.*text)(?:.*\.)?embeddings\.position_embeddings?(?:\.weight)?")
# Vision models that divide a picture into patches. Their position table has one row per patch, preceded by at most two
# further rows.
_OF_PICTURES = frozenset(
    {
        *("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn", "clip", "clip_vision_model"),
        *("siglip", "siglip_vision_model", "blip_vision_model"),
    }
)


def find_lost_statistics(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds BatchNorm statistics that are incomplete or impossible."""
    norms: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        module, _, kind = tensor.parameter.rpartition(".")
        if kind in (_MEAN, _VARIANCE, _COUNT):
            norms[module][kind] = tensor
    yield from _find_negative_variances(evidence, [each[_VARIANCE] for each in norms.values() if _VARIANCE in each])
    families = {module: re.sub(r"\d+", "#", module) for module in norms}
    whole = Counter(families[module] for module, kinds in norms.items() if kinds.keys() >= {_MEAN, _VARIANCE})
    for lost in () if state.is_incomplete else (_MEAN, _VARIANCE):
        for module, kinds in norms.items():
            # Other modules that keep a running mean or variance have only one of the two, and no count of batches.
            is_norm = _COUNT in kinds or whole[families[module]] >= _FEWEST_LIKE
            if lost not in kinds and kinds.keys() & {_MEAN, _VARIANCE} and is_norm:
                what = f"the norm has only {' and '.join(sorted(kinds))}"
                yield Symptom(Trouble.STATISTICS, what, next(iter(kinds.values())).file, f"{module}.{lost}")
    for module, kinds in norms.items():
        if kinds.keys() == {_COUNT} and whole[families[module]] >= _FEWEST_LIKE and not state.is_incomplete:
            what = f"the norm has only {_COUNT}, but {whole[families[module]]} similar norms have all statistics"
            yield Symptom(Trouble.STATISTICS, what, kinds[_COUNT].file, f"{module}.{_MEAN}")
    if not state.is_incomplete:
        yield from _find_lost_counts(norms)


def _find_negative_variances(evidence: CheckpointEvidence, variances: list[SavedTensor]) -> Iterator[Symptom]:
    negative = {
        tensor.name: count
        for tensor in variances
        if (count := sum(scan.num_negative for _, scan in evidence.find_scans(tensor)))
    }
    # The difference of two models has negative variances everywhere.
    is_difference = len(negative) > 1 and 2 * len(negative) > len(variances)
    for tensor in variances:
        if tensor.name in negative:
            trouble = Trouble.UNUSUAL if is_difference else Trouble.VARIANCE
            yield Symptom(trouble, f"{negative[tensor.name]} variances are negative", tensor.file, tensor.name)


def _find_lost_counts(norms: dict[str, dict[str, SavedTensor]]) -> Iterator[Symptom]:
    """Finds norms that lack num_batches_tracked although most similar norms have this count.

    If several norms or only the first norm lack the count, this is reported as unusual and not as damage: frozen norms
    have no count, and usually a model's first norms are frozen.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for module, kinds in norms.items():
        if kinds.keys() >= {_MEAN, _VARIANCE}:
            families[re.sub(r"\d+", "#", module)].append(module)
    for modules in families.values():
        lacking = [module for module in modules if _COUNT not in norms[module]]
        first = min(modules, key=lambda module: [int(number) for number in re.findall(r"\d+", module)])
        for module in lacking if 2 * len(lacking) < len(modules) else ():
            is_lost = len(lacking) == 1 and len(modules) > _FEWEST_LIKE and module != first
            what = (
                f"{len(modules) - len(lacking)} of {len(modules)} similar norms have this count, but this norm lacks it"
            )
            trouble = Trouble.STATISTICS if is_lost else Trouble.UNUSUAL
            yield Symptom(trouble, what, norms[module][_MEAN].file, f"{module}.{_COUNT}")


def compare_gates(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds recurrent cells whose weights have different numbers of rows, or a number of gates that no torch cell has.

    The number of rows must be the hidden size times the number of gates.
    """
    cells: dict[tuple[str, str], dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in () if _may_be_shards(state) else state.select("model"):
        found = _CELL.fullmatch(tensor.parameter)
        if found and len(tensor.shape) == (2 if found["kind"].startswith("weight") else 1) and tensor.numel:
            cells[found["module"], found["layer"]][found["kind"]] = tensor
    gates: dict[str, dict[str, int]] = defaultdict(dict)
    for (module, layer), kinds in cells.items():
        by_rows = [tensor for kind, tensor in kinds.items() if kind != "weight_hr"]
        if not layer and not _is_of_torch(kinds):
            continue
        common = Counter(tensor.shape[0] for tensor in by_rows).most_common(1)[0][0] if by_rows else 0
        for tensor in by_rows:
            if tensor.shape[0] != common:
                what = f"the tensor has {tensor.shape[0]} rows, but the other tensors of the cell have {common}"
                yield Symptom(Trouble.GATES, what, tensor.file, tensor.name)
        hidden = kinds.get("weight_hh")
        if hidden is None or "weight_hr" in kinds or hidden.shape[0] != common:
            continue
        number, rest = divmod(common, hidden.shape[1])
        if rest or number not in _GATES:
            what = f"the tensor is {list(hidden.shape)}, but a cell has 1, 3 or 4 times as many rows as columns"
            yield Symptom(Trouble.GATES if rest else Trouble.UNUSUAL, what, hidden.file, hidden.name)
        elif layer:
            gates[module][layer] = number
    for module, by_layer in gates.items():
        for layer, number in by_layer.items() if len(set(by_layer.values())) > 1 else ():
            if number < max(by_layer.values()):
                hidden = cells[module, layer]["weight_hh"]
                what = f"the tensor has {number} gates, but other layers of the module have {max(by_layer.values())}"
                yield Symptom(Trouble.GATES, what, hidden.file, hidden.name)


def _is_of_torch(kinds: dict[str, SavedTensor]) -> bool:
    """Returns whether a cell without a layer number has torch's layout. Other libraries store transposed weights."""
    biases = {tensor.shape[0] for kind, tensor in kinds.items() if kind.startswith("bias")}
    weights = {tensor.shape for kind, tensor in kinds.items() if kind.startswith("weight")}
    return len(kinds) == 4 and not all(shape[1] in biases for shape in weights)


def _may_be_shards(state: State) -> bool:
    """Returns whether the files may hold only one rank's shards, which do not show the whole shape of a tensor."""
    return state.arrangement is Arrangement.WHOLE and any(re.search(r"rank_?\d", file) for file in state.files)


def find_transposed(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds matrices and convolutions with the transposed shape of similar tensors.

    Such a tensor is reported only if a bias, a norm or the rest of the layer shows that the shape is wrong.
    """
    if _may_be_shards(state):
        return
    tensors = {each.parameter: each for each in state.select("model") if each.numel and is_floating_point(each.dtype)}
    of_layers: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        if found := LAYER.match(name):
            of_layers[f"{found['stack']}.{found['number']}"].append(name)
    families: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in tensors.values():
        if len(tensor.shape) > 0:
            families[_name_role(tensor)].append(tensor)
    common = {name: Counter(each.shape for each in members).most_common(1)[0] for name, members in families.items()}
    odd: list[tuple[SavedTensor, tuple[int, ...]]] = []
    for family, members in families.items():
        shape, count = common[family]
        swapped = (shape[1], shape[0], *shape[2:]) if len(shape) > 1 else shape
        if shape != swapped and count >= _FEWEST_LIKE - 1 and count == len(members) - 1:
            odd += [(tensor, shape) for tensor in members if tensor.shape == swapped]
    for tensor, shape in odd:
        layer = LAYER.match(tensor.parameter)
        beside = of_layers[f"{layer['stack']}.{layer['number']}"] if layer else []
        bias = tensors.get(f"{tensor.parameter.removesuffix('.weight')}.bias")
        others = [tensors[name] for name in beside if tensors[name] is not tensor and tensors[name] is not bias]
        is_alone = bool(others) and all(each.shape == common[_name_role(each)][0] for each in others)
        denies_bias = bias is not None and len(shape) == 2 and bias.shape == shape[:1] != tensor.shape[:1]
        if is_alone or denies_bias:
            what = f"the tensor is {list(tensor.shape)}, but similar tensors are {list(shape)}"
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.name)
    yield from _compare_with_norms(tensors, {tensor.name for tensor, _ in odd})
    yield from _compare_with_biases(tensors)


def _name_role(tensor: SavedTensor) -> str:
    """Replaces the numbers of layers in a name, but not the digits of w1, w2 and w3, whose shapes differ."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", tensor.name)


def _compare_with_norms(tensors: dict[str, SavedTensor], known: set[str]) -> Iterator[Symptom]:
    """Compares each convolution's output channels with the size of the norm with the same number in its name."""
    families: dict[str, list[tuple[SavedTensor, int]]] = defaultdict(list)
    for name, tensor in tensors.items():
        found = _CONVOLUTION.fullmatch(name)
        norm_name = ("normalization" if found["long"] else "bn") + found["number"] if found else ""
        norm = tensors.get(f"{found['parent']}{norm_name}.weight") if found else None
        if norm is not None and len(tensor.shape) > 2 and tensor.shape[0] != tensor.shape[1] and len(norm.shape) == 1:
            families[name_family(tensor)].append((tensor, norm.shape[0]))
    for members in families.values():
        odd = [(tensor, channels) for tensor, channels in members if tensor.shape[0] != channels == tensor.shape[1]]
        fitting = sum(tensor.shape[0] == channels for tensor, channels in members)
        if (
            len(odd) == 1
            and fitting >= _FEWEST_LIKE
            and fitting + 1 == len(members)
            and odd[0][0].parameter not in known
        ):
            tensor, channels = odd[0]
            what = f"the convolution has {tensor.shape[0]} output channels, but the norm after it has {channels}"
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.name)


def _compare_with_biases(tensors: dict[str, SavedTensor]) -> Iterator[Symptom]:
    """Finds a convolution whose bias has the size of another dim (the first, or the second if transposed) than in
    similar convolutions.
    """
    families: dict[str, list[tuple[SavedTensor, int]]] = defaultdict(list)
    for name, tensor in tensors.items():
        bias = tensors.get(f"{name.removesuffix('.weight')}.bias")
        if len(tensor.shape) < 3 or not name.endswith(".weight") or bias is None or len(bias.shape) != 1:
            continue
        if tensor.shape[0] != tensor.shape[1] and bias.shape[0] in tensor.shape[:2]:
            families[name_family(tensor)].append((tensor, tensor.shape.index(bias.shape[0])))
    for members in families.values():
        (common, count), *others = Counter(dim for _, dim in members).most_common()
        for tensor, dim in members if others and len(members) >= _FEWEST_LIKE and count == len(members) - 1 else ():
            if dim != common:
                what = (
                    f"the bias has the size of dim {dim} of {list(tensor.shape)}, but that of dim {common} in {count} "
                    "similar convolutions"
                )
                yield Symptom(Trouble.UNUSUAL, what, tensor.file, tensor.name)


def find_lost_position_bias(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds a T5 stack that has lost its relative position bias while the other stack has it."""
    sides: dict[str, set[str]] = defaultdict(set)
    for tensor in () if state.is_incomplete else state.select("model"):
        if found := _POSITION_BIAS.fullmatch(tensor.parameter):
            sides[found["side"]].add(found["part"])
    for side, parts in sides.items():
        other = re.sub(r"\w+$", "decoder" if side.endswith("encoder") else "encoder", side)
        if parts == {"q"} and len(sides.get(other, ())) == 2:
            name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield Symptom(
                Trouble.MISSING_TENSOR, f"this stack lacks the tensor, but the {other} has it", state.files[0], name
            )


def find_stale_copies(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds copies of a tied embedding from another step: most rows of the copy equal the embedding's, but not all."""
    config = evidence.find_model_config(state)
    tables = [tensor for tensor in state.select("model") if _EMBEDDING.search(tensor.parameter)]
    shared = next((each for each in tables if each.parameter.endswith("shared.weight")), None)
    first = shared or (tables[0] if len(tables) == 1 else None)
    head = next((each for each in state.select("model") if each.parameter == "lm_head.weight"), None)
    ties = config.get("tie_word_embeddings", True if config and shared else None)
    is_judged = ties is True and find_marks(config) is not None
    copies = [each for each in tables if shared is not None and each is not shared]
    copies += [head] if head is not None and ties is not False and not is_judged else []
    for copy in copies if first is not None else ():
        if first is not None and _are_mostly_equal(evidence, first, copy):
            is_certain = ties is True or (copy is not head and ties is None)
            what = f"most rows equal those of {first.parameter}, bit by bit, but some differ"
            yield Symptom(Trouble.STALE_COPY if is_certain else Trouble.UNUSUAL, what, copy.file, copy.name)


def _are_mostly_equal(evidence: CheckpointEvidence, one: SavedTensor, other: SavedTensor) -> bool:
    """Returns whether two tensors differ, but only in a few of their sampled elements."""
    sums = evidence.find_checksum(one), evidence.find_checksum(other)
    if (one.shape, one.dtype) != (other.shape, other.dtype) or None in sums or sums[0] == sums[1]:
        return False
    pairs = list(evidence.pair_samples(one, other))
    equal = sum(int(numpy.count_nonzero((a == b) & (a != 0))) for a, b in pairs)
    return 2 * equal > sum(len(a) for a, _ in pairs)


def compare_positions(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Compares the number of rows in a vision model's position table with the number of patches.

    The table may have at most two more rows than there are patches.
    """
    config = evidence.checkpoint.find_setting(state.directory, "config.json")
    inner = config.get("vision_config")
    of_pictures: dict[str, Any] = inner if isinstance(inner, dict) else config
    sizes = [_read_sides(of_pictures.get(key)) for key in ("image_size", "patch_size")]
    if of_pictures.get("model_type") not in _OF_PICTURES or None in sizes:
        return
    (height, width), (tall, wide) = (size or (0, 1) for size in sizes)
    squares = (height // tall) * (width // wide)
    for tensor in state.select("model"):
        rows = tensor.shape[-2] if len(tensor.shape) in (2, 3) else None
        if _POSITIONS.fullmatch(tensor.parameter) and rows is not None and not squares <= rows <= squares + 2:
            what = f"the table has {rows} rows, but by config.json a picture has {squares} patches"
            yield Symptom(Trouble.SHAPE, what, tensor.file, tensor.name)


def _read_sides(value: Any) -> tuple[int, int] | None:
    sides = value if isinstance(value, list) else [value, value]
    is_pair = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
    return (sides[0], sides[1]) if is_pair else None
