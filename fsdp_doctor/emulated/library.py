"""Loads the device's C++ library, once in a process."""

from __future__ import annotations

import importlib.util
from typing import Any

from fsdp_doctor.emulated import build


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("fsdp_doctor.emulated._C", build.find_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _load()
