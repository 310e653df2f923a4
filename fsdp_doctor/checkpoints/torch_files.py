"""Reads files of torch.save, both zip files (since torch 1.6) and the older pickles, and finds the tensors in them."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import BadFile, NotRead, OpenFile
from fsdp_doctor.checkpoints.pickles import Pickled, Storage, load_pickle, walk_leaves
from fsdp_doctor.checkpoints.record import Member, PlainValue, SavedPiece, SavedTensor, Shape
from fsdp_doctor.text import read_first_line

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LARGEST_PICKLE = 1 << 28
_LOCAL_HEADER = 30
_KINDS = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_qtensor": "quantized",
    "_rebuild_meta_tensor_no_storage": "on the meta device",
    "_rebuild_nested_tensor": "a NestedTensor",
    "_rebuild_njt": "a NestedTensor",
    "_rebuild_device_tensor_from_numpy": "of another device",
    "_reconstruct": "an array of numpy",
    "scalar": "a number of numpy",
    "encode": "bytes",
    "bytearray": "bytes",
}
# Objects that may occur next to tensors and contain no tensor data.
_PLAIN = frozenset(
    {
        *("device", "Size", "Namespace", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
        *("set", "frozenset", "slice", "complex", "_get_layout", "_remote_device", "per_tensor_affine"),
        *("per_channel_affine", "dtype"),
    }
)
_STRIDED = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")


@dataclass(slots=True)
class TorchFile:
    """Contents of a file of torch.save.

    ``members`` are all stored members; ``storages`` are the members with tensor data, by key. ``root`` is the name of
    the archive's top folder. ``refusal`` says why the value of an undamaged file was not read.
    """

    members: list[Member]
    storages: Mapping[str, Member]
    value: Any = None
    pickle_bytes: int = 0
    root: str = ""
    has_checksums: bool = False
    lacks_data: bool = False
    refusal: BadFile | None = None


@dataclass(slots=True)
class TorchTensors:
    """Tensors and other contents of a file's value.

    ``ranks`` and ``world_sizes`` come from its sharded tensors. ``unread`` gives, by path, the kind of each object that
    is neither a plain value nor a tensor with known bytes.
    """

    tensors: list[SavedTensor] = field(default_factory=list)
    values: dict[tuple[str, ...], PlainValue] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    world_sizes: set[int] = field(default_factory=set)
    unread: dict[tuple[str, ...], str] = field(default_factory=dict)


class _Window(io.RawIOBase):
    """File object that reads only a part of another file."""

    def __init__(self, file: OpenFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        part = memoryview(into)[: max(min(len(into), self._length - self._at), 0)]
        self._file.read_into(self._begin + self._at, part)
        self._at += len(part)
        return len(part)


def read_torch_file(file: OpenFile, begin: int = 0, length: int | None = None) -> TorchFile:
    """Reads everything except tensor data from a file of torch.save, which may be embedded in another file.

    Raises BadFile if it is not a file of torch.save, or is truncated or damaged.
    """
    file.check_content()
    length = file.size - begin if length is None else length
    if begin + length > file.size:
        raise BadFile(f"is truncated: it has {file.size} bytes, but {begin + length} are expected")
    if not length:
        raise BadFile("is empty")
    window = _Window(file, begin, length)
    if file.read(begin, min(length, 2)) in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        return _read_legacy(io.BufferedReader(window), begin, length)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            members = [_read_member(file, begin, length, entry) for entry in entries]
    except BadFile:
        raise
    except Exception as error:  # zipfile may raise any exception for a damaged directory
        raise BadFile(f"is truncated, or not a file of torch.save ({read_first_line(error)})") from None
    roots = {member.name.partition("/")[0] for member in members}
    root = roots.pop() if len(roots) == 1 else ""
    named = {member.name.removeprefix(f"{root}/"): member for member in members}
    has_checksums = any(member.crc for member in members)
    if not has_checksums:
        members = [member._replace(crc=None) for member in members]
    storages = {name.removeprefix("data/"): member for name, member in named.items() if name.startswith("data/")}
    filled = [member for member in storages.values() if member.nbytes]
    read = TorchFile(members, storages, root=root, has_checksums=has_checksums)
    read.lacks_data = has_checksums and bool(filled) and not any(member.crc for member in filled)
    try:
        if (order := named.get("byteorder")) and file.read(order.begin, min(order.nbytes, 8)) != b"little":
            raise NotRead("is not little-endian, and is not read")
        if (pickled := named.get("data.pkl")) is None:
            raise BadFile("has no data.pkl: it is a zip file, but not one of torch.save")
        if pickled.nbytes > _LARGEST_PICKLE:
            raise NotRead(f"has a pickle of {pickled.nbytes} bytes, which is not read")
        read.pickle_bytes = pickled.nbytes
        read.value = load_pickle(io.BytesIO(file.read(pickled.begin, pickled.nbytes)))
    except BadFile as refusal:
        read.refusal = refusal
    return read


def _read_member(file: OpenFile, begin: int, length: int, entry: zipfile.ZipInfo) -> Member:
    header = file.read(begin + entry.header_offset, _LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise BadFile(f"has no {entry.filename} where its directory says")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise NotRead(f"is compressed ({entry.filename}), which torch.save never does, and is not read")
    first = entry.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if first + entry.file_size > length:
        raise BadFile(f"is truncated: {entry.filename} ends after the end of the file")
    return Member(entry.filename, begin + first, entry.file_size, entry.CRC)


def _read_legacy(stream: io.BufferedReader, begin: int, length: int) -> TorchFile:
    """Reads the format before torch 1.6: five pickles, then the storages, each preceded by its number of elements."""
    if load_pickle(stream) != _LEGACY_MAGIC:
        raise BadFile("is a pickle, but not a file of torch.save")
    try:
        load_pickle(stream), load_pickle(stream)
        value = load_pickle(stream)
        keys = load_pickle(stream)
    except BadFile as refusal:
        return TorchFile([], {}, refusal=refusal)
    members, at = [], stream.tell()
    storages = list(_walk_storages(value, at))
    itemsizes = {storage.key: DTYPES[storage.dtype].itemsize for storage in storages if storage.dtype}
    for key in keys if isinstance(keys, list) else ():
        stream.seek(at)
        nbytes = int.from_bytes(stream.read(8), "little") * itemsizes.get(key, 1)
        members.append(Member(f"data/{key}", begin + at + 8, nbytes, None))
        at += 8 + nbytes
        if at > length:
            raise BadFile(f"is truncated: it has {length} bytes, but storage {key} ends at byte {at}")
    by_key = {member.name.removeprefix("data/"): member for member in members}
    return TorchFile(members, by_key, value, pickle_bytes=at)


def _walk_storages(value: Any, nbytes: int) -> Iterator[Storage]:
    for _, leaf in walk_leaves(value, nbytes):
        match leaf:
            case Storage():
                yield leaf
            case Pickled():
                yield from _walk_storages(leaf.args, nbytes)
                yield from _walk_storages(leaf.state, nbytes)


def find_tensors(file: str, read: TorchFile, rank: int | None = None) -> TorchTensors:
    """Finds the tensors in a file's value, by the keys of the nested dicts and lists that lead to them.

    Raises BadFile for a tensor that does not fit into its storage.
    """
    found = TorchTensors()
    for path, leaf in walk_leaves(read.value, read.pickle_bytes):
        match leaf:
            case None | int() | float() | str():
                found.values[path] = leaf
            case Pickled():
                _Reader(file, read.storages, rank, found).add(path, leaf)
            case complex() | type() | slice() | set() | frozenset():
                pass
            case _:
                found.unread[path] = "bytes" if isinstance(leaf, bytes) else f"of the class {type(leaf).__name__}"
    return found


@dataclass(slots=True)
class _Reader:
    file: str
    storages: Mapping[str, Member]
    rank: int | None
    found: TorchTensors

    def add(self, path: tuple[str, ...], value: Pickled) -> None:
        try:
            if value.name not in _PLAIN:
                self.found.tensors.append(self._read_tensor(path, value))
        except NotRead as error:
            self.found.unread[path] = error.what
        except BadFile as error:
            raise BadFile(error.what, ".".join(path)) from None
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError) as error:
            raise BadFile(f"is pickled in an unknown form ({type(error).__name__})", ".".join(path)) from None

    def _read_tensor(self, path: tuple[str, ...], value: Pickled) -> SavedTensor:
        match value.name, value.args:
            case name, _ if name in _STRIDED:
                dtype, piece = self._read_strided(value)
                return SavedTensor(path, dtype, piece.shape, [piece])
            case (("_rebuild_parameter" | "_rebuild_parameter_with_state"), (Pickled() as inner, *_)):
                return self._read_tensor(path, inner)
            case "_rebuild_from_type_v2", (function, kind, arguments, state):
                match getattr(kind, "name", ""):
                    case "DTensor":
                        return self._read_dtensor(path, arguments, state)
                    case "ShardedTensor":
                        return self._read_sharded(path, arguments, state)
                    case "Parameter" | "Tensor":
                        inner = function(*arguments)
                        if isinstance(inner, Pickled):
                            return self._read_tensor(path, inner)
                    case name:
                        raise NotRead(_KINDS.get(getattr(function, "name", ""), f"of the class {name or kind!r}"))
        raise NotRead(_KINDS.get(value.name, f"of the class {value.name}"))

    def _read_strided(self, value: Pickled) -> tuple[str, SavedPiece]:
        storage, first, shape, strides, *rest = value.args
        dtype = rest[2] if value.name == "_rebuild_tensor_v3" else storage.dtype
        itemsize = DTYPES[dtype].itemsize
        member = self.storages.get(storage.key)
        if member is None:
            raise BadFile(f"is in data/{storage.key}, which the file does not have")
        shape, strides = _check_counts(shape), _check_counts(strides)
        piece = SavedPiece(self.file, member.begin + first * itemsize, shape, (0,) * len(shape), strides, self.rank)
        if first < 0 or first * itemsize + piece.span * itemsize > member.nbytes:
            raise BadFile(f"needs {(first + piece.span) * itemsize} bytes of a storage of {member.nbytes}")
        return dtype, piece

    def _read_dtensor(self, path: tuple[str, ...], arguments: Any, state: Any) -> SavedTensor:
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
        facts = {key: item for part in parts for key, item in part.items()}
        dtype, shape = arguments[1], _check_counts(arguments[2])
        local_dtype, piece = self._read_strided(facts["_local_tensor"])
        mesh, placements = facts["_spec"].get("mesh"), facts["_spec"].get("placements")
        sizes, coordinate = read_mesh_shape(mesh), mesh.get("_coordinate_on_dim")
        self.found.world_sizes |= {math.prod(sizes)} if sizes else set()
        if isinstance(rank := mesh.get("_rank"), int):
            self.found.ranks.add(rank)
        if not sizes or coordinate is None:
            raise NotRead("a DTensor whose mesh does not give the rank's coordinate")
        shards = order_shards(sizes, placements, facts["_spec"].get("shard_order"))
        offsets, held = compute_local_block(shape, sizes, _check_counts(coordinate), shards)
        if held != piece.shape or dtype != local_dtype:
            raise BadFile(
                f"has {local_dtype} {list(piece.shape)} on the rank at {list(coordinate)} of the mesh "
                f"{list(sizes)}, but must have {dtype} {list(held)} of {list(shape)}"
            )
        return SavedTensor(path, dtype, shape, [piece._replace(offsets=offsets)])

    def _read_sharded(self, path: tuple[str, ...], arguments: Any, state: Any) -> SavedTensor:
        shards, metadata, group, *_ = state
        rank, world = group.get("global_rank"), group.get("global_world_size")
        if isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world:
            self.found.ranks.add(rank)
            self.found.world_sizes.add(world)
        tensor = SavedTensor(path, arguments[1], _check_counts(metadata.get("size")))
        for shard in shards:
            place = shard.get("metadata")
            _, piece = self._read_strided(shard.get("tensor"))
            if piece.shape != _check_counts(place.get("shard_sizes")):
                raise BadFile(f"has a shard of {list(piece.shape)}, but {place.get('shard_sizes')} is expected")
            tensor.pieces.append(piece._replace(offsets=_check_counts(place.get("shard_offsets"))))
        if not shards:
            nothing = (0,) * len(tensor.shape)
            tensor.pieces.append(SavedPiece(self.file, 0, nothing, nothing, nothing, self.rank))
        return tensor


def read_mesh_shape(mesh: Pickled) -> Shape:
    """Returns the lengths of a DeviceMesh's dims, from the pickled form of any torch version; empty if the form gives
    none.
    """
    layout = mesh.get("_layout")
    if isinstance(layout, Pickled):
        if isinstance(axes := layout.get("axes"), tuple | list):
            return tuple(math.prod(_check_counts(axis.get("shape"))) for axis in axes)
        shape = layout.get("shape")
        return (shape,) if isinstance(shape, int) else tuple(math.prod(_flatten(dim)) for dim in shape or ())
    ranks = mesh.get("mesh")
    return _check_counts(ranks.args[2]) if isinstance(ranks, Pickled) and len(ranks.args) > 2 else ()


def order_shards(mesh: Shape, placements: Sequence[Any], said: Any = None) -> list[tuple[int, int]]:
    """Returns (dim of the tensor, mesh dim that shards it) for each sharding, in the order in which they were applied.

    Normally this is the order of the mesh dims. A strided shard means that some later mesh dims were applied first, as
    with tensor parallelism before FSDP; its split factor is the product of their sizes.

    ``said`` is the order that torch 2.10 and newer also store, or None. Raises NotRead for any other placement, and for
    an order that contradicts the placements.
    """
    if len(placements) != len(mesh):
        raise NotRead(f"has {len(placements)} placements, but its mesh has {len(mesh)} dims")
    orders: dict[int, list[int]] = {}
    for at in reversed(range(len(mesh))):
        placement = placements[at]
        match name := getattr(placement, "name", ""):
            case "Replicate":
                continue
            case "Shard" | "_StridedShard":
                order = orders.setdefault(placement.get("dim"), [])
                factor = placement.get("split_factor") if name == "_StridedShard" else 1
                products = (math.prod(mesh[dim] for dim in order[:count]) for count in range(len(order) + 1))
                place = next((count for count, product in enumerate(products) if product == factor), None)
                if place is None:
                    raise NotRead(f"placed as _StridedShard with the split factor {factor} on a mesh of {list(mesh)}")
                order.insert(place, at)
            case _:
                raise NotRead(f"placed as {name or placement!r}")
    if said is not None:
        written = {entry.args[0]: list(entry.args[1]) for entry in said}
        is_strided = any(getattr(placement, "name", "") == "_StridedShard" for placement in placements)
        if {dim: sorted(dims) for dim, dims in written.items()} != {dim: sorted(dims) for dim, dims in orders.items()}:
            raise NotRead(f"divided in the order {written}, but its placements say {orders}")
        if is_strided and written != orders:
            raise NotRead(f"placed as _StridedShard, which contradicts the order {written}")
        orders = written
    return [(dim, at) for dim, order in orders.items() for at in order]


def compute_local_block(
    shape: Shape, mesh: Shape, coordinate: Shape, shards: Sequence[tuple[int, int]]
) -> tuple[Shape, Shape]:
    """Returns the offsets and lengths of the block at a mesh coordinate, divided like torch.chunk.

    ``shards`` is the result of :func:`order_shards`.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, at in shards:
        rows = -(-lengths[dim] // mesh[at])
        first = min(coordinate[at] * rows, lengths[dim])
        offsets[dim] += first
        lengths[dim] = min(rows, lengths[dim] - first)
    return tuple(offsets), tuple(lengths)


def _flatten(value: Any) -> Shape:
    return (value,) if isinstance(value, int) else tuple(each for part in value for each in _flatten(part))


def _check_counts(value: Any) -> Shape:
    """Returns the value as a tuple of lengths. Raises BadFile if it is anything else."""
    if not isinstance(value, tuple | list) or not all(type(each) is int and each >= 0 for each in value):
        raise BadFile(f"has {value!r} instead of lengths")
    return tuple(value)
