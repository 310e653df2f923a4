"""Extraction of full tensors: plan, read shards, gather, yield; and the full state dict on the host.

``full_tensors`` checks its arguments and gets the plan, which the module ``plan`` keeps. ``Pipeline.run`` does the
rest: while one bucket is yielded, the next is loaded and gathered. The caller iterates over a ``TensorStream``.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import queue
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from fsdp_doctor.weights.extract.lora import Lora, LoraAdapter, list_factor_names, make_deltas
from fsdp_doctor.weights.extract.plan import BUCKET_BYTES, Arguments, Plan, get_plan, list_ranks
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection, disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.expert_groups import Experts
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors
from fsdp_doctor.weights.names.hub_names import Names
from fsdp_doctor.weights.transport.agreement import Agreement, PlanMismatch
from fsdp_doctor.weights.transport.buckets import Bucket, Division
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.host_copies import HostCopies, count_threads, view_as_bytes
from fsdp_doctor.weights.transport.loader import CastBuffer, Loader
from fsdp_doctor.weights.transport.rank_groups import Comparison, describe_conflicts, read_groups
from fsdp_doctor.weights.transport.sources import OutputDtypes, TensorSpec, list_sources, list_specs
from fsdp_doctor.weights.transport.streams import HomeStream, Streams, wait_for_device
from fsdp_doctor.weights.transport.transfers import (
    Call,
    OrderedResult,
    TensorTransfer,
    launch_all_gathers,
    materialize,
    take_results,
)

_T = TypeVar("_T")

BucketWatch: TypeAlias = Callable[[int, Sequence[TensorTransfer]], object]
"""Function that is called with a bucket's number and transfers, in a stream that waits for their gathers."""

# Threads of a rank that read pageable memory, and the bytes that they read at once; small chunks let the first copy
# to the device begin early.
MOST_THREADS = 8
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class WeightInfo:
    """Global shape and requested dtype of a tensor that :func:`full_tensors` would yield."""

    shape: torch.Size
    dtype: torch.dtype


@run_for_model
def full_tensors(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
    names: Names = "model",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
    in_step: bool = False,
) -> ClosingIterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) for every parameter and every persistent buffer, in the same order on every rank.

    The results of the modules' ``get_extra_state`` are not tensors, and are left out; ``examine`` names those modules.

    Every rank of the group over which the model is sharded must call it with the same arguments, and iterate to the
    end. A rank that stops early, or raises, first takes part in the collectives that it has promised, and then makes
    the other ranks raise RankLeft. This happens when the rank closes the iterator, at the end of ``with
    full_tensors(model) as tensors``, or when nothing refers to the iterator any more. A traceback refers to the
    iterator, so without ``with`` the other ranks wait while an error is handled. Under HSDP each replica's shard group
    works independently of the other replicas. A model of which nothing is sharded, under DDP or unwrapped, needs no
    other rank. Any rank may call it alone, and the values are not compared with other ranks' values.

    By default, tensors have the names of the model before it was wrapped (by FSDP1, DDP, activation checkpointing,
    torch.compile, peft). A tied parameter is yielded under each of its names; the names share one tensor, which is
    gathered once. A yielded tensor belongs to the caller, may be kept, and never aliases the model. It is ready on the
    stream that is current when it is requested, like the result of any torch operation. The stream may be different
    each time. Shards are read only after the work on the streams that are current at the call and at the first tensor.

    The first call for a model makes a plan, which is kept until the model changes. Values are read during the
    iteration, so the next training step must wait for its end.

    Device memory in use at once, including the caller's last tensor, is the largest of three sums: one bucket and the
    largest tensor; two buckets and an eighth of a bucket; an eighth of a bucket and two tensors that are consecutive or
    in one FSDP1 unit. By default this is at most 1.25 GiB, unless a tensor is larger than 600 MiB. If the largest
    tensor is larger than a bucket, and most of the model is in tensors of at least half this size, such as fused
    experts, one more such tensor is in use. Memory that another stream still reads stays in use until that stream has
    read it.

    model: under FSDP2 (``fully_shard``; any mesh and placements), FSDP1 (``FullyShardedDataParallel``,
        ``use_orig_params`` or not), DDP, or unwrapped; under any offload, also half-moved (its parameters report
        another device than their shards have).
    device: the device of the yielded tensors. It must be the device on which the model's groups gather, which is the
        default; the tensors of a model without shards may be on any device.
    dtype: the dtype to which floating-point tensors are cast, each shard before it is gathered; integers, bools and
        complex numbers stay as they are. By default every tensor keeps its own dtype (under mixed precision, the fp32
        masters).
    keep_dtype: names, or fnmatch patterns, of tensors that are not cast.
    bucket_bytes: device memory of one bucket, in bytes. If the largest tensor needs the memory anyway, a bucket is up
        to four times as large, and a unit of FSDP1 is gathered whole.
    lora: ``merged``: the weights with their active adapters added, as the model computes with them. The merge is out of
        place: peft's ``merge_adapter`` changes the weights, and a generator that is read after ``unmerge_adapter``
        yields the base (verl PR 6782). ``base``: the weights without adapters. ``adapter``: only the one active
        adapter, under the names of peft's adapter files. For a model without adapters, ``merged`` and ``base`` are the
        same.
    names: ``model``: the names of the model; ``hub``: the names that transformers gives the tensors in
        ``save_pretrained``; ``auto``: the Hub's names if transformers knows them, otherwise the model's names; or a
        mapping in the form of :func:`read_hub_view`. A Hub tensor that is a part of a model's tensor, such as one
        expert of a fused tensor, is a view, and keeping the view keeps the whole tensor in memory. ``keep_dtype``
        always has the model's names.
    experts: for experts that were divided before FSDP sharded them, so that groups of ranks have different experts
        under one name: the mesh dim along which they are divided, ``mesh["ep"]``, for all parameters below a module
        ``experts``; or such dims by patterns of names. The experts are joined along their first dim and yielded as one
        tensor.
    tensors: the tensors to yield instead of the model's parameters and persistent buffers, for example an average of
        the weights. They are given by the model's names, in any dtype: DTensors of the same shapes, or plain tensors
        that are whole on every rank. The names, ties and adapters of the model apply to them. To yield the other
        tensors, too, pass ``model.state_dict() | average``. Not for FSDP1 units. The plan is not kept.
    in_step: whether gathers wait for the other ranks, so that no rank gathers while another rank sends. A bucket is
        complete on the device when its first tensor is yielded. The next bucket is gathered when every rank has
        requested it, and when every rank's device has finished its work. This is for receivers on the trainers'
        devices, where a gather that waits for a rank can block the kernels for which the send of that rank waits (RLinf
        issue 1539). Each bucket costs a wait for the device and a meeting over the store.

    Raises, before any collective: ValueError or TypeError for wrong arguments, a mesh in ``experts`` that does not
    divide them, and ``tensors`` that are not the model's; UnreadableTensors (RuntimeError) for tensors whose memory
    does not hold their values; NamesError (ValueError) for names that do not fit the model's tensors; RuntimeError for
    a tensor on the meta device, and for a process group that is missing or has no backend for the device;
    NotImplementedError for adapters that cannot be merged (DoRA, and kinds other than LoRA). Raises on every rank:
    PlanMismatch if the ranks have different models or arguments, or if groups of ranks have different tensors under one
    name, such as experts without a mesh. A plan that is kept is checked for different tensors only once. Warns
    BuffersDiffer, once for a plan that is kept, if the values of persistent buffers differ between ranks: each rank
    yields its own values.
    """
    with announce_errors(model):
        arguments = Arguments.check(
            device=device,
            dtype=dtype,
            keep_dtype=keep_dtype,
            bucket_bytes=bucket_bytes,
            lora=lora,
            names=names,
            experts=experts,
            in_step=in_step,
        )
    return ClosingIterator(yield_each_name(extract(model, arguments, tensors)))


@run_for_model
def weights_info(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    lora: Lora = "merged",
    names: Names = "model",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
) -> dict[str, WeightInfo]:
    """Returns the shape and dtype of each tensor that :func:`full_tensors` would yield, by name, in the same order.

    The function communicates nothing, copies nothing, and touches no device. Any rank may call it alone; verl's
    ``get_actor_weights_info``, by contrast, gathers (verl PR 4726 mends it). Arguments and errors are those of
    :func:`full_tensors`.
    """
    arguments = Arguments.check(dtype=dtype, keep_dtype=keep_dtype, lora=lora, names=names, experts=experts)
    plan, _ = get_plan(model, arguments, tensors)
    return {
        name: WeightInfo(part.shape, plan.dtypes.choose(spec))
        for source in plan.sources
        for spec in list_specs(source)
        for part, _ in plan.names.list_parts(spec)
        for name in part.names
    }


@contextlib.contextmanager
def announce_errors(model: nn.Module) -> Iterator[None]:
    """Tells the other ranks about an error: the ranks of the model or, if these are unknown, all ranks."""
    try:
        yield
    except Exception as error:
        # Without a process group there are no others.
        with contextlib.suppress(Exception):
            Agreement(_find_ranks(model)).leave(f"{type(error).__name__}: {error}")
        raise


def _find_ranks(model: nn.Module) -> tuple[int, ...]:
    with contextlib.suppress(Exception):
        contents = reader.read(model)
        ranks = read_groups(contents).ranks or list_ranks(list_sources(contents))
        if len(ranks) > 1:
            return ranks
    return tuple(range(dist.get_world_size()))


class ExtractionComparison(Comparison):
    """Comparison that raises PlanMismatch on every rank if groups of ranks have different tensors under one name."""

    def conclude(self, conclusion: str) -> None:
        super().conclude(conclusion)
        if self.conflicts:
            raise PlanMismatch(describe_conflicts(self.conflicts))


def extract(
    model: nn.Module, arguments: Arguments, tensors: GivenTensors | None = None, *, compares_anew: bool = False
) -> TensorStream:
    """Yields each full tensor once, with all of its names.

    If the output names divide a tensor, its parts are yielded instead.

    compares_anew: whether the ranks compare buffers and plain parameters at each call instead of once for each plan.
    """
    with announce_errors(model):
        plan, shards = get_plan(model, arguments, tensors)
    return start_extraction(plan, shards, compares_anew=compares_anew)


def start_extraction(
    plan: Plan, shards: Sequence[torch.Tensor], watch: BucketWatch | None = None, *, compares_anew: bool = False
) -> TensorStream:
    agreement = Agreement(plan.ranks)
    comparison = ExtractionComparison(plan.groups, shards, plan.device, anew=compares_anew)
    agreement.expect(lambda: plan.compared, comparison)
    with agreement.announce_leaving():
        pipeline = Pipeline(plan, shards, agreement, watch)
    return TensorStream(plan.names.divide(pipeline.run()), agreement, HomeStream(plan.device))


class ClosingIterator(Iterator[_T]):
    """Iterator that releases the other ranks when it is closed before its end, for example by leaving a ``with`` block.

    The iterator also closes when nothing refers to it any more. While an error is handled, the traceback still refers
    to it.
    """

    def __init__(self, items: Generator[_T]) -> None:
        self._items = items

    @private.leave_uncompiled
    def __next__(self) -> _T:
        return next(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._items.close()


class TensorStream(Iterator[tuple[TensorSpec, torch.Tensor]]):
    """Iterator over full tensors that tells the other ranks when it is closed or dropped before its end.

    The other ranks are also told if no tensor was read.

    A yielded tensor may be used in the stream that is current when it is taken. For a use in another stream, first call
    ``hand_out`` while the other stream is current.
    """

    def __init__(
        self, tensors: Generator[tuple[TensorSpec, torch.Tensor]], agreement: Agreement, home: HomeStream
    ) -> None:
        self.hand_out = home.hand_out
        self._home = home
        self._items = home.run(tensors)
        self._agreement = agreement

    def __next__(self) -> tuple[TensorSpec, torch.Tensor]:
        try:
            spec, tensor = next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self._agreement.leave(f"{type(error).__name__}: {error}")
            raise
        if self._home.callers is not None:
            self._home.hand_out_last(tensor)
        return spec, tensor

    def close(self) -> None:
        self._agreement.leave("its caller stopped")
        self._items.close()

    def __del__(self) -> None:
        self.close()


def yield_each_name(tensors: TensorStream) -> Generator[tuple[str, torch.Tensor]]:
    with contextlib.closing(tensors):
        for spec, tensor in tensors:
            yield spec.names[0], tensor
            for name in spec.names[1:]:
                tensors.hand_out(tensor)
                yield name, tensor
            del tensor


@dataclass(eq=False)
class _PendingBucket:
    """Bucket whose loading has begun.

    is_launched: whether the bucket's collectives have been launched.
    done: the event after the collectives.
    deltas: the LoRA deltas, which the device reads until the event ``done``.
    """

    bucket: Bucket
    transfers: list[TensorTransfer]
    loader: Loader
    is_launched: bool = False
    done: Any = None
    deltas: dict[str, list[Delta]] = field(default_factory=dict)


class Pipeline:
    """Pipeline of one extraction: loads, gathers and yields bucket after bucket.

    shards: this rank's shards, each at the index ``place`` of its source.
    """

    def __init__(
        self, plan: Plan, shards: Sequence[torch.Tensor], agreement: Agreement, watch: BucketWatch | None = None
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._call = Call(plan.device, shards, plan.ready)
        self._agreement = agreement
        self._streams = Streams(plan.device)
        self._cast_buffer = CastBuffer(plan.device, self._streams)
        self._copies = HostCopies(self._streams, MOST_THREADS, CHUNK_BYTES)
        # Small tensors that were gathered with others and come later, in order, and their memory in bytes.
        self._early: collections.deque[OrderedResult] = collections.deque()
        self._early_bytes = 0
        self._pending: collections.deque[_PendingBucket] = collections.deque()
        # The number of buckets that were launched, the number of further buckets that are promised, and whether the
        # collectives of the next bucket have begun.
        self._num_launched = self._promised = 0
        self._has_begun = False
        # Memory that the largest promised bucket needs in addition to the memory of pending buckets; it is reserved,
        # because the caller or another process may take all other memory.
        self._spare: torch.Tensor | None = None
        # Whether this rank is leaving and only launches the buckets that it has promised.
        self._leaves = False

    def run(self) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        """Yields every tensor. As many buckets are pending at once as fit into the plan's ``most_bytes``.

        Each rank agrees to buckets before it launches their collectives. A rank that ends early, for whatever reason,
        first launches the remaining buckets that it agreed to, because the other ranks launch them, too.
        """
        pending = self._pending
        last_done: collections.deque[Any] = collections.deque([None], maxlen=2)
        results: list[OrderedResult] = []
        last_bytes = 0
        try:
            while self._find_next() is not None or pending:
                while (bucket := self._find_next()) is not None and self._may_load(bucket, last_bytes):
                    # The host may be one bucket ahead of the bucket that it hands out, not more: before torch 2.8 a
                    # process group keeps memory until the device has finished with it.
                    if last_done[0] is not None:
                        last_done[0].synchronize()
                    self._load(bucket)
                    if not self._plan.in_step:
                        self._launch_loaded()
                if self._plan.in_step:
                    wait_for_device(self._plan.device)
                if not pending[0].is_launched:
                    self._launch(pending[0])
                if self._plan.in_step:
                    wait_for_device(self._plan.device)
                last_done.append(pending[0].done)
                results = self._make_results(pending.popleft())
                self._keep_spare(self._list_promised_buckets())
                while results:
                    _, spec, result = results.pop()
                    tensor = materialize(result)
                    if not results:
                        last_bytes = tensor.nbytes
                    del result
                    yield spec, tensor
                    del tensor
            if self._plan.in_step:
                wait_for_device(self._plan.device)
            self._agreement.finish()
        except BaseException as error:
            # They hold memory, which the buckets that are yet to be launched may need.
            traceback.clear_frames(error.__traceback__)
            results.clear()
            raise
        finally:
            self._leave()

    def _find_next(self) -> Bucket | None:
        """Returns the next bucket to load, or None after the last."""
        place = self._num_launched + sum(not pending.is_launched for pending in self._pending)
        return self._plan.buckets[place] if place < len(self._plan.buckets) else None

    def _may_load(self, bucket: Bucket, last_bytes: int) -> bool:
        """Returns whether there is memory to load ``bucket`` now.

        last_bytes: the size of the tensor that was yielded last, which the caller usually still holds.
        """
        together = [*(pending.bucket for pending in self._pending), bucket]
        kept_bytes = together[0].begun_bytes + sum(each.nbytes for each in together) + self._early_bytes
        return not self._pending or kept_bytes + last_bytes <= self._plan.most_bytes

    # Reading shards.

    @disable_autograd
    @defer_garbage_collection
    def _load(self, bucket: Bucket) -> None:
        """Begins to load this rank's part of a bucket. No other rank is needed."""
        self._spare = None
        transfers = [transfer.begin(self._call) for transfer in bucket.transfers]
        loader = Loader(self._plan.device, self._streams, self._cast_buffer, self._copies)
        self._pending.append(_PendingBucket(bucket, transfers, loader))
        with self._fill_where_left(loader):
            _begin(loader, transfers, self._find_merged(bucket))

    @contextlib.contextmanager
    def _fill_where_left(self, loader: Loader) -> Iterator[None]:
        """Context that fills the bucket with NaN or 0 if loading fails in the block and this rank is leaving.

        The error is then not raised, because the rank has promised to gather the bucket.
        """
        try:
            yield
        except Exception:
            if not self._leaves:
                raise
            loader.spoil()

    def _launch_loaded(self) -> None:
        """Launches the pending buckets, except the last bucket while threads still read its shards.

        These threads continue during the gathers of the earlier buckets.
        """
        reads = self._pending[-1].loader.is_reading
        for pending in list(self._pending)[: -1 if reads else None]:
            if not pending.is_launched:
                self._launch(pending)

    # Gathering.

    @disable_autograd
    @defer_garbage_collection
    def _launch(self, pending: _PendingBucket) -> None:
        """Launches the bucket's collectives.

        Every step that may fail comes before the ranks agree; otherwise the other ranks would wait. The one exception
        is the gather of adapters that are merged into the shards: if this gather fails, the bucket is still gathered.
        """
        merged = self._find_merged(pending.bucket)
        factors = self._load_factors(merged) if merged else None
        if factors is None:
            with self._fill_where_left(pending.loader):
                pending.loader.finish({})
        self._try_room(pending.transfers)
        self._agree()
        failure = self._merge(pending, merged, factors[0]) if factors is not None else None
        pending.done = self._gather(pending.transfers, pending.deltas)
        pending.is_launched = True
        self._num_launched, self._promised, self._has_begun = self._num_launched + 1, self._promised - 1, False
        if failure is not None and not self._leaves:
            raise failure
        if self._watch is not None and not self._leaves:
            with self._streams.use_watching_stream():
                self._watch(self._num_launched - 1, pending.transfers)
            pending.done = self._streams.record_watching()

    def _try_room(self, transfers: Sequence[TensorTransfer]) -> None:
        """Raises if the device has no memory for what torch allocates in the transfers' own collectives."""
        nbytes = max(transfer.collecting_bytes for transfer in transfers)
        if nbytes:
            with self._streams.use_gathering_stream():
                torch.empty(nbytes, dtype=torch.uint8, device=self._plan.device)

    def _agree(self) -> None:
        if self._promised:
            return
        first = self._num_launched
        num_left = len(self._plan.buckets) - first
        if len(self._plan.ranks) == 1:
            self._promised = num_left
            return
        wanted = 1 if self._plan.in_step else self._agreement.count_next(num_left)
        num_next = self._plan.count_promisable(first, wanted)
        one_only = False
        try:
            self._keep_spare(self._plan.buckets[first + 1 : first + num_next])
        except RuntimeError:
            one_only = True
        self._promised = self._agreement.promise(num_next, one_only=one_only)

    def _list_promised_buckets(self) -> Sequence[Bucket]:
        """Lists the buckets that this rank must still launch, because other ranks rely on them."""
        if len(self._plan.ranks) == 1:
            return ()
        return self._plan.buckets[self._num_launched : self._num_launched + self._promised]

    def _keep_spare(self, promised: Sequence[Bucket]) -> None:
        """Allocates spare memory if the pending buckets, once freed, are too small to launch each promised bucket.

        Raises torch.OutOfMemoryError if the device does not have the spare memory.
        """
        self._spare = None
        needed = max((bucket.launched_bytes + bucket.rounding_bytes for bucket in promised), default=0)
        units = sum(unit.count_kept_bytes() for unit in self._call.units.values())
        kept_bytes = units + sum(pending.bucket.held_bytes for pending in self._pending)
        if needed > kept_bytes:
            self._spare = torch.empty(needed - kept_bytes, dtype=torch.uint8, device=self._plan.device)

    def _gather(self, transfers: Sequence[TensorTransfer], deltas: dict[str, list[Delta]]) -> Any:
        """Launches the collectives and returns the event after them."""
        self._has_begun = True
        with self._streams.use_gathering_stream():
            launch_all_gathers(transfers)
            for transfer in transfers:
                transfer.collect(deltas)
        return self._streams.record_gathering()

    # Merging adapters.

    def _find_merged(self, bucket: Bucket) -> dict[str, list[LoraAdapter]]:
        adapters = self._plan.adapters
        if not adapters:
            return {}
        return {name: adapters[name] for name in dict.fromkeys(bucket.list_names()) if name in adapters}

    def _load_factors(self, merged: Mapping[str, list[LoraAdapter]]) -> tuple[list[TensorTransfer], Loader]:
        """Begins to load this rank's part of the adapters' factors.

        Returns the transfers and the loader, which holds the running copies.
        """
        # The factors of one unit of FSDP1 are as many units.
        call = Call(self._plan.device, self._call.shards, frozenset())
        factors = [self._plan.factors[name] for name in list_factor_names(merged)]
        parts = Division(factors, OutputDtypes(), bucket_bytes=1 << 62).make_buckets()
        transfers = [transfer.begin(call) for part in parts for transfer in part.transfers]
        loader = Loader(self._plan.device, self._streams, self._cast_buffer, self._copies)
        with self._fill_where_left(loader):
            _begin(loader, transfers, ())
            loader.finish({})
        self._try_room(transfers)
        return transfers, loader

    def _merge(
        self, pending: _PendingBucket, merged: Mapping[str, list[LoraAdapter]], factors: list[TensorTransfer]
    ) -> BaseException | None:
        """Gathers the factors and adds their products to this rank's part. Returns an error instead of raising it.

        After an error the other ranks get NaN for this part, until they hear that this rank left.
        """
        self._streams.wait(self._gather(factors, {}))
        try:
            full = {name: materialize(result) for _, spec, result in take_results(factors) for name in spec.names}
            pending.deltas = make_deltas(merged, full)
            # The caller's stream copies the factors out of the gathered memory.
            self._streams.begin_loading()
            pending.loader.finish(pending.deltas)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            pending.deltas.clear()
            pending.loader.spoil()
            return error
        return None

    # Handing out.

    @disable_autograd
    @defer_garbage_collection
    def _make_results(self, launched: _PendingBucket) -> list[OrderedResult]:
        """Returns the bucket's tensors in reverse order, for use in the caller's stream."""
        self._streams.wait(launched.done)
        gathered = list(take_results(launched.transfers))
        end, order = launched.bucket.end, operator.itemgetter(0)
        if early := [result for result in gathered if order(result) >= end]:
            self._early = collections.deque(sorted([*self._early, *early], key=order))
            self._early_bytes += sum(map(_count_bytes, early))
        results = [result for result in gathered if order(result) < end]
        while self._early and order(self._early[0]) < end:
            results.append(self._early.popleft())
            self._early_bytes -= _count_bytes(results[-1])
        results.sort(key=order, reverse=True)
        return results

    def _leave(self) -> None:
        """Ends the extraction. After an early end, memory that is still being written to is freed safely."""
        if self._pending:
            # Threads may be reading into their memory.
            self._copies.close()
            with self._streams.use_gathering_stream():
                all_of_it = self._streams.record_gathering()
            self._streams.wait(all_of_it)
            self._streams.wait(self._streams.record_watching())
        self._pending.clear()
        self._early.clear()
        self._call.units.clear()
        # The error that it leaves with is to be raised, not another one from the rest.
        with contextlib.suppress(Exception):
            self._carry_out()
        self._copies.close()
        if self._plan.adapters:
            private.release_workspaces(self._plan.device)

    def _carry_out(self) -> None:
        """Launches the promised buckets one at a time. There is always memory for a single bucket."""
        self._leaves, self._spare = True, None
        while self._list_promised_buckets() and not self._has_begun:
            self._load(self._plan.buckets[self._num_launched])
            self._launch(self._pending[0])
            self._streams.wait(self._pending.popleft().done)
            self._call.units.clear()


def _count_bytes(result: OrderedResult) -> int:
    """Counts the memory in bytes of a result; 0 if its tensor is yet to be made from a unit of FSDP1."""
    return result[2].nbytes if isinstance(result[2], torch.Tensor) else 0


def _begin(loader: Loader, transfers: Sequence[TensorTransfer], merged: Collection[str]) -> None:
    loader.begin(
        (piece for transfer in transfers for piece in transfer.list_pieces()),
        merged,
        (transfer.list_copies() for transfer in transfers),
    )


# On the host, for checkpoints.

CollectingRanks = Literal["rank0", "all"]

_HOST_CHUNK_BYTES = 32 << 20
_MOST_HOST_THREADS = 8


@run_for_model
@disable_autograd
def full_state_dict(
    model: nn.Module,
    *,
    ranks: CollectingRanks = "rank0",
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
    names: Names = "model",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the whole model's tensors on the CPU, by name, in pageable memory; tied names share one tensor.

    Every rank must call it. Arguments, names, memory on the device and errors are those of :func:`full_tensors`. Host
    memory: the whole model on each rank that collects it, and 256 MiB of pinned memory. Warns BuffersDiffer at each
    call.

    ranks: ``rank0``: only one rank collects, and the other ranks get an empty dict. The collecting rank is the first
        rank of the model's mesh or FSDP1 unit (all replicas included); without either, the first rank of DDP; otherwise
        rank 0. ``all``: every rank collects. Any other word raises ValueError.
    """
    with announce_errors(model):
        if ranks not in get_args(CollectingRanks):
            raise ValueError(f"ranks must be one of {', '.join(get_args(CollectingRanks))}, not {ranks!r}")
        arguments = Arguments.check(
            dtype=dtype,
            keep_dtype=keep_dtype,
            bucket_bytes=bucket_bytes,
            lora=lora,
            names=names,
            experts=experts,
        )
    state: dict[str, torch.Tensor] = {}
    # Of a model that nothing shards or wraps, the first of the default group.
    stream = extract(model, arguments, tensors, compares_anew=True)
    with _ToHost() as copies, contextlib.closing(stream):
        first = (reader.read(model).ranks or (0,))[0]
        collects = ranks == "all" or not dist.is_initialized() or dist.get_rank() == first
        for spec, tensor in stream:
            if collects:
                state |= dict.fromkeys(spec.names, copies.start(tensor))
            del tensor
    return state


class _ToHost:
    """Copies device tensors into pageable memory: the device copies into pinned chunks, and threads copy out of them.

    A single thread would reach only a fraction of the link's bandwidth, because each fresh page is faulted in first.
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_chunks = 0
        self._jobs: list[Future[None]] = []
        self._most_chunks = count_threads(_MOST_HOST_THREADS)
        self._pool = ThreadPoolExecutor(self._most_chunks)

    def __enter__(self) -> _ToHost:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._pool.shutdown(wait=True)
        for job in self._jobs:
            job.result()

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts to copy ``tensor`` and returns a CPU tensor that holds its values once this manager is left."""
        if tensor.device.type == "cpu":
            return tensor
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        parts = zip(
            view_as_bytes(tensor).split(_HOST_CHUNK_BYTES), view_as_bytes(host).split(_HOST_CHUNK_BYTES), strict=True
        )
        for source, target in parts:
            if self._num_chunks < self._most_chunks:
                self._num_chunks += 1
                chunk = torch.empty(_HOST_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:
                chunk = self._free.get()
            pinned = chunk[: source.numel()]
            pinned.copy_(source, non_blocking=True)
            arrival = torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()
            self._jobs.append(self._pool.submit(self._finish, arrival, chunk, pinned, target))
        return host

    def _finish(self, arrival: Any, chunk: torch.Tensor, pinned: torch.Tensor, target: torch.Tensor) -> None:
        try:
            arrival.synchronize()
            target.copy_(pinned)
        finally:
            self._free.put(chunk)
