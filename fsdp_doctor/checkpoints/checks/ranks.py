"""Checks the files of all ranks together: missing rows, rows in several files, and copies of another rank's data."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_doctor.checkpoints.checks.evidence import (
    GROUP_SETTING,
    LAYER,
    REPEATED_HEADS,
    CheckpointEvidence,
    find_rank_file,
)
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.record import (
    Arrangement,
    SavedPiece,
    SavedTensor,
    State,
    parse_file_rank,
    parse_optimizer_slot,
)
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

# With fewer elements, equality may be chance.
_FEWEST_COMPARED = 32
# Boxes are compared pair by pair, so there must not be too many.
_MOST_BOXES = 2000


def find_gaps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds elements that no piece holds, elements in two different pieces, and pieces that exceed their tensor.

    Pieces with the same place in the tensor are replicas, and are allowed.

    Plain tensors in rank files are skipped, because their position in a whole tensor is unknown.
    """
    is_of_ranks = state.arrangement in (Arrangement.RANK_FILES, Arrangement.SHARDED_SAFETENSORS)
    if (
        state.arrangement is Arrangement.WHOLE
        or (is_of_ranks and state.is_incomplete)
        or evidence.checkpoint.is_one_file
    ):
        return
    for tensor in (each for each in state.tensors.values() if not each.is_loose):
        boxes = sorted({(p.offsets, p.shape) for p in tensor.pieces if p.numel})
        file = tensor.file
        if any(o + n > size for box in boxes for o, n, size in zip(*box, tensor.shape, strict=True)):
            yield Symptom(Trouble.OVERLAP, f"a piece exceeds the shape {list(tensor.shape)}", file, tensor.name)
        elif len(boxes) > _MOST_BOXES:
            evidence.checkpoint.unchecked.append(f"{tensor.name}: whether its {len(boxes)} pieces overlap")
        elif tensor.shape and all(o[1:] == boxes[0][0][1:] and s[1:] == tensor.shape[1:] for o, s in boxes):
            yield from _sweep_rows(tensor, file, [(o[0], o[0] + s[0]) for o, s in boxes])
        elif any(_do_overlap(one, two) for one, two in itertools.combinations(boxes, 2)):
            yield Symptom(Trouble.OVERLAP, "pieces of the tensor overlap", file, tensor.name)
        elif (covered := sum(math.prod(s) for _, s in boxes)) < tensor.numel:
            missing = tensor.numel - covered
            yield Symptom(Trouble.GAP, f"{missing} of {tensor.numel} elements are in no file", file, tensor.name)


def _do_overlap(one: tuple[Sequence[int], Sequence[int]], two: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*one, *two, strict=True))


def _sweep_rows(tensor: SavedTensor, file: str, ranges: list[tuple[int, int]]) -> Iterator[Symptom]:
    at = 0
    for begin, end in [*sorted(ranges), (tensor.shape[0], tensor.shape[0])]:
        if begin > at:
            yield Symptom(Trouble.GAP, "these rows are in no file", file, tensor.name, (at, begin))
        elif begin < at and end > begin:
            yield Symptom(Trouble.OVERLAP, "several pieces have these rows", file, tensor.name, (begin, min(at, end)))
        at = max(at, end)


def find_foreign_ranks(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds rank files that hold another rank's tensors, according to the mesh or process group stored in the file."""
    if state.arrangement is not Arrangement.RANK_FILES:
        return
    first_with: dict[int, str] = {}
    for path in state.files:
        file = evidence.checkpoint.files.get(path)
        rank = parse_file_rank(path)
        if file is None or rank is None or len(file.ranks) != 1:
            continue
        (inside,) = file.ranks
        other = first_with.setdefault(inside, path)
        if other != path:
            yield Symptom(Trouble.COPIED_RANK, f"{other} also holds the tensors of rank {inside}", path, rank=rank)
        elif inside != rank:
            yield Symptom(Trouble.FOREIGN_RANK, f"the file holds the tensors of rank {inside}", path, rank=rank)


def compare_ranks(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds differences between the ranks.

    A tensor, counter or setting may be missing on some ranks. Copies of a tensor or an optimizer's settings may differ.
    """
    ranks = {piece.rank for tensor in state.tensors.values() for piece in tensor.pieces}
    yield from _compare_keys(state)
    yield from _compare_settings(state)
    stages = _find_stages(state)
    if loose := [tensor for tensor in state.tensors.values() if tensor.is_loose] if state.is_loose else []:
        what = f"{len(loose)} of {len(state.tensors)} tensors differ between the ranks: parts, or copies that differ"
        yield Symptom(Trouble.LOOSE, what, state.files[0])
    for tensor in state.tensors.values():
        slot = parse_optimizer_slot(tensor)
        # Each rank holds a different part of an FSDP1 flat parameter, but the file does not say so.
        if state.roles[tensor.path] == "other" or (slot and slot[1] == "step") or "flat_param" in tensor.name:
            continue
        here = {piece.rank for piece in tensor.pieces}
        if state.arrangement is Arrangement.RANK_FILES and here != ranks and tensor.path not in stages:
            others = ranks - here
            if len(others) < len(here):
                what = f"this rank lacks the tensor, but {len(here)} of {len(ranks)} ranks have it"
                for rank in sorted(others, key=str):
                    yield Symptom(Trouble.RANKS_DISAGREE, what, find_rank_file(state, rank), tensor.name, rank=rank)
            else:
                what = f"only rank {join_some(sorted(map(str, here)))} of {len(ranks)} ranks has the tensor"
                yield Symptom(Trouble.RANKS_DISAGREE, what, tensor.file, tensor.name)
        values: dict[Any, tuple[SavedPiece, int | None]] = {}
        are_copies = state.arrangement is not Arrangement.WHOLE and not (state.is_loose and tensor.is_loose)
        for piece, scan in evidence.find_scans(tensor) if are_copies else ():
            first, crc = values.setdefault((piece.offsets, piece.shape, piece.strides), (piece, scan.crc))
            if crc != scan.crc and piece.is_contiguous:
                what = f"the tensor differs from its copy in {first.file}"
                yield Symptom(Trouble.REPLICAS_DIFFER, what, piece.file, tensor.name, rank=piece.rank)


def _find_stages(state: State) -> set[tuple[str, ...]]:
    """Returns the paths of the tensors whose layer or module only some ranks have, as in pipeline parallelism.

    Only plain tensors are examined, because a sharded tensor shows that every rank has a part of it.
    """
    if state.tells_layout:
        return set()
    ranks = frozenset(piece.rank for tensor in state.tensors.values() for piece in tensor.pieces)
    holders: dict[str, set[frozenset[int | None]]] = defaultdict(set)
    modules: dict[tuple[str, ...], str] = {}
    for tensor in state.tensors.values():
        name = strip_wrappers(slot[0] if (slot := parse_optimizer_slot(tensor)) else tensor.parameter or tensor.name)
        found = LAYER.match(name)
        modules[tensor.path] = f"{found['stack']}.{found['number']}" if found else name.rpartition(".")[0] or name
        holders[modules[tensor.path]].add(frozenset(piece.rank for piece in tensor.pieces))
    parted = {module for module, of_module in holders.items() if len(of_module) == 1 and ranks not in of_module}
    # One module on some ranks may be lost on the others. A pipeline has layers so, or the first and the last module.
    is_pipeline = any(module.rpartition(".")[2].isdecimal() for module in parted)
    is_pipeline |= len({of_ranks for module in parted for of_ranks in holders[module]}) > 1
    return {path for path, module in modules.items() if is_pipeline and module in parted}


def _compare_keys(state: State) -> Iterator[Symptom]:
    """Finds counters, schedulers and settings that at least half of the ranks have, but not all."""
    if state.arrangement is not Arrangement.RANK_FILES or state.is_incomplete:
        return
    by_key: dict[str, set[int | None]] = defaultdict(set)
    for path, rank in state.values:
        if len(path) > 1:
            by_key[path[0]].add(rank)
    for tensor in state.tensors.values():
        if len(tensor.path) > 1:
            by_key[tensor.path[0]] |= {piece.rank for piece in tensor.pieces}
    ranks = {rank: path for path in state.files if (rank := parse_file_rank(path)) is not None}
    for key, here in by_key.items():
        # A rank may keep values of its own; a key that at least half of the ranks have should be on all of them.
        for rank in sorted(ranks.keys() - here) if len(here) * 2 >= len(ranks) else ():
            what = f"this rank lacks {key}, but {len(here)} of {len(ranks)} ranks have it"
            yield Symptom(Trouble.RANKS_DISAGREE, what, ranks[rank], key, rank=rank)


def _compare_settings(state: State) -> Iterator[Symptom]:
    """Finds settings of the optimizer's groups, such as the learning rate, that differ between the ranks' shards.

    Only files with shards of the same tensors are compared: the ranks of a pipeline may have other groups.
    """
    if state.arrangement is not Arrangement.RANK_FILES or not state.tells_layout:
        return
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for (path, rank), value in state.values.items():
        found = GROUP_SETTING.search(name := ".".join(path))
        if found and not found["key"].startswith("params") and isinstance(value, int | float) and rank is not None:
            by_name[name][rank] = value
    for name, by_rank in by_name.items():
        (common, count), *others = Counter(by_rank.values()).most_common()
        for rank, value in sorted(by_rank.items()) if others else ():
            if value != common:
                what = f"the value is {value:g} on this rank, but {common:g} on {count} of {len(by_rank)} ranks"
                yield Symptom(Trouble.RANKS_DISAGREE, what, find_rank_file(state, rank), name, rank=rank)


def find_copied_rows(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds rows of a sharded tensor that are bitwise equal to another rank's rows.

    Constant rows are skipped, as are heads that may have been repeated to make more key-value heads.
    """
    for tensor in state.tensors.values():
        role = state.roles[tensor.path]
        is_compared = role == "optimizer" or (role == "model" and len(tensor.shape) == 2)
        if not is_compared or not is_floating_point(tensor.dtype) or REPEATED_HEADS.search(tensor.name):
            continue
        seen: dict[tuple[Any, ...], SavedPiece] = {}
        for piece, scan in evidence.find_scans(tensor):
            if scan.is_constant or scan.crc is None or piece.numel < _FEWEST_COMPARED:
                continue
            first = seen.setdefault((scan.crc, piece.shape), piece)
            if first.offsets != piece.offsets:
                what = f"these rows equal the rows from {first.offsets[0]} on in {first.file}, bit by bit"
                yield Symptom(Trouble.COPIED_ROWS, what, piece.file, tensor.name, piece.rows, piece.rank)
