"""The pipeline: while one bucket is handed out, the next is loaded and gathered."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.agreement import Agreement
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.loader import CastBuffer, Loader
from fsdp_doctor.extract.lora import Delta, LoraAdapter
from fsdp_doctor.extract.plan import Bucket, buckets
from fsdp_doctor.extract.sources import Source, TensorSpec, specs
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.extract.transfers import TensorTransfer, all_gather
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection


@dataclass
class _PendingBucket:
    """A bucket that was launched. done: the event after it. deltas: held until then, for the device reads them."""

    bucket: Bucket
    done: Any
    deltas: dict[str, list[Delta]]


class Pipeline:
    """adapters, factors: which factors make up what is merged into a weight, and where they are."""

    def __init__(
        self,
        device: torch.device,
        agreement: Agreement,
        adapters: Mapping[str, list[LoraAdapter]],
        factors: Mapping[str, Source],
    ) -> None:
        self._device = device
        self._agreement = agreement
        self._adapters = adapters
        self._factors = factors
        self._streams = Streams(device)
        self._cast_buffer = CastBuffer(device, self._streams)

    def run(self, plan: Iterable[Bucket], most_bytes: int) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        """Yields every tensor. As many buckets are pending at once as fit into ``most_bytes``.

        Each rank agrees to a bucket before it launches its collectives, and never waits for its caller
        between the two: what one rank launches, all finish.
        """
        buckets = iter(plan)
        upcoming = next(buckets, None)
        pending: collections.deque[_PendingBucket] = collections.deque()
        last_done: collections.deque[Any] = collections.deque([None], maxlen=2)
        try:
            while upcoming is not None or pending:
                while upcoming is not None and self._may_launch(pending, upcoming, most_bytes):
                    # The host may be a bucket further than what it hands out, not more: before torch 2.8
                    # a process group holds on to memory until the device is through with it.
                    if last_done[0] is not None:
                        last_done[0].synchronize()
                    pending.append(self._launch(upcoming))
                    upcoming = next(buckets, None)
                first = pending.popleft()
                results = self._results(first)
                last_done.append(first.done)
                del first
                while results:
                    spec, tensor = results.pop()
                    yield spec, tensor
                    del tensor
            self._agreement.end()
        finally:
            # Who leaves early gives memory back that is still being written to.
            for launched in pending:
                self._streams.wait(launched.done)
            if self._adapters:
                private.release_workspaces(self._device)

    def _may_launch(self, pending: Collection[_PendingBucket], bucket: Bucket, most_bytes: int) -> bool:
        together = [*(launched.bucket for launched in pending), bucket]
        units = {unit for one in together for unit in one.units}
        held = sum(one.nbytes for one in together) + sum(unit.held_bytes() for unit in units)
        return not pending or held <= most_bytes

    @torch.no_grad()
    @without_garbage_collection
    def _launch(self, bucket: Bucket) -> _PendingBucket:
        """Loading this rank's part needs no other rank: only before the first gather do they have to agree."""
        agree: Callable[[], object] = self._agreement.proceed if bucket.is_gathered else _agreed
        deltas: dict[str, list[Delta]] = {}
        if wanted := self._wanted(bucket):
            agree()
            agree = _agreed
            deltas = self._deltas(wanted)
        return _PendingBucket(bucket, self._transfer(bucket.transfers, deltas, agree), deltas)

    def _transfer(
        self, transfers: list[TensorTransfer], deltas: dict[str, list[Delta]], agree: Callable[[], object]
    ) -> Any:
        """Launches all of it; the event after it."""
        for transfer in transfers:
            transfer.allocate(self._device)
        self._streams.begin_loading()
        loader = Loader(self._device, self._streams, self._cast_buffer, deltas)
        try:
            loader.load(piece for transfer in transfers for piece in transfer.pieces())
            agree()
            with self._streams.gathering():
                all_gather(transfers)
                for transfer in transfers:
                    transfer.collect(deltas)
        except BaseException:
            # The memory that is being written to goes back to the caller's stream.
            with self._streams.gathering():
                self._streams.wait(self._streams.gathered())
            raise
        return self._streams.gathered()

    @torch.no_grad()
    @without_garbage_collection
    def _results(self, launched: _PendingBucket) -> list[tuple[TensorSpec, torch.Tensor]]:
        """The bucket's tensors, last first; the caller's stream has them once it gets there."""
        self._streams.wait(launched.done)
        results = [result for transfer in launched.bucket.transfers for result in transfer.results()]
        results.sort(key=lambda result: result[0], reverse=True)
        return [(spec, tensor) for _, spec, tensor in results]

    def _wanted(self, bucket: Bucket) -> dict[str, list[LoraAdapter]]:
        if not self._adapters:
            return {}
        return {name: self._adapters[name] for name in dict.fromkeys(bucket.names()) if name in self._adapters}

    def _deltas(self, wanted: Mapping[str, list[LoraAdapter]]) -> dict[str, list[Delta]]:
        """What is to be merged into a bucket's weights, its factors gathered for it."""
        names = dict.fromkeys(name for many in wanted.values() for adapter in many for name in (adapter.a, adapter.b))
        gathered: dict[str, torch.Tensor] = {}
        for part in buckets(
            [self._factors[name] for name in names], OutputDtypes(), bucket_bytes=1 << 62, extra_bytes={}
        ):
            self._streams.wait(self._transfer(part.transfers, {}, _agreed))
            for transfer in part.transfers:
                gathered |= {name: full for _, spec, full in transfer.results() for name in spec.names}
        return {
            weight: [Delta(gathered[a.a], gathered[a.b], a.scaling, a.transposed) for a in many]
            for weight, many in wanted.items()
        }


def _agreed() -> None:
    """There is nobody to agree with, or it is done."""


def largest(sources: Sequence[Source], dtypes: OutputDtypes) -> int:
    """Bytes of the largest tensor that is yielded."""
    return max((s.numel * dtypes.of(s).itemsize for source in sources for s in specs(source)), default=0)
