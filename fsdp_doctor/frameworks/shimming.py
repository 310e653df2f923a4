"""How a framework is made to find the emulated device: each change by the name under which the report lists it."""

from __future__ import annotations

import importlib
import os
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix


class Shimming:
    """Changes what a framework's matrix lists as its shims. Used as a context, at whose end all must have been."""

    def __init__(self, matrix: FrameworkMatrix) -> None:
        self._framework = matrix.name
        self._open = {shim.name for shim in matrix.shims}

    def __enter__(self) -> Shimming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None and self._open:
            raise AssertionError(f"{self._framework}: its matrix lists {', '.join(sorted(self._open))}, not changed")

    def replace(self, name: str, value: Any) -> Any:
        """Puts ``value`` in the place of ``module:qualified.name``, and returns what was there.

        Raises AttributeError or ImportError where it is not there.
        """
        self._take(name)
        module, _, qualified = name.partition(":")
        *owners, last = qualified.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        before = getattr(owner, last)
        setattr(owner, last, value)
        return before

    def set_variable(self, name: str, value: str) -> None:
        self._take(name)
        os.environ[name] = value

    def note(self, name: str) -> None:
        """For a plug-in or a stand-in that the adapter registers itself, after the framework took it."""
        self._take(name)

    def translate_backend(self) -> None:
        """The process group of a framework that asks for nccl is of the emulated device's backend."""
        original = dist.init_process_group

        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
            # A group that is bound to a device is split by DeviceMesh, which the emulated backend cannot do.
            kwargs.pop("device_id", None)
            if isinstance(backend, str):
                backend = backend.replace("cuda:nccl", "emulated:emulated").replace("nccl", "emulated")
            return original(backend, *args, **kwargs)

        self.replace("torch.distributed:init_process_group", init_process_group)
        dist.distributed_c10d.init_process_group = init_process_group

    def _take(self, name: str) -> None:
        if name not in self._open:
            raise AssertionError(f"{self._framework}: its matrix does not list {name} as a shim")
        self._open.remove(name)
