"""The rooms of the package: which may import which, and which names are defined once."""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

from program import run
from support.rooms import EMULATED, ROOMS, ROOMS_OF_WEIGHTS, WITHOUT_TORCH

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "fsdp_doctor"
# What the package's root offers to users: reached by the two entry points and nobody else.
ROOT = ("__init__", "__main__")

MODULES = sorted(PACKAGE.rglob("*.py"))


def _name(module: pathlib.Path) -> str:
    """Returns the dotted name below the package; a room's own ``__init__`` has the room's name."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _room(name: str) -> str:
    return name.split(".")[0]


def _tree(module: pathlib.Path) -> ast.Module:
    return ast.parse(module.read_text(), str(module))


def _imports(module: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name below the package) of every import of ours, wherever in the module it is."""
    for node in ast.walk(_tree(module)):
        match node:
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, "a relative import, which this test does not follow"
            case ast.ImportFrom(module=str() as source, names=names) if source.split(".")[0] == "fsdp_doctor":
                below = source.split(".")[1:]
                yield from (
                    (node.lineno, ".".join([*below, name.name])) for name in names if name.name != "__version__"
                )
            case ast.Import(names=names):
                for name in names:
                    if name.name.startswith("fsdp_doctor."):
                        yield node.lineno, name.name.split(".", 1)[1]


def _rooms_allowed(room: str) -> set[str]:
    if room == EMULATED:
        return {EMULATED}
    # Registering the emulated device is an import of it; `machine` alone knows when.
    return {*ROOMS[: ROOMS.index(room) + 1], *({EMULATED} if room == "machine" else ())}


def test_a_module_imports_only_rooms_before_its_own() -> None:
    upwards = [
        f"{_name(module)}, line {line}: {imported}"
        for module in MODULES
        if _name(module) not in ROOT
        for line, imported in _imports(module)
        if _room(imported) not in _rooms_allowed(_room(_name(module)))
    ]
    assert upwards == []


def test_a_module_of_the_wing_imports_only_its_rooms_before() -> None:
    modules = [module for module in MODULES if _name(module).startswith("weights.")]
    upwards = [
        f"{_name(module)}, line {line}: {imported}"
        for module in modules
        for line, imported in _imports(module)
        if imported.startswith("weights.")
        and ROOMS_OF_WEIGHTS.index(imported.split(".")[1]) > ROOMS_OF_WEIGHTS.index(_name(module).split(".")[1])
    ]
    assert len(modules) > 50
    assert upwards == []


def test_every_room_has_a_place_in_the_order() -> None:
    assert {_room(_name(module)) for module in MODULES} == {*ROOMS, EMULATED, *ROOT}


def _public_types(module: pathlib.Path) -> Iterator[str]:
    """Names of the classes and type aliases that stand at the top of a module and have no leading underscore."""
    for node in _tree(module).body:
        match node:
            case ast.ClassDef(name=name):
                found = name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                found = name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id=generic))) if (
                generic in ("Literal", "Callable", "Mapping", "Union", "Optional", "dict", "tuple", "list")
            ):
                found = name
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.BitOr())) if name[:1].isupper():
                found = name
            case _:
                continue
        if not found.startswith("_"):
            yield found


def test_a_public_type_is_defined_once() -> None:
    where: dict[str, list[str]] = {}
    for module in MODULES:
        for name in _public_types(module):
            where.setdefault(name, []).append(_name(module))
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def test_a_module_that_the_command_line_needs_can_be_imported_without_torch() -> None:
    modules = [
        f"fsdp_doctor.{name}" for name in map(_name, MODULES) if name in WITHOUT_TORCH or _room(name) in WITHOUT_TORCH
    ]
    code = "import importlib, sys; sys.modules['torch'] = None; print(*map(importlib.import_module, sys.argv[1:]))"
    done = run(sys.executable, "-c", code, *modules)
    assert (done.code, done.stdout.count("<module ")) == (0, len(modules)), done.stderr
    assert len(modules) > 50
