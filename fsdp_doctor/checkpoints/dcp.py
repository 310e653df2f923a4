"""Reads distributed checkpoints (DCP): their metadata, and the items in their data files."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import BadFile, OpenFile
from fsdp_doctor.checkpoints.pickles import Pickled, load_pickle
from fsdp_doctor.checkpoints.record import Member, PlainValue, SavedPiece, Shape
from fsdp_doctor.checkpoints.safetensors_files import Header, read_header
from fsdp_doctor.checkpoints.torch_files import find_tensors, read_torch_file

METADATA = re.compile(r"(__\d+)?\.metadata")
_RANK = re.compile(r"__(\d+)_\d+\.distcp")


class FormError(BadFile):
    """Error for a tensor that differs from its description in the metadata."""


class Item(NamedTuple):
    """Entry of the metadata for a range of a data file.

    ``path`` holds the keys of the nested dicts. ``dtype`` and ``shape`` describe the whole tensor; without a dtype the
    item is an object. ``offsets`` and ``lengths`` describe the chunk. ``packing`` names the transformations of the
    bytes, such as ``stream.zstd/1``.
    """

    path: tuple[str, ...]
    dtype: str | None
    shape: Shape
    offsets: Shape
    lengths: Shape
    file: str
    begin: int
    nbytes: int
    packing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.path)


class Metadata(NamedTuple):
    """Metadata of a checkpoint.

    ``items`` are the entries stored in a data file. ``homeless`` names the chunks and objects that no data file stores.
    """

    items: list[Item]
    homeless: list[str]


def read_metadata(file: OpenFile) -> Metadata:
    """Reads the metadata file. Raises BadFile if its pickle is damaged, or contains anything but DCP's metadata."""
    with open(file.path, "rb") as stream:  # certainly a regular file, since it was opened as one before
        value = load_pickle(stream)
    try:
        return _interpret(value)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise BadFile(f"is not the metadata of a distributed checkpoint ({type(error).__name__}: {error})") from None


def _interpret(value: Any) -> Metadata:
    if not isinstance(value, Pickled) or value.name != "Metadata":
        raise BadFile("is not the metadata of a distributed checkpoint")
    places = {}
    for index, info in value.get("storage_data").items():
        offsets = index.get("offset")
        places[index.get("fqn"), tuple(offsets) if offsets is not None else None] = info
    paths = value.get("planner_data")
    items, homeless = [], []
    for name, entry in value.get("state_dict_metadata").items():
        keys = paths.get(name) if isinstance(paths, dict) else None
        path = tuple(map(str, keys)) if isinstance(keys, tuple | list) and keys else (name,)
        for offsets, lengths in _read_chunks(entry):
            info = places.get((name, offsets)) or (places.get((name, None)) if math.prod(_read_shape(entry)) else None)
            if info is None:
                homeless.append(name)
                continue
            items.append(
                Item(
                    path,
                    entry.get("properties").state[0] if entry.name == "TensorStorageMetadata" else None,
                    _read_shape(entry),
                    offsets or (),
                    lengths,
                    str(info.get("relative_path")),
                    int(info.get("offset")),
                    int(info.get("length")),
                    tuple(map(str, info.get("transform_descriptors") or ())),
                )
            )
            if (dtype := items[-1].dtype) is not None and dtype not in DTYPES:
                raise BadFile(f"has the unknown dtype {dtype!r}", name)
    return Metadata(items, homeless)


def _read_shape(entry: Pickled) -> Shape:
    return tuple(entry.get("size")) if entry.name == "TensorStorageMetadata" else ()


def _read_chunks(entry: Pickled) -> Iterator[tuple[Shape | None, Shape]]:
    if entry.name == "TensorStorageMetadata":
        for chunk in entry.get("chunks"):
            yield tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
    else:
        yield None, ()


class ItemContents(NamedTuple):
    """Contents of an item.

    ``members`` are the parts of the item's range in the file, with their checksums if there are any. For an item that
    is an object, ``values`` holds its plain values by key, and ``unread`` the kinds of its other values.
    """

    members: list[Member]
    piece: SavedPiece | None = None
    values: Mapping[tuple[str, ...], PlainValue] = MappingProxyType({})
    has_checksums: bool = False
    unread: Mapping[tuple[str, ...], str] = MappingProxyType({})


def parse_rank(file: str) -> int | None:
    found = _RANK.fullmatch(pathlib.PurePath(file).name)
    return int(found[1]) if found else None


def read_item(file: OpenFile, path: str, item: Item, header: Header | None) -> ItemContents:
    """Reads an item from the range of the data file that the metadata gives.

    ``header`` is the header of a data file in safetensors format, otherwise None. Raises BadFile if the data differs
    from the metadata.
    """
    rank = parse_rank(path)
    if item.packing:
        if item.begin + item.nbytes > file.size:
            raise BadFile(
                f"would end at byte {item.begin + item.nbytes}, but the file has {file.size} bytes", item.name
            )
        return ItemContents([])
    if header is not None:
        entry = header.tensors.get(item.name)
        if entry is None:
            raise FormError("is not in the file", item.name)
        if (entry.dtype, entry.shape) != (item.dtype, item.lengths):
            raise _refuse_form(item, entry.dtype, entry.shape)
        piece = SavedPiece(path, entry.begin, entry.shape, item.offsets, compute_strides(entry.shape), rank)
        return ItemContents([Member(item.name, entry.begin, entry.nbytes, None)], piece)
    read = read_torch_file(file, item.begin, item.nbytes)
    if read.refusal is not None:
        raise read.refusal
    if read.lacks_data:
        raise BadFile("was saved without data, under skip_data()", item.name)
    contents = ItemContents(read.members, has_checksums=read.has_checksums)
    found = find_tensors(path, read, rank)
    if item.dtype is None:
        tensors = {tensor.path: "a tensor in an object that DCP saved whole" for tensor in found.tensors}
        return contents._replace(values=found.values, unread=found.unread | tensors)
    if found.unread:
        return contents._replace(unread=found.unread)
    if len(found.tensors) != 1 or found.tensors[0].path:
        raise FormError("is not a tensor in the file", item.name)
    (tensor,) = found.tensors
    if (tensor.dtype, tensor.shape) != (item.dtype, item.lengths):
        raise _refuse_form(item, tensor.dtype, tensor.shape)
    return contents._replace(piece=tensor.pieces[0]._replace(offsets=item.offsets))


def _refuse_form(item: Item, dtype: str, shape: Shape) -> FormError:
    return FormError(
        f"is {dtype} {list(shape)} in the file, but {item.dtype} {list(item.lengths)} in the metadata", item.name
    )


def compute_strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def read_safetensors_header(file: OpenFile) -> Header | None:
    """Reads the header of a data file in safetensors format; returns None for other data files."""
    if file.size < 8 or file.read(0, 2) in (b"PK", b"\x80\x02"):
        return None
    try:
        return read_header(file)
    except BadFile:
        return None
