"""Functions that compute alike in every grad mode and in inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_autograd(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """While ``function`` runs nothing is recorded for a backward, and what it makes are ordinary tensors.

    Tensors that are made in inference mode can be written to only by threads that are in it, and only inside of it.
    """
    # To leave inference mode also enables gradients, so that comes first.
    return torch.inference_mode(False)(torch.no_grad()(function))


def in_present_modes(items: Iterator[_T]) -> Iterator[_T]:
    """The same items: what makes them runs in the grad mode, and in inference mode or not, that are on now."""
    in_inference_mode, with_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def steps() -> Iterator[_T]:
        while True:
            with torch.inference_mode(in_inference_mode), torch.set_grad_enabled(with_gradients):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
            del item

    return steps()
