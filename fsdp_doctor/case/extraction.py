"""Steps of a case that extracts: the method runs, and its entries and the state that it must not change are
verified.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import reference, training_state, yielded
from fsdp_doctor.case.findings import join_first_names
from fsdp_doctor.case.lora_reference import compute_merged_weights, compute_rank_parts
from fsdp_doctor.case.matrix_steps import MatrixSteps
from fsdp_doctor.case.methods.lookup import MethodFunction
from fsdp_doctor.case.next_steps import Moment, NextSteps
from fsdp_doctor.case.recorder import Recorder
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import Trainer, Unsupported, compute_dtype
from fsdp_doctor.case.training_state import train_one_step
from fsdp_doctor.case.yielded import ExpectedYield, Verifier, YieldedEntry
from fsdp_doctor.examination.stage_watch import StageWatch, Unwatched
from fsdp_doctor.matrix.axes import Phase
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.methods import MatrixMethod, is_user_method
from fsdp_doctor.text import format_count
from fsdp_doctor.verdict.records import ProblemKind
from fsdp_doctor.weights.fsdp import private, reader

# A method that has yielded twice as many entries as it promised is taken to go on for ever.
_TIMES_OVER = 2
# Threads of a process group hold the tensors of the last collective a little longer than it runs.
_RELEASE_SECONDS = 0.5


class ExtractionCheck:
    """Runs a method that extracts from a model, and records the yielded entries, kept memory and changes.

    Create the check when the model is in the state in which the method will run.

    truth: the model's weights in that state.
    watches_state: whether memory and model may be inspected now; inspecting waits for copies in flight.
    """

    def __init__(
        self,
        recorder: Recorder,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        truth: Reference,
        *,
        watches_state: bool = True,
    ) -> None:
        self._recorder = recorder
        self._runtime = runtime
        self._model = model
        self._optimizer = optimizer
        self._truth = truth
        self._watches_state = watches_state
        if watches_state:
            recorder.enter("fingerprint")
            self.check_weights("the offload or the staging changed weights")
            self._before = training_state.digest_state(model, optimizer)

    def check_weights(self, what: str) -> None:
        """Compares this rank's shards with the reference.

        what: the beginning of the problem's text if shards differ.
        """
        self._runtime.synchronize()
        if lost := training_state.find_lost_weights(self._model, self._truth):
            self._recorder.note("poisoned", f"{what}: {join_first_names(lost)}")

    def run(
        self,
        call: Callable[[], Any],
        expected: ExpectedYield,
        *,
        live_tensors: Collection[int],
        offloaded_bytes: int = 0,
        owned: bool = True,
        keeps: bool = False,
        measured: contextlib.AbstractContextManager[None] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs the method by ``call``, and verifies the method's result.

        call: a function that runs the method and returns its result.
        live_tensors: ids of the tensors that stay alive anyway; a yielded tensor with such an id is not a leak.
        offloaded_bytes: the size of the shards that the method promises to move off the device before it yields.
        owned: whether only ``call`` refers to the result, so that the result's memory can be measured.
        keeps: whether all entries are kept, and read once more at the end.
        measured: a context that is entered while the method runs.
        ended: a function that is called when the method has ended, before the memory that it leaves is inspected.
        """
        verifier = Verifier(expected)
        self._recorder.enter("extract")
        with measured or contextlib.nullcontext():
            self._drain(call, verifier, live_tensors, offloaded_bytes, owned, keeps, ended)
        self._recorder.enter("fingerprint")
        self._recorder.add(problems=verifier.list_problems())
        if self._watches_state:
            now = training_state.digest_state(self._model, self._optimizer)
            self._recorder.add(problems=training_state.find_changes(self._before, now))

    def _drain(
        self,
        call: Callable[[], Any],
        verifier: Verifier,
        live_tensors: Collection[int],
        offloaded_bytes: int,
        owned: bool,
        keeps: bool,
        ended: Callable[[], None],
    ) -> None:
        """Runs the method, reads and verifies each entry as it comes, and then looks for memory that was not released.

        Nothing waits for the device before the method has ended, as in a framework that sends the entries: a wait would
        hide races by ordering work that the method leaves unordered.
        """
        recorder, runtime = self._recorder, self._runtime
        allocated = runtime.read_allocated_bytes() if self._watches_state and owned else None
        runtime.reset_peak()
        timed = _Timed(runtime)
        alive: list[Callable[[], torch.Tensor | None]] = []
        entries: list[YieldedEntry] = []
        kept: list[Any] = []
        with detect_races(runtime.device, recorder.note):
            items = timed.iterate(call)
            for name, value in items:
                if offloaded_bytes and not entries:
                    self._check_shards_are_gone(allocated, offloaded_bytes, value)
                recorder.restore_torch()
                entries.append(yielded.read(name, value, waits=runtime.with_ledgers))
                if owned and isinstance(value, torch.Tensor) and id(value) not in live_tensors:
                    alive.append(private.make_weak_reference(value))
                if keeps:
                    kept.append(value)
                del value
                recorder.switch("extract")
                recorder.show_progress(len(entries))
                if len(entries) > _TIMES_OVER * max(verifier.num_promised, 1):
                    promised = f"where {verifier.num_promised} were promised"
                    recorder.note("wrong", f"goes on after {len(entries)} entries, {promised}")
                    break
            peak = runtime.read_peak_bytes()
            del items
            timed.wait()
        ended()
        recorder.add(
            seconds=timed.seconds,
            num_tensors=len(entries),
            yielded=dict(Counter(entry.kind for entry in entries)),
            peak_extra_bytes=peak - allocated if peak is not None and allocated is not None else None,
        )
        recorder.restore_torch()
        again = [yielded.read(entry.name, value) for entry, value in zip(entries, kept, strict=True)] if keeps else []
        kept.clear()
        runtime.synchronize()
        recorder.switch("verify")
        for entry in entries:
            verifier.check(entry)
            recorder.show_progress(len(entries))
        for entry, last in zip(entries, again, strict=False):
            verifier.check_kept(entry, last)
        recorder.switch("extract")
        self._check_memory_is_released(allocated, alive)

    def _check_memory_is_released(self, allocated: int | None, alive: list[Callable[[], torch.Tensor | None]]) -> None:
        kept, surplus = _measure_kept(alive), self._count_surplus(allocated)
        if kept or surplus:
            gc.collect()
        end = time.monotonic() + _RELEASE_SECONDS
        while (kept or surplus) and time.monotonic() < end:
            time.sleep(0.001)
            kept, surplus = _measure_kept(alive), self._count_surplus(allocated)
        if surplus:
            detail = f"{surplus} bytes of device memory not given back after the method's result was dropped"
            self._recorder.note("leak", detail)
        elif kept:
            detail = f"{len(kept)} yielded tensors ({sum(kept)} bytes) still referenced after the result was dropped"
            self._recorder.note("leak", detail)

    def _check_shards_are_gone(self, allocated: int | None, shard_bytes: int, first: Any) -> None:
        """Checks that the method has freed the device memory of the shards that it moved to the host."""
        now = self._runtime.read_allocated_bytes()
        if now is None or allocated is None:
            return
        fresh = first.untyped_storage().nbytes() if isinstance(first, torch.Tensor) else 0
        kept = now - fresh - (allocated - shard_bytes)
        if 2 * kept > shard_bytes:
            detail = f"{kept} of {shard_bytes} bytes of shards stay on the device though the model was offloaded"
            self._recorder.note("leak", detail)

    def _count_surplus(self, allocated: int | None) -> int:
        """Returns the bytes of device memory above ``allocated``; 0 if the device does not count them."""
        now = self._runtime.read_allocated_bytes() if allocated is not None else None
        return max(0, now - allocated) if now is not None and allocated is not None else 0


class ExtractionSteps(MatrixSteps):
    """Steps of a case of the matrix whose method extracts weights; see :class:`case_run.CaseRun`."""

    keeps_settings = True

    def __init__(
        self,
        scenario: Scenario,
        method: MatrixMethod,
        function: MethodFunction,
        *,
        runtime: Runtime,
        recorder: Recorder,
        next_steps: NextSteps,
    ) -> None:
        super().__init__(scenario, method, function, runtime=runtime, recorder=recorder)
        self._next_steps = next_steps
        self._expected: ExpectedYield | None = None
        self._goes_on = True
        # Before the training step that a method has trained while it goes on.
        self._moment: Moment | None = None

    def build(self) -> Trainer:
        scenario, runtime, measured = self.scenario, self._runtime, self._recorder.measure_memory
        watch = StageWatch(scenario.id, runtime.rank, runtime.device) if runtime.with_ledgers else Unwatched()
        with measured(watch, "built"):
            trainer = Trainer(scenario, runtime, with_mesh=not self.method.without_mesh)
            trainer.watch = watch
            watch.set_model(trainer.model, trainer.optimizer)
        if scenario.phase.is_trained:
            with measured(watch, "first step"):
                trainer.step()
            # A second step: the first one allocates what stays (Adam's state, cuBLAS workspaces).
            with measured(watch, "trained"):
                trainer.step()
            # Bring the state into the form that every later cycle leaves: loading the optimizer moves Adam's step
            # counters, which a step makes on the host, to the device with the rest of the state.
            trainer.resume()
        return trainer

    def is_reusable(self, trainer: Trainer) -> bool:
        """Returns whether the next case can use the trainer.

        True if the scenario's model is trained and the trainer could train on. A scenario with an untrained model needs
        a new trainer, because the step after the method has trained this one.
        """
        return self.scenario.phase.is_trained and self._goes_on

    def look_ahead(self, trainer: Trainer) -> Iterator[None]:
        """Rehearses the steps that follow the calls of the method, before the first call.

        A case whose memory is measured has no rehearsal.
        """
        if self._recorder.record.call == 1 and not self._runtime.with_ledgers:
            may_call_again = self.scenario.phase.is_trained and is_user_method(self.method.name)
            self._next_steps.rehearse(trainer, 2 if may_call_again else 1)
        return iter(())

    def take_back(self, trainer: Trainer) -> None:
        """Restores the trainer to the state at the beginning of the case."""
        if not self._runtime.with_ledgers:
            self._next_steps.take_back(trainer)

    def take_reference(self, trainer: Trainer) -> None:
        self._recorder.enter("reference")
        optimizer = trainer.optimizer if self.method.contract.form == "optimizer" else None
        self.truth = reference.take(trainer.model, optimizer, self._runtime)

    def watch_state(self, trainer: Trainer) -> None:
        model, contract, full = trainer.model, self.method.contract, self.truth.full
        self._check = ExtractionCheck(
            self._recorder,
            self._runtime,
            model,
            trainer.optimizer,
            self.truth,
            # Reading the model waits for copies in flight, and would hide the race of a non-blocking scenario.
            watches_state=self.scenario.transfer.is_blocking,
        )
        merged = compute_merged_weights(model, full)
        self._expected = ExpectedYield(
            contract=contract,
            reference=self.truth,
            rank=self._runtime.rank,
            compute_device=self._runtime.device,
            compute_dtype=compute_dtype(self.scenario.precision),
            parameter_devices=yielded.read_parameter_devices(model),
            shard_group_of_one=self.scenario.sharding.keeps_whole_tensors or self._runtime.world_size == 1,
            merged_weights=merged,
            rank_parts=compute_rank_parts(model, full | self.truth.codes, {} if self.truth.codes else merged)
            if contract.form == "local"
            else {},
            earlier=self._expected,
        )

    def run_method(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        """Runs and verifies the method.

        If the method refuses on every rank to yield quantized codes as weights, records the refusal.
        """
        try:
            self._extract(trainer, call, owned)
        except SystemExit:
            raise
        except BaseException as error:
            if self.scenario.must_extract:
                raise
            self.refuse(error, self._runtime.name_directory(self._recorder.record))
        else:
            if not self.scenario.must_extract:
                self.was_refused_everywhere(False)

    def _extract(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        assert self._expected is not None
        self._check.run(
            lambda: trainer.watch.count_outputs(call()),
            self._expected,
            live_tensors=trainer.list_tensor_ids(),
            offloaded_bytes=_shard_bytes(trainer.model, self._runtime.device) if self.method.offloads else 0,
            owned=owned,
            # The second call of a user's function is made for what it keeps, and for what may be kept of it.
            keeps=self._recorder.record.call == 2 and self.method.contract.keeps,
            measured=self._recorder.measure_memory(trainer.watch, "extracted", self.method.name),
            ended=lambda: self._take_step_back(trainer),
        )

    def train_within(self, trainer: Trainer) -> None:
        if self.scenario.phase is not Phase.TRAINED:
            raise Unsupported("a method can train a step only if the last of the earlier steps finished")
        self._moment = Moment(trainer)
        # The job is not in the context in which it called the method.
        with torch.inference_mode(False), torch.enable_grad():
            trainer.resume(undo_staging=self.undoes_staging)
            self.train_step(trainer)
        self.check_trained(trainer, 0)

    def _take_step_back(self, trainer: Trainer) -> None:
        """Restores the trainer to its state before the method, if the method has trained a step."""
        if self._moment is not None:
            self._moment.restore(trainer)
            self._moment = None
            trainer.offload()
            if self.scenario.staging.is_staged:
                trainer.stage()

    def recover(self, trainer: Trainer) -> bool:
        """Makes the job recover from the step that raised before the method; returns whether it can train on."""
        self._recorder.enter("next step")
        self._goes_on = trainer.recover()
        return self._goes_on

    def check_resumed(self, trainer: Trainer) -> None:
        self._check.check_weights("the next training step would start from other weights")

    def train_step(self, trainer: Trainer) -> None:
        self._unsharded = train_one_step(trainer)

    def check_trained(self, trainer: Trainer, number: int) -> None:
        shards = (*self.truth.flat.values(), *self.truth.local.values())
        if any(shard.numel() for shard in shards) and not training_state.find_lost_weights(trainer.model, self.truth):
            self._recorder.note("poisoned", "the next training step changes no weight")
        if self._runtime.with_ledgers:
            return
        outcome = training_state.digest_step(trainer, self._unsharded)
        if different := training_state.find_differences(outcome, self._next_steps.find_outcome(trainer)):
            what = "the next training step ends otherwise than that of a run without the extraction"
            if not any(problem.kind == "poisoned" for problem in self._recorder.record.problems):
                # It may be something in the process: a function that was replaced, a hook of all modules.
                self._recorder.add(retire="what changes a training step")
            self._recorder.note("poisoned", f"{what}: {join_first_names(different)}")

    def calls_again(self) -> bool:
        """Returns whether the user's function is called a second time. A case whose memory is measured has one call."""
        return is_user_method(self.method.name) and not self._runtime.with_ledgers


class _Timed:
    """Timer of the seconds inside the method: the call and each request for an entry, without the checks in between."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.seconds = 0.0

    def iterate(self, call: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
        with self._measure():
            entries = yielded.iterate_entries(call())
        while True:
            with self._measure():
                entry = next(entries, None)
                if self._runtime.with_ledgers:
                    # What is measured is the memory of one entry after the other.
                    self._runtime.synchronize()
            if entry is None:
                return
            yield entry
            del entry

    def wait(self) -> None:
        """Waits for the device."""
        with self._measure():
            self._runtime.synchronize()

    @contextlib.contextmanager
    def _measure(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


@contextlib.contextmanager
def detect_races(device: torch.device, note: Callable[[ProblemKind, str], None]) -> Iterator[None]:
    """Notes the data races of a block, after it has waited for the device at the block's end.

    Only the emulated device detects races.
    """
    if device.type != "emulated":
        yield
        return
    emulated = torch.get_device_module(device)
    races: list[str] = []
    with emulated.race_detection():
        yield
        emulated.synchronize()
        races = emulated.data_races()
    if races:
        note("race", f"{format_count(len(races), 'race')}, the first: {races[0]}")


def _measure_kept(alive: list[Callable[[], torch.Tensor | None]]) -> list[int]:
    """Returns the size in bytes of each yielded tensor that is still referenced and whose memory was not freed."""
    sizes = [
        private.read_local_tensor(tensor).untyped_storage().nbytes() for ref in alive if (tensor := ref()) is not None
    ]
    return [size for size in sizes if size]


def _shard_bytes(model: nn.Module, device: torch.device) -> int:
    """Counts the bytes of this rank's shards that are on the device."""
    shards = [private.read_local_tensor(tensor.shown) for tensor in reader.read(model).list_tensors()]
    return sum(shard.nbytes for shard in shards if shard.device == device)
