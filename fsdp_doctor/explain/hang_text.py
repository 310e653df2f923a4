"""A hang as a table, rank by rank, and the sentence that says where the ranks part."""

from __future__ import annotations

from fsdp_doctor.explain.cause import Explanation
from fsdp_doctor.explain.collectives import Waiting, named
from fsdp_doctor.explain.entry_text import wrapped

_SHOWN_ROWS = 16
_HEADER = ("ranks", "group", "waits in", "in", "out", "last launched", "last done", "seconds")
_ASK = (
    "To see what each rank did, and who called it: run again with TORCH_FR_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and give the dumps of all ranks to `fsdp-doctor explain`."
)


def hang_lines(found: Explanation, width: int) -> list[str]:
    if found.hang is None:
        return []
    lines = [""]
    for sentence in found.hang.parting:
        lines += wrapped(sentence, width)
    lines += _table(found.hang.waiting)
    for waiting in found.hang.waiting[:_SHOWN_ROWS]:
        if frame := calling_frame(waiting):
            lines.append(f"{named([waiting.rank])} called it at {frame}")
    if found.showing == "hang" and any(not one.frames for one in found.hang.waiting):
        lines += wrapped(_ASK, width)
    return lines


def calling_frame(waiting: Waiting) -> str:
    """The innermost frame of the user's own code, or else of no torch; empty where there is none."""
    own = [frame for frame in waiting.frames if "/torch/" not in frame and "<frozen" not in frame]
    return next((frame for frame in own if "-packages/" not in frame), own[0] if own else "")


def _table(waiting: tuple[Waiting, ...]) -> list[str]:
    """Ranks that are in the same place share a row; a column that says nothing is left out."""
    rows: dict[tuple[str, ...], list[Waiting]] = {}
    for one in waiting:
        call = one.call if one.entered else f"not there; last in {one.call}"
        launched, done = ("" if number is None else str(number) for number in (one.enqueued, one.completed))
        rows.setdefault((one.group, call, one.sent, one.received, launched, done), []).append(one)
    cells = [(named(one.rank for one in ones).partition(" ")[2], *row, _seconds(ones)) for row, ones in rows.items()]
    used = [index for index in range(len(_HEADER)) if any(row[index] for row in cells)]
    table = [tuple(row[index] for index in used) for row in (_HEADER, *cells[:_SHOWN_ROWS])]
    widths = [max(len(row[column]) for row in table) for column in range(len(used))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in table]
    more = [f"and {len(cells) - _SHOWN_ROWS} more"] if len(cells) > _SHOWN_ROWS else []
    return ["", *(f"    {line}" for line in (*lines, *more)), ""] if cells else []


def _seconds(waiting: list[Waiting]) -> str:
    """The longest that one of them waited."""
    times = [one.waited_s for one in waiting if one.waited_s is not None]
    return f"{max(times):.0f}" if times else ""
