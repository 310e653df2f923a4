"""Reads pickles without running them: globals that torch writes become passive records, and all others are refused."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from fsdp_doctor.checkpoints.dtypes import DTYPE_OF_STORAGE, DTYPES
from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.text import read_first_line

# A pickle with deeper nesting, or with more values per byte, is not a state dict but an attempt to exhaust memory.
_MOST_DEPTH = 64
_MOST_VALUES_PER_BYTE = 20
_MOST_VALUES_OF_ANY = 10_000

# For each opcode, the length of its argument in bytes, or the pickletools constant that says how the length is stored.
_ARGUMENTS = {each.code.encode("latin-1"): each.arg.n if each.arg else 0 for each in pickletools.opcodes}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
# Allowed globals by top-level package: modules move between versions of torch, but names do not.
_GLOBALS: Mapping[str, frozenset[str]] = {
    "torch": frozenset(
        {
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size", "device"),
            *("_rebuild_from_type_v2", "_rebuild_wrapper_subclass", "_rebuild_tensor", "_rebuild_tensor_v2"),
            *("_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state", "Parameter", "Tensor"),
            *("DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "Partial"),
            *("_StridedShard", "DeviceMesh", "_MeshLayout", "_FlatLayout", "ShardedTensor", "ShardedTensorMetadata"),
            *("ShardMetadata", "ChunkShardingSpec", "EnumerableShardingSpec", "MEM_FORMAT_ENCODING", "_remote_device"),
            *("UntypedStorage", "_TypedStorage", "TypedStorage", "_rebuild_sparse_tensor", "_rebuild_qtensor"),
            *("_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_device_tensor_from_numpy"),
            *("_rebuild_njt", "NestedTensor", "_DimRange", "QInt8Storage", "QUInt8Storage", "QInt32Storage"),
            *("per_tensor_affine", "per_channel_affine"),
        }
    ),
    "collections": frozenset({"OrderedDict", "defaultdict", "Counter", "deque"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}),
    "numpy": frozenset({"_reconstruct", "ndarray", "dtype", "scalar"}),
    "argparse": frozenset({"Namespace"}),
    "_codecs": frozenset({"encode"}),
    "builtins": frozenset({"getattr", "set", "frozenset", "slice", "complex", "bytearray", "dict", "list"}),
}


class RefusedPickle(BadFile):
    """Error for a pickle that refers to something that does not belong in a torch checkpoint."""


class Storage(NamedTuple):
    """Bytes of one or more tensors, stored as ``data/KEY``. ``dtype`` is None for untyped bytes."""

    key: str
    dtype: str | None
    numel: int


class Pickled:
    """Record of a call in a pickle: the name of the called global, the arguments, and the state that was set later."""

    name = ""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *_: Any, **__: Any) -> None: ...

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def get(self, name: str) -> Any:
        """Returns an attribute of the pickled object; None if it has no such attribute."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


class _Dict(dict[Any, Any]):
    """Stand-in for OrderedDict and similar classes. Its attributes and its factory are dropped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(arg for arg in args[:1] if isinstance(arg, dict | list)))

    def __setstate__(self, _: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    # Each pickle gets its own types, since unpickling may change their attributes.
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin-1")
        self._types: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        root = "builtins" if root == "__builtin__" else root
        if root == "torch" and name in DTYPES:
            return name
        if name not in _GLOBALS.get(root, ()) and not (root == "torch" and name in DTYPE_OF_STORAGE):
            raise RefusedPickle(f"has a pickle that asks for {module}.{name}, which is not part of a torch checkpoint")
        if name in ("OrderedDict", "defaultdict", "Counter", "dict"):
            return self._types.setdefault(name, type(name, (_Dict,), {}))
        if name == "Size":
            return self._types.setdefault(name, type(name, (tuple,), {}))
        if name == "getattr":
            return self._types.setdefault(name, type(name, (), {"__new__": self._make_nested_class}))
        return self._types.setdefault(name, type(name, (Pickled,), {"name": name}))

    def _make_nested_class(self, _: Any, owner: Any = None, name: Any = None) -> Any:
        if getattr(owner, "name", None) != "ShardedTensor" or name != "ProcessGroupState":
            raise RefusedPickle(f"has a pickle that asks for the attribute {name!r} of {owner!r}")
        return self._types.setdefault(name, type(name, (Pickled,), {"name": name}))

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", kind, str(key), _, int(numel), *_):
                return Storage(key, DTYPE_OF_STORAGE.get(getattr(kind, "name", "")), numel)
        raise BadFile("has a pickle with a reference to something other than a storage")


def load_pickle(file: IO[bytes]) -> Any:
    """Loads the pickle at the current position of a seekable file, as plain values, Storages and Pickled records.

    Raises RefusedPickle for a global that torch does not write, and BadFile if the pickle is damaged.
    """
    _check_lengths(file)
    try:
        return _Unpickler(file).load()
    except BadFile:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise BadFile(f"has a damaged pickle ({type(error).__name__}: {read_first_line(error)})") from None


def _check_lengths(file: IO[bytes]) -> None:
    """Raises BadFile for an argument that is longer than the file, and for a memo index that no pickle needs.

    Without this check, a forged length of four bytes makes CPython before 3.14 allocate gigabytes.
    """
    begin = file.tell()
    size = file.seek(0, io.SEEK_END) - begin
    file.seek(begin)
    while (code := file.read(1)) != pickle.STOP:
        length = _ARGUMENTS.get(code)
        if length is None:
            raise BadFile("has a damaged pickle (it ends early, or has an unknown opcode)")
        if code in (pickle.GLOBAL, pickle.INST):
            file.readline()  # the module; the name comes next
        of_length = _LENGTH_BYTES.get(length, length)
        argument = file.readline() if length == pickletools.UP_TO_NEWLINE else file.read(of_length)
        number = int.from_bytes(argument, "little")
        if code == pickle.PUT:
            number = int(argument) if argument.strip().isdigit() and len(argument) < 12 else size + 1
        if (length in _LENGTH_BYTES or code in (pickle.PUT, pickle.LONG_BINPUT)) and number > size:
            raise BadFile(f"has a damaged pickle (it needs {number} bytes or places, and has {size} bytes)")
        if length in _LENGTH_BYTES:
            file.seek(number, io.SEEK_CUR)
    file.seek(begin)


def walk_leaves(value: Any, nbytes: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each value inside nested dicts, lists and tuples, with the keys that lead to it.

    ``nbytes`` is the length of the pickle. Raises BadFile if the nesting is too deep or endless.
    """
    left = _MOST_VALUES_PER_BYTE * nbytes + _MOST_VALUES_OF_ANY
    stack: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while stack:
        path, value = stack.pop()
        left -= 1
        if left < 0 or len(path) > _MOST_DEPTH:
            raise BadFile("has a pickle with more values than any checkpoint can have")
        match value:
            case dict():
                stack += [((*path, str(key)), each) for key, each in reversed(value.items())]
            case list() | tuple() if not isinstance(value, Storage):
                stack += [((*path, str(key)), each) for key, each in reversed(list(enumerate(value)))]
            case _:
                yield path, value
