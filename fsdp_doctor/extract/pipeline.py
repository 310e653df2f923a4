"""The pipeline: while one bucket is handed out, the next is loaded and gathered."""

from __future__ import annotations

import collections
import contextlib
import operator
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_doctor.extract.agreement import Agreement
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.host_copies import HostCopies
from fsdp_doctor.extract.loader import CastBuffer, Loader
from fsdp_doctor.extract.lora import Delta, LoraAdapter
from fsdp_doctor.extract.plan import Bucket, Plan, buckets
from fsdp_doctor.extract.sources import TensorSpec
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.extract.transfers import Call, Result, TensorTransfer, all_gather, handed_out
from fsdp_doctor.extract.without_autograd import without_autograd
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection

# Of a rank, to read pageable memory: the smaller the chunks, the sooner the first is on its way.
MOST_THREADS = 8
CHUNK_BYTES = 4 << 20


@dataclass(eq=False)
class _PendingBucket:
    """A bucket whose loading has begun. is_launched: its collectives are, and ``done`` is the event after them.

    deltas: held until then, for the device reads them.
    """

    bucket: Bucket
    transfers: list[TensorTransfer]
    loader: Loader
    is_launched: bool = False
    done: Any = None
    deltas: dict[str, list[Delta]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _LoadedFactors:
    """This rank's part of what is merged into a bucket. loader: holds what is being copied."""

    transfers: list[TensorTransfer]
    loader: Loader


class Pipeline:
    """One extraction. shards: this rank's, by the places of the plan's sources."""

    def __init__(self, plan: Plan, shards: Sequence[torch.Tensor], agreement: Agreement) -> None:
        self._plan = plan
        self._call = Call(plan.device, shards, plan.ready)
        self._agreement = agreement
        self._streams = Streams(plan.device)
        self._cast_buffer = CastBuffer(plan.device, self._streams)
        self._copies = HostCopies(self._streams, MOST_THREADS, CHUNK_BYTES)
        # Small tensors that were gathered with others and come later.
        self._early: list[tuple[int, TensorSpec, Result]] = []
        self._pending: collections.deque[_PendingBucket] = collections.deque()
        # How many buckets were launched, how many of the others are launched whatever happens, and whether the
        # collectives of the next have begun.
        self._num_launched = self._promised = 0
        self._has_begun = False
        # What the largest of those needs beside the memory of buckets that are pending: the caller, or another process,
        # may take all other memory. Whether this rank only carries out what it has promised.
        self._spare: torch.Tensor | None = None
        self._leaves = False

    def run(self) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        """Yields every tensor. As many buckets are pending at once as fit into the plan's ``most_bytes``.

        Each rank agrees to buckets before it launches their collectives. If it ends before all of those are launched,
        for whatever reason, it launches the rest first: what one rank launches, all do.
        """
        pending = self._pending
        last_done: collections.deque[Any] = collections.deque([None], maxlen=2)
        results: list[tuple[int, TensorSpec, Result]] = []
        last_bytes = 0
        try:
            while self._upcoming() is not None or pending:
                while (bucket := self._upcoming()) is not None and self._may_load(bucket, last_bytes):
                    # The host may be a bucket further than what it hands out, not more: before torch 2.8
                    # a process group holds on to memory until the device is through with it.
                    if last_done[0] is not None:
                        last_done[0].synchronize()
                    self._load(bucket)
                    self._launch_loaded()
                if not pending[0].is_launched:
                    self._launch(pending[0])
                last_done.append(pending[0].done)
                results = self._results(pending.popleft())
                self._keep_spare(self._promised_buckets())
                while results:
                    _, spec, result = results.pop()
                    tensor = handed_out(result)
                    if not results:
                        last_bytes = tensor.nbytes
                    del result
                    yield spec, tensor
                    del tensor
            self._agreement.finish()
        except BaseException as error:
            # They hold memory, which the buckets that are yet to be launched may need.
            traceback.clear_frames(error.__traceback__)
            results.clear()
            raise
        finally:
            self._leave()

    def _upcoming(self) -> Bucket | None:
        """The next to be loaded."""
        place = self._num_launched + sum(not pending.is_launched for pending in self._pending)
        return self._plan.buckets[place] if place < len(self._plan.buckets) else None

    def _may_load(self, bucket: Bucket, last_bytes: int) -> bool:
        """last_bytes: of the tensor that the caller had last, and still has as a rule."""
        together = [*(pending.bucket for pending in self._pending), bucket]
        units = {unit for one in together for unit in one.units} & self._call.units.keys()
        held = sum(one.nbytes for one in together) + sum(self._call.units[unit].held_bytes() for unit in units)
        return not self._pending or held + last_bytes <= self._plan.most_bytes

    @without_autograd
    @without_garbage_collection
    def _load(self, bucket: Bucket) -> None:
        """Loading this rank's part needs no other rank."""
        self._spare = None
        transfers = [transfer.begun(self._call) for transfer in bucket.transfers]
        loader = Loader(self._plan.device, self._streams, self._cast_buffer, self._copies)
        self._pending.append(_PendingBucket(bucket, transfers, loader))
        with self._loading(loader):
            loader.begin(transfers, self._wanted(bucket))

    @contextlib.contextmanager
    def _loading(self, loader: Loader) -> Iterator[None]:
        """What a rank that leaves cannot load is NaN or 0: that it is gathered all the same is what it has promised."""
        try:
            yield
        except Exception:
            if not self._leaves:
                raise
            loader.spoil()

    def _launch_loaded(self) -> None:
        """All but the last where threads are reading that: they go on while the one before is gathered."""
        reads = self._pending[-1].loader.is_reading
        for pending in list(self._pending)[: -1 if reads else None]:
            if not pending.is_launched:
                self._launch(pending)

    @without_autograd
    @without_garbage_collection
    def _launch(self, pending: _PendingBucket) -> None:
        """What may fail comes before the ranks agree, or the others would wait for this one.

        Only what is merged into the shards needs a gather first. If that fails, the bucket is gathered all the same.
        """
        wanted = self._wanted(pending.bucket)
        factors = self._loaded_factors(wanted) if wanted else None
        if factors is None:
            with self._loading(pending.loader):
                pending.loader.finish({})
        self._try_room(pending.transfers)
        self._agree()
        failure = self._merge(pending, wanted, factors) if factors is not None else None
        pending.done = self._gather(pending.transfers, pending.deltas)
        pending.is_launched = True
        self._num_launched, self._promised, self._has_begun = self._num_launched + 1, self._promised - 1, False
        if failure is not None and not self._leaves:
            raise failure

    def _try_room(self, transfers: Sequence[TensorTransfer]) -> None:
        """Raises where the device has no memory for what torch allocates in the transfers' own collectives."""
        nbytes = max(transfer.collecting_bytes for transfer in transfers)
        if nbytes:
            with self._streams.gathering():
                torch.empty(nbytes, dtype=torch.uint8, device=self._plan.device)

    def _agree(self) -> None:
        """Before the first collective of a bucket."""
        if self._promised:
            return
        first = self._num_launched
        num_left = len(self._plan.buckets) - first
        if len(self._plan.ranks) == 1:
            self._promised = num_left
            return
        num_next = self._plan.num_promisable(first, self._agreement.num_next(num_left))
        one_only = False
        try:
            self._keep_spare(self._plan.buckets[first + 1 : first + num_next])
        except RuntimeError:
            one_only = True
        self._promised = self._agreement.promise(num_next, one_only=one_only)

    def _promised_buckets(self) -> Sequence[Bucket]:
        """Those that are yet to be launched, for other ranks."""
        if len(self._plan.ranks) == 1:
            return ()
        return self._plan.buckets[self._num_launched : self._num_launched + self._promised]

    def _keep_spare(self, promised: Sequence[Bucket]) -> None:
        """Raises where what is pending, once it is let go of, is not memory enough to launch each of these."""
        self._spare = None
        needed = max((bucket.launched_bytes + bucket.rounding_bytes for bucket in promised), default=0)
        units = sum(unit.held_bytes() for unit in self._call.units.values())
        held = units + sum(pending.bucket.held_bytes for pending in self._pending)
        if needed > held:
            self._spare = torch.empty(needed - held, dtype=torch.uint8, device=self._plan.device)

    def _gather(self, transfers: Sequence[TensorTransfer], deltas: dict[str, list[Delta]]) -> Any:
        """Launches all of it; the event after it."""
        self._has_begun = True
        with self._streams.gathering():
            all_gather(transfers)
            for transfer in transfers:
                transfer.collect(deltas)
        return self._streams.gathered()

    def _leave(self) -> None:
        """At the end, or early: then memory is given back that is still being written to."""
        if self._pending:
            with self._streams.gathering():
                all_of_it = self._streams.gathered()
            self._streams.wait(all_of_it)
        self._pending.clear()
        self._early.clear()
        self._call.units.clear()
        # What it leaves with is to be known, not that it could not take part in the rest.
        with contextlib.suppress(Exception):
            self._carry_out()
        self._copies.close()
        if self._plan.adapters:
            private.release_workspaces(self._plan.device)

    def _carry_out(self) -> None:
        """Launches what is promised, one bucket after the other: for that there is memory."""
        self._leaves, self._spare = True, None
        while self._promised_buckets() and not self._has_begun:
            self._load(self._plan.buckets[self._num_launched])
            self._launch(self._pending[0])
            self._streams.wait(self._pending.popleft().done)
            self._call.units.clear()

    @without_autograd
    @without_garbage_collection
    def _results(self, launched: _PendingBucket) -> list[tuple[int, TensorSpec, Result]]:
        """The bucket's tensors, last first; the caller's stream has them once it gets there."""
        self._streams.wait(launched.done)
        results = self._early
        for transfer in launched.transfers:
            results += transfer.results()
        end = launched.bucket.end
        self._early = [result for result in results if result[0] >= end]
        results = [result for result in results if result[0] < end]
        results.sort(key=operator.itemgetter(0), reverse=True)
        return results

    def _wanted(self, bucket: Bucket) -> dict[str, list[LoraAdapter]]:
        adapters = self._plan.adapters
        if not adapters:
            return {}
        return {name: adapters[name] for name in dict.fromkeys(bucket.names()) if name in adapters}

    def _loaded_factors(self, wanted: Mapping[str, list[LoraAdapter]]) -> _LoadedFactors:
        names = dict.fromkeys(name for many in wanted.values() for adapter in many for name in (adapter.a, adapter.b))
        # The factors of one unit of FSDP1 are as many units.
        call = Call(self._plan.device, self._call.shards, frozenset())
        factors = [self._plan.factors[name] for name in names]
        parts = buckets(factors, OutputDtypes(), bucket_bytes=1 << 62, extra_bytes={})
        transfers = [transfer.begun(call) for part in parts for transfer in part.transfers]
        loader = Loader(self._plan.device, self._streams, self._cast_buffer, self._copies)
        with self._loading(loader):
            loader.begin(transfers, ())
            loader.finish({})
        self._try_room(transfers)
        return _LoadedFactors(transfers, loader)

    def _merge(
        self, pending: _PendingBucket, wanted: Mapping[str, list[LoraAdapter]], factors: _LoadedFactors
    ) -> BaseException | None:
        """Gathers the factors, and adds their products to this rank's part. What goes wrong there is not raised.

        The others have then NaN of that part, until they hear that this rank left.
        """
        self._streams.wait(self._gather(factors.transfers, {}))
        try:
            full = {
                name: handed_out(result)
                for one in factors.transfers
                for _, spec, result in one.results()
                for name in spec.names
            }
            pending.deltas = {
                weight: [Delta(full[a.a], full[a.b], a.scaling, a.transposed) for a in many]
                for weight, many in wanted.items()
            }
            # The caller's stream has copied them out of what was gathered.
            self._streams.begin_loading()
            pending.loader.finish(pending.deltas)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            pending.deltas.clear()
            pending.loader.spoil()
            return error
        return None
