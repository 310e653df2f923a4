"""Imports of torch and of what is built on it: half a million objects, all of which stay."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def of_what_stays() -> Iterator[None]:
    """For imports: Python looks for garbage in nothing that they make, neither meanwhile nor later nor in a fork.

    It would look through all of it again and again while it grows.
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
