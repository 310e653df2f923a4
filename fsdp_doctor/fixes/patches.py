"""Writes fixes as a patch of the installed release, for a fork or a pull request."""

from __future__ import annotations

import ast
import difflib
import pathlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.fixes.sources import FixedFunction
from fsdp_doctor.machine.imports import find_source_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of a module; ``edits.toml`` explains the fields."""

    fix: str
    old: str
    new: str
    module: str = ""

    @property
    def num_lines(self) -> int:
        """The number of lines that the change adds or replaces."""
        lines = difflib.ndiff(self.old.splitlines(), self.new.splitlines())
        return sum(line.startswith("+ ") for line in lines)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A unified diff for ``patch -p1`` in the directory that contains the frameworks' packages.

    importing: ids of the fixes whose functions import this library in the patched framework; the functions of other
        fixes need only torch.
    """

    text: str
    importing: tuple[str, ...]


def read_edits() -> list[Edit]:
    """Reads the table of changes that need only torch."""
    table = tomllib.loads(pathlib.Path(__file__).with_name("edits.toml").read_text(encoding="utf-8"))
    return msgspec.convert(table["edit"], list[Edit])


def render_patch(functions: Iterable[FixedFunction]) -> Patch:
    """Renders the fixes as a patch.

    Functions with edits are changed so that they need only torch. The other functions are decorated with
    :func:`fsdp_doctor.fixes.use_fix`, and need this library. Raises CannotRun if a module does not contain the text
    that an edit replaces.
    """
    functions = list(functions)
    edits = read_edits()
    edited = {edit.fix for edit in edits}
    decorated = [function for function in functions if function.fix.id not in edited]
    edits_of: dict[str, list[Edit]] = {}
    for function in functions:
        for edit in edits:
            if edit.fix == function.fix.id:
                edits_of.setdefault(edit.module or function.fix.module, []).append(edit)
    modules = dict.fromkeys([*edits_of, *(function.fix.module for function in decorated)])
    texts = [
        _render_module(
            module, edits_of.get(module, []), [function for function in decorated if function.fix.module == module]
        )
        for module in modules
    ]
    return Patch(text="".join(texts), importing=tuple(function.fix.id for function in decorated))


def _render_module(module: str, edits: Sequence[Edit], decorated: Sequence[FixedFunction]) -> str:
    file = find_source_file(module)
    if file is None:
        raise CannotRun(f"{module} has no source file here, so no patch can be written for it")
    text = file.read_text(encoding="utf-8")
    patched = _apply_edits(_decorate(text, decorated), module, edits)
    name = "/".join(module.split(".")) + ("/__init__.py" if file.name == "__init__.py" else ".py")
    lines = text.splitlines(keepends=True), patched.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))


def _decorate(text: str, functions: Sequence[FixedFunction]) -> str:
    if not functions:
        return text
    lines = text.splitlines(keepends=True)
    patched = list(lines)
    # From the end, so that the numbers of the lines before stay.
    for function in sorted(functions, key=lambda function: -function.first_line):
        decorated = lines[function.first_line - 1]
        indentation = decorated[: len(decorated) - len(decorated.lstrip())]
        patched.insert(function.first_line - 1, f'{indentation}@use_fix("{function.fix.id}")\n')
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    after_future = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    patched.insert(after_future[0].lineno - 1, "from fsdp_doctor.fixes import use_fix\n")
    return "".join(patched)


def _apply_edits(text: str, module: str, edits: Iterable[Edit]) -> str:
    for edit in edits:
        if text.count(edit.old) != 1:
            raise CannotRun(
                f"fix {edit.fix}: {module} differs from the source for which its patch was written; "
                "make the change by hand"
            )
        text = text.replace(edit.old, edit.new)
    return text
