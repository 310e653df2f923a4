"""Compares the values that the ranks give in the same message: a checksum or norm, or an amount of memory."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from fsdp_doctor.explain.rank_lines import MAX_TRACKED, RANK, SHOWN, Found, has_any, name_rank
from fsdp_doctor.text import join_some

TOTAL_WORDS = ("hecksum", "hash", "igest", "crc", "md5", "sha", "ingerprint", "norm of", "sum of")
_TOTALS = re.compile(r"(?i)checksum|\bhash\b|digest|\bcrc|\bmd5|\bsha\d|fingerprint|\bnorm of\b|\bsum of\b")
_VALUE = re.compile(r"(?P<value>0x[0-9a-f]+|\b[0-9a-f]{8,64}\b|-?\d+\.\d+(?:e[+-]?\d+)?)\W*$", re.IGNORECASE)
_MEMORY = re.compile(r"(?i)(?P<value>\d+(?:\.\d+)?) ?(?P<unit>[GM]i?B)\b")
# A rank that has so many times the memory of the others.
_UNEVEN = 2.0


@dataclass
class _ByRank:
    """The values of one message by rank, and the lines that contain them."""

    values: dict[str, str] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)


def names_total(raw: str) -> bool:
    """Returns whether a line gives a checksum, a norm or a sum."""
    return has_any(TOTAL_WORDS, raw) and _TOTALS.search(raw) is not None


class ValueReader:
    """Finds ranks whose values differ from the values of the other ranks in the same message."""

    def __init__(self) -> None:
        self._totals: dict[str, _ByRank] = {}
        self._memory: dict[str, _ByRank] = {}

    def read(self, number: int, text: str, source: str, *, names_memory: bool) -> None:
        """Reads the next line that gives a value.

        names_memory: whether the value is an amount of memory.
        """
        name = name_rank(text, source)
        value = _MEMORY.search(text) if names_memory else _VALUE.search(text)
        if not name or value is None:
            return
        before, after = text[: value.start()], text[value.end() :]
        message = " ".join(RANK.sub("", f"{before}{'' if names_memory else after}").split())
        tracked = self._memory if names_memory else self._totals
        if len(tracked) < MAX_TRACKED:
            of_message = tracked.setdefault(message, _ByRank())
            if name not in of_message.values:
                of_message.values[name] = value[0] if names_memory else value["value"]
                of_message.lines.append(number)

    def end(self) -> Found | None:
        """Returns, after the end of the log, the symptom that the ranks' values differ; None if they do not."""
        return self._compare_totals() or self._compare_memory()

    def _compare_totals(self) -> Found | None:
        for message, by_rank in self._totals.items():
            values = Counter(by_rank.values.values())
            if len(by_rank.values) > 1 and 1 < len(values) < len(by_rank.values):
                usual = values.most_common(1)[0][0]
                others = [rank for rank, value in by_rank.values.items() if value != usual]
                other = by_rank.values[others[0]]
                said = message.strip(" :=")
                clash = (
                    f"the ranks differ in the same message ({said}): {join_some(others, SHOWN)} has {other}, "
                    f"the others have {usual}"
                )
                decide = (
                    "Is the tensor whole on every rank? Then `fsdp_doctor.fingerprint(model)` on all ranks names each "
                    "tensor that differs: was it loaded only on some ranks, or not broadcast?"
                )
                return Found(clash, decide, (by_rank.lines[0], by_rank.lines[-1]))
        return None

    def _compare_memory(self) -> Found | None:
        for message, by_rank in self._memory.items():
            sizes = {rank: _count_mib(text) for rank, text in by_rank.values.items()}
            if len(sizes) < 2:
                continue
            rank = max(sizes, key=lambda name: sizes[name])
            others = sorted(size for name, size in sizes.items() if name != rank)
            if sizes[rank] > _UNEVEN * others[-1] and sizes[rank] > 1024:
                clash = (
                    f"{rank} has {by_rank.values[rank]} ({message.strip(' :=')}), the others have at most "
                    f"{others[-1] / 1024:.3g} GiB"
                )
                decide = (
                    f"What does only {rank} hold: the whole model before it is sharded, a checkpoint that "
                    "`torch.load` put on its device (`map_location`), the tensors of other ranks? "
                    "`fsdp_doctor.examine(model, optimizer)` lists what each rank has."
                )
                return Found(clash, decide, (by_rank.lines[0], by_rank.lines[-1]))
        return None


def _count_mib(text: str) -> float:
    match = _MEMORY.search(text)
    return float(match["value"]) * (1024 if match["unit"].startswith("G") else 1) if match else 0.0
