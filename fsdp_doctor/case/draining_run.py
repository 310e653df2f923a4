"""The extraction itself on one rank: what the path yields, what it leaves behind, and what it must leave alone."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import training_state, verification, yielded_entries
from fsdp_doctor.case.problem_notes import first_names
from fsdp_doctor.case.recorded_run import RecordedRun
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.fsdp import private
from fsdp_doctor.verdict.records import Problem

# Nothing that goes on after it has yielded each name twice comes to an end.
_TIMES_OVER = 2
# Threads of a process group hold the tensors of the last collective a little longer than it runs.
_RELEASE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class ExtractionCall:
    """A path about to run.

    call: what runs it. own: ids of the tensors that live on, so that a path which yields one keeps nothing alive.
    offloaded_bytes: of shards that the path promises to move off the device before it yields.
    owned: whether the path runs in ``call`` alone and nobody else holds its result, so that its memory can be told.
    """

    call: Callable[[], Any]
    own: Collection[int]
    offloaded_bytes: int = 0
    owned: bool = True


class DrainingRun(RecordedRun):
    """A case whose path yields."""

    @property
    def _watches_state(self) -> bool:
        """Whether memory and model may be looked at while the path runs, which waits for copies in flight."""
        return True

    def _note_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, truth: Reference) -> None:
        """What the path must leave alone, of a model that was offloaded as its scenario has it."""
        self._before = training_state.StateDigest(parts={}, unsharded=frozenset())
        if self._watches_state:
            self._enter("fingerprint")
            self._check_weights(model, truth, "the offload or the staging changed weights")
            self._before = training_state.state_of(model, optimizer)

    def _extract(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extraction: ExtractionCall,
        expected: verification.ExpectedYield,
    ) -> None:
        """Runs the path after :meth:`_note_state`, and verifies what came of it."""
        verifier = verification.Verifier(expected)
        self._enter("extract")
        self._drain(extraction, verifier)
        self._enter("fingerprint")
        self._add(problems=verifier.problems())
        if self._watches_state:
            self._add(problems=training_state.changes(self._before, training_state.state_of(model, optimizer)))

    def _check_weights(self, model: nn.Module, truth: Reference, what: str) -> None:
        self._runtime.synchronize()
        lost = training_state.lost_weights(model, truth)
        if lost:
            self._add(problems=(Problem(kind="poisoned", detail=f"{what}: {first_names(lost)}"),))

    def _drain(self, extraction: ExtractionCall, verifier: verification.Verifier) -> None:
        """Runs the path, reads and checks each entry, then looks at what is left behind."""
        allocated = self._runtime.allocated_bytes() if self._watches_state and extraction.owned else None
        self._runtime.reset_peak()
        timed = _Timed(self._runtime, self._watches_state)
        alive: list[Callable[[], torch.Tensor | None]] = []
        yielded: Counter[str] = Counter()
        items = timed.over(extraction.call)
        for name, value in items:
            if extraction.offloaded_bytes and not yielded:
                self._look_for_kept_shards(allocated, extraction.offloaded_bytes, value)
            self._torch_functions.restore()
            entry = yielded_entries.read(name, value)
            yielded[entry.kind] += 1
            if extraction.owned and isinstance(value, torch.Tensor) and id(value) not in extraction.own:
                alive.append(private.weak_reference(value))
            del value
            self._stay("verify")
            verifier.check(entry)
            self._stay("extract")
            self._show_progress(yielded.total())
            if yielded.total() > _TIMES_OVER * max(verifier.num_promised, 1):
                detail = f"goes on after {yielded.total()} entries, where {verifier.num_promised} were promised"
                self._add(problems=(Problem(kind="wrong", detail=detail),))
                break
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
            entries = yielded_entries.entries_of(call())
        while True:
            with self._watch():
                entry = next(entries, None)
                # What is yielded on the host must be there: a wait for the device would let its copy arrive.
                if self._synchronize and not (entry and yielded_entries.is_on_host(entry[1])):
                    self._runtime.synchronize()
            if entry is None:
                return
            yield entry
            del entry

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def _kept(alive: list[Callable[[], torch.Tensor | None]]) -> list[int]:
    """Bytes of each yielded tensor that somebody still holds and whose memory was not freed."""
    sizes = [private.local_tensor(tensor).untyped_storage().nbytes() for ref in alive if (tensor := ref()) is not None]
    return [size for size in sizes if size]
