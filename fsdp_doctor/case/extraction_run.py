"""One extraction case on one rank: the offload, the path, what it yields, what it leaves behind, the next step."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import reference, training_state, verification
from fsdp_doctor.case.case_run import Assignment, CaseRun
from fsdp_doctor.case.lora_reference import merged_weights
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.trainer import COMPUTE_DTYPE, Trainer
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.verdict.records import Problem

# Threads of a process group hold the tensors of the last collective a little longer than it runs.
_RELEASE_SECONDS = 0.5


class ExtractionRun(CaseRun):
    """A path that extracts weights. ``truth``: what they are, once the scenario is in its state."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.truth = reference.Reference()
        self._before: training_state.StateDigest = {}

    def _new_trainer(self) -> Trainer:
        trainer = Trainer(self._case.scenario, self._runtime, with_mesh=not self._path.without_mesh)
        if self._case.scenario.phase == "trained":
            trainer.step()
            # A second step: the first one allocates what stays (Adam's state, cuBLAS workspaces).
            trainer.step()
            # As every later cycle leaves it: loading the optimizer takes Adam's step counters, which a step
            # makes on the host, to the device with the rest of the state.
            trainer.resume()
        return trainer

    def _train_on(self, trainer: Trainer) -> None:
        self._enter("next step")
        trainer.resume(undo_staging=self.undoes_staging)
        self._check_weights(trainer, self.truth, "the next training step would start from other weights")
        trainer.step()
        self._runtime.synchronize()

    def _is_reusable(self, trainer: Trainer) -> bool:
        return self._case.scenario.phase == "trained"

    def _bring_to_state(self, trainer: Trainer) -> None:
        self._enter("reference")
        optimizer = trainer.optimizer if self._contract.form == "optimizer" else None
        self.truth = reference.take(trainer.model, optimizer, self._runtime)
        self._enter("offload")
        trainer.offload()
        if self._case.scenario.staging == "staged":
            self._enter("staging")
            trainer.stage()
        if self._watches_state:
            self._enter("fingerprint")
            self._check_weights(trainer, self.truth, "the offload or the staging changed weights")
            self._before = training_state.state_of(trainer.model, trainer.optimizer)
        self._expected = self._expected_yield(trainer)

    def _expected_yield(self, trainer: Trainer) -> verification.ExpectedYield:
        return verification.ExpectedYield(
            contract=self._contract,
            reference=self.truth,
            rank=self._runtime.rank,
            compute_device=self._runtime.device,
            compute_dtype=COMPUTE_DTYPE,
            parameter_devices=verification.parameter_devices(trainer.model),
            shard_group_of_one=self._case.scenario.sharding == "size1" or self._runtime.world_size == 1,
            merged_weights=merged_weights(trainer.model, self.truth.full),
        )

    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        self._enter("extract")
        verifier = verification.Verifier(self._expected)
        self._drain(trainer, verifier, call, owned)
        self._enter("fingerprint")
        self._add(problems=verifier.problems())
        if self._watches_state:
            self._add(
                problems=training_state.changes(self._before, training_state.state_of(trainer.model, trainer.optimizer))
            )

    def _check_weights(self, trainer: Trainer, truth: reference.Reference, what: str) -> None:
        self._runtime.synchronize()
        lost = training_state.lost_weights(trainer.model, truth)
        if lost:
            self._add(problems=(Problem(kind="poisoned", detail=f"{what}: {verification.first_names(lost)}"),))

    def _drain(self, trainer: Trainer, verifier: verification.Verifier, call: Callable[[], Any], owned: bool) -> None:
        """Runs the path, reads and checks each entry, then looks at what is left behind."""
        allocated = self._runtime.allocated_bytes() if self._watches_state and owned else None
        self._runtime.reset_peak()
        timed = _Timed(self._runtime, self._watches_state)
        alive: list[Callable[[], torch.Tensor | None]] = []
        own = trainer.tensor_ids()
        yielded: Counter[str] = Counter()
        shards = _shard_bytes(trainer.model, self._runtime.device) if self._path.offloads else 0
        items = timed.over(call)
        for name, value in items:
            if self._path.offloads and not yielded:
                self._look_for_kept_shards(allocated, shards, value)
            entry = verification.read(name, value)
            yielded[entry.kind] += 1
            if owned and isinstance(value, torch.Tensor) and id(value) not in own:
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
