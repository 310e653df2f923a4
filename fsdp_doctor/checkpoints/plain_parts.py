"""Finds plain tensors in rank files that may be parts of larger tensors, although no file shows the division."""

from __future__ import annotations

import bisect
import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping

from fsdp_doctor.checkpoints.names import EMBEDDING
from fsdp_doctor.checkpoints.record import (
    RANK_FILE,
    Arrangement,
    Member,
    SavedCheckpoint,
    SavedFile,
    SavedPiece,
    State,
)

# Matches a path that names one rank's part.
_OF_ONE_RANK = re.compile(r"(?<![a-z])(?:rank|shard|worker|proc|[tpe]p|mp)[-_]?\d")


def find_loose_tensors(checkpoint: SavedCheckpoint, state: State, *, is_of_one_rank: bool) -> None:
    """Marks plain tensors that differ between ranks as loose: they may be parts of a tensor, or copies trained apart.

    Tensors that are equal on all ranks are copies of a whole tensor. One rank's file alone does not show whether its
    tensors are whole.
    """
    is_alone = _has_other_ranks(checkpoint, state) if checkpoint.is_one_file else not is_of_one_rank
    is_alone &= len(state.files) == 1
    find_sum = _StoredSums(checkpoint.files)
    for tensor in state.tensors.values() if len(state.files) > 1 else ():
        # Nothing joins FSDP1's flat parameters, which are known to be parts.
        if tensor.numel and tensor.shape and not tensor.is_divided and "flat_param" not in tensor.name:
            sums = {find_sum(piece) for piece in tensor.pieces}
            tensor.is_loose = len(sums) > 1 or None in sums
    matrices = [tensor for tensor in state.tensors.values() if len(tensor.shape) > 1]
    compared = matrices or state.tensors.values()
    state.is_loose = not state.tells_layout and (is_alone or any(tensor.is_loose for tensor in compared))
    if state.is_loose:
        _note_loose(checkpoint, state)


def find_loose_files(checkpoint: SavedCheckpoint) -> None:
    """Marks as loose each state that was read as whole although its file, such as ``rank0.pt`` or
    ``rank_1/model.safetensors``, belongs to one rank.

    Other numbers in names, as in ``model_0.pt``, may be numbers of steps. Such numbers count as ranks if the embedding
    has 1/N of the rows or columns that config.json gives, for N such files.
    """
    alike: dict[tuple[str, frozenset[tuple[str, ...]]], list[State]] = defaultdict(list)
    for state in checkpoint.states:
        if state.arrangement is Arrangement.WHOLE and len(state.files) == 1 and state.tensors:
            alike[re.sub(r"\d+", "#", state.files[0]), frozenset(state.tensors)].append(state)
    for states in alike.values():
        names_rank = bool(_OF_ONE_RANK.search(states[0].files[0]))
        may_be_alone = len(states) == 1 and not checkpoint.is_one_file
        if may_be_alone or not (names_rank or all(_is_share(checkpoint, each, len(states)) for each in states)):
            continue
        for state in states:
            state.is_loose = True
            _note_loose(checkpoint, state)


def _is_share(checkpoint: SavedCheckpoint, state: State, count: int) -> bool:
    """Returns whether an embedding is one of ``count`` parts of the embedding that config.json describes."""
    config = checkpoint.find_setting(state.directory, "config.json")
    sizes = (config.get("vocab_size"), config.get("hidden_size", config.get("n_embd")))
    whole = [size if isinstance(size, int) else 0 for size in sizes]
    for tensor in state.select("model"):
        if len(tensor.shape) == 2 and EMBEDDING.search(tensor.parameter) and count > 1:
            odd = [(part, size) for part, size in zip(tensor.shape, whole, strict=True) if part != size]
            return len(odd) == 1 and odd[0][1] > 0 and odd[0][0] <= math.ceil(odd[0][1] / count)
    return False


def _note_loose(checkpoint: SavedCheckpoint, state: State) -> None:
    what = "no file says how they were divided, so neither shapes nor missing layers and experts were judged"
    place = pathlib.PurePath(state.directory, state.label)
    checkpoint.unchecked.append(f"{place}: whether the ranks' plain tensors are a whole model: {what}")


def _has_other_ranks(checkpoint: SavedCheckpoint, state: State) -> bool:
    """Returns whether another rank's file is next to the file that the user gave."""
    beside = (RANK_FILE.fullmatch(each.name) for each in checkpoint.root.iterdir())
    labels = [found["label"] or found["item"] for found in beside if found is not None]
    return labels.count(state.label) > 1


class _StoredSums:
    """The checksums that files store for the bytes of their tensors."""

    def __init__(self, files: Mapping[str, SavedFile]) -> None:
        self._files = files
        self._members: dict[str, list[Member]] = {}

    def __call__(self, piece: SavedPiece) -> tuple[int, int, int] | None:
        """Returns the stored checksum of the bytes that contain the piece, or None if none is stored.

        The result is (checksum, length of the bytes that it covers, offset of the piece in these bytes).
        """
        if piece.file not in self._members:
            self._members[piece.file] = sorted(self._files[piece.file].members, key=lambda member: member.begin)
        members = self._members[piece.file]
        at = bisect.bisect_right(members, piece.begin, key=lambda member: member.begin) - 1
        found = members[at] if at >= 0 else None
        return (found.crc, found.nbytes, piece.begin - found.begin) if found and found.crc is not None else None
