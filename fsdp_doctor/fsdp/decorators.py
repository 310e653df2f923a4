"""Functions that run alike in every autograd mode, or without a garbage collection."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def disable_autograd(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Runs ``function`` so that nothing is recorded for a backward, and its new tensors are ordinary ones.

    Tensors that are made in inference mode can be written to only by threads in that mode, and only while it lasts.
    """
    # To leave inference mode also enables gradients, so that comes first.
    return torch.inference_mode(False)(torch.no_grad()(function))


def keep_present_modes(items: Iterator[_T]) -> Iterator[_T]:
    """Makes each item in the grad mode, and in inference mode or not, that are on now."""
    in_inference_mode, with_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run_steps() -> Iterator[_T]:
        while True:
            with torch.inference_mode(in_inference_mode), torch.set_grad_enabled(with_gradients):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
            del item

    return run_steps()


def defer_garbage_collection(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """While ``function`` runs no collection begins; where the collector is off it stays off.

    Ten thousand tensors make some hundred thousand objects at once, which Python takes for a reason to collect, several
    times over; none of them is garbage.
    """

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
