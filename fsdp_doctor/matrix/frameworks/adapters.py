"""Finds adapters: this package's adapters by name, and others by ``module:ATTRIBUTE``.

An adapter's table lies next to its module, with the same stem. No adapter is imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from dataclasses import dataclass
from importlib.machinery import PathFinder

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import describe_nearest

_ROOM = pathlib.Path(__file__).parents[2] / "frameworks"
BUILT_IN = tuple(sorted(table.stem.removeprefix("on_") for table in _ROOM.glob("on_*.toml")))


@dataclass(frozen=True)
class AdapterPlace:
    """Place of an adapter: an attribute of a module, and the module's file."""

    module: str
    attribute: str
    file: pathlib.Path

    @property
    def table(self) -> pathlib.Path:
        return self.file.with_suffix(".toml")

    @property
    def template(self) -> pathlib.Path:
        """Path of the template for a case's script; the file need not exist."""
        return self.file.with_suffix(".py.jinja")


@functools.cache
def locate_adapter(name: str) -> AdapterPlace:
    """Finds the adapter of a framework by its name, or by ``module:ATTRIBUTE``. Raises UsageError if there is none."""
    if name not in BUILT_IN and ":" not in name:
        raise UsageError(
            f"there is no framework {name!r}{describe_nearest(name, BUILT_IN)}; use {', '.join(BUILT_IN)}, "
            "or module:ADAPTER for an adapter of your own"
        )
    spelled = f"fsdp_doctor.frameworks.on_{name}:ADAPTER" if name in BUILT_IN else name
    module, _, attribute = spelled.partition(":")
    file = _find_file(module)
    if file is None:
        raise UsageError(f"framework {name!r}: there is no module {module!r} here; set PYTHONPATH to where it is")
    return AdapterPlace(module, attribute, file)


def _find_file(module: str) -> pathlib.Path | None:
    """Finds the source of a module without importing its parent packages; None if there is no such module."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except ValueError:
        return None
    for part in rest:
        spec = PathFinder.find_spec(part, spec.submodule_search_locations) if spec else None
    return pathlib.Path(spec.origin) if spec and spec.has_location and spec.origin else None
