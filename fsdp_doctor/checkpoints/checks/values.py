"""Checks of values: not finite, zero, equal, or of another size than others like them."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import (
    EMBEDDING,
    LAYER,
    LORA,
    CheckpointEvidence,
    group_families,
    measure_size,
)
from fsdp_doctor.checkpoints.record import Arrangement, SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.scanning import PAGE_BYTES, SpanScan
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# A vocabulary is padded by less than this part of its rows.
_MOST_PADDING = 1 / 8
# How many matrices say what is usual, and by which factor one is of another order.
_FEWEST_LIKE, _OTHER_ORDER, _SAME_ORDER = 3, 500.0, 16.0
_MASK = re.compile(r"mask|inv_freq")


def find_nonfinite(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    for tensor in state.tensors.values():
        if _MASK.search(tensor.last_name):
            continue
        for piece, scan in evidence.find_scans(tensor):
            if scan.num_huge:
                row = _locate_row(piece, scan.first_bad or 0) if piece.is_contiguous else None
                what = f"{scan.num_huge} values are beyond 1e38"
                yield Symptom(Trouble.HUGE, what, piece.file, tensor.name, row, piece.rank)
            if not scan.num_nan + scan.num_inf + scan.num_minus_inf or scan.first_bad is None:
                continue
            parts = {"NaN": scan.num_nan, "inf": scan.num_inf, "-inf": scan.num_minus_inf}
            what = "it holds " + ", ".join(f"{count} {kind}" for kind, count in parts.items() if count)
            may_be_mask = tensor.last_name != "weight" and state.roles[tensor.path] != "optimizer"
            is_bad = scan.num_nan or scan.num_inf or not may_be_mask
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
    """Matrices whose values are of another order than those like it, and those whose bits are of another dtype."""
    matrices = [tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel]
    for tensor in matrices:
        for piece, scan in evidence.find_scans(tensor):
            if scan.looks_split:
                what = "its bytes are those of bfloat16, two values for each of float32"
                yield Symptom(Trouble.OTHER_BITS, what, piece.file, tensor.name, piece.rows, piece.rank)
    for members in group_families(each for each in matrices if not LORA.match(each.parameter)):
        sizes = [(tensor, size) for tensor in members if (size := measure_size(evidence, tensor))]
        if len(sizes) < _FEWEST_LIKE:
            continue
        median = statistics.median(size for _, size in sizes)
        far = [(tensor, size) for tensor, size in sizes if not 1 / _OTHER_ORDER < size / median < _OTHER_ORDER]
        near = [size for _, size in sizes if 1 / _SAME_ORDER < size / median < _SAME_ORDER]
        if len(far) + len(near) < len(sizes) or len(far) * 3 > len(sizes):
            continue  # they differ anyway
        for tensor, size in far:
            what = f"its values are of the size {size:.2g}, and those of {len(near)} like it of {median:.2g}"
            yield Symptom(Trouble.MAGNITUDE, what, tensor.file, tensor.name)


def find_equal_layers(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Layers all of whose matrices are the same, bit by bit."""
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
            what = f"its {len(sums)} matrices are those of layer {other}, bit by bit"
            yield Symptom(Trouble.EQUAL_LAYERS, what, next(iter(tensors.values())).file, f"{stack}.{number}")


def find_zeros(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Matrices, ranks' rows and blocks of the file that are zero where others like them are not."""
    matrices = (tensor for tensor in state.select("model") if len(tensor.shape) > 1 and tensor.numel)
    for members in group_families(each for each in matrices if not LORA.match(each.parameter)):
        zero = [tensor for tensor in members if evidence.is_zero(tensor)]
        for tensor in zero if len(zero) < len(members) else ():
            what = f"it is zero, and of {len(members)} tensors like it {len(members) - len(zero)} are not"
            yield Symptom(Trouble.ZERO_MATRIX, what, tensor.file, tensor.name)
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


def _judge_zero_runs(
    evidence: CheckpointEvidence, tensor: SavedTensor, piece: SavedPiece, scan: SpanScan
) -> Iterator[Symptom]:
    file = evidence.checkpoint.files[piece.file]
    row_bytes = piece.numel // piece.shape[0] * tensor.itemsize
    for begin, end in scan.zero_runs:
        # The zero bytes of the elements beside the run belong to it.
        first, after = -(-begin // row_bytes), end // row_bytes
        rows = piece.offsets[0] + first, piece.offsets[0] + after
        slack = max(tensor.itemsize, 8)
        if begin > first * row_bytes - slack and end - after * row_bytes < slack:
            may_be_padding = EMBEDDING.search(tensor.name) and after == piece.shape[0]
            whose = "" if may_be_padding else _describe_share(piece.shape[0], first, after)
            if not whose and not EMBEDDING.search(tensor.name) and (after - first) * 8 >= piece.shape[0]:
                whose = f", {after - first} of {piece.shape[0]} that follow one another"
            trouble = Trouble.ZERO_RANK if whose else Trouble.ZERO_ROWS
            yield Symptom(trouble, f"these rows are zero{whose}", piece.file, tensor.name, rows, piece.rank)
            continue
        # A checksum that is right says that the zeros were saved.
        if file.has_checksums:
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
    """Words for whose rows they are, if they are all of one rank of a job of 2 to 1024."""
    for world in (2**power for power in range(10, 0, -1)):
        share = -(-rows // world)
        if share > 1 and first % share == 0 and after == min(first + share, rows):
            return f", which rank {first // share} of {world} would hold"
    return ""


def find_lora(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Halves without the other, a rank that adapter_config.json denies, and B that never moved from zero."""
    halves: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("model"):
        if found := LORA.match(tensor.parameter):
            halves[found["module"]][found["half"]] = tensor
    config = evidence.checkpoint.find_setting(state.directory, "adapter_config.json")
    for module, by_half in halves.items():
        file = next(iter(by_half.values())).file
        if len(by_half) == 1:
            yield Symptom(Trouble.LORA_PAIR, f"it has lora_{next(iter(by_half))} alone", file, module)
        elif not config.get("rank_pattern") and by_half["A"].shape[0] != config.get("r", by_half["A"].shape[0]):
            what = f"lora_A has {by_half['A'].shape[0]} rows, and adapter_config.json says r = {config['r']}"
            yield Symptom(Trouble.SHAPE, what, file, module)
    matrices = [by_half["B"] for by_half in halves.values() if "B" in by_half]
    zero = [tensor for tensor in matrices if evidence.is_zero(tensor)]
    if zero and len(zero) < len(matrices):
        for tensor in zero:
            what = f"it is zero, and {len(matrices) - len(zero)} of {len(matrices)} are not"
            yield Symptom(Trouble.LORA_ZERO, what, tensor.file, tensor.name)
    elif zero:
        step = evidence.checkpoint.find_setting(state.directory, "trainer_state.json").get("global_step")
        trouble = Trouble.LORA_ZERO if isinstance(step, int) and step > 0 else Trouble.LORA_START
        after = f" after {step} steps" if trouble is Trouble.LORA_ZERO else ""
        yield Symptom(trouble, f"all {len(zero)} lora_B are zero{after}", zero[0].file)
