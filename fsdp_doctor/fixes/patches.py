"""A fix as a patch of the installed release, for a fork or a pull request."""

from __future__ import annotations

import ast
import difflib

from fsdp_doctor.fixes.sources import FixedFunction


def render_patch(function: FixedFunction) -> str:
    """Renders a unified diff that ``patch -p1`` takes in the directory that has the framework's package.

    It decorates the function with :func:`fsdp_doctor.fixes.use_fix`, so the patched framework needs this library.
    """
    text = function.file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    decorated = lines[function.first_line - 1]
    indentation = decorated[: len(decorated) - len(decorated.lstrip())]
    patched = list(lines)
    patched.insert(function.first_line - 1, f'{indentation}@use_fix("{function.fix.id}")\n')
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    after_future = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    patched.insert(after_future[0].lineno - 1, "from fsdp_doctor.fixes import use_fix\n")
    module = function.fix.target.partition(":")[0]
    name = "/".join(module.split(".")) + ".py"
    return "".join(difflib.unified_diff(lines, patched, f"a/{name}", f"b/{name}"))
