"""Functions that compute alike in every grad mode and in inference mode."""

from __future__ import annotations

from collections.abc import Callable
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
