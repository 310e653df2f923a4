"""Prints the size of the package and of its tests: ``python tests/rooms/sizes.py``.

Import levels are the modules of the longest chain in which each imports the next, at its top or in a function, but not
for type checking alone. Modules that import each other are one level.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _module_name(file: pathlib.Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """The modules that ``tree`` imports; where a name is imported from one, the module with the name behind it, too."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.ImportFrom(module=str() as source, names=names):
                yield from (f"{source}.{name.name}" for name in names)
                yield source
            case ast.Import(names=names):
                yield from (name.name for name in names)
        yield from _imported_names(node)


def import_levels(files: list[pathlib.Path]) -> int:
    """The number of import levels of the modules in ``files``."""
    trees = {_module_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    graph = {name: set(_imported_names(tree)) & set(trees) - {name, "fsdp_doctor"} for name, tree in trees.items()}

    @functools.cache
    def reachable(name: str) -> frozenset[str]:
        seen, waiting = set(), [name]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return frozenset(seen)

    @functools.cache
    def level(name: str) -> int:
        together = {name} | {other for other in reachable(name) if name in reachable(other)}
        below = set().union(*(graph[member] for member in together)) - together
        return 1 + max(map(level, below), default=0)

    return max(map(level, graph))


def main() -> None:
    for directory in ("fsdp_doctor", "tests"):
        files = sorted((ROOT / directory).rglob("*.py"))
        lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
        print(f"{directory}: {lines:,} lines of Python in {len(files)} files")
    print(f"import levels: {import_levels(sorted((ROOT / 'fsdp_doctor').rglob('*.py')))}")


if __name__ == "__main__":
    main()
