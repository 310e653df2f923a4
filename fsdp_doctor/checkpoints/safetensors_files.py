"""Reads and writes safetensors files, and the index of a checkpoint that consists of several files."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_doctor.checkpoints.dtypes import DTYPES, NAME_OF_CODE
from fsdp_doctor.checkpoints.files import BadFile, NotRead, OpenFile
from fsdp_doctor.text import join_some, read_first_line

# Header size limit of the safetensors package.
_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8
# Each tensor takes about two kilobytes of memory; model files have some thousands of tensors.
_MOST_TENSORS = 200_000


class HeaderEntry(NamedTuple):
    """Tensor in a file. ``begin`` is the offset of its first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class Header(NamedTuple):
    """Header of a file: its tensors by name in byte order, and the end of the last tensor's bytes."""

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, Any]
    end: int


def read_header(file: OpenFile) -> Header:
    """Reads the header of a safetensors file.

    Raises BadFile if it is not such a file, or if tensors lie outside the file or overlap; NotRead for an unknown
    dtype.
    """
    file.check_content()
    size = file.size
    if size < _LENGTH_BYTES:
        raise BadFile(f"is not a safetensors file: it has {size} bytes")
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if not 2 <= length <= _LONGEST_HEADER:
        raise BadFile(f"is not a safetensors file: its header would be {length} bytes long")
    begin = _LENGTH_BYTES + length
    if begin > size:
        raise BadFile(f"is truncated, or not a safetensors file: it has {size} bytes, but a header of {length}")
    text = file.read(_LENGTH_BYTES, length)
    if (count := text.count(b'"data_offsets"')) > _MOST_TENSORS:
        raise NotRead(f"has {count} tensors, but at most {_MOST_TENSORS} are read")
    try:
        header = parse_json(text)
    except ValueError as error:
        raise BadFile(f"is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise BadFile("is not a safetensors file: its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    entries = {name: _read_entry(name, entry, begin, size) for name, entry in header.items()}
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes, item[0])))
    at, before = begin, ""
    for name, entry in tensors.items():
        if entry.begin < at:
            raise BadFile(f"and {name} use the same bytes", before)
        if entry.begin > at:
            raise BadFile(
                f"begins {entry.begin - at} bytes after the end of the previous tensor, which safetensors refuses", name
            )
        at, before = entry.begin + entry.nbytes, name
    end = max((entry.begin + entry.nbytes for entry in tensors.values()), default=begin)
    return Header(tensors, metadata if isinstance(metadata, dict) else {}, end)


def _read_entry(name: str, entry: Any, begin: int, size: int) -> HeaderEntry:
    entry = entry if isinstance(entry, dict) else {}
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in NAME_OF_CODE:
        raise NotRead(f"has the unknown dtype {code!r}; known dtypes are {', '.join(NAME_OF_CODE)}", name)
    if not _are_counts(shape):
        raise BadFile(f"has the shape {shape!r}, which is not a list of lengths", name)
    if not _are_counts(offsets) or len(offsets) != 2:
        raise BadFile(f"has the offsets {offsets!r}, which are not a first and a last byte", name)
    first, last = offsets
    dtype = NAME_OF_CODE[code]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if last - first != nbytes:
        raise BadFile(f"has {last - first} bytes, but its shape {shape} needs {nbytes}", name)
    if begin + last > size:
        raise BadFile(f"is truncated: it has {size} bytes, but {name} ends at byte {begin + last}")
    return HeaderEntry(dtype, tuple(shape), begin + first, nbytes)


def make_header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """Makes the first bytes of a file for these tensors, and returns them with the offset of each tensor in the file.

    The tensors keep their order. Pass tensors with larger elements first: there is no padding between tensors, so this
    order keeps all of them aligned. Raises BadFile for a dtype that safetensors does not have.
    """
    entries, begins, at = {}, {}, 0
    for name, (dtype, shape) in tensors.items():
        if not DTYPES[dtype].code:
            raise BadFile(f"is {dtype}, which safetensors does not have", name)
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": DTYPES[dtype].code, "shape": shape, "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


class HubFile(NamedTuple):
    """File to be written: its header, the offset of each tensor by name, and its total size in bytes."""

    name: str
    header: bytes
    begins: dict[str, int]
    nbytes: int


def plan_hub_files(tensors: Iterable[tuple[str, str, tuple[int, ...]]], largest_file: int) -> list[HubFile]:
    """Divides tensors, given as (name, dtype, shape), into files in their order, with the file names of transformers.

    ``largest_file`` limits the bytes of tensors in a file; only a single larger tensor may exceed it. Raises BadFile
    for a tensor that safetensors cannot store.
    """
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, dtype, shape in tensors:
        if name == "__metadata__":
            raise BadFile("has a name that is reserved by safetensors", name)
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if groups[-1] and filled + nbytes > largest_file:
            groups.append({})
            filled = 0
        groups[-1][name] = dtype, shape
        filled += nbytes
    files = []
    for number, group in enumerate(groups, 1):
        of = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        ordered = dict(sorted(group.items(), key=lambda item: -DTYPES[item[1][0]].itemsize))
        header, begins = make_header(ordered)
        nbytes = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in group.values())
        files.append(HubFile(f"model{of}.safetensors", header, begins, len(header) + nbytes))
    return files


def make_index(files: Sequence[HubFile]) -> bytes:
    """Makes the text of ``model.safetensors.index.json``."""
    weight_map = {key: file.name for file in files for key in file.begins}
    total_size = sum(file.nbytes - len(file.header) for file in files)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()


def read_weight_map(index: pathlib.Path) -> dict[str, str]:
    """Reads the file name of each tensor from an index that transformers wrote.

    Raises BadFile if the index is malformed or names files outside its directory, and OSError if it cannot be read.
    """
    # Reading a pipe might block forever.
    with OpenFile(index) as file:
        if file.size > _LONGEST_HEADER:
            raise BadFile(f"is not an index of a checkpoint: it has {file.size} bytes")
        text = file.read(0, file.size)
    try:
        weight_map = parse_json(text)["weight_map"]
    except KeyError:
        raise BadFile("is not an index of a checkpoint: it has no weight_map") from None
    except (ValueError, TypeError) as error:
        raise BadFile(f"is not an index of a checkpoint: {read_first_line(error)}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadFile("is not an index of a checkpoint: its weight_map does not map names to files")
    outside = {name for name in weight_map.values() if name in ("", "..") or pathlib.PurePath(name).name != name}
    if outside:
        raise BadFile(f"names files outside its directory: {join_some(sorted(name or repr(name) for name in outside))}")
    return weight_map


def parse_json(text: bytes) -> Any:
    """Parses JSON. Raises ValueError for invalid JSON, for duplicate names, and for too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice} occurs twice")
    return entries


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and {int}.issuperset(map(type, value)) and min(value, default=0) >= 0
