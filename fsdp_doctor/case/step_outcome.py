"""What one training step makes of this rank's shards and moments, as digests by which two runs can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from fsdp_doctor.case import held_pieces
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.case.training_state import digests_of
from fsdp_doctor.fsdp import private

StepOutcome = dict[str, str]


def outcome_of_step(trainer: Trainer) -> StepOutcome:
    """Trains one step; by name the digest of each shard and of each of its moments. Every rank must call it."""
    with deterministic():
        trainer.step()
        trainer.runtime.synchronize()
    return outcome_of(trainer.model, trainer.optimizer)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Training steps in it use torch's deterministic algorithms: two runs from the same state end in the same bits."""
    mode, settings = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    filling = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        torch.set_deterministic_debug_mode(mode)


def outcome_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepOutcome:
    """By name the digest of each shard on this rank and of each of its moments. The device must be synchronized."""
    return digests_of({name: _with_one_nan(value) for name, value in _values(model, optimizer)})


def _with_one_nan(value: torch.Tensor) -> torch.Tensor:
    """Of a dtype to which a load may have rounded: which NaN it made depends on the device and its instructions."""
    return torch.where(value.isnan(), torch.nan, value) if value.dtype in (torch.bfloat16, torch.float16) else value


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((piece.name, piece.held) for piece in held_pieces.of_model(model, {}))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{key} of parameter {index}", private.local_tensor(value).detach()


def differences(actual: StepOutcome, expected: StepOutcome) -> list[str]:
    """The names of what differs, and of what one of the two lacks."""
    return [name for name in sorted(actual | expected) if actual.get(name) != expected.get(name)]
