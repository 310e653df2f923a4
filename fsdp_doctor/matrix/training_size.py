"""Size of a training step, which determines the memory of its activations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """Size of a training step of each rank.

    batch: the number of sequences.
    sequence: the number of tokens in each sequence.
    checkpointing: whether decoder layers keep only their inputs for the backward, and compute the other activations
        again.
    """

    batch: int = 2
    sequence: int = 16
    checkpointing: bool = False


SMALL_STEP = TrainingSize()
