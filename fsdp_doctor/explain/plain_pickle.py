"""Reads a pickle that holds nothing but containers, text and numbers, without running anything of it.

``pickle`` itself imports and calls what a file tells it to, and takes memory for what a file only announces. Here the
opcodes are read one by one, and any other than these ends the reading.
"""

from __future__ import annotations

import pickletools
from typing import Any

_MOST_OPCODES = 3_000_000
_VALUES = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    }
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT, _GET = frozenset({"BINPUT", "LONG_BINPUT"}), frozenset({"BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})


class NotPlain(Exception):
    """It is no pickle, or one that holds more than containers, text and numbers, or too many of them."""


def read_plain_pickle(data: bytes) -> Any:
    """The value. Raises NotPlain."""
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count >= _MOST_OPCODES:
                raise NotPlain(f"more than {_MOST_OPCODES} opcodes")
            machine.run(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}") from None


class _Machine:
    """A stack, where marks begin on it, and what was remembered for later."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _PUT:
            self._memo[argument] = stack[-1]
        elif name in _GET:
            stack.append(self._memo[argument])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(tuple(self._popped(len(stack) - _TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._popped(self._marks.pop())))
        elif name in ("APPEND", "APPENDS"):
            items = self._popped(len(stack) - 1 if name == "APPEND" else self._marks.pop())
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._popped(len(stack) - 2 if name == "SETITEM" else self._marks.pop())
            _set(stack[-1], items)
        elif name not in _IGNORED:
            raise NotPlain(f"the opcode {name}")

    def _popped(self, start: int) -> list[Any]:
        if not 0 <= start <= len(self.stack):
            raise NotPlain("its stack is empty")
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _set(into: dict[Any, Any], items: list[Any]) -> None:
    keys = items[::2]
    # The hash of a tuple in a tuple in a tuple has no limit.
    if not all(isinstance(key, str | int) for key in keys):
        raise NotPlain("a key that is neither text nor a number")
    into.update(zip(keys, items[1::2], strict=True))
