"""Takes a path's function out of our source, with all that it calls of ours, so that a script needs no import of us.

The scripts run the very code that the probe runs. Nothing is imported to read it.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

_PACKAGE = pathlib.Path(__file__).parent.parent
_OURS = "fsdp_doctor."
_TYPES_ONLY = ("__future__", "typing", "collections.abc")
_LOCAL_ANNOTATION = re.compile(r"^(\s+\w+): [^=\n]+? = ", re.MULTILINE)
# A path is called with a Subject; in a script its fields are variables.
_SUBJECT = "model, optimizer, device"
_FIELDS = {"subject.scratch": "SCRATCH", "subject.control": "None"}


@dataclass
class Lifted:
    """Functions as text by name, callees first, and the import statements that they need."""

    functions: dict[str, str] = field(default_factory=dict)
    imports: dict[tuple[str, str], None] = field(default_factory=dict)


def lift(module: str, function: str, into: Lifted) -> None:
    """Adds a function of ``fsdp_doctor.<module>`` and what it needs."""
    source, tree = _parsed(module)
    definitions = {name: node for node in tree.body if (name := _defined(node))}
    node = definitions[function]
    used = _used(node)
    for name in sorted(used & set(definitions) - {function}):
        lift(module, name, into)
    for origin, original, name in _imported(tree):
        if name not in used or original == "Subject":
            continue
        if not origin.startswith(_OURS):
            into.imports[origin, original] = None
        elif original and (_PACKAGE.joinpath(*origin.split(".")[1:], f"{original}.py")).exists():
            for called in _attributes(node, name):
                lift(f"{origin}.{original}".removeprefix(_OURS), called, into)
        else:
            lift(origin.removeprefix(_OURS), original, into)
    into.functions.setdefault(function, _as_text(source, node))


def import_lines(imports: dict[tuple[str, str], None]) -> str:
    """Import statements: the standard library, then the rest; names of one module together."""
    whole = {module: f"import {module}" for module, name in imports if not name}
    names = {module: sorted(name for origin, name in imports if origin == module and name) for module, _ in imports}
    named = {module: f"from {module} import {', '.join(found)}" for module, found in names.items() if found}
    groups: tuple[list[str], list[str]] = ([], [])
    for statements in (whole, named):
        for module in sorted(statements):
            groups[module.split(".")[0] not in sys.stdlib_module_names].append(statements[module])
    return "\n\n".join("\n".join(group) for group in groups if group)


@functools.cache
def _parsed(module: str) -> tuple[str, ast.Module]:
    source = _PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    return source, ast.parse(source)


def _defined(node: ast.stmt) -> str:
    """The name of a function or a constant at the top of a module."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(module, name in it or "" for the module itself, name here) of every import that is not for types."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module not in _TYPES_ONLY:
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                renamed = f" as {alias.asname}" if alias.asname else ""
                yield f"{alias.name}{renamed}", "", alias.asname or alias.name.partition(".")[0]


def _used(node: ast.stmt) -> set[str]:
    """The names that run: those of annotations do not."""
    if not isinstance(node, ast.FunctionDef):
        return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    annotations = {
        id(name)
        for part in ast.walk(node)
        for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None))
        if annotation is not None
        for name in ast.walk(annotation)
    }
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and id(name) not in annotations}


def _attributes(node: ast.stmt, module: str) -> set[str]:
    """What of an imported module the function asks for."""
    asked = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    return {
        attribute.attr for attribute in asked if isinstance(attribute.value, ast.Name) and attribute.value.id == module
    }


def _as_text(source: str, node: ast.stmt) -> str:
    """The definition as it stands, without annotations; ours are called without their module's name."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    if isinstance(node, ast.FunctionDef):
        decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
        first = node.body[1 if ast.get_docstring(node) is not None else 0]
        body = source.splitlines()[first.lineno - 1 : node.end_lineno]
        lines = [*decorators, f"def {node.name}({_arguments(node.args)}):", *body]
    text = _LOCAL_ANNOTATION.sub(r"\1 = ", "\n".join(lines))
    for old, new in _FIELDS.items():
        text = text.replace(old, new)
    text = re.sub(r"\bsubject\.(model|optimizer|device)\b", r"\1", text)
    text = re.sub(r"\b(?:fsdp1|fsdp2|private)\.(?=\w+\()", "", text)
    return re.sub(r"\bsubject\b", _SUBJECT, text)


def _arguments(arguments: ast.arguments) -> str:
    """Names and defaults alone."""
    plain = ast.parse(f"def f({ast.unparse(arguments)}): pass").body[0]
    assert isinstance(plain, ast.FunctionDef)
    for argument in (*plain.args.args, *plain.args.kwonlyargs):
        argument.annotation = None
    return ast.unparse(plain.args)
