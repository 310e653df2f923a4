"""CONFIG arguments to settings: files, ``-`` for the standard input, and overrides of one setting.

A file is YAML, JSON, TOML or Python by its suffix. Any other file, and the standard input, is a text with commands and
overrides ``a.b.c=value`` anywhere in it, as a shell script or a bug report, or one of the formats without its suffix.
No interpolation, shell variable or Hydra default list is expanded beyond what the text itself says.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from fsdp_doctor.check.config_formats import OF_SUFFIX
from fsdp_doctor.check.config_input import text_of
from fsdp_doctor.check.pasted_text import settings_of_text
from fsdp_doctor.check.python_calls import python_settings
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.yaml_text import scalar
from fsdp_doctor.errors import UsageError

COMMAND_LINE = "command line"
_MOST_SETTINGS = 20_000

_ARGUMENT = re.compile(r"(?P<sign>~|\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){0,31})(?:=(?P<value>.*))?", re.DOTALL)


def read(arguments: Sequence[str]) -> Settings:
    """The settings of all arguments together: a later file replaces an earlier one, overrides replace files.

    Raises UsageError for what cannot be read, with the file and, where it is known, the line.
    """
    matches = [_override(argument) for argument in arguments]
    files = [argument for argument, match in zip(arguments, matches, strict=True) if match is None]
    found = Settings.of(row for file in files for row in _rows(file))
    given = [match for match in matches if match is not None]
    for match in given:
        if match["sign"] != "~":
            found.put(Setting(match["key"], scalar(match["value"]), COMMAND_LINE))
    for match in given:
        if match["sign"] == "~":
            found.without(match["key"])
    if not list(found):
        names = ", ".join(arguments)
        raise UsageError(
            f"no settings found in {names}: expected YAML, JSON, TOML, a command that starts a training, a Python "
            "script that configures one, or overrides like a.b=value"
        )
    return found


def followed(row: Setting) -> Settings | None:
    """The settings of the file that a setting names: as the command would find it, or from the folder of its own file.

    None where there is none. Raises Unreadable where it cannot be read.
    """
    named = str(row.value)
    for path in (named, os.path.join(os.path.dirname(row.file), named)):
        path = os.path.expanduser(path)
        if os.path.isfile(path):
            try:
                return read([path])
            except UsageError as error:
                raise Unreadable(f"{row}: {error}") from None
    return None


def _override(argument: str) -> re.Match[str] | None:
    """The parts of ``a.b=value`` or ``~a.b``; None for anything else, and for a file that has such a name."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None or os.path.exists(argument):
        return None
    return match if match["value"] is not None or match["sign"] == "~" else None


def _rows(argument: str) -> list[Setting]:
    name, text = text_of(argument)
    try:
        rows = list(itertools.islice(_settings_of(text, name), _MOST_SETTINGS + 1))
    except RecursionError:
        raise UsageError(f"cannot read {name}: it is nested too deeply") from None
    if len(rows) > _MOST_SETTINGS:
        raise UsageError(f"{name} has more than {_MOST_SETTINGS:,} settings")
    return rows


def _settings_of(text: str, name: str) -> Iterator[Setting]:
    suffix = pathlib.Path(name).suffix.lower()
    if suffix == ".py":
        return iter(python_settings(text, name))
    if suffix in OF_SUFFIX:
        return OF_SUFFIX[suffix](text, name)
    return settings_of_text(text, name, _MOST_SETTINGS + 1)
