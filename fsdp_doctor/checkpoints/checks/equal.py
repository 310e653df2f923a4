"""Checks tensors for rows, matrices, layers and stacks that are equal although they should differ."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import (
    EXPERT,
    LAYER,
    LORA,
    MATRIX,
    MOMENTS,
    REPEATED_HEADS,
    CheckpointEvidence,
    group_families,
    parse_number,
)
from fsdp_doctor.checkpoints.checks.optimizer import OptimizedParameter, name_parameters
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.names import EMBEDDING
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor, State, parse_optimizer_slot
from fsdp_doctor.checkpoints.spans import SpanScan
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# After this many steps every trained weight has changed, whatever the warmup.
_FEWEST_STEPS = 3
# Fraction of a part's rows that must be equal before two parts count as equal.
_MOST_ROWS = 0.95
_FRACTIONS = {2: "half", 4: "quarter", 8: "eighth"}
# Recurrent weights, and the spread of the magnitudes above which most of them are zero.
_CELL, _MOST_SPREAD = re.compile(r"(?:^|\.)weight_[ih]h(?:_l\d+)?(?:_reverse)?$"), 2.0
_SIDE = re.compile(r"(?P<before>(?:.*\.)?)(?P<side>encoder|decoder)\.(?P<rest>.+)")
_PROJECTIONS = re.compile(r"(?P<module>.*\.)(?P<kind>(?:q|k|v|gate|up)_proj|query|key|value|w[13]|[qkv])\.weight$")


def find_constants(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds constant matrices, and equal rows or parts within a matrix, unless similar tensors have them, too."""
    matrices = (tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel > 1)
    for members in group_families(each for each in matrices if is_floating_point(each.dtype)):
        of_one_value = [tensor for tensor in members if _is_of_one_value(evidence, tensor)]
        for tensor in of_one_value if len(of_one_value) < len(members) else ():
            what = f"all elements are equal, as in {len(of_one_value)} of {len(members)} similar tensors"
            yield Symptom(Trouble.CONSTANT, what, tensor.file, tensor.name)
        found = {
            tensor.path: _find_equal_rows(evidence, tensor) + _find_equal_parts(evidence, state, tensor)
            for tensor in members
            if tensor not in of_one_value
        }
        of_equal_rows = [tensor for tensor in members if found.get(tensor.path)]
        for tensor in of_equal_rows if 2 * len(of_equal_rows) <= max(len(members), 2) else ():
            piece, rows, what = found[tensor.path][0]
            yield Symptom(Trouble.EQUAL_ROWS, what, piece.file, tensor.name, rows, piece.rank)


def _is_of_one_value(evidence: CheckpointEvidence, tensor: SavedTensor) -> bool:
    scans = evidence.find_scans(tensor)
    return bool(scans) and all(scan.is_constant and not scan.is_zero for _, scan in scans)


def _find_equal_rows(
    evidence: CheckpointEvidence, tensor: SavedTensor
) -> list[tuple[SavedPiece, tuple[int, int] | None, str]]:
    """Finds equal consecutive rows, and equal halves, quarters or eighths of a tensor.

    Embeddings are skipped, since the rows of added tokens may be equal. Halves, quarters and eighths of the rows of key
    and value projections are not compared, since the heads may have been repeated to make more groups.
    """
    is_of_cell = _CELL.search(tensor.parameter) is not None
    is_matrix = len(tensor.shape) == 2 and (is_of_cell or MATRIX.search(tensor.parameter))
    if not is_matrix or EMBEDDING.search(tensor.parameter):
        return []
    found: list[tuple[SavedPiece, tuple[int, int] | None, str]] = []
    for piece, scan in evidence.find_scans(tensor):
        at = piece.offsets[0] if piece.offsets else 0
        # The gates of a recurrent cell may begin as unit matrices.
        if scan.is_constant or (is_of_cell and (scan.spread or math.inf) > _MOST_SPREAD):
            continue
        if scan.equal_rows is not None:
            first, after = scan.equal_rows
            found.append((piece, (at + first, at + after), f"these {after - first} rows are equal, bit by bit"))
        if scan.equal_columns is not None and not is_of_cell:
            count, one, other = scan.equal_columns
            what = f"{_FRACTIONS[count]} {other + 1} of the columns equals {_FRACTIONS[count]} {one + 1}, bit by bit"
            found.append((piece, None, f"{what}, in all rows that were checked"))
        repeated = None if REPEATED_HEADS.search(tensor.parameter) else _find_repeated_block(scan, piece.shape[0])
        if repeated is not None:
            rows, count = repeated
            what = f"this {_FRACTIONS[count]} of the rows equals another one, bit by bit"
            found.append((piece, (at + rows[0], at + rows[1]), what))
    return found


def _find_equal_parts(
    evidence: CheckpointEvidence, state: State, tensor: SavedTensor
) -> list[tuple[SavedPiece, tuple[int, int] | None, str]]:
    """Finds equal parts in a fused matrix, such as keys that equal values, or a gate that equals the up projection."""
    found: list[tuple[SavedPiece, tuple[int, int] | None, str]] = []
    for piece, scan in evidence.find_scans(tensor):
        repeats = dict(scan.repeats) if piece.shape == tensor.shape and not scan.is_constant else {}
        sizes = _list_sizes_of_parts(evidence.find_model_config(state), tensor) if repeats else {}
        for distance, rows in sizes.items():
            # Rows that span two chunks of the file are not compared, so a few may be missing from the count.
            if repeats.get(distance, 0) >= _MOST_ROWS * rows:
                what = f"{repeats[distance]} rows begin and end with the same bytes as the row {distance} rows before"
                found.append((piece, None, what))
    return found


def _list_sizes_of_parts(config: Mapping[str, Any], tensor: SavedTensor) -> dict[int, int]:
    """Maps the distance between two parts of a fused matrix to the number of rows that repeat if the parts are equal.

    Only parts that must differ are listed: keys never equal values, but heads within the keys may be repeated.
    """
    rows = tensor.shape[-2]
    if re.search(r"gate_up|w13|(?:^|[._])kv", tensor.name):
        return {rows // 2: rows // 2} if rows % 2 == 0 else {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if len(tensor.shape) != 2 or not isinstance(heads, int) or not isinstance(hidden, int):
        return {rows // 3: rows // 3} if rows % 3 == 0 and len(tensor.shape) == 2 else {}
    groups, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    if not isinstance(groups, int) or not isinstance(width, int) or rows != (heads + 2 * groups) * width:
        return {}
    by_heads = {width: groups * width} if groups == heads else {}
    return by_heads | {groups * width: groups * width}


def _find_repeated_block(scan: SpanScan, rows: int) -> tuple[tuple[int, int], int] | None:
    """Finds the first half, quarter or eighth whose sampled rows all equal those of an earlier part of the same size.

    Returns (range of the rows of the repeated part, number of parts of this size), or None.
    """
    for count in _FRACTIONS if scan.row_sums else ():
        size = len(scan.row_sums) // count
        seen: set[tuple[int | None, ...]] = set()
        for number in range(count):
            block = scan.row_sums[number * size : (number + 1) * size]
            if None not in block and len(set(block)) > 1 and block in seen:
                return (number * rows // count, (number + 1) * rows // count), count
            seen.add(block)
    return None


def find_equal_tensors(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds single matrices and optimizer moments that are bitwise equal to those of another layer.

    Layers that share weights share all of them, or share them in pairs. A single equal pair among three or more layers
    is therefore a copying error. Two parameters have the same moments only if they are one parameter under two names.
    """
    of_model = [each for each in state.select("model") if len(each.shape) > 1 and is_floating_point(each.dtype)]
    of_layers = [each for each in of_model if LAYER.match(each.parameter) and not LORA.match(each.parameter)]
    for members in group_families(of_layers):
        layers = {found["number"] for each in members if (found := LAYER.match(each.parameter))}
        equal = _find_equal(evidence, members) if len(layers) == len(members) else []
        whole = _list_equal_layers(evidence, state) if equal else set()
        if len(equal) == 1 and not {LAYER.sub(r"\g<stack>.\g<number>", each.parameter) for each in equal[0]} <= whole:
            tensor, other = equal[0]
            yield Symptom(
                Trouble.COPIED_TENSOR, f"the tensor equals {other.name}, bit by bit", tensor.file, tensor.name
            )
    beside = (tensor for each in evidence.checkpoint.states for tensor in each.select("model"))
    # Position and token type embeddings that are summed have equal gradients if all their indices are equal.
    outside = {tensor.shape for tensor in beside if not LAYER.match(tensor.parameter)}
    moments: dict[str, list[SavedTensor]] = defaultdict(list)
    for tensor in state.select("optimizer"):
        # Biases that are added into the same sum have equal gradients.
        slot = parse_optimizer_slot(tensor)
        if slot is None or slot[1] not in MOMENTS or len(tensor.shape) < 2:
            continue
        if LAYER.match(slot[0]) or (slot[0].isdecimal() and outside and tensor.shape not in outside):
            moments[slot[1]].append(tensor)
    for tensors in moments.values():
        for tensor, other in _find_equal(evidence, tensors):
            yield Symptom(
                Trouble.COPIED_TENSOR, f"the tensor equals {other.name}, bit by bit", tensor.file, tensor.name
            )


def find_equal_projections(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds two projections of one module that are bitwise equal, such as key and value, or gate and up projection.

    Projections that are equal in most layers are not reported, because the model may share them.
    """
    modules: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        found = _PROJECTIONS.match(tensor.parameter) if len(tensor.shape) == 2 and tensor.numel > 1 else None
        if found and LAYER.match(tensor.parameter) and not EXPERT.match(tensor.parameter):
            modules[found["module"]][found["kind"]] = tensor
    families: dict[tuple[str, str, str], list[tuple[str, bool]]] = defaultdict(list)
    for module, by_kind in modules.items():
        for kind, other in itertools.combinations(sorted(by_kind), 2):
            if by_kind[kind].shape == by_kind[other].shape:
                is_equal = bool(_find_equal(evidence, (by_kind[kind], by_kind[other])))
                families[re.sub(r"\d+", "#", module), kind, other].append((module, is_equal))
    for (_, kind, other), found_here in families.items():
        equal = [module for module, is_equal in found_here if is_equal]
        is_of_some = 3 * len(equal) <= len(found_here) or (len(equal) == 1 < len(found_here))
        for module in equal if is_of_some else ():
            tensor = modules[module][other]
            what = f"the tensor equals {kind} of the same module, bit by bit, as in {len(equal)} of {len(found_here)}"
            yield Symptom(Trouble.COPIED_TENSOR, what, tensor.file, tensor.name)


def _find_equal(evidence: CheckpointEvidence, tensors: Iterable[SavedTensor]) -> list[tuple[SavedTensor, SavedTensor]]:
    """Returns pairs of equal tensors: each tensor that equals an earlier tensor, together with the earlier one."""
    seen: dict[tuple[Any, ...], SavedTensor] = {}
    found = []
    for tensor in tensors:
        is_constant = all(scan.is_constant for _, scan in evidence.find_scans(tensor))
        crc = evidence.find_checksum(tensor) if tensor.numel and not is_constant else None
        if crc is not None and (other := seen.setdefault((crc, tensor.shape, tensor.dtype), tensor)) is not tensor:
            found.append((tensor, other))
    return found


def find_equal_layers(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds layers whose matrices all equal those of another layer bit by bit.

    This is damage if an optimizer has trained both layers.
    """
    for stack, number, other, tensors in _compare_layers(evidence, state):
        what = f"the layer's {len(tensors)} matrices equal those of layer {other}, bit by bit"
        trouble = Trouble.EQUAL_LAYERS
        if _are_all_trained(evidence, state) or _were_trained_apart(evidence, state, tensors, (number, other)):
            trouble, what = Trouble.COPIED_TENSOR, f"{what}, but the optimizer updated both"
        yield Symptom(trouble, what, tensors[0].file, f"{stack}.{number}")


def find_equal_stacks(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds a decoder whose matrices all equal the encoder's matrices with the same names."""
    sides: dict[tuple[str, str, str], dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        found = _SIDE.fullmatch(tensor.parameter)
        if found and LAYER.match(tensor.parameter) and len(tensor.shape) > 1 and tensor.numel:
            sides[found["before"], found["rest"].partition(".")[0], found["side"]][found["rest"]] = tensor
    for (before, stack, side), tensors in sides.items():
        others = sides.get((before, stack, "encoder"), {}) if side == "decoder" else {}
        pairs = [(tensor, others[rest]) for rest, tensor in tensors.items() if rest in others]
        if len(pairs) > 1 and all(len(_find_equal(evidence, pair)) == 1 for pair in pairs):
            what = f"all {len(pairs)} matrices that the decoder shares with the encoder by name are equal, bit by bit"
            yield Symptom(Trouble.EQUAL_LAYERS, what, pairs[0][0].file, f"{before}{side}.{stack}")


def _compare_layers(evidence: CheckpointEvidence, state: State) -> Iterator[tuple[str, int, int, list[SavedTensor]]]:
    """Yields (stack, layer number, earlier layer's number, matrices) for each layer that equals an earlier layer."""
    layers: dict[tuple[str, int], dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if (found := LAYER.match(tensor.parameter)) and len(tensor.shape) > 1 and tensor.numel:
            layers[found["stack"], int(found["number"])][found["rest"]] = tensor
    seen: dict[tuple[Any, ...], int] = {}
    for (stack, number), tensors in sorted(layers.items()):
        sums = [(rest, evidence.find_checksum(tensor)) for rest, tensor in sorted(tensors.items())]
        if len(sums) < 2 or any(crc is None for _, crc in sums) or all(map(evidence.is_zero, tensors.values())):
            continue
        other = seen.setdefault((stack, *sums), number)
        if other != number:
            yield stack, number, other, list(tensors.values())


def _list_equal_layers(evidence: CheckpointEvidence, state: State) -> set[str]:
    return {f"{stack}.{each}" for stack, *pair, _ in _compare_layers(evidence, state) for each in pair}


def _were_trained_apart(
    evidence: CheckpointEvidence, state: State, tensors: list[SavedTensor], numbers: tuple[int, int]
) -> bool:
    """Returns whether an optimizer made at least three steps with different gradients for the two layers' matrices."""
    beside = [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]
    kept: dict[str, OptimizedParameter] = {}
    for each in beside:
        kept |= name_parameters(evidence, each, beside)
    for tensor in tensors:
        pair = [kept.get(LAYER.sub(rf"\g<stack>.{number}.\g<rest>", tensor.parameter)) for number in numbers]
        moments = [each.tensors["exp_avg"] for each in pair if each is not None and "exp_avg" in each.tensors]
        steps = [step for each in pair if each is not None for step in each.steps]
        sums = {evidence.find_checksum(moment) for moment in moments}
        if (
            len(sums) < 2
            or None in sums
            or min(steps, default=0) < _FEWEST_STEPS
            or any(map(evidence.is_zero, moments))
        ):
            return False
    return True


def _are_all_trained(evidence: CheckpointEvidence, state: State) -> bool:
    """Returns whether the optimizer trained all tensors of the state.

    It must have nonzero Adam moments for each tensor, and must have made at least three steps. Fewer steps prove
    nothing, since a warmup may start at a learning rate of zero.
    """
    others = [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]
    moments = [
        tensor
        for each in others
        for tensor in each.select("optimizer")
        if tensor.last_name == "exp_avg" and not evidence.is_zero(tensor)
    ]
    steps = [
        parse_number(tensor.dtype, scan.head) or 0.0
        for each in others
        for tensor in each.select("optimizer")
        if tensor.last_name == "step" and tensor.numel == 1
        for _, scan in evidence.find_scans(tensor)
    ]
    num_tensors = sum(is_floating_point(tensor.dtype) for tensor in state.select("model"))
    return len(moments) >= num_tensors > 0 and min(steps, default=0.0) >= _FEWEST_STEPS
