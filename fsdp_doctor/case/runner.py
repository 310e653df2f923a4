"""One case on one rank: bring the scenario to its state, run the path, verify, train on."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.case import reference, training_state, verification
from fsdp_doctor.case.leftovers import Leftovers
from fsdp_doctor.case.lora_reference import merged_weights
from fsdp_doctor.case.paths.arguments import PathArguments, PathFunction, called_by_name
from fsdp_doctor.case.paths.lookup import function_of, load_user_path
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import COMPUTE_DTYPE, Trainer, Unsupported
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.matrix.cases import Case, Scenario
from fsdp_doctor.matrix.paths import Path, find_path, impossible, is_user_path
from fsdp_doctor.verdict.records import Problem, Record, Stage
from fsdp_doctor.verdict.tracebacks import failure_from

RecordSink = Callable[[Record], None]
_PROGRESS_SECONDS = 1.0
# Threads of a process group hold the tensors of the last collective a little longer than it runs.
_RELEASE_SECONDS = 0.5


class CaseRunner:
    """Runs cases one after the other on this rank, and keeps a scenario while it stays whole.

    report: called with the record each time the case reaches another stage.
    """

    def __init__(self, runtime: Runtime, user_paths: tuple[str, ...], report: RecordSink) -> None:
        self._runtime = runtime
        self._user_paths = {name: load_user_path(name) for name in user_paths}
        self._report = report
        self._leftovers = Leftovers(runtime.device)
        self._trainer: Trainer | None = None

    def examine(self, case: Case) -> Record:
        """Runs one case. Every rank must call it with the same case; of exceptions it raises SystemExit alone."""
        path, function = self._path(case)
        examination = _CaseRun(case, path, function, self._runtime, self._leftovers, self._report)
        self._trainer = examination.run(self._kept_for(case.scenario, path))
        return examination.record

    def _kept_for(self, scenario: Scenario, path: Path) -> Trainer | None:
        """The trainer of the last case if it is of this scenario and still in its state."""
        kept, self._trainer = self._trainer, None
        if kept is not None and (kept.scenario, kept.with_mesh) == (scenario, not path.without_mesh):
            return kept
        del kept
        self._release()
        return None

    def _path(self, case: Case) -> tuple[Path, PathFunction]:
        path = find_path(case.path, case.scenario.version)
        if is_user_path(case.path):
            function, contract = self._user_paths[case.path]
            return dataclasses.replace(path, contract=contract), called_by_name(function)
        return path, called_by_name(function_of(path))

    def _release(self) -> None:
        """Gives a dropped scenario's memory back, so that it is not counted against the next."""
        gc.collect()
        if self._runtime.has_accelerator:
            torch.get_device_module(self._runtime.device).empty_cache()


class _CaseRun:
    """The state of one case while it runs: the record so far, reported at each stage."""

    def __init__(
        self,
        case: Case,
        path: Path,
        function: PathFunction,
        runtime: Runtime,
        leftovers: Leftovers,
        report: RecordSink,
    ) -> None:
        self._case = case
        self._path = path
        self._contract = path.contract
        self._runtime = runtime
        self._leftovers = leftovers
        self._tell = report
        self._reported_at = 0.0
        self._function = function
        self._changed_somewhere = False
        self.record = Record(case_id=case.id, stage="build")

    def run(self, kept: Trainer | None) -> Trainer | None:
        """Returns the trainer, in the state between two steps, if it may be used again."""
        trainer, truth = kept, None
        with self._catching():
            trainer = trainer or self._build()
            truth = self._extract(trainer)
        if not self.record.unsupported and self._agree() and self._unbroken and trainer and truth:
            with self._catching():
                self._enter("next step")
                trainer.resume(undo_staging=self._path.undoes_staging)
                self._check_weights(trainer, truth, "the next training step would start from other weights")
                trainer.step()
                self._runtime.synchronize()
            self._agree()
        self._add(retire=self._leftovers.undo(), done=True)
        self._report(self.record)
        reusable = self._unbroken and not self._changed_somewhere and self._case.scenario.phase == "trained"
        return trainer if reusable else None

    @property
    def _unbroken(self) -> bool:
        return self.record.failure is None and not self.record.unsupported

    def _build(self) -> Trainer:
        self._enter("build")
        reason = _why_not(self._case, self._path, self._runtime)
        if reason:
            raise Unsupported(reason)
        trainer = Trainer(self._case.scenario, self._runtime, with_mesh=not self._path.without_mesh)
        if self._case.scenario.phase == "trained":
            trainer.step()
            # A second step: the first one allocates what stays (Adam's state, cuBLAS workspaces).
            trainer.step()
            # As every later cycle leaves it: loading the optimizer takes Adam's step counters, which a step
            # makes on the host, to the device with the rest of the state.
            trainer.resume()
        return trainer

    def _extract(self, trainer: Trainer) -> reference.Reference:
        """Brings the scenario to its state, runs the path and verifies it; returns the reference."""
        scenario: Scenario = self._case.scenario
        self._enter("reference")
        wants_optimizer = self._contract.form == "optimizer"
        truth = reference.take(trainer.model, trainer.optimizer if wants_optimizer else None, self._runtime)
        self._enter("offload")
        trainer.offload()
        if scenario.staging == "staged":
            self._enter("staging")
            trainer.stage()
        before: training_state.StateDigest = {}
        if self._watches_state:
            self._enter("fingerprint")
            self._check_weights(trainer, truth, "the offload or the staging changed weights")
            before = training_state.state_of(trainer.model, trainer.optimizer)
        verifier = verification.Verifier(
            verification.ExpectedYield(
                contract=self._contract,
                reference=truth,
                rank=self._runtime.rank,
                compute_device=self._runtime.device,
                compute_dtype=COMPUTE_DTYPE,
                parameter_devices=verification.parameter_devices(trainer.model),
                shard_group_of_one=scenario.sharding == "size1" or self._runtime.world_size == 1,
                merged_weights=merged_weights(trainer.model, truth.full),
            )
        )
        self._enter("extract")
        self._leftovers.look_before()
        self._drain(trainer, verifier)
        self._enter("fingerprint")
        self._add(problems=verifier.problems())
        if self._watches_state:
            self._add(
                problems=training_state.changes(before, training_state.state_of(trainer.model, trainer.optimizer))
            )
        return truth

    @property
    def _watches_state(self) -> bool:
        """Reading the model would wait for copies in flight, and so hide the race that a non-blocking
        scenario is there to show: nothing of ours looks at it there until the path is through."""
        return self._case.scenario.transfer == "blocking"

    def _check_weights(self, trainer: Trainer, truth: reference.Reference, what: str) -> None:
        self._runtime.synchronize()
        lost = training_state.lost_weights(trainer.model, truth)
        if lost:
            self._add(problems=(Problem(kind="poisoned", detail=f"{what}: {verification.first_names(lost)}"),))

    def _drain(self, trainer: Trainer, verifier: verification.Verifier) -> None:
        """Runs the path, reads and checks each entry, then looks at what is left behind."""
        allocated = self._runtime.allocated_bytes() if self._watches_state else None
        self._runtime.reset_peak()
        arguments = PathArguments(
            model=trainer.model,
            device=self._runtime.device,
            optimizer=trainer.optimizer,
            scratch=self._runtime.scratch / self._case.id.replace("/", "-"),
            control=self._runtime.control,
        )
        timed = _Timed(self._runtime, self._watches_state)
        alive: list[Callable[[], torch.Tensor | None]] = []
        own = trainer.tensor_ids()
        yielded: Counter[str] = Counter()
        shards = _shard_bytes(trainer.model, self._runtime.device) if self._path.offloads else 0
        items = timed.over(lambda: self._function(arguments))
        for name, value in items:
            if self._path.offloads and not yielded:
                self._look_for_kept_shards(allocated, shards, value)
            entry = verification.read(name, value)
            yielded[entry.kind] += 1
            if isinstance(value, torch.Tensor) and id(value) not in own:
                alive.append(private.weak_reference(value))
            del value
            self._stay("verify")
            verifier.check(entry)
            self._stay("extract")
            self._show_progress(yielded.total())
        peak = self._runtime.peak_bytes()
        del items
        self._add(
            seconds=timed.seconds,
            num_tensors=yielded.total(),
            yielded=dict(yielded),
            peak_extra_bytes=peak - allocated if peak is not None and allocated is not None else None,
        )
        self._look_for_leak(allocated, alive)

    def _look_for_leak(self, allocated: int | None, alive: list[Callable[[], torch.Tensor | None]]) -> None:
        kept, surplus = _kept(alive), self._surplus(allocated)
        if kept or surplus:
            gc.collect()
        end = time.monotonic() + _RELEASE_SECONDS
        while (kept or surplus) and time.monotonic() < end:
            time.sleep(0.001)
            kept, surplus = _kept(alive), self._surplus(allocated)
        if surplus:
            detail = f"{surplus} bytes of device memory not given back after the path's result was dropped"
            self._add(problems=(Problem(kind="leak", detail=detail),))
        elif kept:
            detail = f"{len(kept)} yielded tensors ({sum(kept)} bytes) still referenced after the result was dropped"
            self._add(problems=(Problem(kind="leak", detail=detail),))

    def _look_for_kept_shards(self, allocated: int | None, shards: int, first: Any) -> None:
        """The path has moved the shards off the device: their memory must have come back by now."""
        now = self._runtime.allocated_bytes()
        if now is None or allocated is None:
            return
        fresh = first.untyped_storage().nbytes() if isinstance(first, torch.Tensor) else 0
        kept = now - fresh - (allocated - shards)
        if 2 * kept > shards:
            detail = f"{kept} of {shards} bytes of shards stay on the device though the model was offloaded"
            self._add(problems=(Problem(kind="leak", detail=detail),))

    def _surplus(self, allocated: int | None) -> int:
        """Bytes of device memory above ``allocated``; 0 where nobody counts them."""
        now = self._runtime.allocated_bytes() if allocated is not None else None
        return max(0, now - allocated) if now is not None and allocated is not None else 0

    def _agree(self) -> bool:
        """Tells the other ranks whether this one failed. False if they ended otherwise.

        Where all ranks ended alike, one collective over the model's own group shows whether it
        still works; the answer decides whether the next case may run in the same workers.
        """
        failed = self.record.failure is not None
        stage = self.record.stage
        if not failed:
            self._enter("agree")
        try:
            same = self._same_everywhere(failed)
            works = same and self._group_works()
            self._add(healthy=self.record.healthy and works, stage=stage)
        except Exception as error:
            if not failed:
                self._add(failure=failure_from(error))
            self._add(healthy=False)
            return False
        if same and not works:
            self._add(
                problems=(Problem(kind="poisoned", detail="a collective over the model's group gives a wrong sum"),)
            )
        return works

    def _same_everywhere(self, failed: bool) -> bool:
        changed = any(problem.kind == "poisoned" for problem in self.record.problems)
        # The path may have left another default device.
        mine = torch.tensor([int(failed), int(changed)], device="cpu")
        everyone = [torch.zeros_like(mine) for _ in range(self._runtime.world_size)]
        dist.all_gather(everyone, mine, group=self._runtime.control)
        # All ranks build the scenario anew, or none does.
        self._changed_somewhere = any(bool(other[1]) for other in everyone)
        return all(int(other[0]) == int(failed) for other in everyone)

    def _group_works(self) -> bool:
        ones = torch.ones(4, device=self._runtime.device)
        dist.all_reduce(ones)
        self._runtime.synchronize()
        return bool((ones == self._runtime.world_size).all())

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """The path's exceptions become part of the record, KeyboardInterrupt and a user's own kind among them:
        nobody interrupts a worker. SystemExit is left alone: it ends the worker."""
        try:
            yield
        except Unsupported as reason:
            self._add(unsupported=str(reason))
        except SystemExit:
            raise
        except BaseException as error:
            self._add(failure=failure_from(error))
            self._report(self.record)

    def _enter(self, stage: Stage) -> None:
        self._stay(stage)
        self._report(self.record)

    def _report(self, record: Record) -> None:
        self._reported_at = time.monotonic()
        self._tell(record)

    def _show_progress(self, num_tensors: int) -> None:
        """A path that goes on yielding is no hang, however long it takes."""
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            self._add(num_tensors=num_tensors)
            self._report(self.record)

    def _stay(self, stage: Stage) -> None:
        self.record = dataclasses.replace(self.record, stage=stage)

    def _add(self, *, problems: tuple[Problem, ...] = (), **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, problems=(*self.record.problems, *problems), **fields)


class _Timed:
    """Seconds spent inside the path itself: its call and each of its steps, not our checks between."""

    def __init__(self, runtime: Runtime, synchronize: bool) -> None:
        self._runtime = runtime
        self._synchronize = synchronize
        self.seconds = 0.0

    def over(self, call: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
        with self._watch():
            entries = verification.entries_of(call())
        while True:
            with self._watch():
                entry = next(entries, None)
            if entry is None:
                return
            yield entry
            del entry

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._synchronize:
            self._runtime.synchronize()
        self.seconds += time.perf_counter() - start


def _shard_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of this rank's shards that lie on the device."""
    shards = [private.local_tensor(tensor.shown) for tensor in reader.read(model).tensors()]
    return sum(shard.nbytes for shard in shards if shard.device == device)


def _kept(alive: list[Callable[[], torch.Tensor | None]]) -> list[int]:
    """Bytes of each yielded tensor that somebody still holds and whose memory was not freed."""
    sizes = [private.local_tensor(tensor).untyped_storage().nbytes() for ref in alive if (tensor := ref()) is not None]
    return [size for size in sizes if size]


def _why_not(case: Case, path: Path, runtime: Runtime) -> str:
    """Why the path cannot be tried in this scenario; empty if it can."""
    if reason := impossible(path, case.scenario):
        return reason
    if path.name == "dcp" and runtime.num_nodes > 1:
        return "the checkpoint directory is not shared between the nodes"
    return ""
