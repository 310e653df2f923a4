"""Compares the lines of the ranks about a save: the directory that it goes to, and the ranks that ended it."""

from __future__ import annotations

import pathlib
import re
from collections import Counter

from fsdp_doctor.explain.rank_lines import MAX_TRACKED, NEAR, RANK, SHOWN, Found, name_rank
from fsdp_doctor.text import join_some

_SAVED_TO = re.compile(r"(?i)\bsav\w+\b.*?(?P<path>/[\w./-]{3,300})")
_BEGINS = re.compile(r"(?i)\b(?:saving|start\w*(?: to)? sav\w*|begin\w* (?:to )?sav\w*|sav\w* start\w*)\b")
_ENDS = re.compile(
    r"(?i)\b(?:saved|finish\w* sav\w*|done sav\w*|sav\w* (?:is )?(?:done|finished|complete\w*|took)|save_\w+ done)\b"
)


class SaveReader:
    """Finds a save that goes to two directories, or that only some of its ranks ended."""

    def __init__(self) -> None:
        self._paths: dict[str, tuple[str, int]] = {}
        self._begun: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._last_saved: dict[str, int] = {}

    def read(self, number: int, text: str, source: str) -> Found | None:
        """Reads the next line that names a save, and returns the symptom that this line completes, or None."""
        found = self._compare_directories(number, text, source)
        self._count_save(number, text, source)
        return found

    def _compare_directories(self, number: int, text: str, source: str) -> Found | None:
        """Returns the symptom that two ranks save to directories whose paths differ in one part, or None."""
        saved, rank = _SAVED_TO.search(text), RANK.search(text)
        source = source or (rank[0].strip("[]") if rank else "")
        if saved is None or not source or "rank" in saved["path"]:
            return None
        path = saved["path"].rstrip("./")
        found: Found | None = None
        for other, (before, at) in self._paths.items():
            if found is None and other != source and _differ_in_one_part(before, path) and number - at < NEAR:
                clash = f"{other} saves to {before}, and {source} to {path}"
                decide = (
                    "Do both paths belong to one checkpoint? If so, broadcast the name from rank 0; `fsdp-doctor "
                    "checkpoint verify DIRECTORY` says which ranks' files exist."
                )
                found = Found(clash, decide, (at, number))
        self._paths[source] = path, number
        return found

    def _count_save(self, number: int, text: str, source: str) -> None:
        name = name_rank(text, source)
        if not name or len(self._last_saved) > MAX_TRACKED:
            return
        if _ENDS.search(text):
            self._ended[name] += 1
        elif _BEGINS.search(text):
            self._begun[name] += 1
        else:
            return
        self._last_saved[name] = number

    def end(self) -> Found | None:
        """Returns the symptom that some ranks did not end the last save; None without it."""
        most = max(self._begun.values(), default=0)
        begun = [rank for rank in self._begun if self._begun[rank] == most]
        ended = [rank for rank in begun if self._ended[rank] == most]
        missing = [rank for rank in begun if self._ended[rank] == most - 1]
        # One rank may write the checkpoint for all, and only it says so; but not if the others said so before.
        if not missing or not (len(ended) > 1 or (ended and most > 1)):
            return None
        clash = f"{join_some(ended, SHOWN)} ended the save, {join_some(missing, SHOWN)} did not"
        decide = (
            f"Where is {missing[0]}? Run `py-spy dump --pid PID` there: a collective in a save needs all ranks. "
            "`fsdp-doctor checkpoint verify DIRECTORY` says whether the checkpoint is complete."
        )
        numbers = sorted(self._last_saved[rank] for rank in (*ended[-1:], *missing[:1]))
        return Found(clash, decide, tuple(numbers))


def _differ_in_one_part(path: str, other: str) -> bool:
    """Returns whether two paths differ in exactly one part, like the paths of one save at two times."""
    parts, others = pathlib.PurePath(path).parts, pathlib.PurePath(other).parts
    different = [(a, b) for a, b in zip(parts, others, strict=False) if a != b]
    return len(parts) == len(others) and len(different) == 1 and not any("rank" in name for name in different[0])
