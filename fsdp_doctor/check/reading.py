"""CONFIG arguments to settings: files, ``-`` for the standard input, and overrides of one setting.

A file is YAML, JSON or TOML by its suffix. Any other file, and the standard input, is a text with overrides
``a.b.c=value`` anywhere in it, as in a shell script or a bug report, or one of the three formats without its suffix.
No interpolation, shell variable or Hydra default list is expanded beyond what the text itself says.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from fsdp_doctor.check.config_formats import OF_SUFFIX, any_format, scalar
from fsdp_doctor.check.pasted_text import fenced_blocks, overrides
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.standard_input import standard_input

COMMAND_LINE = "command line"
_STANDARD_INPUT = "standard input"
_MOST_BYTES = 4 << 20
_MOST_SETTINGS = 20_000

_ARGUMENT = re.compile(r"(?P<sign>~|\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+)*)(?:=(?P<value>.*))?", re.DOTALL)


def read(arguments: Sequence[str]) -> Settings:
    """The settings of all arguments together: a later file replaces an earlier one, overrides replace files.

    Raises UsageError for what cannot be read, with the file and, where it is known, the line.
    """
    matches = [_override(argument) for argument in arguments]
    files = [argument for argument, match in zip(arguments, matches, strict=True) if match is None]
    found = Settings(row for file in files for row in _rows(file))
    given = [match for match in matches if match is not None]
    for match in given:
        if match["sign"] != "~":
            found.put(Setting(match["key"], scalar(match["value"]), COMMAND_LINE))
    for match in given:
        if match["sign"] == "~":
            found.without(match["key"])
    if not list(found):
        names = ", ".join(arguments)
        raise UsageError(f"no settings found in {names}: expected YAML, JSON, TOML, or overrides like a.b=value")
    return found


def _override(argument: str) -> re.Match[str] | None:
    """The parts of ``a.b=value`` or ``~a.b``; None for anything else, and for a file that has such a name."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None or os.path.exists(argument):
        return None
    return match if match["value"] is not None or match["sign"] == "~" else None


def _rows(argument: str) -> list[Setting]:
    name = _STANDARD_INPUT if argument == "-" else argument
    text = _decoded(name, _bytes(argument, name))
    parse = OF_SUFFIX.get(pathlib.Path(name).suffix.lower(), _any_text)
    try:
        rows = list(itertools.islice(parse(text, name), _MOST_SETTINGS + 1))
    except RecursionError:
        raise UsageError(f"cannot read {name}: it is nested too deeply") from None
    if len(rows) > _MOST_SETTINGS:
        raise UsageError(f"{name} has more than {_MOST_SETTINGS:,} settings")
    return rows


def _bytes(argument: str, name: str) -> bytes:
    """All of it, or one byte more than is allowed."""
    try:
        if argument == "-":
            return standard_input().read(_MOST_BYTES + 1)
        with open(pathlib.Path(argument).expanduser(), "rb") as file:
            return file.read(_MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # pathlib raises the last for the home of an unknown user.
        said = (error.strerror if isinstance(error, OSError) else None) or error
        form = "CONFIG must be a file, - for standard input, or an override like a.b=value"
        raise UsageError(f"cannot read {name}: {said}; {form}") from None


def _decoded(name: str, data: bytes) -> str:
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{name} is larger than {_MOST_BYTES >> 20} MiB, too large for a training configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a text file in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file in UTF-8")
    if not text.strip():
        raise UsageError(f"{name} is empty")
    return text


def _any_text(text: str, name: str) -> Iterator[Setting]:
    """A pasted command if there is an override in it; else fenced blocks of any format, or whichever the whole is."""
    if found := overrides(text, name):
        return iter(found)
    return (row for block in fenced_blocks(text) or [text] for row in any_format(block, name, _MOST_SETTINGS + 1))
