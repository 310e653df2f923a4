"""Writes fixes as a patch of the installed release, for a fork or a pull request."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable

from fsdp_doctor.fixes.sources import FixedFunction


def render_patch(functions: Iterable[FixedFunction]) -> str:
    """Renders a unified diff for ``patch -p1`` in the directory that contains the frameworks' packages.

    The diff decorates the functions with :func:`fsdp_doctor.fixes.use_fix`, so the patched framework needs this
    library.
    """
    by_module: dict[str, list[FixedFunction]] = {}
    for function in functions:
        by_module.setdefault(function.fix.module, []).append(function)
    return "".join(_render_module(module, of_module) for module, of_module in by_module.items())


def _render_module(module: str, functions: list[FixedFunction]) -> str:
    text = functions[0].file.read_text(encoding="utf-8")
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
    name = "/".join(module.split(".")) + ".py"
    return "".join(difflib.unified_diff(lines, patched, f"a/{name}", f"b/{name}"))
