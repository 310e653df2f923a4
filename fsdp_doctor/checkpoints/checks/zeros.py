"""Checks tensors for zeros where similar tensors have other values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fsdp_doctor.checkpoints.checks.evidence import LAYER, LORA, MATRIX, CheckpointEvidence, group_families
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.model_types import find_marks
from fsdp_doctor.checkpoints.names import EMBEDDING
from fsdp_doctor.checkpoints.record import Arrangement, SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.spans import PAGE_BYTES, SpanScan
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# Padding rows are less than this fraction of a vocabulary.
_MOST_PADDING = 1 / 8
_NORM = re.compile(r"(?:norm\d?|ln_\w+)\.weight$")
_IN_LIST = re.compile(r"(?P<list>.+)\.(?P<number>\d+)\.\w+")


def find_zeros(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds zero matrices and norms if similar tensors are not zero, and zero rows, columns and blocks in matrices."""
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
    """Returns whether the tensor belongs to the last of several similar modules in a list.

    The MLP in a detector's head is such a list. The last matrix of such an MLP is often initialized to zeros.
    """
    found = _IN_LIST.fullmatch(tensor.name)
    beside = [other for each in members if (other := _IN_LIST.fullmatch(each.name))]
    numbers = [int(each["number"]) for each in beside if found is not None and each["list"] == found["list"]]
    return found is not None and len(numbers) > 1 and int(found["number"]) == max(numbers)


def _find_zero_last_norm(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds a norm outside the layers that is zero although no norm within the layers is zero.

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
    """Describes which rank the rows belong to, if they are exactly one rank's share for a world size that is a power of
    two up to 1024; empty otherwise.
    """
    for world in (2**power for power in range(10, 0, -1)):
        share = -(-rows // world)
        if share > 1 and first % share == 0 and after == min(first + share, rows):
            return f", which is the share of rank {first // share} of {world}"
    return ""
