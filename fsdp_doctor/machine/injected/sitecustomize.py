"""Executes files of this program in a user's job after modules are imported.

The directory of this file is first on the job's PYTHONPATH.

The variable FSDP_DOCTOR_AFTER_IMPORT, made by :mod:`fsdp_doctor.machine.injection`, is a JSON object that maps the name
of a module to a file. The file's ``start(module name)`` is called when the module has been executed.

Python imports a module named ``sitecustomize`` when it starts. If the user has such a module, which this file hides,
this file executes the user's module, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImports:
    """An import hook that calls ``start`` of a module's file after the import. Other finders find the module."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.pop(name, None)
        if file is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_start(module: ModuleType) -> None:
            execute(module)
            stem = os.path.splitext(os.path.basename(file))[0]
            _load(f"_fsdp_doctor_{stem}", file).start(name)

        spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


def _load(name: str, file: str) -> ModuleType:
    """Executes a file as the module ``name``, which works even if the job's interpreter cannot find this package."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_hidden() -> None:
    """Executes the ``sitecustomize`` module that Python would have imported if this file did not exist."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin is not None:
        del sys.modules["sitecustomize"]
        _load("sitecustomize", spec.origin)


_run_hidden()
# The finder is inserted last, so that it comes before finders that the user's sitecustomize has inserted.
if "FSDP_DOCTOR_AFTER_IMPORT" in os.environ:
    sys.meta_path.insert(0, _AfterImports(json.loads(os.environ["FSDP_DOCTOR_AFTER_IMPORT"])))
