"""The table of checks: each looks at a checkpoint that was read and scanned, and yields what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

from fsdp_doctor.checkpoints.checks.evidence import CheckpointEvidence
from fsdp_doctor.checkpoints.checks.optimizer import compare_optimizer
from fsdp_doctor.checkpoints.checks.ranks import compare_ranks, find_copied_rows, find_foreign_ranks, find_gaps
from fsdp_doctor.checkpoints.checks.structure import (
    compare_with_class,
    compare_with_config,
    compare_with_shards,
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
    judge_random_states,
    judge_settings,
    judge_settings_beside,
)
from fsdp_doctor.checkpoints.checks.values import (
    find_constants,
    find_equal_layers,
    find_equal_tensors,
    find_lora,
    find_nonfinite,
    find_other_sizes,
    find_zeros,
)
from fsdp_doctor.checkpoints.names import strip_prefixes
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
    find_zeros,
    find_constants,
    find_equal_layers,
    find_equal_tensors,
    find_experts,
    find_lora,
    find_wrapped_names,
    find_flat_shards,
    compare_with_config,
    compare_with_class,
    find_odd_shapes,
    find_missing_tensors,
    find_mixed_dtypes,
)
CHECKS_OF_ALL: tuple[Callable[[CheckpointEvidence], Iterator[Symptom]], ...] = (
    compare_optimizer,
    compare_trainer_step,
    compare_counts,
    judge_settings_beside,
    find_missing_settings,
    compare_with_shards,
)


# Those that look at a model's values and names, and so at another copy of it, such as an average.
_CHECKS_OF_PARTS: tuple[_Check, ...] = (
    find_other_sizes,
    find_zeros,
    find_constants,
    find_equal_layers,
    find_equal_tensors,
    find_odd_shapes,
)


def run_checks(evidence: CheckpointEvidence) -> list[Symptom]:
    found = [symptom for state in evidence.checkpoint.states for check in CHECKS for symptom in check(evidence, state)]
    for state in evidence.checkpoint.states:
        for part in _list_parts(state):
            found += [symptom for check in _CHECKS_OF_PARTS for symptom in check(evidence, part)]
            found += find_missing_from_part(state, part)
    return found + [symptom for check in CHECKS_OF_ALL for symptom in check(evidence)]


def _list_parts(state: State) -> Iterator[State]:
    """Lists the parts of the state that are not the model but have its names, such as an average of the weights."""
    names = {tensor.parameter for tensor in state.select("model")}
    for part, count in state.left_out.items():
        head = tuple(part.split(".")) if part else ()
        tensors = {path: tensor for path, tensor in state.tensors.items() if head and path[: len(head)] == head}
        of_names = strip_prefixes([".".join(path[len(head) :]) for path in tensors])
        if count > 1 and 2 * len(names & set(of_names.values())) > len(of_names):
            yield dataclasses.replace(
                state,
                tensors={
                    path: dataclasses.replace(tensor, parameter=of_names[".".join(path[len(head) :])])
                    for path, tensor in tensors.items()
                },
                roles=dict.fromkeys(tensors, "model"),
                head=head,
                values={},
                left_out={},
            )
