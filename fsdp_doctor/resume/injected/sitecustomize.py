"""First on PYTHONPATH of a job under ``fsdp-doctor resume``: starts the recorder once torch is imported.

Python imports a module of this name when it starts. It hides a ``sitecustomize`` of the user's, which is run then.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """A finder that lets others find torch, and starts the recorder when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            execute(module)
            _start_recorder()

        spec.loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def _load(name: str, file: str) -> ModuleType:
    """Executes a file as the module ``name``: the job's interpreter need not find this package."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _start_recorder() -> None:
    file = os.path.join(os.path.dirname(_HERE), "recorder.py")
    _load("_fsdp_doctor_recorder", file).start()


def _run_hidden() -> None:
    """Runs the ``sitecustomize`` that Python would have imported without this one."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin is not None:
        _load("sitecustomize", spec.origin)


if "FSDP_DOCTOR_RESUME" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden()
