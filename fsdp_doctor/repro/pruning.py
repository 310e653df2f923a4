"""Takes out of a script what nothing in it uses, so that it can be written with all that any case may need."""

from __future__ import annotations

import ast
import sys


def prune(source: str) -> str:
    """``source`` without the functions, constants and imports that its main block does not use, nor what it uses.

    What is left is put into the usual order: docstring, imports, constants, functions, main block; empty lines within
    a function go.
    """
    lines = source.splitlines()
    docstring, *body = ast.parse(source).body
    (main,) = (node for node in body if isinstance(node, ast.If))
    definitions: dict[str, ast.stmt] = {}
    for node in body:
        if (name := _defined(node)) in definitions:
            raise ValueError(f"defined twice: {name}")
        definitions |= {name: node} if name else {}
    used = more = _names(main)
    while more := {other for name in more & definitions.keys() for other in _names(definitions[name])} - used:
        used |= more
    kept = [node for name, node in definitions.items() if name in used]
    parts = [
        "\n".join(lines[: docstring.end_lineno]).strip(),
        _imports(body, used),
        "\n".join(_text(lines, node) for node in kept if isinstance(node, ast.Assign)),
        *(_text(lines, node) for node in kept if isinstance(node, ast.FunctionDef)),
        _text(lines, main),
    ]
    return "\n\n".join(parts) + "\n"


def _defined(node: ast.stmt) -> str:
    """The name of a function or a constant; empty for any other statement."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def _names(node: ast.stmt) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _imports(body: list[ast.stmt], used: set[str]) -> str:
    """One statement for each module that is used: the standard library's, then the rest."""
    members: dict[str, set[str]] = {}
    for node in body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if (alias.asname or alias.name.partition(".")[0]) not in used:
                continue
            if isinstance(node, ast.ImportFrom):
                members.setdefault(f"from {node.module} import ", set()).add(ast.unparse(alias))
            else:
                members[f"import {ast.unparse(alias)}"] = set()
    statements = [head + ", ".join(sorted(names)) for head, names in members.items()]
    statements.sort(key=lambda statement: (statement.startswith("from"), statement))
    standard = [line for line in statements if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return "\n".join([*standard, "", *(line for line in statements if line not in standard)])


def _text(lines: list[str], node: ast.stmt) -> str:
    """With its decorators, which ``ast`` counts apart."""
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return "\n".join(line for line in lines[first - 1 : node.end_lineno] if line.strip())
