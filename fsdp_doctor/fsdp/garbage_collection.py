"""Python's garbage collector, kept from going through the whole heap while a model is read.

Ten thousand tensors make some hundred thousand objects at once, which Python takes for a reason to
collect, several times over; none of them is garbage.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_garbage_collection(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """While ``function`` runs no collection begins; where the collector is off it stays off."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
