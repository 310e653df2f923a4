"""Reads dumps of torch's flight recorder, which each rank writes as a pickle or as JSON when a collective times out.

The last collectives in the dumps show where the ranks differ. The dumps are files ``comm_lib_trace_rank_N`` or
``nccl_trace_rank_N`` in the directory of TORCH_FR_DUMP_TEMP_FILE.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain.hangs import Waiting
from fsdp_doctor.text import read_first_line

_MAX_PICKLE = 32 << 20
_MAX_JSON = 12 << 20
_MAX_ENTRIES = 200_000
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_JSON = re.compile(rb"\s{0,20}\{.{0,4096}\"(?:entries|pg_config|comm_lib_version|nccl_version)\"", re.DOTALL)
_RANK = re.compile(r"(\d{1,9})(?:\.\w{1,10})?$")
_MAX_FRAMES = 40
_LARGEST = 1 << 63


@dataclass(frozen=True)
class _Call:
    """One collective of one rank in a dump."""

    number: int
    name: str
    sent: str
    received: str
    ended: bool
    frames: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, str, str]:
        """The name and the sizes, which are equal on all ranks that call the same collective."""
        return self.name, self.sent, self.received


@dataclass(frozen=True)
class Dump:
    """The collectives of one rank, by group and number."""

    rank: int
    groups: Mapping[str, Mapping[int, _Call]]


def read_dump(path: pathlib.Path, index: int) -> Dump | None:
    """Reads the dump in a file; returns None if the file is something else.

    Raises UsageError for a dump that cannot be read.

    index: the rank to use if the file's name does not end with a rank.
    """
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            begin = file.read(8192)
            is_pickle, is_json = _PICKLE.match(begin) is not None, _JSON.match(begin) is not None
            if not (is_pickle or is_json):
                return None
            data = begin + file.read(_MAX_PICKLE if is_pickle else _MAX_JSON)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > (_MAX_PICKLE if is_pickle else _MAX_JSON):
        raise UsageError(f"{path} is too large for a dump of the flight recorder")
    content = _unpickle(path, data) if is_pickle else _parse_json(path, data)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path} is not a dump of torch's flight recorder: it has no list of entries")
    rank = _RANK.search(path.name)
    return Dump(int(rank[1]) if rank else index, _group_calls(entries))


def find_waiting_ranks(dumps: Sequence[Dump]) -> list[Waiting]:
    """Lists the ranks with the collective at which each waits.

    This is the first collective in which the ranks differ or, without a difference, the first that did not end.
    """
    groups = list(dict.fromkeys(name for dump in dumps for name in dump.groups))
    for name in groups:
        members = [dump for dump in dumps if name in dump.groups]
        if (number := _find_first_difference([dump.groups[name] for dump in members])) is not None:
            return [_find_waiting(dump, name, number) for dump in members]
    return [
        _make_waiting(dump, name, call)
        for name in groups
        for dump in dumps
        if (call := next((call for call in dump.groups.get(name, {}).values() if not call.ended), None))
    ]


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, texts and numbers. Nothing that a pickle names is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickle(path: pathlib.Path, data: bytes) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    # A damaged pickle makes the unpickler raise nearly anything, MemoryError for a size that it only announces.
    except Exception as error:
        raise UsageError(
            f"{path} is a pickle, but not a dump of torch's flight recorder: {read_first_line(error)}"
        ) from None


def _parse_json(path: pathlib.Path, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} begins like a flight recorder's dump, but is not a complete JSON document") from None


def _group_calls(entries: list[Any]) -> dict[str, dict[int, _Call]]:
    groups: dict[str, dict[int, _Call]] = {}
    for entry in entries[-_MAX_ENTRIES:]:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        number = _read_number(entry.get("collective_seq_id"))
        if number is not None:
            groups.setdefault(_parse_group(entry), {})[number] = _parse_call(entry, number)
    return groups


def _parse_call(entry: Mapping[str, Any], number: int) -> _Call:
    name = str(_show(entry.get("profiling_name"))).rpartition(":")[2]
    ended = entry.get("state") == "completed" or entry.get("retired") is True
    return _Call(
        number,
        name,
        _parse_sizes(entry.get("input_sizes")),
        _parse_sizes(entry.get("output_sizes")),
        ended,
        _parse_frames(entry.get("frames")),
    )


def _parse_group(entry: Mapping[str, Any]) -> str:
    names = entry.get("process_group")
    texts = [_show(name) for name in names[:2]] if isinstance(names, list | tuple) else []
    return next(filter(None, reversed(texts)), None) or f"group {_read_number(entry.get('pg_id')) or 0}"


def _parse_sizes(value: Any) -> str:
    """Writes ``[[4, 8]]`` as ``4x8``, and several shapes separated by commas."""
    shapes = value[:4] if isinstance(value, list | tuple) else []
    texts = [
        "x".join(str(_read_number(size)) for size in shape[:8]) for shape in shapes if isinstance(shape, list | tuple)
    ]
    more = f", {len(value) - 4} more" if isinstance(value, list | tuple) and len(value) > 4 else ""
    return ", ".join(text or "scalar" for text in texts) + more


def _parse_frames(value: Any) -> tuple[str, ...]:
    frames = value[:_MAX_FRAMES] if isinstance(value, list | tuple) else []
    return tuple(
        f'File "{_show(frame.get("filename"))}", line {_read_number(frame.get("line"))}, in {_show(frame.get("name"))}'
        for frame in frames
        if isinstance(frame, dict)
    )


def _show(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def _read_number(value: Any) -> int | None:
    return value if isinstance(value, int) and -_LARGEST < value < _LARGEST else None


def _find_first_difference(calls: Sequence[Mapping[int, _Call]]) -> int | None:
    """Returns the number of the first collective in which the ranks differ; None if there is no difference.

    Ranks differ if they call different collectives, or if one rank waits and another has no call.
    """
    begin = max(min(of_rank) for of_rank in calls)
    end = max(max(of_rank) for of_rank in calls)
    for number in sorted(number for number in set().union(*calls) if begin <= number <= end):
        at_number = [of_rank.get(number) for of_rank in calls]
        kinds = {call.kind for call in at_number if call is not None}
        if len(kinds) > 1 or (None in at_number and any(call is not None and not call.ended for call in at_number)):
            return number
    return None


def _find_waiting(dump: Dump, group: str, number: int) -> Waiting:
    calls = dump.groups[group]
    if number in calls:
        return _make_waiting(dump, group, calls[number])
    last = _make_waiting(dump, group, calls[max(calls)])
    last.entered = False
    return last


def _make_waiting(dump: Dump, group: str, call: _Call) -> Waiting:
    calls = dump.groups[group]
    return Waiting(
        rank=dump.rank,
        group=group,
        op=call.name.upper()
        .strip("_")
        .removesuffix("_BASE")
        .replace("ALL_GATHER", "ALLGATHER")
        .replace("ALL_REDUCE", "ALLREDUCE"),
        number=call.number,
        sent=call.sent,
        received=call.received,
        enqueued=max(calls),
        completed=max((call.number for call in calls.values() if call.ended), default=None),
        frames=call.frames,
    )
