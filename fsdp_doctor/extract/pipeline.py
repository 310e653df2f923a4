"""The pipeline: while one bucket is handed out, the next is loaded and gathered."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.agreement import Agreement
from fsdp_doctor.extract.collector import collector_waits
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.loader import Loader, Staging
from fsdp_doctor.extract.lora import Adapter, Delta
from fsdp_doctor.extract.plan import Bucket, buckets
from fsdp_doctor.extract.sources import Source, TensorSpec, entries
from fsdp_doctor.extract.steps import Step, all_gather
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.fsdp import private


@dataclass
class _PendingBucket:
    """A bucket under way. arrival: the event after it. deltas: held until then, for the device reads them."""

    bucket: Bucket
    arrival: Any
    deltas: dict[str, list[Delta]]


class Pipeline:
    """adapters, factors: which factors make up what is merged into a weight, and where they are."""

    def __init__(
        self,
        device: torch.device,
        agreement: Agreement,
        adapters: Mapping[str, list[Adapter]],
        factors: Mapping[str, Source],
    ) -> None:
        self._device = device
        self._agreement = agreement
        self._adapters = adapters
        self._factors = factors
        self._streams = Streams(device)
        self._staging = Staging(device, self._streams)

    def run(self, plan: Iterable[Bucket], room: int) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        """Yields every tensor. As many buckets are under way at once as fit into ``room`` bytes.

        Each rank gives its word for a bucket before it launches it, and never waits for its caller
        between the two: what is launched is finished by all.
        """
        buckets = iter(plan)
        waiting = next(buckets, None)
        under_way: collections.deque[_PendingBucket] = collections.deque()
        landed: collections.deque[Any] = collections.deque([None], maxlen=2)
        try:
            while waiting is not None or under_way:
                while waiting is not None and self._may_launch(under_way, waiting, room):
                    # The host may be a bucket further than what it hands out, not more: before torch 2.8
                    # a process group holds on to memory until the device is through with it.
                    if landed[0] is not None:
                        landed[0].synchronize()
                    under_way.append(self._launch(waiting))
                    waiting = next(buckets, None)
                pending = under_way.popleft()
                results = self._land(pending)
                landed.append(pending.arrival)
                del pending
                while results:
                    entry, tensor = results.pop()
                    yield entry, tensor
                    del tensor
            self._agreement.end()
        finally:
            # Who leaves early gives memory back that is still being written to.
            for pending in under_way:
                self._streams.wait(pending.arrival)
            if self._adapters:
                private.release_workspaces(self._device)

    def _may_launch(self, under_way: Collection[_PendingBucket], bucket: Bucket, room: int) -> bool:
        together = [*(pending.bucket for pending in under_way), bucket]
        begun = {assembly for one in together for assembly in one.assemblies}
        held = sum(one.nbytes for one in together) + sum(assembly.held_bytes() for assembly in begun)
        return not under_way or held <= room

    @torch.no_grad()
    @collector_waits
    def _launch(self, bucket: Bucket) -> _PendingBucket:
        """This rank's part needs no other rank: only before the first gather do they have to be agreed."""
        agree = self._agreement.proceed if bucket.is_gathered else _nothing
        deltas: dict[str, list[Delta]] = {}
        if wanted := self._wanted(bucket):
            agree()
            agree = _nothing
            deltas = self._deltas(wanted)
        return _PendingBucket(bucket, self._carry(bucket.steps, deltas, agree), deltas)

    def _carry(self, steps: list[Step], deltas: dict[str, list[Delta]], agree: Callable[[], None]) -> Any:
        for step in steps:
            step.allocate(self._device)
        self._streams.begin_loading()
        loader = Loader(self._device, self._streams, self._staging, deltas)
        try:
            loader.load(piece for step in steps for piece in step.pieces())
            agree()
            with self._streams.gathering():
                all_gather(steps)
                for step in steps:
                    step.collect(deltas)
        except BaseException:
            # The memory that is being written to goes back to the caller's stream.
            with self._streams.gathering():
                self._streams.wait(self._streams.gathered())
            raise
        return self._streams.gathered()

    @torch.no_grad()
    @collector_waits
    def _land(self, pending: _PendingBucket) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The bucket's tensors, last first; the caller's stream has them once it gets there."""
        self._streams.wait(pending.arrival)
        results = [result for step in pending.bucket.steps for result in step.results()]
        results.sort(key=lambda result: result[0], reverse=True)
        return [(entry, tensor) for _, entry, tensor in results]

    def _wanted(self, bucket: Bucket) -> dict[str, list[Adapter]]:
        if not self._adapters:
            return {}
        return {name: self._adapters[name] for name in dict.fromkeys(bucket.names()) if name in self._adapters}

    def _deltas(self, wanted: Mapping[str, list[Adapter]]) -> dict[str, list[Delta]]:
        """What is to be merged into a bucket's weights, its factors gathered for it."""
        names = dict.fromkeys(name for many in wanted.values() for adapter in many for name in (adapter.a, adapter.b))
        gathered: dict[str, torch.Tensor] = {}
        for part in buckets(
            [self._factors[name] for name in names], OutputDtypes(), bucket_bytes=1 << 62, extra_bytes={}
        ):
            self._streams.wait(self._carry(part.steps, {}, _nothing))
            for step in part.steps:
                gathered |= {name: full for _, entry, full in step.results() for name in entry.names}
        return {
            weight: [Delta(gathered[a.a], gathered[a.b], a.scaling, a.transposed) for a in many]
            for weight, many in wanted.items()
        }


def _nothing() -> None:
    """There is nobody to agree with, or it is done."""


def largest(sources: Sequence[Source], dtypes: OutputDtypes) -> int:
    """Bytes of the largest tensor that is yielded."""
    return max((e.numel * dtypes.of(e).itemsize for source in sources for e in entries(source)), default=0)
