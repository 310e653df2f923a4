"""Reads CONFIG arguments as settings: files, the files that these name, ``-`` for standard input, and overrides.

A suffix marks a file as YAML, JSON or TOML. Any other file, and standard input, is read as a shell script or as one of
these formats. Python scripts are refused, since only running them would show what they configure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from fsdp_doctor.check import config_files
from fsdp_doctor.check.config_files import parse_scalar, read_text
from fsdp_doctor.check.launch_commands import SECTION, read_script
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.errors import UsageError

_ARGUMENT = re.compile(r"(?P<sign>~|\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){0,31})(?:=(?P<value>.*))?", re.DOTALL)
# `--config FILE`, `train FILE`, and the file that a NeMo-RL YAML is based on. `--config_file` belongs to accelerate.
_NAMING = ("config", f"{SECTION}.config", "defaults")
_MAX_FOLLOWED = 5
_FILE = re.compile(r"[^\n]+\.(?:ya?ml|json|toml)", re.IGNORECASE)


def read(arguments: Sequence[str]) -> Settings:
    """Reads the settings of all arguments and of the files that they name.

    Later files override earlier ones, a file overrides the files that it names, and command-line overrides take
    precedence over all files. Raises UsageError for input that cannot be read, with the file and, if known, the line.
    """
    overrides = [match for match in map(_match_override, arguments) if match is not None]
    settings = Settings.from_rows(
        row for argument in arguments if _match_override(argument) is None for row in _read_file(argument)
    )
    for match in overrides:
        if match["sign"] != "~":
            settings.put(Setting(match["key"], parse_scalar(match["value"]), "command line"))
    for match in overrides:
        if match["sign"] == "~":
            settings.remove(match["key"])
    if not list(settings):
        names = ", ".join(arguments)
        raise UsageError(
            f"no settings found in {names}: expected YAML, JSON, TOML, a shell script that starts a training, or "
            "overrides like a.b=value"
        )
    naming = _find_naming(settings)
    for _ in range(_MAX_FOLLOWED):
        if naming and (named := _follow_if_readable(naming.pop(0))) is not None:
            settings = Settings.join(named, settings)
            naming += _find_naming(named)
    return settings


def follow(row: Setting) -> Settings | None:
    """Reads the file that a setting names, relative to the working directory or to the setting's own file.

    Returns None if there is no such file. Raises Unreadable if the file cannot be read.
    """
    name = str(row.value)
    for path in (name, os.path.join(os.path.dirname(row.file), name)):
        path = os.path.expanduser(path)
        if os.path.isfile(path):
            try:
                return Settings.from_rows(_read_file(path))
            except UsageError as error:
                raise Unreadable(f"{row}: {error}") from None
    return None


def find_missing_files(settings: Settings) -> Iterator[Setting]:
    """Finds settings that name a configuration file which cannot be read here."""
    return (row for row in _find_naming(settings) if _follow_if_readable(row) is None)


def _match_override(argument: str) -> re.Match[str] | None:
    """Matches ``a.b=value`` or ``~a.b``; None for anything else, and if a file of that name exists."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None or os.path.exists(argument):
        return None
    return match if match["value"] is not None or match["sign"] == "~" else None


def _read_file(argument: str) -> list[Setting]:
    if argument.endswith(".py"):
        raise UsageError(
            f"{argument} is a Python script, and its settings are known only at run time: call "
            "fsdp_doctor.examine(model) in the script, or give its settings as overrides like a.b=value"
        )
    name, text = read_text(argument)
    return config_files.parse(text, name, read_script)


def _find_naming(settings: Settings) -> list[Setting]:
    rows = [settings.rows[key] for key in _NAMING if key in settings]
    return [row for row in rows if isinstance(row.value, str) and _FILE.fullmatch(row.value)]


def _follow_if_readable(row: Setting) -> Settings | None:
    try:
        return follow(row)
    except Unreadable:
        return None
