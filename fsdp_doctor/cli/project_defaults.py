"""Reads the defaults of options that a project sets in ``[tool.fsdp-doctor.COMMAND]`` of its pyproject.toml."""

from __future__ import annotations

import difflib
import pathlib
import sys
from typing import Any

from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_defaults(program: Any) -> dict[str, Any]:
    """Reads the project's defaults for the options of ``program``, a click group, in the form of click's
    ``default_map``.

    The defaults are in the pyproject.toml of the working directory, or of the nearest directory above that has the
    file. A key is an option without its dashes. Raises UsageError for a file that is not TOML, and for a command or an
    option that does not exist.
    """
    here = pathlib.Path.cwd()
    file = next((file for place in (here, *here.parents) if (file := place / "pyproject.toml").is_file()), None)
    if file is None:
        return {}
    try:
        tools = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    return _select_defaults(program, tools.get("fsdp-doctor", {}), f"{file}: [tool.fsdp-doctor")


def _select_defaults(command: Any, table: Any, where: str) -> dict[str, Any]:
    """Returns the defaults of a command; for a group, maps each of its commands to the command's defaults.

    Raises UsageError if ``table`` is not a table, or names a command or an option that does not exist.

    where: the header of the table without its closing bracket, for messages.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{where}] is not a table")
    commands = getattr(command, "commands", None)
    options = {name.lstrip("-"): option for option in command.params for name in option.opts if name.startswith("-")}
    defaults: dict[str, Any] = {}
    for name, value in table.items():
        if commands is not None:
            defaults[name] = _select_defaults(
                _look_up(commands, name, f"{where}] names the command"), value, f"{where}.{name}"
            )
        else:
            option = _look_up(options, name, f"{where}] sets the option")
            defaults[option.name] = [value] if option.multiple and not isinstance(value, list) else value
    return defaults


def _look_up(known: dict[str, Any], name: str, where: str) -> Any:
    if name in known:
        return known[name]
    moved = [f"{group}.{name}" for group, command in known.items() if name in getattr(command, "commands", ())]
    close = moved or difflib.get_close_matches(name, known, n=1)
    raise UsageError(f"{where} {name}, which does not exist; {f'did you mean {close[0]}?' if close else 'remove it'}")
