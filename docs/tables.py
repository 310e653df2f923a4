"""Writes the tables of docs/matrix.md from the axes and methods of `fsdp-doctor list`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.methods import METHODS

PAGE = pathlib.Path(__file__).resolve().with_name("matrix.md")


def fill_tables(text: str) -> str:
    """Returns the page with each table between its two comments as the package has it."""
    tables = {"axes": _list_axes(), "methods out": _list_methods("out"), "methods in": _list_methods("in")}
    for name, rows in tables.items():
        head, begin, rest = text.partition(f"<!-- {name}: written by docs/tables.py -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->")
        text = "".join((head, begin, *(f"{row}\n" for row in rows), end, tail))
    return text


def _list_axes() -> Iterator[str]:
    yield "| axis | value | meaning |\n|---|---|---|"
    for axis in AXES:
        for value, meaning in axis.values.items():
            yield f"| {axis.name if value == axis.default else ''} | `{value}` | {_escape(meaning)} |"


def _list_methods(direction: str) -> Iterator[str]:
    yield "| method | FSDP | call | used by |\n|---|---|---|---|"
    for method in METHODS:
        if method.direction == direction:
            versions = ", ".join(map(str, method.fsdp))
            yield f"| `{method.name}` | {versions} | {_escape(method.summary)} | {_escape(method.used_by)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
