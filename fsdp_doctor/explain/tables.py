"""Reads the TOML tables in this directory, and matches their patterns."""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(name: str) -> dict[str, Any]:
    """Reads the TOML file with this name in this directory."""
    return tomllib.loads(pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8"))


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern that ignores case."""
    return re.compile(pattern, re.IGNORECASE)


def shows_any(patterns: Iterable[str], text: str) -> bool:
    """Returns whether one of the patterns matches somewhere in the text, without regard to case."""
    return any(compile_pattern(pattern).search(text) for pattern in patterns)
