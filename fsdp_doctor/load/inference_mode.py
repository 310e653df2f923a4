"""What a load makes or writes to must be ordinary tensors, wherever it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_of_inference_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Views that are made inside cannot be written to by other threads, and parameters made there cannot be trained."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run
