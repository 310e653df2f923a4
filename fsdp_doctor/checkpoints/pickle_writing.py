"""Writes pickles that ``weights_only`` accepts, for a fixed set of types, without importing the classes they name."""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.checkpoints.dtypes import DTYPE_OF_STORAGE, DTYPES

_STORAGE_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_STORAGE.items()}


@dataclass(frozen=True, slots=True)
class PickledGlobal:
    """Reference to a class or function by module and name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class PickledCall:
    """Call of a function with arguments. If the same object occurs several times, it is unpickled as one object."""

    function: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PickledInstance:
    """Object that is created without ``__init__`` and then given a state.

    If the same instance occurs several times, it is unpickled as one object.
    """

    cls: Any
    state: Any = None
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageReference:
    """Reference to the bytes of the archive member ``data/KEY``. ``kind`` is the name of the storage class."""

    module: str
    kind: str
    key: str
    numel: int


ORDERED_DICT = PickledGlobal("collections", "OrderedDict")
STRIDED = PickledCall(PickledGlobal("torch.serialization", "_get_layout"), ("torch.strided",))


def write_pickle(value: Any) -> bytes:
    """Pickles None, bools, numbers, strings, tuples, lists, dicts and the classes above. Raises TypeError for other
    types.
    """
    emitter = _Emitter()
    emitter.emit(value)
    return b"".join((*emitter.parts, b"."))


def make_dtype(dtype: str) -> PickledGlobal:
    return PickledGlobal("torch", dtype)


def make_tensor(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], key: str, numel: int) -> PickledCall:
    """Returns the call that rebuilds a CPU tensor, which starts at the beginning of its storage."""
    if dtype in _STORAGE_OF_DTYPE:
        storage = StorageReference("torch", _STORAGE_OF_DTYPE[dtype], key, numel)
        arguments: tuple[Any, ...] = (storage, 0, shape, strides, False, PickledCall(ORDERED_DICT, ()))
        return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v2"), arguments)
    storage = StorageReference("torch.storage", "UntypedStorage", key, numel * DTYPES[dtype].itemsize)
    arguments = (storage, 0, shape, strides, False, PickledCall(ORDERED_DICT, ()), make_dtype(dtype))
    return PickledCall(PickledGlobal("torch._utils", "_rebuild_tensor_v3"), arguments)


class _Emitter:
    """Writes pickle protocol 2, as torch.save does."""

    def __init__(self) -> None:
        self.parts = [b"\x80\x02"]
        self._memo: dict[Hashable, int] = {}

    def emit(self, value: Any) -> None:
        match value:
            case None:
                self.parts.append(b"N")
            case bool():
                self.parts.append(b"\x88" if value else b"\x89")
            case int():
                self.parts.append(_encode_int(value))
            case float():
                self.parts.append(b"G" + struct.pack(">d", value))
            case str():
                data = value.encode("utf-8", "surrogatepass")
                self._emit_once(value, lambda: self.parts.append(b"X" + struct.pack("<I", len(data)) + data))
            case PickledGlobal(module, name):
                self._emit_once(value, lambda: self.parts.append(f"c{module}\n{name}\n".encode()))
            case tuple():
                self._emit_all(b"(", value, b"t")
            case list():
                self._emit_all(b"](", value, b"e")
            case dict():
                self._emit_all(b"}(", [each for item in value.items() for each in item], b"u")
            case PickledCall(function, arguments):
                self._emit_once(id(value), lambda: self._emit_all(b"", (function, arguments), b"R"))
            case PickledInstance():
                self._emit_once(id(value), lambda: self._emit_instance(value))
            case StorageReference(module, kind, key, numel):
                self.emit(("storage", PickledGlobal(module, kind), key, "cpu", numel))
                self.parts.append(b"Q")
            case _:
                raise TypeError(f"{type(value).__name__} is not pickled")

    def _emit_all(self, before: bytes, values: Any, after: bytes) -> None:
        self.parts.append(before)
        for value in values:
            self.emit(value)
        self.parts.append(after)

    def _emit_instance(self, value: PickledInstance) -> None:
        self._emit_all(b"", (value.cls, value.arguments), b"\x81")
        if value.state is not None:
            self._emit_all(b"", (value.state,), b"b")

    def _emit_once(self, key: Hashable, emit: Any) -> None:
        """Writes an object with ``emit`` at the first call with its ``key``; later calls write a memo reference."""
        if (number := self._memo.get(key)) is not None:
            self.parts.append(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
            return
        emit()
        number = self._memo[key] = len(self._memo)
        self.parts.append(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))


def _encode_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
