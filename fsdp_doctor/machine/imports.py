"""Excludes the objects of imports from garbage collection, and finds source files of modules without an import."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import pathlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Excludes the objects that imports in this block make from garbage collection, also later and in forks.

    Otherwise the garbage collector would traverse all these objects again and again while their number grows.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if enabled:
            gc.enable()


def find_source_file(module: str, *directories: pathlib.Path) -> pathlib.Path | None:
    """Finds a module's source file in the directories and on the path, without an import.

    Returns None if the module has no source file. Raises ModuleNotFoundError if the module, or the package that
    contains it, is not found.
    """
    package, *parts = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(package, [*map(str, directories), *sys.path])
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    if not parts:
        origins = [pathlib.Path(spec.origin)] if spec.origin else []
    else:
        origins = [
            file
            for place in spec.submodule_search_locations or ()
            for file in (pathlib.Path(place, *parts).with_suffix(".py"), pathlib.Path(place, *parts, "__init__.py"))
        ]
    return next((origin for origin in origins if origin.suffix == ".py" and origin.is_file()), None)
