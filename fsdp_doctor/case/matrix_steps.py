"""Steps that all cases of the matrix share: the doctor's own trainer is offloaded, staged and brought back."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from fsdp_doctor.case import built_scenario
from fsdp_doctor.case.case_steps import CaseSteps, R
from fsdp_doctor.case.consumers import consume, prepare_consumer, write_weights
from fsdp_doctor.case.methods.lookup import MethodArguments, MethodFunction
from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.sharding import find_experts_mesh
from fsdp_doctor.case.trainer import Trainer, Unsupported
from fsdp_doctor.matrix.axes import Consumer
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.methods import MatrixMethod, explain_impossible
from fsdp_doctor.verdict.records import make_failure


class MatrixSteps(CaseSteps[Trainer]):
    """Steps of a case of the matrix. Subclasses implement the differences between extractions and loads.

    given: the arguments of the method, once the case is prepared.
    undoes_staging: whether a staged module is moved back to the CPU before the next step.
    """

    given: MethodArguments

    def __init__(
        self,
        scenario: Scenario,
        method: MatrixMethod,
        function: MethodFunction,
        *,
        runtime: Runtime,
        recorder: Recorder,
    ) -> None:
        super().__init__(recorder, runtime)
        self.scenario = scenario
        self.method = method
        self.undoes_staging = method.undoes_staging
        self._function = function
        self._runtime = runtime
        self._recorder = recorder

    @property
    def state(self) -> Any:
        """Checkpoint that the method is given; None for a method without a checkpoint."""
        return None

    @property
    def buffers(self) -> dict[str, Any]:
        """Non-persistent buffers that the method is given, by name, on the host."""
        return {}

    def check_possible(self) -> None:
        if reason := _explain_impossible(self.method, self.scenario, self._runtime):
            raise Unsupported(reason)
        prepare_consumer(self.scenario.consumer)

    def drive(self, trainer: Trainer, life: Generator[None, None, R]) -> R:
        try:
            next(life)
            while True:
                try:
                    self.train_step(trainer)
                except BaseException as error:
                    life.throw(error)
                else:
                    next(life)
        except StopIteration as end:
            result: R = end.value
            return result

    def train_step(self, trainer: Trainer) -> None:
        """Trains one step."""
        trainer.step()

    def train_within(self, trainer: Trainer) -> None:
        """Trains a step while the method is still running."""
        self.train_on(trainer)

    def train_on(self, trainer: Trainer) -> None:
        """Brings a prepared trainer back into the state for training, and trains a step."""
        trainer.resume(undo_staging=self.undoes_staging)
        trainer.step()

    def offload(self, trainer: Trainer) -> None:
        recorder = self._recorder
        trainer.interrupt_step()
        recorder.enter("offload")
        with recorder.measure_memory(trainer.watch, "offloaded"):
            trainer.offload()
        if self.scenario.staging.is_staged:
            recorder.enter("staging")
            with recorder.measure_memory(trainer.watch, "staged"):
                trainer.stage()

    def note_state(self, trainer: Trainer) -> None:
        self.watch_state(trainer)
        self._recorder.enter("fingerprint")
        self._check_as_named(trainer)
        self.given = MethodArguments(
            model=trainer.model,
            device=self._runtime.device,
            optimizer=trainer.optimizer,
            scratch=self._runtime.name_directory(self._recorder.record),
            control=self._runtime.control,
            state=self.state,
            buffers=self.buffers,
            experts=find_experts_mesh(trainer.model),
            train=functools.partial(self.train_within, trainer),
        )

    def watch_state(self, trainer: Trainer) -> None:
        """Notes the state that the method must not change, and the values that it must deliver."""
        raise NotImplementedError

    def _check_as_named(self, trainer: Trainer) -> None:
        """Raises NotAsNamed if the model is not built as the id of its scenario says.

        Before a second call of the method, a mismatch comes from the first call, and is recorded as a problem of the
        method.
        """
        device, ranks = self._runtime.device.type, self._runtime.world_size
        try:
            built_scenario.check(trainer.model, trainer.optimizer, self.scenario, device=device, ranks=ranks)
        except built_scenario.NotAsNamed as difference:
            if self._recorder.record.call == 1:
                raise
            self._recorder.note("poisoned", str(difference))

    def call_method(self, trainer: Trainer) -> Any:
        if self.method.trains:
            write_weights(self.given)
        return consume(self.scenario.consumer, self._function, self.given, self._recorder.note)

    def refuse(self, error: BaseException, directory: pathlib.Path) -> None:
        """Records ``error`` as the method's refusal on this rank.

        Raises ``error`` unless the method refused on every rank.

        directory: the checkpoint's directory, which is replaced in the recorded text.
        """
        # The supervisor may have to end the others, which wait: it must know why.
        self._recorder.fail(error)
        with contextlib.suppress(Exception):
            if self.was_refused_everywhere(True):
                summary = make_failure(error).summary.replace(str(directory), "the checkpoint")
                self._recorder.add(refusal=summary)
                return
        raise error

    def was_refused_everywhere(self, mine: bool) -> bool:
        """Returns whether the method refused on every rank. Every rank must call this function.

        mine: whether the method refused on this rank.
        """
        self._recorder.restore_torch()
        flags = torch.tensor([int(mine)], device="cpu")
        dist.all_reduce(flags, group=self._runtime.control)
        return int(flags) == self._runtime.world_size

    def resume(self, trainer: Trainer) -> None:
        recorder, name = self._recorder, self.method.name
        self.prepare_optimizer(trainer)
        with recorder.measure_memory(trainer.watch, "offloaded again", name):
            trainer.unstage(undo_staging=self.undoes_staging)
        with recorder.measure_memory(trainer.watch, "loaded", name):
            trainer.load()
        recorder.enter("fingerprint")
        self.check_resumed(trainer)

    def prepare_optimizer(self, trainer: Trainer) -> None:
        """Prepares the optimizer of the next step, which usually is the optimizer of the earlier steps."""

    def check_resumed(self, trainer: Trainer) -> None:
        """Checks that the next step starts from the right weights."""
        raise NotImplementedError

    def measure_step(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        return self._recorder.measure_memory(trainer.watch, "trained again", self.method.name)

    def explain_retirement(self) -> str:
        # torch lets go of all of an FSDP1 model but its parameters: they would be in the next one's ledgers.
        return "a model that would be counted with the next" if self._runtime.with_ledgers else ""


def _explain_impossible(method: MatrixMethod, scenario: Scenario, runtime: Runtime) -> str:
    """Explains why the method cannot be tried in this scenario; empty if it can."""
    if reason := explain_impossible(method, scenario):
        return reason
    if scenario.consumer is Consumer.SHARED_DEVICE and (runtime.device.type != "emulated" or runtime.world_size == 1):
        return "the order of launches can be observed only on the emulated device with 2 ranks or more"
    if method.since and Version(torch.__version__) < Version(method.since):
        return (
            f"torch {torch.__version__} has no {method.name} with the arguments of this case; it needs torch "
            f"{method.since} or newer"
        )
    if method.on_accelerator and not runtime.has_accelerator:
        return f"{method.name} needs an accelerator"
    on_disk = method.name.startswith(("dcp", "save_full_tensors")) or method.contract.given in ("dcp", "rank_files")
    if on_disk and runtime.num_nodes > 1:
        return "the checkpoint directory is not shared between the nodes"
    return ""
