"""Finds the facts in a log that an issue needs: the versions of packages, and the ranks of processes."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_doctor.explain.log_input import LogInput
from fsdp_doctor.explain.versions import PACKAGE_NAME, VERSION, find_package

_FRAME = re.compile(rf'File "(?:[^"]*/)?(?P<name>{PACKAGE_NAME})/')
_PID = re.compile(r"\bpid\s?[=:]?\s?(\d+)")
_RANK = re.compile(r"\brank\s*[=:]?\s*(\d{1,6})\b|\[rank(\d{1,6})\]")
_LONGEST_LINE = 4_000


@dataclass(frozen=True, kw_only=True)
class NamedInLogs:
    """The versions and the ranks that logs name.

    versions: maps packages to versions, in the order of the logs; a version is empty if only a traceback names the
        package.
    ranks: maps pids to ranks.
    """

    versions: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)

    def write_ranks(self, text: str) -> str:
        """Returns the text with each pid replaced by the rank of the process."""
        return _PID.sub(lambda pid: self._write_rank(pid[1]), text)

    def _write_rank(self, pid: str) -> str:
        return f"rank {self.ranks[pid]}" if pid in self.ranks else "a rank that the log does not number"


def read_names(logs: Iterable[pathlib.Path]) -> NamedInLogs:
    """Returns the versions and the ranks that the logs name. Each log is read once.

    The rank of a process is in the same line as its pid or, in torchrun's summary, in an earlier line.
    """
    named = NamedInLogs()
    for log in logs:
        rank: int | None = None
        for piece in LogInput(log).read_pieces():
            for whole in piece.written:
                line = whole[:_LONGEST_LINE]
                for found in _FRAME.finditer(line):
                    named.versions.setdefault(find_package(found["name"]), "")
                for found in VERSION.finditer(line):
                    name = find_package(found["name"])
                    named.versions[name] = named.versions.get(name) or found["version"]
                if ranks := _RANK.search(line):
                    rank = int(ranks[1] or ranks[2])
                if (pid := _PID.search(line)) and rank is not None and (ranks or "exitcode" in line):
                    named.ranks.setdefault(pid[1], rank)
    return named
