"""Imports modules without garbage collection and without a CUDA context, and finds source files without an import."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Iterator

# Packages that make a CUDA context when they are imported.
_MAKE_CONTEXTS = ("torchao", "bitsandbytes")
# Modules whose functions keep the answer to whether a package is installed.
_KEEP_WHAT_IS_INSTALLED = ("transformers.utils.import_utils", "accelerate.utils.imports", "peft.import_utils")


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Excludes from garbage collection the objects that imports in this block create, for good, and also in forks.

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


@contextlib.contextmanager
def import_before_forks() -> Iterator[None]:
    """Keeps the imports in its block from making a CUDA context, so that forks of this process can use CUDA.

    A fork cannot use CUDA if this process has a context. torchao and bitsandbytes, which transformers and peft import
    where they are installed, make a context when they are imported, because they ask for the properties of the devices.
    On a machine with CUDA, this block makes torchao and bitsandbytes seem not installed; a fork can import them.
    """
    # Without this variable, torch.cuda.is_available() would initialize CUDA in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    hidden: list[str] = []
    try:
        with freeze_imports():
            import torch

            if torch.cuda.is_available():
                hidden = [name for name in _MAKE_CONTEXTS if name not in sys.modules]
                sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None, which Python documents
            yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        for module in (sys.modules[name] for name in _KEEP_WHAT_IS_INSTALLED if hidden and name in sys.modules):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


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
