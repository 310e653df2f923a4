"""Checks tensors for values that are non-finite, zero, equal to others, or of an unusual magnitude."""

from __future__ import annotations

import itertools
import math
import re
import statistics
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
    measure_size,
    parse_number,
)
from fsdp_doctor.checkpoints.checks.optimizer import OptimizedParameter, name_parameters
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.model_types import find_marks
from fsdp_doctor.checkpoints.names import EMBEDDING
from fsdp_doctor.checkpoints.record import Arrangement, SavedPiece, SavedTensor, State, parse_optimizer_slot
from fsdp_doctor.checkpoints.spans import PAGE_BYTES, SpanScan
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import format_bytes

# Padding rows are less than this fraction of a vocabulary.
_MOST_PADDING = 1 / 8
# A bfloat16 matrix with magnitudes below _TINY cannot be a weight. The spread of magnitudes is at least _USUAL_SPREAD
# for real weights, and below _NARROW if the bits were misread.
_TINY, _USUAL_SPREAD, _NARROW = 1e-10, 0.5, 0.35
# After this many steps every trained weight has changed, whatever the warmup.
_FEWEST_STEPS = 3
# Fraction of a part's rows that must be equal before two parts count as equal.
_MOST_ROWS = 0.95
_FRACTIONS = {2: "half", 4: "quarter", 8: "eighth"}
_NORM = re.compile(r"(?:norm\d?|ln_\w+)\.weight$")
# _FEWEST_LIKE: the fewest similar matrices from which the usual magnitude is derived. Magnitudes are different if they
# differ by more than the factor _OTHER_ORDER, and similar within the factor _SAME_ORDER.
_FEWEST_LIKE, _OTHER_ORDER, _SAME_ORDER = 3, 500.0, 16.0
_HUGE = 1e38
# Recurrent weights, and the spread of the magnitudes above which most of them are zero.
_CELL, _MOST_SPREAD = re.compile(r"(?:^|\.)weight_[ih]h(?:_l\d+)?(?:_reverse)?$"), 2.0
_SIDE = re.compile(r"(?P<before>(?:.*\.)?)(?P<side>encoder|decoder)\.(?P<rest>.+)")
_PROJECTIONS = re.compile(r"(?P<module>.*\.)(?P<kind>(?:q|k|v|gate|up)_proj|query|key|value|w[13]|[qkv])\.weight$")
# A frozen base that is saved with its adapters causes a warning if it is this many times larger and at least this many
# bytes.
_TIMES_THE_ADAPTERS, _LARGE_BASE = 10, 64 << 20
_DORA = re.compile(r"^(?P<module>.*)\.lora_magnitude_vector\b")
_IN_LIST = re.compile(r"(?P<list>.+)\.(?P<number>\d+)\.\w+")
# Buffers that bound the values of a module; infinite until they were measured.
_BOUND = re.compile(r"(?:^|_)(?:max|min)$")
_MASK = re.compile(r"mask|inv_freq")


def find_nonfinite(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    for tensor in state.tensors.values():
        if _MASK.search(tensor.last_name):
            continue
        for piece, scan in evidence.find_scans(tensor):
            # Masks hold the lowest value of their dtype, which no weight comes near.
            if scan.num_huge and (scan.largest > _HUGE or len(tensor.shape) > 1):
                row = _locate_row(piece, scan.first_bad or 0) if piece.is_contiguous else None
                what = f"{scan.num_huge} values are beyond 1e30"
                yield Symptom(Trouble.HUGE, what, piece.file, tensor.name, row, piece.rank)
            if not scan.num_nan + scan.num_inf + scan.num_minus_inf or scan.first_bad is None:
                continue
            parts = {"NaN": scan.num_nan, "inf": scan.num_inf, "-inf": scan.num_minus_inf}
            what = "it holds " + ", ".join(f"{count} {kind}" for kind, count in parts.items() if count)
            may_be_mask = tensor.last_name != "weight" and state.roles[tensor.path] != "optimizer"
            is_bound = tensor.numel == 1 and _BOUND.search(tensor.last_name) is not None
            is_bad = scan.num_nan or (scan.num_inf and not is_bound) or not may_be_mask
            row = _locate_row(piece, scan.first_bad) if piece.is_contiguous else None
            yield Symptom(
                Trouble.NONFINITE if is_bad else Trouble.INFINITE, what, piece.file, tensor.name, row, piece.rank
            )


def _locate_row(piece: SavedPiece, element: int) -> tuple[int, int] | None:
    if not piece.shape:
        return None
    row = piece.offsets[0] + element // math.prod(piece.shape[1:])
    return row, row + 1


def find_other_sizes(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds matrices with values of an unusual magnitude for their kind, and matrices whose bits belong to another
    dtype.
    """
    matrices = [tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel]
    yield from _find_misread_halves(evidence, [each for each in matrices if not LORA.match(each.parameter)])
    for tensor in matrices:
        for piece, scan in evidence.find_scans(tensor):
            if scan.looks_split:
                what = "the bytes are bfloat16 values, two for each float32 element"
                yield Symptom(Trouble.OTHER_BITS, what, piece.file, tensor.name, piece.rows, piece.rank)
    for members in group_families(each for each in matrices if not LORA.match(each.parameter)):
        sizes = [(tensor, size) for tensor in members if (size := measure_size(evidence, tensor))]
        if len(sizes) < _FEWEST_LIKE:
            continue
        median = statistics.median(size for _, size in sizes)
        far = [(tensor, size) for tensor, size in sizes if not 1 / _OTHER_ORDER < size / median < _OTHER_ORDER]
        near = [size for _, size in sizes if 1 / _SAME_ORDER < size / median < _SAME_ORDER]
        if len(far) + len(near) < len(sizes) or len(far) * 3 > len(sizes):
            continue  # magnitudes vary anyway
        for tensor, size in far:
            what = f"the values have the size {size:.2g}, but {len(near)} similar tensors have the size {median:.2g}"
            yield Symptom(Trouble.MAGNITUDE, what, tensor.file, tensor.name)


def _find_misread_halves(evidence: CheckpointEvidence, matrices: list[SavedTensor]) -> Iterator[Symptom]:
    """Finds float16 bits that are labelled bfloat16, and the reverse, from the magnitudes that result.

    Read as bfloat16, a float16 weight of 0.02 becomes about 1e-16, because the exponent has eight bits instead of five.
    Read as float16, bfloat16 weights all have magnitudes near 1.5.
    """
    samples = [
        (tensor, scans[0][1].size, scans[0][1].spread)
        for tensor in matrices
        if (scans := evidence.find_scans(tensor)) and scans[0][1].size and scans[0][1].spread is not None
    ]
    small = [tensor for tensor, size, _ in samples if tensor.dtype == "bfloat16" and size is not None and size < _TINY]
    if len(small) >= _FEWEST_LIKE and 2 * len(small) > len(matrices):
        what = (
            f"{len(small)} of {len(matrices)} matrices have values below {_TINY:g}, as if float16 bits were read "
            "as bfloat16"
        )
        yield Symptom(Trouble.OTHER_BITS, what, small[0].file, small[0].name)
    usual = statistics.median(spread or 0.0 for *_, spread in samples) if samples else 0.0
    for tensor, size, spread in samples if usual > _USUAL_SPREAD else ():
        if tensor.dtype == "float16" and (spread or 0.0) < _NARROW and 0.9 < (size or 0.0) < 2:
            what = f"all magnitudes are near {size:.2g}, as if bfloat16 bits were read as float16"
            yield Symptom(Trouble.OTHER_BITS, what, tensor.file, tensor.name)


def find_constants(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds constant matrices and repeated rows that similar tensors do not have."""
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

    Embeddings are skipped, since the rows of added tokens may be equal. For key and value projections only consecutive
    rows are compared, since their heads may have been repeated to make more groups.
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
    """Returns the distances at which equal parts of a fused matrix would lie, each with the number of rows they would
    have.

    Heads may be repeated within the keys and within the values, but keys never equal values.
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
    """Finds the first half, quarter or eighth whose sampled rows all equal the rows of an earlier part of this size."""
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
    """Finds two projections of one module that are bitwise equal: keys as values, or a gate as the projection up.

    If they are equal in most layers, the model may share them.
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
    """Finds a decoder whose layers have all the matrices of the encoder's layers with the same numbers."""
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
    """Yields (stack, number, number, matrices) for each layer that equals an earlier layer of the same stack."""
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


def find_zeros(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds zero matrices, zero rows of a rank and zero blocks of a file where similar tensors are not zero."""
    matrices = (tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel)
    for members in group_families(each for each in matrices if not LORA.match(each.parameter)):
        zero = [tensor for tensor in members if evidence.is_zero(tensor)]
        for tensor in zero if len(zero) < len(members) else ():
            what = f"the tensor is zero, but {len(members) - len(zero)} of {len(members)} similar tensors are not"
            trouble = Trouble.ZERO_LAST if _is_last_of_its_list(tensor, members) else Trouble.ZERO_MATRIX
            yield Symptom(trouble, what, tensor.file, tensor.name)
    norms = (tensor for tensor in state.select("model") if len(tensor.shape) == 1 and _NORM.search(tensor.parameter))
    for members in group_families(norms):
        zero = [tensor for tensor in members if evidence.is_zero(tensor)]
        for tensor in zero if len(zero) * 3 <= len(members) else ():
            what = f"the norm is zero, but {len(members) - len(zero)} of {len(members)} similar norms are not"
            yield Symptom(Trouble.ZERO_MATRIX, what, tensor.file, tensor.name)
    yield from _find_zero_last_norm(evidence, state)
    yield from _find_zero_columns(evidence, state)
    for tensor in state.tensors.values():
        scans = evidence.find_scans(tensor)
        if all(scan.is_zero for _, scan in scans):
            continue
        is_matrix = len(tensor.shape) > 1 and state.roles[tensor.path] == "model"
        for piece, scan in scans:
            if scan.is_zero and is_matrix and state.arrangement is not Arrangement.WHOLE:
                is_last = piece.offsets[0] + piece.shape[0] == tensor.shape[0]
                is_padding = is_last and piece.shape[0] < tensor.shape[0] * _MOST_PADDING
                trouble = Trouble.ZERO_ROWS if is_padding and EMBEDDING.search(tensor.name) else Trouble.ZERO_RANK
                yield Symptom(trouble, "these rows are zero", piece.file, tensor.name, piece.rows, piece.rank)
            elif not scan.is_zero and piece.is_contiguous and is_matrix:
                yield from _judge_zero_runs(evidence, tensor, piece, scan)


def _is_last_of_its_list(tensor: SavedTensor, members: Iterable[SavedTensor]) -> bool:
    """Returns whether the tensor is of the last of several single modules in a list, as in an MLP of a detector's head.

    Such an MLP often begins with a last matrix of zeros.
    """
    found = _IN_LIST.fullmatch(tensor.name)
    beside = [other for each in members if (other := _IN_LIST.fullmatch(each.name))]
    numbers = [int(each["number"]) for each in beside if found is not None and each["list"] == found["list"]]
    return found is not None and len(numbers) > 1 and int(found["number"]) == max(numbers)


def _find_zero_last_norm(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds a norm behind the layers that is zero although no norm within the layers is.

    Classes that add 1 to a norm's weight, such as Gemma, may keep such a norm frozen at zero, so this is damage only
    for known classes.
    """
    norms = [each for each in state.select("model") if len(each.shape) == 1 and _NORM.search(each.parameter)]
    of_layers = [each for each in norms if LAYER.match(each.parameter)]
    if not of_layers or any(map(evidence.is_zero, of_layers)):
        return
    config = evidence.find_model_config(state)
    is_known = find_marks(config) is not None and not str(config["model_type"]).startswith("gemma")
    for tensor in norms:
        if not LAYER.match(tensor.parameter) and evidence.is_zero(tensor):
            what = f"the norm is zero, but none of the {len(of_layers)} norms of the layers is"
            yield Symptom(Trouble.ZERO_MATRIX if is_known else Trouble.UNUSUAL, what, tensor.file, tensor.name)


def _find_zero_columns(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds zero columns: damage if similar tensors do not have the same zero columns, otherwise padding."""
    matrices = (each for each in state.select("model") if len(each.shape) == 2 and is_floating_point(each.dtype))
    for members in group_families(each for each in matrices if not LORA.match(each.parameter)):
        found = [
            (tensor, piece, scan.zero_columns)
            for tensor in members
            for piece, scan in evidence.find_scans(tensor)
            if scan.zero_columns is not None and (scan.zero_columns[1] - scan.zero_columns[0]) * 8 >= piece.shape[1]
        ]
        tensors = {tensor.path for tensor, _, _ in found}
        is_alike = len(tensors) == len(members) or len({columns for _, _, columns in found}) == 1 < len(tensors)
        for tensor, piece, (first, after) in found if MATRIX.search(members[0].parameter) else ():
            what = f"the columns {first} to {after - 1} are zero in all rows that were checked"
            trouble = Trouble.PADDED_COLUMNS if is_alike and len(members) > 1 else Trouble.ZERO_COLUMNS
            yield Symptom(trouble, what, piece.file, tensor.name, piece.rows, piece.rank)


def _judge_zero_runs(
    evidence: CheckpointEvidence, tensor: SavedTensor, piece: SavedPiece, scan: SpanScan
) -> Iterator[Symptom]:
    file = evidence.checkpoint.files[piece.file]
    row_bytes = piece.numel // piece.shape[0] * tensor.itemsize
    for begin, end in scan.zero_runs:
        # Zero bytes of the elements at either end of the run may belong to it, so a few bytes of slack are allowed.
        first, after = -(-begin // row_bytes), end // row_bytes
        rows = piece.offsets[0] + first, piece.offsets[0] + after
        slack = max(tensor.itemsize, 8)
        if begin > first * row_bytes - slack and end - after * row_bytes < slack:
            may_be_padding = EMBEDDING.search(tensor.name) and after == piece.shape[0]
            whose = "" if may_be_padding else _describe_share(piece.shape[0], first, after)
            if not whose and not EMBEDDING.search(tensor.name) and (after - first) * 8 >= piece.shape[0]:
                whose = f", {after - first} of {piece.shape[0]} consecutive rows"
            trouble = Trouble.ZERO_RANK if whose else Trouble.ZERO_ROWS
            yield Symptom(trouble, f"these rows are zero{whose}", piece.file, tensor.name, rows, piece.rank)
            continue
        # If the checksum is right, the zeros were saved that way.
        if file.has_checksums:
            what = f"{end - begin} consecutive bytes are zero, beginning and ending within a row"
            yield Symptom(Trouble.ZERO_ROWS, what, piece.file, tensor.name, rows, piece.rank)
            continue
        from_page = begin and -(piece.begin + begin) % PAGE_BYTES < slack
        to_page = end < scan.nbytes and (piece.begin + end) % PAGE_BYTES < slack
        at_end = end == scan.nbytes and piece.begin + end == file.size
        is_block = from_page or to_page or at_end
        what = f"the bytes {piece.begin + begin} to {piece.begin + end} of the file are zero"
        what += ", from page to page" if is_block else ", from within one row to within another"
        trouble = Trouble.ZERO_BLOCK if is_block else Trouble.ZERO_ROWS
        yield Symptom(trouble, what, piece.file, tensor.name, rows, piece.rank)


def _describe_share(rows: int, first: int, after: int) -> str:
    """Describes which rank the rows belong to, if they are exactly one rank's share for a world size of 2 to 1024."""
    for world in (2**power for power in range(10, 0, -1)):
        share = -(-rows // world)
        if share > 1 and first % share == 0 and after == min(first + share, rows):
            return f", which is the share of rank {first // share} of {world}"
    return ""


def find_lora(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds LoRA halves without their counterpart, ranks that contradict adapter_config.json, and B matrices still at
    zero.
    """
    halves: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if found := LORA.match(tensor.parameter):
            halves[found["module"]][found["half"]] = tensor
    config = evidence.checkpoint.find_setting(state.directory, "adapter_config.json")
    for module, by_half in halves.items():
        file = next(iter(by_half.values())).file
        if len(by_half) == 1:
            yield Symptom(Trouble.LORA_PAIR, f"the module has only lora_{next(iter(by_half))}", file, module)
        elif state.is_loose:
            continue
        elif not config.get("rank_pattern") and by_half["A"].shape[0] != config.get("r", by_half["A"].shape[0]):
            what = f"lora_A has {by_half['A'].shape[0]} rows, but adapter_config.json says r = {config['r']}"
            yield Symptom(Trouble.SHAPE, what, file, module)
        elif 1 < len(by_half["A"].shape) == len(by_half["B"].shape) and (
            by_half["B"].name == by_half["A"].name.replace("lora_A", "lora_B")
            and by_half["A"].shape[0] != by_half["B"].shape[1]
        ):
            what = f"lora_A has {by_half['A'].shape[0]} rows, but lora_B has {by_half['B'].shape[1]} columns"
            yield Symptom(Trouble.SHAPE, what, file, module)
    yield from _find_missing_adapters(state, halves, config)
    yield from _find_missing_magnitudes(state, halves, config)
    if halves:
        yield from _find_frozen_base(state)
    matrices = [by_half["B"] for by_half in halves.values() if "B" in by_half]
    zero = [tensor for tensor in matrices if evidence.is_zero(tensor)]
    if zero and len(zero) < len(matrices):
        for tensor in zero:
            what = f"lora_B is zero, but {len(matrices) - len(zero)} of {len(matrices)} are not"
            yield Symptom(Trouble.LORA_ZERO, what, tensor.file, tensor.name)
    elif zero:
        step = evidence.checkpoint.find_setting(state.directory, "trainer_state.json").get("global_step")
        trouble = Trouble.LORA_ZERO if isinstance(step, int) and step > 0 else Trouble.LORA_START
        after = f" after {step} steps" if trouble is Trouble.LORA_ZERO else ""
        yield Symptom(trouble, f"all {len(zero)} lora_B are zero{after}", zero[0].file)


def _find_frozen_base(state: State) -> Iterator[Symptom]:
    """Finds a frozen base model that is saved with its adapters and is many times larger than they are."""
    tensors = list(state.select("model"))
    adapters = sum(tensor.numel * tensor.itemsize for tensor in tensors if LORA.match(tensor.parameter))
    base = sum(tensor.numel * tensor.itemsize for tensor in tensors if not LORA.match(tensor.parameter))
    if base >= max(_TIMES_THE_ADAPTERS * adapters, _LARGE_BASE):
        what = f"the frozen base takes {format_bytes(base)}, the adapters {format_bytes(adapters)}"
        yield Symptom(Trouble.FROZEN_BASE, what, tensors[0].file)


def _find_missing_magnitudes(
    state: State, halves: Mapping[str, dict[str, SavedTensor]], config: Mapping[str, Any]
) -> Iterator[Symptom]:
    """Finds adapters of DoRA that lack their vector of magnitudes, by adapter_config.json or by the other adapters."""
    modules = {found["module"] for tensor in state.select("model") if (found := _DORA.match(tensor.parameter))}
    lacking = sorted(halves.keys() - modules)
    if lacking and (config.get("use_dora") is True or 2 * len(lacking) <= len(halves)):
        for module in lacking:
            what = f"the module has no lora_magnitude_vector, which {len(halves) - len(lacking)} of {len(halves)} have"
            yield Symptom(Trouble.LORA_PAIR, what, next(iter(halves[module].values())).file, module)


def _find_missing_adapters(
    state: State, halves: Mapping[str, dict[str, SavedTensor]], config: Mapping[str, Any]
) -> Iterator[Symptom]:
    """Finds modules that lack an adapter in some layers, and target modules that have no adapter at all."""
    by_kind: dict[tuple[str, str], set[int]] = defaultdict(set)
    for module in halves:
        if found := LAYER.match(module):
            by_kind[found["stack"], found["rest"]].add(int(found["number"]))
    targets = config.get("target_modules")
    is_by_layer = any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if is_by_layer or not isinstance(targets, list) or not state.files:
        return
    for (stack, rest), numbers in by_kind.items():
        layers = set().union(*(each for (other, _), each in by_kind.items() if other == stack))
        for number in sorted(layers - numbers) if rest.rpartition(".")[2] in targets else ():
            what = (
                f"{len(numbers)} of {len(layers)} layers have this module, but adapter_config.json names it for "
                "all layers"
            )
            yield Symptom(Trouble.ADAPTER_PART, what, state.files[0], f"{stack}.{number}.{rest}")
    for target in sorted(map(str, targets)):
        if halves and not any(f".{module}".endswith(f".{target}") for module in halves):
            what = f"adapter_config.json names {target}, but no tensor belongs to it"
            yield Symptom(Trouble.NO_TARGET, what, state.files[0])
