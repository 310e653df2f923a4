"""Imports of torch and of packages built on it: half a million objects that stay for the life of the process."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Keeps the garbage collector away from the objects that imports in this block make, also later and in forks.

    Otherwise the collector walks through all these objects again and again while they grow.
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
