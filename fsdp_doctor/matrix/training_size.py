"""Size of a training step, which decides the memory of its activations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """Sequences of each rank in a step (batch), and tokens of a sequence.

    checkpointing: whether decoder layers keep only their inputs for the backward, and compute the rest anew.
    """

    batch: int = 2
    sequence: int = 16
    checkpointing: bool = False


SMALL_STEP = TrainingSize()
