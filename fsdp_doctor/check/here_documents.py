"""Files that a shell script writes itself: ``cat > FILE <<EOF``, ``tee FILE <<EOF``."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_doctor.check.config_formats import OF_SUFFIX
from fsdp_doctor.check.launch_commands import SECTION
from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.shell_text import ShellText
from fsdp_doctor.errors import UsageError

_MOST_DOCUMENTS = 50
_LONGEST_LINE = 4_000
_NAMING = ("config", f"{SECTION}.config")
_OPENED = re.compile(r"<<(?P<dash>-?)[ \t]*(?P<quote>['\"\\]?)(?P<word>[A-Za-z_]\w{0,100})['\"]?")
_REDIRECTED = re.compile(r"(?<![\d&<>])(?P<more>>{1,2})[ \t]*(?P<path>[^\s<>|;&]{1,1000})")
_TEE = re.compile(r"(?:^|[\s|;&])tee[ \t]+(?P<more>-a[ \t]+|--append[ \t]+)?(?P<path>[^\s<>|;&-][^\s<>|;&]{0,1000})")


@dataclass(frozen=True)
class _Document:
    """path: as the script names it. line: of its first line. expands: whether the shell puts variables into it."""

    path: str
    body: str
    line: int
    appended: bool
    expands: bool


def with_written_files(shell: ShellText, launched: Sequence[Setting]) -> list[Setting]:
    """A command's settings, after those of the files that it names and that the text writes for it.

    A file that the text writes twice, as in two branches, is not known, and one that is in no format has none.
    """
    found: list[Setting] = []
    read: set[str] = set()
    for path, documents in _written(shell, {_path(row) for row in launched}).items():
        rows = [row for document in documents for row in _rows(shell, document)]
        found += rows
        read |= {path} if rows else set()
    # What is read here need not be looked for.
    return [*found, *(row for row in launched if row.key not in _NAMING or _path(row) not in read)]


def _written(shell: ShellText, named: set[str]) -> dict[str, list[_Document]]:
    written: dict[str, list[_Document]] = {}
    for document in _documents(shell):
        written.setdefault(os.path.normpath(document.path), []).append(document)
    return {
        path: documents
        for path, documents in written.items()
        if path in named and not documents[0].appended and all(document.appended for document in documents[1:])
    }


def _path(row: Setting) -> str:
    return os.path.normpath(row.value) if isinstance(row.value, str) and row.value else ""


def _rows(shell: ShellText, document: _Document) -> list[Setting]:
    suffix = pathlib.Path(document.path).suffix.lower()
    body = shell.substituted(document.body) if document.expands else document.body
    try:
        return list(OF_SUFFIX[suffix]("\n" * (document.line - 1) + body, shell.name)) if suffix in OF_SUFFIX else []
    except UsageError:
        return []


def _documents(shell: ShellText) -> Iterator[_Document]:
    lines = shell.text.split("\n")
    at = found = 0
    while at < len(lines) and found < _MOST_DOCUMENTS:
        line, at = lines[at], at + 1
        if "<<" not in line or len(line) > _LONGEST_LINE or (opened := _OPENED.search(line)) is None:
            continue
        end = next((n for n in range(at, len(lines)) if _ends(lines[n], opened)), len(lines))
        body, first, at = lines[at:end], at + 1, end + 1
        if target := _target(line):
            found += 1
            text = "\n".join(part.lstrip("\t") if opened["dash"] else part for part in body)
            path = shell.substituted(target["path"].strip("'\""))
            yield _Document(path, text, first, target["more"] not in (None, ">"), not opened["quote"])


def _ends(line: str, opened: re.Match[str]) -> bool:
    return (line.lstrip("\t") if opened["dash"] else line) == opened["word"]


def _target(line: str) -> re.Match[str] | None:
    """Where the command writes: what tee is given, or the last redirection."""
    if teed := _TEE.search(line):
        return teed
    redirected = [match for match in _REDIRECTED.finditer(line) if match["path"] != "/dev/null"]
    return redirected[-1] if redirected else None
