"""One loading case on one rank: other weights, the offload, the path, every shard, then the step that must follow."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.case import held_pieces, lora_reference, models
from fsdp_doctor.case.bitwise import compare
from fsdp_doctor.case.case_run import Assignment, CaseRun
from fsdp_doctor.case.checkpoint_forms import CheckpointForms
from fsdp_doctor.case.checkpoints import EXTRA_KEY, Checkpoint, Saved, right_weights, start_of
from fsdp_doctor.case.loaded_state import LoadedState, held_by, optimizer_problems
from fsdp_doctor.case.paths.arguments import PathArguments
from fsdp_doctor.case.problem_notes import first_names
from fsdp_doctor.case.step_outcome import differences, outcome_of, train_one_step
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.verdict.records import Problem, ProblemKind
from fsdp_doctor.verdict.tracebacks import failure_from


class LoadingRun(CaseRun):
    """A path that loads weights, the optimizer's state, or both.

    A checkpoint that does not fit is refused on every rank, or loaded right: nothing between.
    """

    def __init__(self, assignment: Assignment, saved: Saved) -> None:
        super().__init__(assignment)
        self._saved = saved
        self._fit = assignment.case.scenario.checkpoint
        self._must_fit = assignment.case.scenario.checkpoint.must_load

    def _new_trainer(self) -> Trainer:
        self._enter("checkpoint")
        self._checkpoint: Checkpoint = self._saved.of(self._case.scenario)
        self._right = right_weights(self._checkpoint, self._fit)
        self._enter("build")
        trainer = self._saved.start(self._case.scenario, start_of(self._case.scenario))
        # What the path does not load has been loaded already.
        if self._contract.loads == "optimizer":
            pieces = held_pieces.of_model(trainer.model, self._right)
            held_pieces.write(pieces)
            self._right = {name: self._right[name].to(piece.held.dtype) for piece in pieces for name in piece.names}
        elif self._contract.weights == "adapter":
            base = {name: full for name, full in self._right.items() if not lora_reference.is_adapter(name)}
            held_pieces.write(held_pieces.of_model(trainer.model, base))
        return trainer

    def _is_reusable(self, trainer: Trainer) -> bool:
        return False

    def _bring_to_state(self, trainer: Trainer) -> None:
        self._enter("checkpoint")
        self._state = CheckpointForms(self._checkpoint, self._fit, trainer, self._scratch).state(self._contract)
        self._enter("offload")
        trainer.offload()
        if self._case.scenario.staging == "staged":
            self._enter("staging")
            trainer.stage()
        self._enter("fingerprint")
        self._loaded = LoadedState(
            trainer.model,
            self._right,
            device=self._runtime.device,
            parameter_device=torch.device("cpu") if self._case.scenario.policy else self._runtime.device,
            buffers=self._transient_buffers(),
            left_alone=self._checkpoint.missing_key if self._fit == "missing-key" else "",
            watches=self._watches_state,
        )

    def _arguments(self, trainer: Trainer) -> PathArguments:
        given = super()._arguments(trainer)
        return dataclasses.replace(given, state=self._state, buffers=self._transient_buffers())

    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        result = self._load(call, owned)
        if self.record.refusal:
            return
        self._enter("verify")
        self._runtime.synchronize()
        reported = () if self._contract.strict else _missing_keys(result)
        self._add(problems=self._loaded.problems(reported), num_tensors=len(self._right))
        if self._fit == "extra-key" and self._contract.strict:
            self._note("incomplete", f"{EXTRA_KEY} of the checkpoint, which the model has not, was dropped in silence")
        if self._contract.loads != "model":
            moments, options = self._checkpoint.moments, self._checkpoint.options
            self._add(problems=optimizer_problems(trainer.model, trainer.optimizer, moments, [options]))

    def _transient_buffers(self) -> dict[str, torch.Tensor]:
        scenario = self._case.scenario
        return models.transient_buffers(scenario.model, scenario.dims, self._runtime.custom_model)

    def _load(self, call: Callable[[], Any], owned: bool) -> Any:
        """Runs the path. Where every rank refuses a checkpoint that does not fit, the record says so."""
        self._enter("load")
        allocated = self._runtime.allocated_bytes() if self._watches_state and owned else None
        self._runtime.reset_peak()
        start = time.perf_counter()
        try:
            result = call()
        except SystemExit:
            raise
        except BaseException as error:
            # torch's CheckpointException is no Exception.
            if self._must_fit:
                raise
            self._refuse(error)
            return None
        if self._watches_state:
            self._runtime.synchronize()
        peak = self._runtime.peak_bytes()
        extra = peak - allocated if peak is not None and allocated is not None else None
        self._add(seconds=time.perf_counter() - start, peak_extra_bytes=extra)
        if not self._must_fit:
            self._refused_everywhere(False)
        return result

    def _refuse(self, error: BaseException) -> None:
        """Takes note that this rank did not load the checkpoint. Raises ``error`` if another rank did, or went away."""
        # The supervisor may have to end the others, which wait: it must know why.
        self._add(failure=failure_from(error))
        self._report(self.record)
        with contextlib.suppress(Exception):
            if self._refused_everywhere(True):
                directory = self._checkpoint.directory or self._scratch
                told = failure_from(error).summary.replace(str(directory), "the checkpoint")
                self._add(refusal=told)
                return
        raise error

    def _refused_everywhere(self, mine: bool) -> bool:
        self._torch_functions.restore()
        flags = torch.tensor([int(mine)], device="cpu")
        dist.all_reduce(flags, group=self._runtime.control)
        return int(flags) == self._runtime.world_size

    def _train_on(self, trainer: Trainer) -> None:
        self._enter("next step")
        scenario = self._case.scenario
        if scenario.init == "meta" and not self._path.optimizer_first:
            trainer.optimizer = trainer.make_optimizer()
        trainer.resume(undo_staging=self.undoes_staging)
        self._enter("fingerprint")
        self._look_at_what_trains(trainer)
        if self._contract.loads != "model":
            trainer.seek(self._checkpoint.data_position)
        self._enter("checkpoint")
        expected = self._saved.next_step(scenario, self._contract.loads)
        self._enter("next step")
        train_one_step(trainer)
        self._enter("fingerprint")
        actual = outcome_of(trainer.model, trainer.optimizer)
        others = differences(actual, expected)
        if others and self._fit != "missing-key" and not self.record.problems:
            what = "the next training step ends otherwise than that of a run which had this state from the start"
            self._note("poisoned", f"{what}: {first_names(others)}")

    def _look_at_what_trains(self, trainer: Trainer) -> None:
        self._runtime.synchronize()
        held, total = held_by(trainer.optimizer, trainer.model)
        if held != total:
            self._note("poisoned", f"the optimizer holds {held} of the model's {total} parameters")
        pieces = held_pieces.of_model(trainer.model, self._right)
        lost = [p.name for p in pieces if not p.held.is_meta and p.expected is not None and _differs(p)]
        if lost and not self.record.problems:
            self._note("poisoned", f"the next training step would start from other weights: {first_names(lost)}")

    def _note(self, kind: ProblemKind, detail: str) -> None:
        self._add(problems=(Problem(kind=kind, detail=detail),))


def _differs(piece: held_pieces.HeldPiece) -> bool:
    assert piece.expected is not None
    return any(compare(held.cpu(), piece.expected) for held in piece.everywhere)


def _missing_keys(result: Any) -> Iterable[str]:
    """What ``load_state_dict``, torch's setters and our loader return says of names that were not loaded."""
    for attribute in ("missing_keys", "missing"):
        if names := getattr(result, attribute, ()):
            return tuple(names)
    return ()
