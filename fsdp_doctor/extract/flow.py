"""The pipeline: while one bucket is handed out, the next is loaded and gathered."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.agreement import Agreement
from fsdp_doctor.extract.lanes import Lanes
from fsdp_doctor.extract.loader import Loader
from fsdp_doctor.extract.lora import Adapter, Delta
from fsdp_doctor.extract.plan import Bucket, buckets
from fsdp_doctor.extract.sources import Entry, Source, entries
from fsdp_doctor.extract.steps import Step, all_gather
from fsdp_doctor.extract.wire import Wire


@dataclass
class _Flight:
    """A bucket under way. arrival: the event after it. deltas: held until then, for the device reads them."""

    bucket: Bucket
    arrival: Any
    deltas: dict[str, list[Delta]]


class Flow:
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
        self._lanes = Lanes(device)

    def run(self, plan: Sequence[Bucket], room: int) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yields every tensor. Two buckets are under way at once unless they take more than ``room`` bytes.

        Each rank gives its word for a bucket before it launches it, and never waits for its caller
        between the two: what is launched is finished by all.
        """
        waiting = list(reversed(plan))
        under_way: collections.deque[_Flight] = collections.deque()
        landed: Any = None
        try:
            while waiting or under_way:
                while waiting and self._may_launch(under_way, waiting[-1], room):
                    # So that the host is not more than a bucket ahead of the device.
                    if landed is not None:
                        landed.synchronize()
                    under_way.append(self._launch(waiting.pop()))
                flight = under_way.popleft()
                results, landed = self._land(flight), flight.arrival
                del flight
                while results:
                    entry, tensor = results.pop()
                    yield entry, tensor
                    del tensor
            self._agreement.end()
        finally:
            # Who leaves early gives memory back that is still being written to.
            for flight in under_way:
                self._lanes.wait(flight.arrival)

    def _may_launch(self, under_way: Collection[_Flight], bucket: Bucket, room: int) -> bool:
        held = sum(flight.bucket.nbytes for flight in under_way)
        return not under_way or (len(under_way) < 2 and held + bucket.nbytes <= room)

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> _Flight:
        if bucket.is_gathered:
            self._agreement.proceed()
        deltas = self._deltas(bucket)
        loader = Loader(self._device, deltas)
        return _Flight(bucket, self._carry(bucket.steps, loader), deltas)

    def _carry(self, steps: list[Step], loader: Loader) -> Any:
        for step in steps:
            step.allocate(self._device)
        with self._lanes.loading():
            for step in steps:
                step.load(loader)
        with self._lanes.gathering():
            all_gather(steps)
            for step in steps:
                step.finish()
        return self._lanes.gathered()

    @torch.no_grad()
    def _land(self, flight: _Flight) -> list[tuple[Entry, torch.Tensor]]:
        """The bucket's tensors, last first; the caller's stream has them once it gets there."""
        self._lanes.wait(flight.arrival)
        results = [result for step in flight.bucket.steps for result in step.results()]
        results.sort(key=lambda result: result[0], reverse=True)
        return [(entry, tensor) for _, entry, tensor in results]

    def _deltas(self, bucket: Bucket) -> dict[str, list[Delta]]:
        """What is to be merged into this bucket's weights, its factors gathered for it."""
        wanted = {name: self._adapters[name] for name in dict.fromkeys(bucket.names) if name in self._adapters}
        if not wanted:
            return {}
        names = dict.fromkeys(name for many in wanted.values() for adapter in many for name in (adapter.a, adapter.b))
        gathered: dict[str, torch.Tensor] = {}
        for part in buckets([self._factors[name] for name in names], Wire(), bucket_bytes=1 << 62, extra_bytes={}):
            self._lanes.wait(self._carry(part.steps, Loader(self._device, {})))
            for step in part.steps:
                gathered |= {name: full for _, entry, full in step.results() for name in entry.names}
        return {
            weight: [Delta(gathered[a.a], gathered[a.b], a.scaling, a.transposed) for a in many]
            for weight, many in wanted.items()
        }


def largest(sources: Sequence[Source], wire: Wire) -> int:
    """Bytes of the largest tensor that is yielded."""
    return max((e.numel * wire.of(e).itemsize for source in sources for e in entries(source)), default=0)
