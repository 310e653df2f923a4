"""The checkpoint that a loading case is given: of a run of the same scenario, after two training steps.

What is in it is taken with the reference, without any path under test. Where other processes save it, they save
it as frameworks do, and leave beside it what was in it and what their next step made of it.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import assert_never

from fsdp_doctor.case import framework_saves, held_pieces, reference
from fsdp_doctor.case.held_pieces import Full
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.step_outcome import StepOutcome, outcome_of_step
from fsdp_doctor.case.trainer import Start, Trainer
from fsdp_doctor.fsdp import reader
from fsdp_doctor.matrix.axes import CheckpointFit, Offload, Phase
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Loads

EXTRA_KEY = "extra.weight"
EXTRA_SHAPE = (3, 3)
# Of AdamW: not those of the run that is saved, so that a load which does not bring them is seen.
_OTHER_OPTIONS = {"lr": 5e-4, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A run between two steps. Tensors are on the host.

    weights: every name of the state dict. tied_names: those of them that are not a parameter's first.
    missing_key: the name that a checkpoint which lacks one lacks.
    moments: ``<parameter>.<state>``, unsharded. options: of the one param group.
    raw_optimizer: this rank's ``optimizer.state_dict()``. data_position: this rank's.
    went_on: what the run's next step made of it; None where it ran on another number of ranks, which reduce other
        batches.
    directory: what the frameworks' own ways of saving left, in processes that are gone; None where nobody saved it.
    """

    weights: Full
    tied_names: frozenset[str]
    missing_key: str
    moments: Full
    options: Mapping[str, Any]
    raw_optimizer: dict[str, Any]
    data_position: torch.Tensor
    went_on: StepOutcome | None
    directory: pathlib.Path | None = None


def source_of(scenario: Scenario) -> Scenario:
    """The scenario whose run is saved: the same one as far as it decides the bits of a training step."""
    return scenario.changed(
        offload=Offload.of(policy=scenario.policy),
        staging="unstaged",
        phase="trained",
        transfer="blocking",
        init="materialized",
        checkpoint="exact",
        context="ordinary",
    )


def take(scenario: Scenario, runtime: Runtime, save: Callable[[Trainer], None] = lambda trainer: None) -> Checkpoint:
    """Runs the source of a scenario for three steps, and saves it after the second. Every rank must call it.

    save: called after the second step too.
    """
    trainer = Trainer(source_of(scenario), runtime, start=Start(same_batches=_replicas_part(scenario)))
    trainer.step()
    trainer.step()
    truth = reference.take(trainer.model, trainer.optimizer, runtime)
    held = reader.read(trainer.model)
    tied = [names for names in held.all_names() if len(names) > 1]
    (group,) = trainer.optimizer.state_dict()["param_groups"]
    raw_optimizer = copy.deepcopy(trainer.optimizer.state_dict())
    data_position = trainer.data_position()
    save(trainer)
    return Checkpoint(
        weights=truth.full,
        tied_names=frozenset(name for names in tied for name in names[1:]),
        missing_key=max(set(truth.parameters) - {name for names in tied for name in names}),
        moments=truth.optimizer,
        options={key: value for key, value in group.items() if key != "params"},
        raw_optimizer=raw_optimizer,
        data_position=data_position,
        went_on=outcome_of_step(trainer),
    )


def directory_of(scenario: Scenario, scratch: pathlib.Path) -> pathlib.Path:
    """Where the processes that save the checkpoint of a scenario leave it."""
    return scratch / "saved" / f"{source_of(scenario).id.replace('/', '-')}-{scenario.checkpoint}"


def save(scenario: Scenario, runtime: Runtime) -> None:
    """Takes the checkpoint of a scenario and leaves it for processes that come later. Every rank must call it."""
    directory = directory_of(scenario, runtime.scratch)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = take(scenario, runtime, lambda trainer: framework_saves.save(trainer, directory))
    if runtime.rank == 0:
        torch.save((runtime.world_size, dataclasses.replace(checkpoint, raw_optimizer={})), directory / "whole.pt")
    torch.save((checkpoint.data_position, checkpoint.went_on), directory / f"rank_{runtime.rank}.pt")


def _read(scenario: Scenario, runtime: Runtime) -> Checkpoint:
    """What :func:`save` left. A rank more than there were then goes on with the data of one of them."""
    directory = directory_of(scenario, runtime.scratch)
    saved_by: int
    checkpoint: Checkpoint
    saved_by, checkpoint = torch.load(directory / "whole.pt", weights_only=False)
    position, went_on = torch.load(directory / f"rank_{runtime.rank % saved_by}.pt")
    return dataclasses.replace(
        checkpoint,
        data_position=position,
        went_on=went_on if saved_by == runtime.world_size else None,
        directory=directory,
    )


def as_saved(checkpoint: Checkpoint, fit: CheckpointFit) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint of that fit has them; fresh tensors on the host."""
    saved = {name: tensor.clone() for name, tensor in checkpoint.weights.items()}
    match fit:
        case (
            CheckpointFit.EXACT
            | CheckpointFit.FP32
            | CheckpointFit.TIED_TWICE
            | CheckpointFit.OTHER_RUN
            | CheckpointFit.OTHER_WORLD
        ):
            return saved
        case CheckpointFit.BF16:
            return {name: t.bfloat16() if t.is_floating_point() else t for name, t in saved.items()}
        case CheckpointFit.EXTRA_KEY:
            return {**saved, EXTRA_KEY: torch.ones(EXTRA_SHAPE)}
        case CheckpointFit.MISSING_KEY:
            return {name: tensor for name, tensor in saved.items() if name != checkpoint.missing_key}
        case CheckpointFit.TIED_ONCE:
            return {name: tensor for name, tensor in saved.items() if name not in checkpoint.tied_names}
        case _:
            assert_never(fit)


def right_weights(checkpoint: Checkpoint, fit: CheckpointFit) -> dict[str, torch.Tensor]:
    """What the model is to hold after a load of a checkpoint of that fit, in the dtypes of its parameters.

    What the checkpoint lacks is left out.
    """
    saved = {name: checkpoint.weights[name] for name in checkpoint.tied_names} | as_saved(checkpoint, fit)
    return {name: saved[name].to(own.dtype) for name, own in checkpoint.weights.items() if name in saved}


def start_of(scenario: Scenario) -> Start:
    """What a trainer is before a load: other weights, or none yet, and other options than the run that was saved."""
    return Start(
        weights="meta" if scenario.init == "meta" else "other",
        options=_OTHER_OPTIONS,
        same_batches=_replicas_part(scenario),
    )


def _replicas_part(scenario: Scenario) -> bool:
    """Whether each rank would train a model of its own: FSDP1 reduces no gradient over a shard group of one.

    A checkpoint has one set of weights, so there every rank is given the same batches.
    """
    return scenario.version == 1 and scenario.sharding == "size1"


class Saved:
    """The checkpoints of one generation of workers, each taken once. Every rank must call every method alike."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._checkpoints: dict[tuple[Scenario, str], Checkpoint] = {}
        self._next_steps: dict[tuple[Scenario, Phase, CheckpointFit, bool], StepOutcome] = {}

    def of(self, scenario: Scenario) -> Checkpoint:
        """The checkpoint that a load in the scenario is given."""
        key = (source_of(scenario), scenario.checkpoint if scenario.checkpoint.saved_elsewhere else "")
        if key not in self._checkpoints:
            self._checkpoints[key] = (_read if scenario.checkpoint.saved_elsewhere else take)(scenario, self._runtime)
        return self._checkpoints[key]

    def start(self, scenario: Scenario, start: Start) -> Trainer:
        """A trainer of the scenario, trained where its phase says so."""
        trainer = Trainer(scenario, self._runtime, start=start)
        if scenario.phase == "trained":
            trainer.step()
            trainer.step()
            trainer.resume()
        return trainer

    def next_step(self, scenario: Scenario, loads: Loads) -> StepOutcome:
        """What the step after a load must end in: that of the run that was saved and went on, if it can be compared.

        That of a model with the same state, written by hand, where weights alone are loaded or the run that was
        saved had another number of ranks.
        """
        checkpoint = self.of(scenario)
        with_optimizer = loads != "model"
        if with_optimizer and checkpoint.went_on is not None:
            return checkpoint.went_on
        key = (source_of(scenario), scenario.phase, scenario.checkpoint, with_optimizer)
        if key not in self._next_steps:
            self._next_steps[key] = self._step_from(checkpoint, scenario, with_optimizer)
        return self._next_steps[key]

    def _step_from(self, checkpoint: Checkpoint, scenario: Scenario, with_optimizer: bool) -> StepOutcome:
        # An optimizer has a state that can be written to once it has made a step.
        source = source_of(scenario).changed(phase="trained" if with_optimizer else scenario.phase)
        trainer = self.start(source, start_of(source))
        held_pieces.write(held_pieces.of_model(trainer.model, right_weights(checkpoint, scenario.checkpoint)))
        if with_optimizer:
            moments, _ = held_pieces.of_optimizer(trainer.model, trainer.optimizer, checkpoint.moments)
            held_pieces.write(moments)
            trainer.optimizer.param_groups[0].update(checkpoint.options)
            trainer.seek(checkpoint.data_position)
        return outcome_of_step(trainer)
