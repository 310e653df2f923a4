"""The adapters by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fsdp_doctor.frameworks.adapter import Adapter
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName

_MODULES: Mapping[FrameworkName, str] = {"accelerate": "on_accelerate", "verl": "on_verl"}


def adapter_of(name: FrameworkName) -> Adapter:
    """The adapter; its framework is not imported yet."""
    adapter: Adapter = importlib.import_module(f"fsdp_doctor.frameworks.{_MODULES[name]}").ADAPTER
    return adapter
