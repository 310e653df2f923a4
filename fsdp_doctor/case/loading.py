"""Steps of a case that loads: the model starts with other weights, and every shard is compared after the method and a
step.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fsdp_doctor.case import codes, local_pieces, lora_reference, models
from fsdp_doctor.case.checkpoints import EXTRA_KEY, CheckpointForms, SavedCheckpoints, make_expected_weights, start_of
from fsdp_doctor.case.findings import compare, join_first_names
from fsdp_doctor.case.loaded_state import LoadedState, count_optimized, find_optimizer_problems
from fsdp_doctor.case.matrix_steps import MatrixSteps
from fsdp_doctor.case.methods.lookup import MethodFunction
from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.case.training_state import digest_outcome, find_differences, train_one_step
from fsdp_doctor.matrix.axes import CheckpointFit
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.methods import MatrixMethod


class LoadingSteps(MatrixSteps):
    """Steps of a case whose method loads weights, the optimizer's state, or both; see :class:`case_run.CaseRun`.

    A checkpoint that does not fit must be either refused on every rank or loaded right.
    """

    def __init__(
        self,
        scenario: Scenario,
        method: MatrixMethod,
        function: MethodFunction,
        *,
        runtime: Runtime,
        recorder: Recorder,
        saved: SavedCheckpoints,
    ) -> None:
        super().__init__(scenario, method, function, runtime=runtime, recorder=recorder)
        self._contract = method.contract
        self._saved = saved
        self._state: Any = None

    @property
    def state(self) -> Any:
        return self._state

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        return models.list_transient_buffers(self.scenario.model, self.scenario.dims, self._runtime.custom_model)

    def build(self) -> Trainer:
        self._recorder.enter("checkpoint")
        self._checkpoint = self._saved.choose(self.scenario)
        self._right = make_expected_weights(self._checkpoint, self.scenario.checkpoint)
        self._recorder.enter("build")
        trainer = self._saved.start(self.scenario, start_of(self.scenario))
        # What the method does not load has been loaded already.
        if self._contract.loads == "optimizer":
            # Each weight is rounded where it lies: torch's setters step an optimizer to make its state, and the
            # arithmetic of a device keeps the bits of a NaN that it made, but not of one that the other made.
            pieces = local_pieces.list_model_pieces(trainer.model, self._right)
            held = {name: piece.held for piece in pieces for name in piece.names}
            places = {name: self._runtime.device if tensor.is_meta else tensor.device for name, tensor in held.items()}
            self._right = {
                name: self._right[name].to(places[name]).to(tensor.dtype).cpu() for name, tensor in held.items()
            }
            local_pieces.write(local_pieces.list_model_pieces(trainer.model, self._right))
            codes.write_scales(trainer.model, self._checkpoint.scales)
        elif self._contract.weights == "adapter":
            base = {name: full for name, full in self._right.items() if not lora_reference.is_adapter(name)}
            local_pieces.write(local_pieces.list_model_pieces(trainer.model, base))
            codes.write_scales(trainer.model, self._checkpoint.scales)
        return trainer

    def is_reusable(self, trainer: Trainer) -> bool:
        """Returns False: each load needs a trainer with other weights."""
        return False

    def take_reference(self, trainer: Trainer) -> None:
        self._recorder.enter("checkpoint")
        directory = self._runtime.name_directory(self._recorder.record)
        forms = CheckpointForms(self._checkpoint, self.scenario.checkpoint, trainer, directory)
        self._state = forms.files if forms.files and self.method.is_fix else forms.make_state(self._contract)

    def watch_state(self, trainer: Trainer) -> None:
        self._recorder.enter("fingerprint")
        self._loaded = LoadedState(
            trainer.model,
            self._right,
            device=self._runtime.device,
            on_host=trainer.names_on_host,
            pins=self.scenario.offload.takes_policy,
            buffers=self.buffers,
            left_alone=self._checkpoint.missing_key if self.scenario.checkpoint is CheckpointFit.MISSING_KEY else "",
            watches=self._watches_state,
        )

    def run_method(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        recorder, checkpoint = self._recorder, self._checkpoint
        result = self._load(call, owned)
        if recorder.record.refusal:
            return
        recorder.enter("verify")
        self._runtime.synchronize()
        reported = () if self._contract.strict else _read_missing_keys(result)
        recorder.add(problems=self._loaded.list_problems(reported), num_tensors=len(self._right))
        if other := codes.find_other_scales(trainer.model, checkpoint.scales):
            what = "the codes are multiplied with other scales than those of the checkpoint's model"
            recorder.note("wrong", f"{what}: {join_first_names(other)}")
        if self.scenario.checkpoint is CheckpointFit.EXTRA_KEY and self._contract.strict:
            what = f"{EXTRA_KEY} of the checkpoint, which the model has not, was dropped in silence"
            recorder.note("incomplete", what)
        if self._contract.loads != "model":
            options = [checkpoint.options]
            recorder.add(
                problems=find_optimizer_problems(trainer.model, trainer.optimizer, checkpoint.moments, options)
            )

    def recover(self, trainer: Trainer) -> bool:
        """Returns whether the job trains on: False only if the load of a checkpoint that fits was refused.

        Nothing is repaired, because the model must be able to train after a load.
        """
        return not self._recorder.record.refusal or not self.scenario.checkpoint.must_load

    def prepare_optimizer(self, trainer: Trainer) -> None:
        """Makes the optimizer of a model that was on the meta device, unless the method was given one."""
        if self.scenario.init.is_meta and not self.method.optimizer_first:
            trainer.optimizer = trainer.make_optimizer()

    def check_resumed(self, trainer: Trainer) -> None:
        recorder = self._recorder
        self._runtime.synchronize()
        num, total = count_optimized(trainer.optimizers, trainer.model)
        if num != total:
            recorder.note("poisoned", f"the optimizer holds {num} of the model's {total} parameters")
        pieces = local_pieces.list_model_pieces(trainer.model, self._right)
        lost = [piece.name for piece in pieces if not piece.held.is_meta and _differs(piece)]
        if lost and not recorder.record.problems:
            recorder.note(
                "poisoned", f"the next training step would start from other weights: {join_first_names(lost)}"
            )
        if self._contract.loads != "model":
            trainer.seek(self._checkpoint.data_position)
            trainer.num_steps = self._checkpoint.num_steps
        recorder.enter("checkpoint")
        self._expected = self._saved.expect_next_step(self.scenario, self._contract.loads)

    def train_step(self, trainer: Trainer) -> None:
        train_one_step(trainer)

    def check_trained(self, trainer: Trainer, number: int) -> None:
        different = find_differences(digest_outcome(trainer.model, trainer.optimizer), self._expected)
        if (
            different
            and self.scenario.checkpoint is not CheckpointFit.MISSING_KEY
            and not self._recorder.record.problems
        ):
            what = "the next training step ends otherwise than that of a run which had this state from the start"
            self._recorder.note("poisoned", f"{what}: {join_first_names(different)}")

    @property
    def _watches_state(self) -> bool:
        """True if the model may be read. To read it while copies are in flight would wait for them and hide races."""
        return self.scenario.transfer.is_blocking

    @property
    def _must_fit(self) -> bool:
        """True if the load has to succeed. A load that does not touch the base of a 4-bit model must succeed, too."""
        leaves_base = self._contract.loads == "optimizer" or self._contract.weights == "adapter"
        return self.scenario.can_be_loaded if leaves_base else self.scenario.must_load

    def _load(self, call: Callable[[], Any], owned: bool) -> Any:
        """Runs the method. If every rank refuses a checkpoint that need not fit, records the refusal."""
        runtime, must_fit = self._runtime, self._must_fit
        self._recorder.enter("load")
        allocated = runtime.read_allocated_bytes() if self._watches_state and owned else None
        runtime.reset_peak()
        start = time.perf_counter()
        try:
            result = call()
        except SystemExit:
            raise
        except BaseException as error:
            # torch's CheckpointException is no Exception.
            if must_fit:
                raise
            files = (
                self._state if isinstance(self._state, pathlib.Path) else runtime.name_directory(self._recorder.record)
            )
            self.refuse(error, self._checkpoint.directory or files)
            return None
        if self._watches_state:
            runtime.synchronize()
        peak = runtime.read_peak_bytes()
        extra = peak - allocated if peak is not None and allocated is not None else None
        self._recorder.add(seconds=time.perf_counter() - start, peak_extra_bytes=extra)
        if not must_fit:
            self.was_refused_everywhere(False)
        return result


def _differs(piece: local_pieces.LocalPiece) -> bool:
    """Returns whether any memory of the piece has other values than the expected ones."""
    expected = piece.expected
    return expected is not None and any(compare(held.cpu(), expected) for held in piece.everywhere)


def _read_missing_keys(result: Any) -> Iterable[str]:
    """Returns the names that ``load_state_dict``, torch's setters or our loader report as not loaded."""
    for attribute in ("missing_keys", "missing"):
        if names := getattr(result, attribute, ()):
            return tuple(names)
    return ()
