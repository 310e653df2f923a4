"""A text that people paste, as a shell script or a bug report: its commands, its overrides and its fenced blocks."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator

from fsdp_doctor.check.config_formats import any_format
from fsdp_doctor.check.here_documents import with_written_files
from fsdp_doctor.check.launch_commands import launch_settings
from fsdp_doctor.check.python_calls import python_settings
from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.shell_text import ShellText
from fsdp_doctor.check.yaml_text import scalar
from fsdp_doctor.errors import UsageError

_MOST_BLOCKS = 50
_FENCE = re.compile(r"^[ \t>]*(?P<fence>```+|~~~+)[ \t]*(?P<kind>[\w+-]*)[^\n`]*$")
# In a block of these kinds there is nothing but commands, and in one of the others nothing at all.
_SHELLS = frozenset(("bash", "sh", "shell", "console", "zsh", "shellscript", "cmd"))
_OUTPUTS = frozenset(("log", "text", "txt", "pytb", "traceback", "output", "diff", "cpp", "c", "rust", "markdown"))
_PYTHON = frozenset(("python", "py", "python3"))
# What `accelerate env` prints, as in a bug report.
_OF_ACCELERATE_ENV = re.compile(r"^[ \t]*- (?P<key>[a-z_0-9]+):[ \t]*(?P<value>\S.*)?$")


def settings_of_text(text: str, name: str, most: int) -> Iterator[Setting]:
    """Of fenced blocks in any format, of commands and the files that the text itself writes for them, and of overrides.

    Of the whole, if it has one of the formats and none of these.
    """
    blocks = list(itertools.islice(_fenced_blocks(text), _MOST_BLOCKS))
    structured = [row for kind, block in blocks for row in _of_block(kind, block, name, most)]
    shell = ShellText(text, name)
    launched = with_written_files(shell, launch_settings(shell))
    rows = itertools.chain(structured, _accelerate_env(text, name), launched, shell.overrides())
    found = list(itertools.islice(rows, most))
    return iter(found if found or blocks else _of_block("", text, name, most))


def _fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The kind and text of Markdown's blocks, each after as many empty lines as stood before it: it keeps its lines."""
    fence, kind, body, first = "", "", [""], 0
    for number, line in enumerate(text.split("\n")):
        match = _FENCE.match(line[:200])
        if fence and match and match["fence"].startswith(fence) and not match["kind"]:
            yield kind, "\n" * first + textwrap.dedent("\n".join(body))
            fence = ""
        elif fence:
            body.append(line)
        elif match:
            fence, kind, body, first = match["fence"], match["kind"].lower(), [], number + 1
    if fence:  # One that is not closed goes on to the end.
        yield kind, "\n" * first + textwrap.dedent("\n".join(body))


def _of_block(kind: str, block: str, name: str, most: int) -> list[Setting]:
    if kind in _SHELLS or kind in _OUTPUTS:
        return []
    try:
        if kind in _PYTHON or (not kind and _looks_like_python(block)):
            return python_settings(block, name)
        return any_format(block, name, most)
    except UsageError:
        return []


def _looks_like_python(block: str) -> bool:
    return bool(re.search(r"^(?:import \w|from \w[\w.]* import |def \w+\(|class \w)", block, re.MULTILINE))


def _accelerate_env(text: str, name: str) -> Iterator[Setting]:
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        match = _OF_ACCELERATE_ENV.match(line[:4000])
        inside = match is not None and (inside or match["key"] == "compute_environment")
        if inside and match is not None:
            value = match["value"] or ""
            where = f"{name}:{number}"
            if value.startswith("{"):
                rows = any_format(f"{match['key']}: {value}", name, 100)
                yield from (Setting(row.key, row.value, where) for row in rows)
            else:
                yield Setting(match["key"], scalar(value), where)
