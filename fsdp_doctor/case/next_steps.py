"""Rehearses the next training steps of a scenario without a method, and restores the trainer to its earlier state."""

from __future__ import annotations

from typing import TypeAlias

import torch

from fsdp_doctor.case import local_pieces
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.case.training_state import StepOutcome, digest_step, list_optimizer_states, train_one_step
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.weights.fsdp import private, reader

# The facts that determine the bits of a trainer: its scenario, and whether it has a mesh. A step also has a number.
_Build: TypeAlias = tuple[Scenario, bool]
_Step: TypeAlias = tuple[_Build, int]


class Moment:
    """State of a trainer between two training steps, copied to the host: everything that a step changes."""

    def __init__(self, trainer: Trainer) -> None:
        self.num_steps = trainer.num_steps
        self._data_position = trainer.read_data_position()
        self._values = {name: places[0].to("cpu", copy=True) for name, places in _list_changing(trainer).items()}

    def restore(self, trainer: Trainer) -> None:
        """Writes the state into a trainer of the same scenario that has made at least as many steps."""
        with torch.no_grad():
            for name, places in _list_changing(trainer).items():
                for place in places:
                    place.copy_(self._values[name].view(place.shape))
        trainer.seek(self._data_position)
        trainer.num_steps = self.num_steps


class NextSteps:
    """Outcomes on this rank of the training steps that follow a case, if no method is called.

    Each step of a scenario is rehearsed once, with a model that no method has touched. Every rank must call the methods
    of this class in the same order.
    """

    def __init__(self) -> None:
        self._outcomes: dict[_Step, StepOutcome] = {}
        self._start: tuple[_Build, Moment] | None = None

    def rehearse(self, trainer: Trainer, num_steps: int) -> None:
        """Trains the next steps and restores the trainer, unless the outcomes of these steps are known.

        A trainer without a step cannot be restored, so another trainer is built for the rehearsal.
        """
        if not trainer.num_steps:
            if (_name(trainer), num_steps) not in self._outcomes:
                other = Trainer(trainer.scenario, trainer.runtime, with_mesh=trainer.with_mesh)
                self._train(other, num_steps)
            return
        if self._start is None or self._start[0] != _name(trainer):
            self._start = _name(trainer), Moment(trainer)
        if (_name(trainer), trainer.num_steps + num_steps) not in self._outcomes:
            _, start = self._start
            moment = start if start.num_steps == trainer.num_steps else Moment(trainer)
            self._train(trainer, num_steps)
            moment.restore(trainer)

    def find_outcome(self, trainer: Trainer) -> StepOutcome:
        """Returns the rehearsed outcome of the trainer's last step."""
        return self._outcomes[_name(trainer), trainer.num_steps]

    def take_back(self, trainer: Trainer) -> None:
        """Restores a trainer to the state at the beginning of its first case."""
        if self._start is not None and self._start[0] == _name(trainer):
            self._start[1].restore(trainer)

    def _train(self, trainer: Trainer, num_steps: int) -> None:
        for _ in range(num_steps):
            unsharded = train_one_step(trainer)
            self._outcomes[_name(trainer), trainer.num_steps] = digest_step(trainer, unsharded)


def _name(trainer: Trainer) -> _Build:
    return trainer.scenario, trainer.with_mesh


def _list_changing(trainer: Trainer) -> dict[str, tuple[torch.Tensor, ...]]:
    """Lists the local tensors of each parameter, buffer and optimizer state on this rank, by name."""
    places = {piece.name: piece.everywhere for piece in local_pieces.list_model_pieces(trainer.model, {})}
    for buffer in reader.read(trainer.model).transient_buffers:
        places[buffer.names[0]] = (private.read_local_tensor(buffer.tensor).detach(),)
    for index, key, state in list_optimizer_states(trainer.optimizer):
        places[f"{key} of parameter {index}"] = (private.read_local_tensor(state).detach(),)
    return places
