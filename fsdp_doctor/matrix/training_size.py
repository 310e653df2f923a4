"""Size of a training step, which decides the memory of its activations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """batch: sequences of each rank in a step. sequence: tokens of each.

    checkpointing: whether decoder layers keep their inputs alone for the backward, and compute the rest anew.
    """

    batch: int = 2
    sequence: int = 16
    checkpointing: bool = False


SMALL_STEP = TrainingSize()
