"""Fingerprints checkpoints on disk in any format, and compares two of them. Checkpoints of any size are streamed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from fsdp_doctor.checkpoints.files import BadFile, OpenFile, get_version, make_path
from fsdp_doctor.checkpoints.hub_parts import HubPart, split_for_hub
from fsdp_doctor.checkpoints.names import MatchedNames, match_names
from fsdp_doctor.checkpoints.reading import read_checkpoint
from fsdp_doctor.checkpoints.record import (
    SavedPiece,
    SavedTensor,
    choose_model,
    list_settings_places,
)
from fsdp_doctor.checkpoints.sums import crc32
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.weights.fingerprints.block_fingerprints import FingerprintSumsOfBlocks, make_unsummed, swap_halves
from fsdp_doctor.weights.fingerprints.differences import (
    FingerprintDifference,
    FingerprintVariant,
    VariantKind,
    compare_fingerprints,
)
from fsdp_doctor.weights.fingerprints.fingerprint_set import FingerprintError, Fingerprints, TensorFingerprint
from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock, make_grid_block
from fsdp_doctor.weights.fsdp.dtypes import check_dtype, name_dtype
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides

_CHUNK_BYTES = 16 << 20
# The rows that differ are searched for this many tensors at most, since the search reads both checkpoints again.
_MOST_LOCATED = 20
_WITH_SIZES = ("float64", "float32", "float16", "bfloat16")
# Damage that does not affect the weights.
_HARMLESS = (Trouble.SETTINGS_DAMAGED, Trouble.TRAILING_BYTES, Trouble.WORLD_SIZE)
_BlocksOf: TypeAlias = Callable[[torch.Tensor, tuple[int, ...]], list[IndexedBlock]]
_ROUNDED_TO = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class CheckpointComparison:
    """Result of the comparison of two checkpoints.

    differences: the tensors in which the second checkpoint differs from the first.
    notes: sentences on how the names were matched.
    compared: the number of tensors in the first checkpoint.
    equal: the names of tensors that are equal bit by bit.
    places: for each tensor that differs, its file in the second checkpoint and, if known, the range of rows from the
        first to the last row that differs.
    """

    differences: list[FingerprintDifference]
    notes: list[str]
    compared: int
    equal: list[str]
    places: Mapping[str, tuple[str, tuple[int, int] | None]] = field(default_factory=dict)


def fingerprint_checkpoint(
    path: pathlib.Path | str, *, dtype: torch.dtype | None = None, part: str | None = None
) -> Fingerprints:
    """Fingerprints the model in a checkpoint of any format that ``fsdp-doctor checkpoint verify`` reads.

    The names are the model's, without the keys of the dicts around it (``model``, ``state_dict``). An optimizer is left
    out, unless the checkpoint has nothing else. If the checkpoint has the model in several forms, one is read:
    safetensors if present, otherwise the whole tensors, otherwise the shards. Host memory: a block of at most 16 MiB,
    or of one row if a row is larger, and the cast of this block. No pickle is run.

    dtype: the dtype to which floating-point tensors are cast, as in :func:`fingerprint`.
    part: the part of the checkpoint to take as the model, such as ``ema``: the keys that lead to it, or the last of
        them.

    Raises FingerprintError if ``path`` is no checkpoint, is damaged, or changes while it is read; OSError if it cannot
    be read; ValueError for an empty path.
    """
    check_dtype(dtype)
    return _fingerprint(_Weights(make_path(path), part), dtype)


def _fingerprint(weights: _Weights, dtype: torch.dtype | None) -> Fingerprints:
    sums = FingerprintSumsOfBlocks()
    for name, tensor in weights.tensors.items():
        for part, offsets in weights.read_parts(tensor):
            cast = part.to(dtype) if dtype is not None and part.is_floating_point() else part
            blocks = [make_grid_block(0, cast, offsets, compute_row_major_strides(tensor.shape))]
            sums.add_blocks(name, make_unsummed(cast.dtype, tensor.shape, blocks), blocks)
            sums.flush()
    weights.check_unchanged()
    return Fingerprints(sums.fingerprints().tensors, tuple(weights.find_ties()))


def compare_checkpoints(
    left: pathlib.Path,
    right: pathlib.Path,
    *,
    dtype: torch.dtype | None = None,
    base: pathlib.Path | None = None,
    strip: Iterable[str] = (),
    config: str | None = None,
    part: str | None = None,
    find_parts: Callable[[str], Mapping[str, HubPart]] | None = None,
) -> CheckpointComparison:
    """Compares the models in two checkpoints of any formats: which tensors of ``right`` differ, and how.

    Either path may be a JSON file of fingerprints.

    dtype: the dtype to which the tensors of both are cast.
    base: the checkpoint of the model before training, which shows the weights that were not updated.
    strip: prefixes to remove from the names of both.
    config: the model's configuration; by default the ``config.json`` next to a checkpoint.
    find_parts: a function like :func:`read_hub_parts`. If it is given and the names of the two sides differ, both are
        renamed to the Hub's names.

    Raises the errors of :func:`fingerprint_checkpoint`, and FingerprintError for models that have no tensor in common.
    """
    opened = {path: _open(path, part) for path in (left, right)}
    parts = _find_hub_parts(list(opened.values()), strip, config, find_parts) if find_parts is not None else {}
    read = {path: _read(path, weights, dtype, parts) for path, weights in opened.items()}
    names = match_names(read[left].tensors, read[right].tensors, strip, (str(left), str(right)))
    if parts:
        names.notes.append("the tensors of both are compared by the Hub's names")
    one, two = _rename(read[left], names.left), _rename(read[right], names.right)
    of_base = None
    if base is not None:
        of_base = _read(base, _open(base), dtype, parts)
        of_base = _rename(of_base, match_names(of_base.tensors, one.tensors, strip).left)
    differing = [name for name in one.tensors if name in two.tensors and one.tensors[name] != two.tensors[name]]
    variants: dict[str, list[FingerprintVariant]] = {}
    if differing and (weights := opened[left]) is not None:
        originals = {form: name for name, form in names.left.items()}
        found = _find_variants(weights, {originals[name]: two.tensors[name] for name in differing}, dtype)
        variants = {names.left[name]: of_name for name, of_name in found.items()}
    differences = compare_fingerprints(one, two, base=of_base, variants=variants, called=(str(left), str(right)))
    differences = _add_sizes(differences, opened[left], opened[right], names, dtype)
    equal = [name for name, tensor in one.tensors.items() if two.tensors.get(name) == tensor]
    places = _locate(opened[left], opened[right], names, differing)
    return CheckpointComparison(differences, names.notes, len(one.tensors), equal, places)


def _add_sizes(
    differences: Sequence[FingerprintDifference],
    left: _Weights | None,
    right: _Weights | None,
    names: MatchedNames,
    dtype: torch.dtype | None,
) -> list[FingerprintDifference]:
    """Adds the largest difference of the values to the differences of up to 20 tensors, which are read again
    for this.
    """
    if left is None or right is None:
        return [*differences]
    of_left = {form: left.tensors[name] for name, form in names.left.items()}
    of_right = {form: right.tensors[name] for name, form in names.right.items()}
    sized = []
    num_read = 0
    for each in differences:
        one, two = of_left.get(each.name), of_right.get(each.name)
        if each.kind == "values" and one is not None and two is not None and num_read < _MOST_LOCATED:
            num_read += 1
            size = _find_largest_difference(left, one, right, two, dtype)
            each = replace(each, detail=f"{each.detail}, by at most {size:.2g}") if size is not None else each
        sized.append(each)
    return sized


def _find_largest_difference(
    left: _Weights, one: SavedTensor, right: _Weights, two: SavedTensor, dtype: torch.dtype | None
) -> float | None:
    """Returns the largest difference of two values at one place; None unless both are read in the same blocks and all
    values are finite.
    """
    if (one.dtype, one.shape) != (two.dtype, two.shape) or one.dtype not in _WITH_SIZES:
        return None
    largest = 0.0
    for (part, offsets), (other, its_offsets) in itertools.zip_longest(
        left.read_parts(one), right.read_parts(two), fillvalue=(torch.empty(0), ())
    ):
        if offsets != its_offsets or part.shape != other.shape:
            return None
        if part.numel():
            values, others = (each.to(dtype or each.dtype).double() for each in (part, other))
            of_part = float((values - others).abs().max())
            if not math.isfinite(of_part):
                return None
            largest = max(largest, of_part)
    return largest


def _locate(
    left: _Weights | None, right: _Weights | None, names: MatchedNames, differing: Sequence[str]
) -> dict[str, tuple[str, tuple[int, int] | None]]:
    """Finds, for each tensor that differs, its file on the right side and the rows that differ."""
    if right is None:
        return {}
    of_left = {form: left.tensors[name] for name, form in names.left.items()} if left is not None else {}
    of_right = {form: right.tensors[name] for name, form in names.right.items()}
    places: dict[str, tuple[str, tuple[int, int] | None]] = {}
    for at, name in enumerate(differing):
        one, two = of_left.get(name), of_right[name]
        rows = None
        if left is not None and one is not None and at < _MOST_LOCATED:
            rows = _find_rows(left, one, right, two) if (one.dtype, one.shape) == (two.dtype, two.shape) else None
        places[name] = two.file, rows
    return places


def _find_rows(left: _Weights, one: SavedTensor, right: _Weights, two: SavedTensor) -> tuple[int, int] | None:
    """Returns the range from the first row that differs to the last; None if no row is known to differ.

    Rows that are divided between several pieces are not compared.
    """
    sums = _sum_rows(left, one), _sum_rows(right, two)
    wrong = [at for at, (a, b) in enumerate(zip(*sums, strict=True)) if a != b]
    return (wrong[0], wrong[-1] + 1) if wrong else None


def _sum_rows(weights: _Weights, tensor: SavedTensor) -> list[int]:
    sums = [0] * (tensor.shape[0] if tensor.shape else 0)
    for part, offsets in weights.read_parts(tensor):
        if part.dim() and part.shape[1:] == tensor.shape[1:]:
            for at, row in enumerate(part.reshape(part.shape[0], -1).view(torch.uint8)):
                sums[offsets[0] + at] = crc32(memoryview(row.numpy()))
    return sums


def _find_hub_parts(
    both: Sequence[_Weights | None],
    strip: Iterable[str],
    config: str | None,
    find_parts: Callable[[str], Mapping[str, HubPart]],
) -> Mapping[str, HubPart]:
    """Returns the parts that the Hub's names divide tensors into; empty if the names match, or no configuration is
    found.
    """
    weights = [each for each in both if each is not None]
    if len(weights) < 2:
        return {}
    names = match_names(weights[0].tensors, weights[1].tensors, strip)
    if set(names.left.values()) == set(names.right.values()):
        return {}
    places = [place for each in weights for place in each.list_settings_places()]
    config = config or next((str(place) for place in places if (place / "config.json").is_file()), None)
    return find_parts(config) if config is not None else {}


def read_fingerprints(path: pathlib.Path, dtype: torch.dtype | None = None, part: str | None = None) -> Fingerprints:
    """Reads the fingerprints in a JSON file, or computes the fingerprints of a checkpoint.

    Raises the errors of :func:`fingerprint_checkpoint`.
    """
    return _read(path, _open(path, part), dtype, {})


def _open(path: pathlib.Path, part: str | None = None) -> _Weights | None:
    """Opens a checkpoint. Returns None for a JSON file of fingerprints."""
    return None if path.suffix == ".json" and path.is_file() else _Weights(path, part)


def _read(
    path: pathlib.Path, weights: _Weights | None, dtype: torch.dtype | None, parts: Mapping[str, HubPart]
) -> Fingerprints:
    if weights is not None:
        weights.take_hub_names(parts)
        return _fingerprint(weights, dtype)
    if dtype is not None:
        raise FingerprintError(f"{path} contains sums, and --dtype {name_dtype(dtype)} cannot be applied to sums")
    try:
        return Fingerprints.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise FingerprintError(f"{path} is not a text file") from None


def _rename(fingerprints: Fingerprints, names: Mapping[str, str]) -> Fingerprints:
    tensors = {names[name]: tensor for name, tensor in fingerprints.tensors.items()}
    tied = tuple(tuple(names[name] for name in group) for group in fingerprints.tied)
    return replace(fingerprints, tensors=tensors, tied=tied)


def _find_variants(
    weights: _Weights, differing: Mapping[str, TensorFingerprint], dtype: torch.dtype | None
) -> dict[str, list[FingerprintVariant]]:
    """Computes, for some tensors, the sums that each common mistake would lead to, such as a transposition.

    differing: the other side's fingerprints of these tensors, by this side's names.
    """
    return {
        name: list(_sum_variants(weights, weights.tensors[name], actual, dtype))
        for name, actual in differing.items()
        if name in weights.tensors
    }


def _sum_variants(
    weights: _Weights, tensor: SavedTensor, actual: TensorFingerprint, dtype: torch.dtype | None
) -> Iterator[FingerprintVariant]:
    shape, saved = tensor.shape, getattr(torch, tensor.dtype)
    expected = dtype if dtype is not None and saved.is_floating_point else saved
    other = getattr(torch, actual.dtype, expected)
    mistakes: list[tuple[VariantKind, str, _BlocksOf]] = []
    if len(shape) > 1 and math.prod(actual.shape) == math.prod(shape):
        mistakes.append(("transposed", "transposed", functools.partial(_transpose, expected, shape)))
    if actual.shape == shape:
        for dim in (dim for dim, length in enumerate(shape) if length % 2 == 0):
            detail = f"the halves of dim {dim} are swapped"
            mistakes.append(("halves swapped", detail, functools.partial(_swap_halves, expected, shape, dim)))
    if actual.shape == shape and expected.is_floating_point and other != expected:
        detail = f"the dtype is {actual.dtype}, not {name_dtype(expected)}: the same values, rounded"
        mistakes.append(("rounded", detail, functools.partial(_cast, (other,), shape)))
    elif actual.shape == shape and expected.is_floating_point:
        for between in _ROUNDED_TO:
            detail = f"cast twice: to {name_dtype(between)} and back"
            mistakes.append(("cast twice", detail, functools.partial(_cast, (between, expected), shape)))
    for kind, detail, blocks_of in mistakes:
        sums = FingerprintSumsOfBlocks()
        for part, offsets in weights.read_parts(tensor):
            blocks = blocks_of(part, offsets)
            sums.add_blocks("", make_unsummed(expected, shape, blocks), blocks)
            sums.flush()
        yield FingerprintVariant(kind, detail, sums.fingerprints().tensors[""].lanes)


def _cast(
    dtypes: Sequence[torch.dtype], shape: Sequence[int], part: torch.Tensor, offsets: Sequence[int]
) -> list[IndexedBlock]:
    for dtype in dtypes:
        part = part.to(dtype)
    return [make_grid_block(0, part, offsets, compute_row_major_strides(shape))]


def _transpose(
    dtype: torch.dtype, shape: Sequence[int], part: torch.Tensor, offsets: Sequence[int]
) -> list[IndexedBlock]:
    return [make_grid_block(0, part.to(dtype), offsets, (*compute_row_major_strides(shape)[:-2], 1, shape[-2]))]


def _swap_halves(
    dtype: torch.dtype, shape: Sequence[int], dim: int, part: torch.Tensor, offsets: Sequence[int]
) -> list[IndexedBlock]:
    return list(swap_halves(part.to(dtype), offsets, shape, dim))


class _Weights:
    """Tensors of the model in a checkpoint, by name.

    Raises FingerprintError if there are none, or if damage was found while their positions in the files were read.
    """

    def __init__(self, path: pathlib.Path, part: str | None = None) -> None:
        if not path.exists():
            raise FingerprintError(f"{path} does not exist")
        self.path, self.checkpoint = path, read_checkpoint(path, part)
        with self._raise_errors_of(""):
            self._model = choose_model(self.checkpoint)
        self.tensors: Mapping[str, SavedTensor] = self._model.tensors
        states = self._model.states
        places = {file for state in states for file in state.files} | {state.directory for state in states}
        for symptom in self.checkpoint.symptoms:
            is_grave = symptom.trouble.value.severity != "warning" and symptom.trouble not in _HARMLESS
            if is_grave and (not self.tensors or {symptom.file, str(pathlib.PurePath(symptom.file).parent)} & places):
                where = path if symptom.file in ("", ".") else self.checkpoint.root / symptom.file
                what = f"{symptom.tensor}: {symptom.what}" if symptom.tensor else symptom.what
                raise FingerprintError(f"{where}: {what} (fsdp-doctor checkpoint verify {path} says more)")
        if not self.tensors:
            raise FingerprintError(f"{path} contains no named tensors")

    def take_hub_names(self, parts: Mapping[str, HubPart]) -> None:
        with self._raise_errors_of(""):
            self.tensors = split_for_hub(self._model.tensors, parts) if parts else self._model.tensors

    def list_settings_places(self) -> list[pathlib.Path]:
        return list_settings_places(self.checkpoint, self._model)

    def read_parts(self, tensor: SavedTensor) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yields contiguous blocks of a tensor with their offsets. A block has at most 16 MiB or one row, and no two
        blocks overlap.
        """
        seen = set()
        for piece in tensor.pieces:
            if (piece.offsets, piece.shape) not in seen:
                seen.add((piece.offsets, piece.shape))
                with self._raise_errors_of(piece.file), OpenFile(self.checkpoint.root / piece.file) as file:
                    yield from _read_blocks(file, piece, getattr(torch, tensor.dtype))

    def check_unchanged(self) -> None:
        for path in sorted({piece.file for tensor in self.tensors.values() for piece in tensor.pieces}):
            with contextlib.suppress(FileNotFoundError):  # all that was read is of one version
                if get_version(os.stat(self.checkpoint.root / path)) != self.checkpoint.files[path].version:
                    raise FingerprintError(f"{self.checkpoint.root / path} changed while it was read")

    def find_ties(self) -> Iterator[tuple[str, ...]]:
        """Yields groups of names whose tensors are the same bytes of a file."""
        by_place: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel:
                by_place.setdefault((*tensor.pieces, tensor.dtype), []).append(name)
        return (tuple(names) for names in by_place.values() if len(names) > 1)

    @contextlib.contextmanager
    def _raise_errors_of(self, path: str) -> Iterator[None]:
        try:
            yield
        except BadFile as error:
            raise FingerprintError(error.describe(self.checkpoint.root / path)) from None


def _read_blocks(
    file: OpenFile, piece: SavedPiece, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    if not piece.numel:
        yield torch.empty(piece.shape, dtype=dtype), piece.offsets
        return
    if not piece.shape:
        yield _read_tensor(file, piece, dtype), ()
        return
    row = piece._replace(shape=(1, *piece.shape[1:]))
    step = max(_CHUNK_BYTES // (max(row.span, 1) * dtype.itemsize), 1)
    for first in range(0, piece.shape[0], step):
        part = piece._replace(
            begin=piece.begin + first * piece.strides[0] * dtype.itemsize,
            shape=(min(step, piece.shape[0] - first), *piece.shape[1:]),
        )
        yield _read_tensor(file, part, dtype), (piece.offsets[0] + first, *piece.offsets[1:])


def _read_tensor(file: OpenFile, piece: SavedPiece, dtype: torch.dtype) -> torch.Tensor:
    data = bytearray(piece.span * dtype.itemsize)
    file.read_into(piece.begin, memoryview(data))
    return torch.frombuffer(data, dtype=dtype).as_strided(piece.shape, piece.strides).contiguous()
