"""Prints the size of the package, its tests and its docs: ``python tests/rooms/sizes.py [CHECKOUT]``.

Rooms are the folders and files directly below the package; an arrow is a pair of rooms, one of which imports the other.
Import levels are the modules of the longest chain in which each imports the next, at its top or in a function, but not
for type checking alone. Modules that import each other are one level.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import statistics
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()


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


def list_arrows(files: list[pathlib.Path]) -> set[tuple[str, str]]:
    """Lists the pairs (importing room, imported room) of the package."""
    arrows = set()
    for file in files:
        room = (*_module_name(file).split("."), "")[1]
        names = {
            name.split(".")[1]
            for name in _imported_names(ast.parse(file.read_text()))
            if name.count(".") and name.startswith("fsdp_doctor.")
        }
        arrows |= {(room, name) for name in names if name != room and not name.startswith("__")}
    return arrows


def list_function_lengths(files: list[pathlib.Path]) -> list[int]:
    """Lists the lines of each function, with its signature and docstring."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [
        (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def main() -> None:
    for directory in ("fsdp_doctor", "tests"):
        files = sorted((ROOT / directory).rglob("*.py"))
        lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
        print(f"{directory}: {lines:,} lines of Python in {len(files)} files")
    package = sorted((ROOT / "fsdp_doctor").rglob("*.py"))
    arrows = list_arrows(package)
    arrows = {arrow for arrow in arrows if arrow[0] and not arrow[0].startswith("__")}
    print(f"rooms: {len({room for arrow in arrows for room in arrow})}, arrows: {len(arrows)}")
    print(f"import levels: {import_levels(package)}")
    print(f"median function: {statistics.median(list_function_lengths(package)):g} lines")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    print(f"docs: {sum(len(page.read_text(encoding='utf-8').split()) for page in pages):,} words in {len(pages)} pages")


if __name__ == "__main__":
    main()
