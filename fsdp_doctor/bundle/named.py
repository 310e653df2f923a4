"""Finds the facts in a log that an issue needs: the versions of packages, and the ranks of processes."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_doctor.explain.log_input import LogInput
from fsdp_doctor.known.clues import make_version_pattern

# The packages whose versions decide which failures occur, by the names of their distributions.
_PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "trl", "verl", "vllm", "sglang", "ray", "lightning"),
    *("torchtitan", "torchao", "safetensors", "bitsandbytes", "deepspeed", "axolotl", "flash-attn", "triton", "numpy"),
)
_ALIASES = {"pytorch": "torch", "pytorch-lightning": "lightning", "flash_attn": "flash-attn"}
_NAME = "|".join(sorted((*_PACKAGES, *_ALIASES), key=len, reverse=True))
_VERSION = make_version_pattern((*_PACKAGES, *_ALIASES))
_FRAME = re.compile(rf'File "(?:[^"]*/)?(?P<name>{_NAME})/')
_PID = re.compile(r"\bpid\s?[=:]?\s?(\d+)")
_RANK = re.compile(r"\brank\s*[=:]?\s*(\d{1,6})\b|\[rank(\d{1,6})\]")
_LONGEST_LINE = 4_000


@dataclass(frozen=True, kw_only=True)
class NamedInLogs:
    """The versions and the ranks that logs name.

    versions: maps packages to versions, in the order of the logs; empty for a package that only a traceback names.
    ranks: maps pids to ranks.
    """

    versions: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)

    def write_ranks(self, text: str) -> str:
        """Returns the text with each process's pid replaced by its rank."""
        return _PID.sub(lambda pid: self._write_rank(pid[1]), text)

    def _write_rank(self, pid: str) -> str:
        return f"rank {self.ranks[pid]}" if pid in self.ranks else "a rank that the log does not number"


def read_names(logs: Iterable[pathlib.Path]) -> NamedInLogs:
    """Reads each log once.

    A process's rank is in the same line as its pid, or in an earlier line where torchrun prints it.
    """
    named = NamedInLogs()
    for log in logs:
        rank: int | None = None
        for piece in LogInput(log).read_pieces():
            for whole in piece.written:
                line = whole[:_LONGEST_LINE]
                for found in _FRAME.finditer(line):
                    named.versions.setdefault(_find_package(found["name"]), "")
                for found in _VERSION.finditer(line):
                    name = _find_package(found["name"])
                    named.versions[name] = named.versions.get(name) or found["version"]
                if ranks := _RANK.search(line):
                    rank = int(ranks[1] or ranks[2])
                if (pid := _PID.search(line)) and rank is not None and (ranks or "exitcode" in line):
                    named.ranks.setdefault(pid[1], rank)
    return named


def _find_package(name: str) -> str:
    return _ALIASES.get(name.lower(), name.lower())
