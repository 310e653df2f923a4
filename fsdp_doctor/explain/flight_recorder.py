"""torch's flight recorder: the dump that each rank writes when a collective times out, as a pickle or as JSON.

By its last collectives on each rank, it says at which one the ranks part. The dumps are ``comm_lib_trace_rank_N`` or
``nccl_trace_rank_N`` in the folder of TORCH_FR_DUMP_TEMP_FILE.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain.collectives import Waiting
from fsdp_doctor.explain.plain_pickle import NotPlain, read_plain_pickle

_MOST_PICKLE = 32 << 20
_MOST_JSON = 12 << 20
_MOST_ENTRIES = 200_000
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_JSON = re.compile(rb"\s{0,20}\{.{0,4096}\"(?:entries|pg_config|comm_lib_version|nccl_version)\"", re.DOTALL)
_RANK = re.compile(r"(\d{1,9})(?:\.\w{1,10})?$")
_MOST_FRAMES = 40
_LARGEST = 1 << 63


@dataclass(frozen=True)
class _Call:
    """One collective of one rank, as the recorder has it."""

    number: int
    name: str
    sent: str
    received: str
    ended: bool
    frames: tuple[str, ...]

    @property
    def what(self) -> tuple[str, str, str]:
        return self.name, self.sent, self.received


@dataclass(frozen=True)
class Dump:
    """Of one rank: its collectives by group and number."""

    rank: int
    groups: Mapping[str, Mapping[int, _Call]]


def dump_in(path: pathlib.Path, index: int) -> Dump | None:
    """The dump in a file; None where it is something else. ``index`` is the rank where nothing names one.

    Raises UsageError for a dump that cannot be read.
    """
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            begin = file.read(8192)
            is_pickle, is_json = _PICKLE.match(begin) is not None, _JSON.match(begin) is not None
            if not (is_pickle or is_json):
                return None
            data = begin + file.read(_MOST_PICKLE if is_pickle else _MOST_JSON)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > (_MOST_PICKLE if is_pickle else _MOST_JSON):
        raise UsageError(f"{path} is larger than a flight recorder's dump that can be read")
    content = _unpickled(path, data) if is_pickle else _parsed(path, data)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UsageError(f"{path} is no dump of torch's flight recorder: it has no list of entries")
    rank = _RANK.search(path.name)
    return Dump(int(rank[1]) if rank else index, _by_group(entries))


def parting(dumps: Sequence[Dump]) -> list[Waiting]:
    """Each rank where the ranks part first, in the first group in which they do; else in what did not end."""
    groups = list(dict.fromkeys(name for dump in dumps for name in dump.groups))
    for name in groups:
        members = [dump for dump in dumps if name in dump.groups]
        if (number := _first_difference([dump.groups[name] for dump in members])) is not None:
            return [_stand(dump, name, number) for dump in members]
    return [
        _waiting(dump, name, call)
        for name in groups
        for dump in dumps
        if (call := next((one for one in dump.groups.get(name, {}).values() if not one.ended), None))
    ]


def _unpickled(path: pathlib.Path, data: bytes) -> Any:
    try:
        return read_plain_pickle(data)
    except NotPlain as why:
        raise UsageError(f"{path} is a pickle, but no dump of torch's flight recorder: {why}") from None


def _parsed(path: pathlib.Path, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        raise UsageError(f"{path} begins like a flight recorder's dump and is no whole JSON document") from None


def _by_group(entries: list[Any]) -> dict[str, dict[int, _Call]]:
    groups: dict[str, dict[int, _Call]] = {}
    for entry in entries[-_MOST_ENTRIES:]:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        number = _number(entry.get("collective_seq_id"))
        if number is not None:
            groups.setdefault(_group(entry), {})[number] = _call(entry, number)
    return groups


def _call(entry: Mapping[str, Any], number: int) -> _Call:
    name = str(_text(entry.get("profiling_name"))).rpartition(":")[2]
    ended = entry.get("state") == "completed" or entry.get("retired") is True
    return _Call(
        number,
        name,
        _sizes(entry.get("input_sizes")),
        _sizes(entry.get("output_sizes")),
        ended,
        _frames(entry.get("frames")),
    )


def _group(entry: Mapping[str, Any]) -> str:
    names = entry.get("process_group")
    texts = [_text(name) for name in names[:2]] if isinstance(names, list | tuple) else []
    return next(filter(None, reversed(texts)), None) or f"group {_number(entry.get('pg_id')) or 0}"


def _sizes(value: Any) -> str:
    """``[[4, 8]]`` as ``4x8``, several with a comma."""
    shapes = value[:4] if isinstance(value, list | tuple) else []
    texts = ["x".join(str(_number(size)) for size in shape[:8]) for shape in shapes if isinstance(shape, list | tuple)]
    more = f", {len(value) - 4} more" if isinstance(value, list | tuple) and len(value) > 4 else ""
    return ", ".join(text or "scalar" for text in texts) + more


def _frames(value: Any) -> tuple[str, ...]:
    frames = value[:_MOST_FRAMES] if isinstance(value, list | tuple) else []
    return tuple(
        f'File "{_text(one.get("filename"))}", line {_number(one.get("line"))}, in {_text(one.get("name"))}'
        for one in frames
        if isinstance(one, dict)
    )


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and -_LARGEST < value < _LARGEST else None


def _first_difference(calls: Sequence[Mapping[int, _Call]]) -> int | None:
    """The first number at which one rank calls something else than another, or nothing while another goes on."""
    begin = max(min(one) for one in calls)
    end = max(max(one) for one in calls)
    for number in sorted(number for number in set().union(*calls) if begin <= number <= end):
        found = [one.get(number) for one in calls]
        there = {call.what for call in found if call is not None}
        if len(there) > 1 or (None in found and any(call is not None and not call.ended for call in found)):
            return number
    return None


def _stand(dump: Dump, group: str, number: int) -> Waiting:
    calls = dump.groups[group]
    if number in calls:
        return _waiting(dump, group, calls[number])
    last = _waiting(dump, group, calls[max(calls)])
    last.entered = False
    return last


def _waiting(dump: Dump, group: str, call: _Call) -> Waiting:
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
        completed=max((one.number for one in calls.values() if one.ended), default=None),
        frames=call.frames,
    )
