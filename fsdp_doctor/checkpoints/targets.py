"""Formats to which a checkpoint can be converted: their files, and the place of each tensor's bytes in them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.checkpoints.archives import Archive, ArchiveMember
from fsdp_doctor.checkpoints.dcp import compute_strides
from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.pickle_writing import (
    STRIDED,
    PickledCall,
    PickledGlobal,
    PickledInstance,
    make_dtype,
    make_tensor,
    write_pickle,
)
from fsdp_doctor.checkpoints.record import SavedTensor, Shape
from fsdp_doctor.checkpoints.safetensors_files import make_index, plan_hub_files
from fsdp_doctor.machine.versions import is_at_least, read_installed_versions


class ConversionTarget(str, Enum):
    """Targets of a conversion, named after the programs that read them."""

    HF = "hf"
    DCP = "dcp"
    TORCH = "torch"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """Tensor that is to be written, cast to ``dtype``.

    If ``is_sharded`` is true, FSDP shards its rows; otherwise every rank has all of it, as with a buffer.
    """

    saved: SavedTensor
    dtype: str
    is_sharded: bool

    @property
    def shape(self) -> Shape:
        return self.saved.shape

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.saved.numel * self.itemsize

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def choose_rows(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns a rank's first row and the row after its last; the rows are divided like in torch.chunk."""
        rows = self.shape[0]
        each = -(-rows // world_size)
        return min(rank * each, rows), min((rank + 1) * each, rows)


class PlaceToWrite(NamedTuple):
    """Destination of bytes: a file by its index, an offset, and the archive member that contains them, if any."""

    file: int
    begin: int
    member: ArchiveMember | None = None


class Slot(NamedTuple):
    """Range of a tensor's bytes, and the positions in files at which it is written."""

    first: int
    nbytes: int
    places: list[PlaceToWrite]


@dataclass(slots=True)
class PlannedFile:
    """File to be written. ``texts`` are bytes that are already known, each with its offset."""

    name: str
    nbytes: int = 0
    texts: list[tuple[int, bytes]] = field(default_factory=list)
    archives: list[Archive] = field(default_factory=list)


_NOTHING: Mapping[str, bytes] = {}
# Nested dicts, lists and tuples whose leaves are values or tensors.
_Tree: TypeAlias = Any
_Store: TypeAlias = Callable[[TensorToWrite, int, int], str]
_Pickle: TypeAlias = Callable[[TensorToWrite, _Store], Any]


@dataclass(slots=True)
class FilePlan:
    """Plan of all files. ``slots`` holds, for each tensor, its ranges in byte order and the position in a file
    at which each is written.
    """

    files: list[PlannedFile] = field(default_factory=list)
    slots: dict[int, tuple[TensorToWrite, list[Slot]]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def add_file(self, name: str, text: bytes | None = None) -> PlannedFile:
        self.files.append(PlannedFile(name, len(text or b""), [(0, text)] if text else []))
        return self.files[-1]

    def add_place(self, tensor: TensorToWrite, first: int, nbytes: int, begin: int, member: Any = None) -> None:
        """Adds a position for a range of a tensor's bytes, in the file that was added last."""
        slots = self.slots.setdefault(id(tensor), (tensor, []))[1]
        place = PlaceToWrite(len(self.files) - 1, begin, member)
        if slots and slots[-1].first == first:
            slots[-1].places.append(place)
        elif nbytes:
            slots.append(Slot(first, nbytes, [place]))

    def add_archive(self, root: str, tree: _Tree, pickle: _Pickle, constants: Mapping[str, bytes] = _NOTHING) -> None:
        """Adds to the last file the archive that torch.save would write for ``tree``.

        ``constants`` are further members of the archive, by key.
        """
        stored: dict[Any, tuple[str, TensorToWrite, int, int]] = {}

        def store(tensor: TensorToWrite, first: int, nbytes: int) -> str:
            memory = tuple(tensor.saved.pieces), tensor.dtype, first, nbytes
            return stored.setdefault(memory, (str(len(stored)), tensor, first, nbytes))[0]

        file = self.files[-1]
        archive = Archive.make(root, file.nbytes, _replace_tensors(tree, lambda tensor: pickle(tensor, store)))
        for name, data in constants.items():
            archive.add(f"data/{name}", len(data), data)
        for key, tensor, first, nbytes in stored.values():
            member = archive.add(f"data/{key}", nbytes)
            self.add_place(tensor, first, nbytes, member.begin, member)
        file.archives.append(archive)
        file.nbytes = archive.end


class StatesToWrite(NamedTuple):
    """States to write: the model's tensors by name, and the optimizer.

    ``optimizer`` has ``state`` and ``param_groups``, by parameter names, or is None if there is no optimizer.
    """

    model: dict[str, TensorToWrite]
    optimizer: dict[str, Any] | None


def lay_out(
    target: ConversionTarget, states: StatesToWrite, world_size: int, largest_file: int, device: str
) -> FilePlan:
    """Plans the files of a target format. Raises BadFile for a tensor that the format cannot hold."""
    layout = FilePlan()
    match target:
        case ConversionTarget.HF:
            _lay_out_hub(layout, states.model, largest_file)
        case ConversionTarget.DCP:
            _lay_out_dcp(layout, states, world_size)
        case ConversionTarget.TORCH:
            for name, tree in (("pytorch_model_fsdp", states.model), ("optimizer", states.optimizer)):
                if tree is not None:
                    layout.add_file(f"{name}.bin")
                    layout.add_archive(name, tree, _pickle_rows)
        case ConversionTarget.FSDP1 | ConversionTarget.FSDP2:
            _lay_out_ranks(layout, states, world_size, device, is_fsdp2=target is ConversionTarget.FSDP2)
        case _:
            assert_never(target)
    return layout


def _replace_tensors(tree: _Tree, function: Callable[[TensorToWrite], Any]) -> Any:
    match tree:
        case TensorToWrite():
            return function(tree)
        case dict():
            return {key: _replace_tensors(each, function) for key, each in tree.items()}
        case list() | tuple():
            return type(tree)(_replace_tensors(each, function) for each in tree)
    return tree


def _pickle_rows(tensor: TensorToWrite, store: _Store, rows: tuple[int, int] | None = None) -> PickledCall:
    """Pickles a plain tensor that consists of all rows or of the given range."""
    if rows is None:
        shape, first = tensor.shape, 0
    else:
        shape, first = (rows[1] - rows[0], *tensor.shape[1:]), rows[0] * tensor.row_bytes
    numel = math.prod(shape)
    key = store(tensor, first, numel * tensor.itemsize)
    return make_tensor(tensor.dtype, shape, compute_strides(shape), key, numel)


# Hugging Face


def _lay_out_hub(layout: FilePlan, model: dict[str, TensorToWrite], largest_file: int) -> None:
    tensors = sorted(model.items(), key=lambda item: (-item[1].itemsize, item[0]))
    files = plan_hub_files(((name, tensor.dtype, tensor.shape) for name, tensor in tensors), largest_file)
    for planned in files:
        file = layout.add_file(planned.name, planned.header)
        file.nbytes = planned.nbytes
        for name, begin in planned.begins.items():
            layout.add_place(model[name], 0, model[name].nbytes, begin)
    if len(files) > 1:
        layout.add_file("model.safetensors.index.json", make_index(files))


# A file of each rank, as verl and SkyRL name them


def _lay_out_ranks(layout: FilePlan, states: StatesToWrite, world_size: int, device: str, *, is_fsdp2: bool) -> None:
    optimizer = states.optimizer
    if optimizer is not None and is_fsdp2:
        optimizer = _number_parameters(optimizer)
    for rank in range(world_size):
        mesh = _make_mesh(rank, world_size, device) if is_fsdp2 else None
        ranks = {"mesh": b"".join(each.to_bytes(4, "little") for each in range(world_size))} if is_fsdp2 else {}

        def pickle(
            tensor: TensorToWrite, store: _Store, rank: int = rank, mesh: PickledInstance | None = mesh
        ) -> PickledCall:
            if not tensor.is_sharded:
                return _pickle_rows(tensor, store)
            if mesh is not None:
                return _pickle_dtensor(tensor, rank, world_size, mesh, store)
            return _pickle_sharded_tensor(tensor, rank, world_size, store)

        for kind, tree in (("model", states.model), ("optim", optimizer)):
            if tree is not None:
                root = f"{kind}_world_size_{world_size}_rank_{rank}"
                layout.add_file(f"{root}.pt")
                layout.add_archive(root, tree, pickle, ranks)
    config = {"FSDP_version": 2 if is_fsdp2 else 1, "world_size": world_size}
    layout.add_file("fsdp_config.json", json.dumps(config, indent=4).encode())


def _number_parameters(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Numbers the parameters in the order of the groups, as ``optimizer.state_dict()`` does."""
    numbers: dict[str, int] = {}
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {numbers[name]: slots for name, slots in optimizer["state"].items()}, "param_groups": groups}


# Versions of torch that change the form of a pickled mesh: the first version with a known form, the first version with
# the present form, and the first version whose form is unknown.
_OLDEST_TORCH, _NEWEST_TORCH, _UNKNOWN_TORCH = "2.11", "2.13", "2.14"
_DEVICE, _SIZE = PickledGlobal("torch", "device"), PickledGlobal("torch", "Size")


def _rebuild_wrapper(cls: PickledGlobal, tensor: TensorToWrite, state: Any) -> PickledCall:
    """Pickles a tensor subclass that wraps other tensors, as torch does."""
    shape, on_cpu = tensor.shape, PickledCall(_DEVICE, ("cpu",))
    arguments = (cls, make_dtype(tensor.dtype), shape, compute_strides(shape), 0, STRIDED, on_cpu, False)
    rebuild = PickledGlobal("torch._utils", "_rebuild_wrapper_subclass")
    return PickledCall(PickledGlobal("torch._tensor", "_rebuild_from_type_v2"), (rebuild, cls, arguments, state))


def _make_mesh(rank: int, world_size: int, device: str) -> PickledInstance:
    """Makes a one-dimensional DeviceMesh over all ranks, in the pickled form of the installed torch.

    Its ranks are stored as ``data/mesh``. Raises BadFile if the form of this torch version is not known.
    """
    layouts = "torch.distributed._mesh_layout"
    extent: dict[str, Any] = {"shape": (world_size,), "stride": (1,)}
    installed = read_installed_versions(["torch"]).get("torch", _NEWEST_TORCH)
    if not is_at_least(installed, _OLDEST_TORCH) or is_at_least(installed, _UNKNOWN_TORCH):
        raise BadFile(
            f"cannot be written as DTensors of torch {installed}: the pickled form of a mesh is known only for "
            f"{_OLDEST_TORCH} to {_NEWEST_TORCH}; use --to dcp, which pickles no mesh"
        )
    if is_at_least(installed, _NEWEST_TORCH):
        # This form omits dims of length 1.
        extent = extent if world_size > 1 else {"shape": (), "stride": ()}
        extent = {"axes": (PickledInstance(PickledGlobal(layouts, "_FlatLayout"), extent),)}
    return PickledInstance(
        PickledGlobal("torch.distributed.device_mesh", "DeviceMesh"),
        {
            "_device_type": device,
            "_layout": PickledInstance(PickledGlobal(layouts, "_MeshLayout"), extent),
            "_rank_map": make_tensor("int32", (world_size,), (1,), "mesh", world_size),
            "_mesh_dim_names": ("fsdp",),
            "_root_mesh": None,
            "_flatten_rank_map": tuple(range(world_size)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": ["0"],
            "_rank": rank,
            "_coordinate_on_dim": (rank,),
        },
    )


def _pickle_dtensor(
    tensor: TensorToWrite, rank: int, world_size: int, mesh: PickledInstance, store: _Store
) -> PickledCall:
    specs, shape = "torch.distributed.tensor._dtensor_spec", tensor.shape
    meta = (PickledCall(_SIZE, (shape,)), compute_strides(shape), make_dtype(tensor.dtype))
    spec = {
        "mesh": mesh,
        "placements": (
            PickledInstance(PickledGlobal("torch.distributed.tensor.placement_types", "Shard"), {"dim": 0}),
        ),
        "tensor_meta": PickledInstance(PickledGlobal(specs, "TensorMeta"), arguments=meta),
        "shard_order": (PickledInstance(PickledGlobal(specs, "ShardOrderEntry"), arguments=(0, (0,))),),
        "use_strided_shard_as_shard_order": False,
        "_hash": None,
    }
    local = _pickle_rows(tensor, store, tensor.choose_rows(rank, world_size))
    state = {"_local_tensor": local, "_spec": PickledInstance(PickledGlobal(specs, "DTensorSpec"), spec)}
    return _rebuild_wrapper(PickledGlobal("torch.distributed.tensor", "DTensor"), tensor, (None, state))


def _pickle_sharded_tensor(tensor: TensorToWrite, rank: int, world_size: int, store: _Store) -> PickledCall:
    package = "torch.distributed._shard"
    cls = PickledGlobal(f"{package}.sharded_tensor.api", "ShardedTensor")
    places, shards = [], []
    for other in range(world_size):
        rows = tensor.choose_rows(other, world_size)
        if rows[0] == rows[1]:
            continue
        device = PickledInstance(
            PickledGlobal("torch.distributed.remote_device", "_remote_device"),
            {"_worker_name": None, "_rank": other, "_device": PickledCall(_DEVICE, ("cpu",))},
        )
        place = {
            "shard_offsets": [rows[0], *(0 for _ in tensor.shape[1:])],
            "shard_sizes": [rows[1] - rows[0], *tensor.shape[1:]],
            "placement": device,
        }
        places.append(PickledInstance(PickledGlobal(f"{package}.metadata", "ShardMetadata"), (None, place)))
        if other == rank:
            state = (None, {"tensor": _pickle_rows(tensor, store, rows), "metadata": places[-1]})
            shards.append(PickledInstance(PickledGlobal(f"{package}.sharded_tensor.shard", "Shard"), state))
    module = f"{package}.sharded_tensor.metadata"
    encoding = PickledCall(PickledGlobal(module, "MEM_FORMAT_ENCODING"), (0,))
    properties = (make_dtype(tensor.dtype), STRIDED, False, encoding, False)
    metadata = {
        "shards_metadata": places,
        "size": PickledCall(_SIZE, (tensor.shape,)),
        "tensor_properties": PickledInstance(PickledGlobal(module, "TensorProperties"), properties),
    }
    group = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": world_size,
        "global_world_size": world_size,
    }
    nested = PickledCall(PickledGlobal("__builtin__", "getattr"), (cls, "ProcessGroupState"))
    devices = [place.state[1]["placement"] for place in places]
    spec = PickledGlobal(f"{package}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
    parts = PickledInstance(nested, group), PickledInstance(spec, {"dim": 0, "placements": devices})
    sharded = PickledInstance(PickledGlobal(module, "ShardedTensorMetadata"), metadata)
    return _rebuild_wrapper(cls, tensor, (shards, sharded, *parts, False))


# Distributed checkpoints

_DCP = "torch.distributed.checkpoint.metadata"


def _lay_out_dcp(layout: FilePlan, states: StatesToWrite, world_size: int) -> None:
    """Lays out a checkpoint with the keys ``model`` and ``optim``.

    Rows are divided between the ranks like under FSDP, so that each rank reads only its own rows.
    """
    tree = {"model": states.model} | ({"optim": states.optimizer} if states.optimizer is not None else {})
    leaves = list(_flatten(tree, ()))
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, TensorToWrite)]
    home = {id(tensor): number % world_size for number, tensor in enumerate(tensors)}
    entries: dict[str, PickledInstance] = {}
    chunks: dict[str, list[PickledInstance]] = {}
    places: dict[PickledInstance, PickledInstance] = {}
    for rank in range(world_size):
        file = layout.add_file(f"__{rank}_0.distcp")
        for path, leaf in leaves:
            name, begin, offsets = ".".join(map(str, path)), file.nbytes, None
            if isinstance(leaf, TensorToWrite):
                rows = leaf.choose_rows(rank, world_size) if leaf.is_sharded and leaf.shape else None
                if (rows is None and home[id(leaf)] != rank) or (rows is not None and rows[0] == rows[1]):
                    continue
                layout.add_archive("archive", leaf, functools.partial(_pickle_rows, rows=rows))
                first, last = rows or (0, leaf.shape[0] if leaf.shape else 0)
                offsets = PickledCall(_SIZE, ((first, *(0 for _ in leaf.shape[1:]))[: len(leaf.shape)],))
                sizes = PickledCall(_SIZE, ((last - first, *leaf.shape[1:])[: len(leaf.shape)],))
                chunk = {"offsets": offsets, "sizes": sizes}
                chunks.setdefault(name, []).append(PickledInstance(PickledGlobal(_DCP, "ChunkStorageMetadata"), chunk))
                entries.setdefault(name, _describe_tensor(leaf, chunks[name]))
            elif rank == 0:
                layout.add_archive("archive", leaf, _pickle_rows)
                entries[name] = PickledInstance(PickledGlobal(_DCP, "BytesStorageMetadata"), {})
            else:
                continue
            index = {"fqn": name, "offset": offsets, "index": None}
            info = {"relative_path": file.name, "offset": begin, "length": file.nbytes - begin}
            places[PickledInstance(PickledGlobal(_DCP, "MetadataIndex"), index)] = PickledInstance(
                PickledGlobal("torch.distributed.checkpoint.filesystem", "_StorageInfo"), info
            )
    about: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    metadata = {
        "state_dict_metadata": entries,
        "planner_data": {".".join(map(str, path)): path for path, _ in leaves},
        "storage_data": places,
        "storage_meta": PickledInstance(PickledGlobal(_DCP, "StorageMeta"), about),
        "version": "1.0.0",
    }
    layout.add_file(".metadata", write_pickle(PickledInstance(PickledGlobal(_DCP, "Metadata"), metadata)))


def _describe_tensor(tensor: TensorToWrite, chunks: list[PickledInstance]) -> PickledInstance:
    encoding = PickledCall(PickledGlobal(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (make_dtype(tensor.dtype), STRIDED, False, encoding, False)
    entry = {
        "properties": PickledInstance(PickledGlobal(_DCP, "TensorProperties"), properties),
        "size": PickledCall(_SIZE, (tensor.shape,)),
        "chunks": chunks,
    }
    return PickledInstance(PickledGlobal(_DCP, "TensorStorageMetadata"), entry)


def _flatten(tree: _Tree, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields (path, leaf) for dicts, and for lists that contain dicts, lists or tensors, as DCP flattens them."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list) and any(isinstance(each, dict | list | TensorToWrite) for each in tree):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, each in items:
        yield from _flatten(each, (*path, key))
