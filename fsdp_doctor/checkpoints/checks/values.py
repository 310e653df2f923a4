"""Checks tensors for values that are non-finite or of an unusual magnitude, and for bits of another dtype."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator

from fsdp_doctor.checkpoints.checks.evidence import LORA, CheckpointEvidence, group_families, measure_size
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# A bfloat16 matrix with magnitudes below _TINY cannot be a weight. The spread of magnitudes is at least _USUAL_SPREAD
# for real weights, and below _NARROW if the bits were misread.
_TINY, _USUAL_SPREAD, _NARROW = 1e-10, 0.5, 0.35
# _FEWEST_LIKE: the fewest similar matrices from which the usual magnitude is derived. Magnitudes are different if they
# differ by more than the factor _OTHER_ORDER, and similar within the factor _SAME_ORDER.
_FEWEST_LIKE, _OTHER_ORDER, _SAME_ORDER = 3, 500.0, 16.0
_HUGE = 1e38
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
