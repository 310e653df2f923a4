"""Strides of contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence


def compute_row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Computes the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
