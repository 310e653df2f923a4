"""The table of checks. Each check examines a checkpoint that was read and scanned, and yields a symptom per problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from fsdp_doctor.checkpoints.checks.adapters import find_lora
from fsdp_doctor.checkpoints.checks.classes import compare_sides, compare_with_formulas, find_lost_outside
from fsdp_doctor.checkpoints.checks.copies import compare_averages, compare_masters, list_parts
from fsdp_doctor.checkpoints.checks.equal import (
    find_constants,
    find_equal_layers,
    find_equal_projections,
    find_equal_stacks,
    find_equal_tensors,
)
from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.checks.modules import (
    compare_gates,
    compare_positions,
    find_lost_position_bias,
    find_lost_statistics,
    find_stale_copies,
    find_transposed,
)
from fsdp_doctor.checkpoints.checks.optimizer import compare_optimizer
from fsdp_doctor.checkpoints.checks.quantized import compare_scales, find_codes
from fsdp_doctor.checkpoints.checks.ranks import compare_ranks, find_copied_rows, find_foreign_ranks, find_gaps
from fsdp_doctor.checkpoints.checks.structure import (
    compare_with_class,
    compare_with_config,
    compare_with_shards,
    compare_with_tokenizer,
    find_experts,
    find_flat_shards,
    find_missing_from_part,
    find_missing_settings,
    find_missing_tensors,
    find_mixed_dtypes,
    find_odd_shapes,
    find_wrapped_names,
)
from fsdp_doctor.checkpoints.checks.training_state import (
    compare_counts,
    compare_steps,
    compare_trainer_step,
    find_missing_random_states,
    find_torn_steps,
    judge_random_states,
    judge_settings,
    judge_settings_beside,
)
from fsdp_doctor.checkpoints.checks.values import find_nonfinite, find_other_sizes
from fsdp_doctor.checkpoints.checks.zeros import find_zeros
from fsdp_doctor.checkpoints.record import State
from fsdp_doctor.checkpoints.troubles import Symptom

_Check: TypeAlias = Callable[[CheckpointEvidence, State], Iterator[Symptom]]


CHECKS: tuple[_Check, ...] = (
    find_foreign_ranks,
    find_gaps,
    compare_ranks,
    find_copied_rows,
    compare_steps,
    judge_settings,
    judge_random_states,
    find_nonfinite,
    find_other_sizes,
    find_codes,
    compare_scales,
    find_zeros,
    find_constants,
    find_equal_layers,
    find_equal_stacks,
    find_equal_tensors,
    find_equal_projections,
    find_experts,
    find_lora,
    find_wrapped_names,
    find_flat_shards,
    compare_with_config,
    compare_with_class,
    compare_with_formulas,
    compare_sides,
    find_lost_outside,
    find_odd_shapes,
    find_missing_tensors,
    find_mixed_dtypes,
    find_lost_statistics,
    find_transposed,
    compare_gates,
    compare_positions,
    find_lost_position_bias,
    find_stale_copies,
    compare_averages,
    compare_masters,
    find_torn_steps,
)
CHECKS_OF_ALL: tuple[Callable[[CheckpointEvidence], Iterator[Symptom]], ...] = (
    compare_optimizer,
    compare_trainer_step,
    compare_counts,
    judge_settings_beside,
    find_missing_random_states,
    compare_with_tokenizer,
    find_missing_settings,
    compare_with_shards,
)


# Checks that look only at a model's values and names, and so also apply to copies of the model, such as an average.
_CHECKS_OF_PARTS: tuple[_Check, ...] = (
    find_other_sizes,
    find_zeros,
    find_constants,
    find_equal_layers,
    find_equal_tensors,
    find_equal_projections,
    find_odd_shapes,
    find_lost_statistics,
    find_transposed,
    compare_gates,
)


def run_checks(evidence: CheckpointEvidence) -> list[Symptom]:
    found = [symptom for state in evidence.checkpoint.states for check in CHECKS for symptom in check(evidence, state)]
    for state in evidence.checkpoint.states:
        for part in list_parts(state):
            found += [symptom for check in _CHECKS_OF_PARTS for symptom in check(evidence, part)]
            found += find_missing_from_part(state, part)
    return found + [symptom for check in CHECKS_OF_ALL for symptom in check(evidence)]
