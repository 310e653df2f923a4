"""The table of checks: each looks at a checkpoint that was read and scanned, and yields what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.checks.ranks import compare_ranks, find_foreign_ranks, find_gaps
from fsdp_doctor.checkpoints.checks.structure import (
    compare_with_config,
    compare_with_shards,
    find_experts,
    find_flat_shards,
    find_missing_settings,
    find_missing_tensors,
    find_mixed_dtypes,
    find_wrapped_names,
)
from fsdp_doctor.checkpoints.checks.training_state import compare_optimizer, compare_steps, compare_trainer_step
from fsdp_doctor.checkpoints.checks.values import (
    find_equal_layers,
    find_lora,
    find_nonfinite,
    find_other_sizes,
    find_zeros,
)
from fsdp_doctor.checkpoints.record import State
from fsdp_doctor.checkpoints.troubles import Symptom

_Check: TypeAlias = Callable[[CheckpointEvidence, State], Iterator[Symptom]]


CHECKS: tuple[_Check, ...] = (
    find_foreign_ranks,
    find_gaps,
    compare_ranks,
    compare_steps,
    find_nonfinite,
    find_other_sizes,
    find_zeros,
    find_equal_layers,
    find_experts,
    find_lora,
    find_wrapped_names,
    find_flat_shards,
    compare_with_config,
    find_missing_tensors,
    find_mixed_dtypes,
)
CHECKS_OF_ALL: tuple[Callable[[CheckpointEvidence], Iterator[Symptom]], ...] = (
    compare_optimizer,
    compare_trainer_step,
    find_missing_settings,
    compare_with_shards,
)


def run_checks(evidence: CheckpointEvidence) -> list[Symptom]:
    found = [symptom for state in evidence.checkpoint.states for check in CHECKS for symptom in check(evidence, state)]
    return found + [symptom for check in CHECKS_OF_ALL for symptom in check(evidence)]
