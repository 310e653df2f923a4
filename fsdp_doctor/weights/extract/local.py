"""Shards of this rank: the rank's part of each tensor, its place in the whole tensor, and an iterator that loads all
parts.

Shards are yielded on the device, cast and merged like full tensors. No weight is gathered.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from fsdp_doctor.weights.extract import lora as adapters
from fsdp_doctor.weights.extract.full import (
    CHUNK_BYTES,
    MOST_THREADS,
    ClosingIterator,
    TensorStream,
    announce_errors,
    start_extraction,
)
from fsdp_doctor.weights.extract.lora import Lora, LoraAdapter
from fsdp_doctor.weights.extract.plan import BUCKET_BYTES, Arguments, Plan, describe_plan, get_plan
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection, disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.expert_groups import Experts
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.names.hub_names import Names
from fsdp_doctor.weights.names.output_names import OutputNames
from fsdp_doctor.weights.names.views import NamesError, TensorView, find_box
from fsdp_doctor.weights.transport.agreement import ComparedPlan, PlanMismatch
from fsdp_doctor.weights.transport.buckets import Division
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.host_copies import HostCopies
from fsdp_doctor.weights.transport.loader import CastBuffer, Loader, Piece
from fsdp_doctor.weights.transport.rank_groups import describe_conflicts
from fsdp_doctor.weights.transport.shard_places import ShardPlace, SourceShard, read_own_shards
from fsdp_doctor.weights.transport.sources import OutputDtypes, Source, TensorSpec
from fsdp_doctor.weights.transport.streams import HomeStream, Streams


class LocalShard(NamedTuple):
    """Part of one tensor that this rank holds.

    tensor: the part, on the device; 1-D if ``place.group`` is given, otherwise in the shape of the part; empty if the
        rank holds nothing.
    shape: the shape of the whole tensor.
    """

    name: str
    tensor: torch.Tensor
    shape: torch.Size
    place: ShardPlace


@run_for_model
def local_shards(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
    names: Names = "model",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
) -> ClosingIterator[LocalShard]:
    """Yields this rank's part of every parameter and persistent buffer: (name, tensor, global shape, place).

    Names, their order, dtypes and arguments are the same as for :func:`full_tensors`; tied names share a tensor. Every
    rank yields every name, with an empty tensor if the rank has nothing of it. A yielded tensor belongs to the caller,
    and is ready on the stream that is current when it is requested. Nothing is gathered, and no other rank is needed,
    with one exception: if the model has adapters and they are merged, their factors are gathered before the first
    shard. In this case every rank must call it, as for :func:`full_tensors`, and a rank that stops or raises makes the
    others raise RankLeft.

    Device memory in use at once, in addition to the tensors that the caller keeps, is the sum of: two buckets (one
    bucket and the largest shard, if the shard is larger than a bucket); 24 MiB if shards are cast or merged; the
    factors of all adapters.

    Raises the errors of :func:`full_tensors`. Also raises LayoutError (RuntimeError) for placements that do not divide
    a tensor into shards, and NamesError for a tensor of the Hub whose elements on a rank are neither a range nor a
    block of the tensor. Plain parameters that differ between the ranks are not noticed.
    """
    with announce_errors_where_merged(model, lora):
        arguments = Arguments.check(
            dtype=dtype,
            keep_dtype=keep_dtype,
            bucket_bytes=bucket_bytes,
            lora=lora,
            names=names,
            experts=experts,
        )
        request = request_shards(model, arguments, tensors)
        refuse_unknown(request)
    return ClosingIterator(_yield_each_name(request, start_factor_stream(request)))


def _yield_each_name(request: ShardRequest, factors: TensorStream | None) -> Generator[LocalShard]:
    home = HomeStream(request.device)
    with contextlib.closing(home.run(load_shards(request, gather_deltas(request, factors), shows="nothing"))) as shards:
        for shard in shards:
            for spec, tensor, place, _ in divide_shard(request.plan.names, shard):
                for name in spec.names:
                    home.hand_out(tensor)
                    yield LocalShard(name, tensor, spec.shape, place)
                del tensor
            del shard


@contextlib.contextmanager
def announce_errors_where_merged(model: nn.Module, lora: Lora) -> Iterator[None]:
    """Tells the other ranks about an error if they will wait for this rank to gather the adapters' factors."""
    try:
        yield
    except Exception:
        if lora not in ("base", "adapter") and _has_adapters(model):
            with announce_errors(model):
                raise
        raise


def _has_adapters(model: nn.Module) -> bool:
    with contextlib.suppress(Exception):
        return adapters.read(adapters.find_adapter_modules(reader.find_innermost(model))).has_adapters
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardRequest:
    """Arguments of one call, checked against the model.

    plan, shards: the plan and the shards of an extraction with the same arguments.
    sources: the requested tensors of the plan.
    adapters: the adapters to merge into these tensors.
    dtypes: the dtypes in which the tensors are yielded.
    """

    plan: Plan
    shards: Sequence[torch.Tensor]
    sources: Sequence[Source]
    adapters: Mapping[str, list[LoraAdapter]]
    dtypes: OutputDtypes
    arguments: Arguments

    @property
    def device(self) -> torch.device:
        return self.plan.device


def request_shards(model: nn.Module, arguments: Arguments, tensors: GivenTensors | None = None) -> ShardRequest:
    plan, shards = get_plan(model, arguments, tensors)
    return ShardRequest(
        plan=plan,
        shards=shards,
        sources=plan.sources,
        adapters=plan.adapters,
        dtypes=plan.dtypes,
        arguments=arguments,
    )


def refuse_unknown(request: ShardRequest) -> None:
    """Raises PlanMismatch for names under which other ranks may have different tensors.

    Plain tensors are not checked.
    """
    if unknown := request.plan.groups.find_unknown():
        raise PlanMismatch(describe_conflicts(unknown))


def start_factor_stream(request: ShardRequest) -> TensorStream | None:
    """Begins to gather the adapters' factors; returns None if the model has no adapters, or if they are not merged.

    If the stream is dropped before its end, the other ranks are told. A rank on which no adapter is active must also
    call it, because the ranks compare their active adapters.
    """
    plan = request.plan
    if not plan.merges:
        return None
    factors, dtypes = [plan.factors[name] for name in adapters.list_factor_names(request.adapters)], OutputDtypes()
    settings = f"factors bucket_bytes={request.arguments.bucket_bytes}"
    # The factors of one unit of FSDP1 are as many units.
    division = Division(factors, dtypes, request.arguments.bucket_bytes)
    gathering = replace(
        plan,
        sources=factors,
        adapters={},
        factors={},
        dtypes=dtypes,
        buckets=list(division.make_buckets()),
        most_bytes=division.most_bytes,
        ready=frozenset(),
        names=OutputNames(),
        compared=ComparedPlan(describe_plan(factors, dtypes, settings, request.adapters)),
    )
    return start_extraction(gathering, request.shards)


def gather_deltas(request: ShardRequest, factors: TensorStream | None) -> dict[str, list[Delta]]:
    """Returns the products to merge into each weight. Every rank must call it if there are factors to gather."""
    full = {name: tensor for spec, tensor in factors or () for name in spec.names}
    return adapters.make_deltas(request.adapters, full)


class LoadedShard(NamedTuple):
    """Shard like :class:`LocalShard`, with all names of its tensor.

    is_copy: whether the shard's memory is independent of the model's parameters.
    """

    spec: TensorSpec
    tensor: torch.Tensor
    place: ShardPlace
    is_copy: bool


ShownShards: TypeAlias = Literal["nothing", "finished", "unmerged"]
"""Shards that are yielded as views instead of copies: none; only shards that need no copy to the device, cast or merge;
or all shards into which nothing is merged, on any device and in any dtype."""


def load_shards(
    request: ShardRequest, deltas: Mapping[str, list[Delta]], *, shows: ShownShards
) -> Generator[LoadedShard]:
    """Yields each requested shard once, without communication.

    deltas: the result of :func:`gather_deltas`.
    """
    loading = _ShardLoading(request.device, request.dtypes, deltas, shows)
    pending: collections.deque[_LoadedBucket] = collections.deque()
    try:
        for bucket in _divide_into_buckets(
            read_own_shards(request.sources, request.shards), request.dtypes, request.arguments.bucket_bytes
        ):
            pending.append(loading.launch(bucket))
            if len(pending) > 1:
                yield from loading.yield_results(pending.popleft())
        while pending:
            yield from loading.yield_results(pending.popleft())
    finally:
        for launched in pending:
            loading.streams.wait(launched.done)
        loading.copies.close()
        if deltas:
            private.release_workspaces(request.device)


def divide_shard(names: OutputNames, shard: LoadedShard) -> Iterator[LoadedShard]:
    """Yields this rank's piece of each part of a tensor, as views of its shard.

    Raises NamesError if a rank's elements of a part are neither a range nor a block of it.
    """
    for part, view in names.list_parts(shard.spec):
        yield LoadedShard(part, *shard[1:]) if view is None else _cut(shard, part, view)


def _cut(shard: LoadedShard, part: TensorSpec, view: TensorView) -> LoadedShard:
    shape, place, stride = shard.spec.shape, shard.place, compute_row_major_strides(part.shape)
    is_whole = place.mesh is None and place.group is None
    if (
        not is_whole
        and place.offset is not None
        and place.stride == compute_row_major_strides(shape)
        and view.is_contiguous
    ):
        first = min(max(place.offset - view.offset, 0), part.numel)
        last = max(min(place.offset + place.numel - view.offset, part.numel), first)
        begin = max(view.offset + first - place.offset, 0) if last > first else 0
        tensor = shard.tensor.reshape(-1)[begin : begin + last - first]
        new = ShardPlace(numel=last - first, offset=first, stride=stride, group=_dividing_group(place))
        return LoadedShard(part, tensor, new, shard.is_copy)
    box = find_box(view, shape)
    if is_whole and box is not None:
        tensor = view.read(shard.tensor.view(shape))
        return LoadedShard(part, tensor, ShardPlace(numel=part.numel, offset=0, stride=stride), shard.is_copy)
    if place.mesh is None or box is None or box.dims is None:
        raise NamesError(
            f"{part.names[0]} is a part of {shard.spec.names[0]}, whose shards cut across this part: use the names of "
            'the model (names="model"), or full tensors'
        )
    held = place.held_part(shape)
    cut, places = box.cut(held)
    indices, tensor = box.restore(cut, shard.tensor.view(held.shape)[places])
    new = ShardPlace(numel=tensor.numel(), offset=None, stride=stride, part=indices)
    return LoadedShard(part, tensor, new, shard.is_copy)


def _dividing_group(place: ShardPlace) -> dist.ProcessGroup | None:
    """Returns the group over which a tensor is divided, for a shard that is one range of its tensor.

    For a DTensor this is the group of the only mesh dim that divides the tensor.
    """
    if place.mesh is None:
        return place.group
    placements = place.placements or ()
    return place.mesh.get_group(next(dim for dim, one in enumerate(placements) if not isinstance(one, Replicate)))


def _divide_into_buckets(
    shards: Iterable[SourceShard], dtypes: OutputDtypes, bucket_bytes: int
) -> Iterator[list[SourceShard]]:
    bucket: list[SourceShard] = []
    total = 0
    for shard in shards:
        nbytes = shard.local.numel() * dtypes.choose(shard.spec).itemsize
        if bucket and total + nbytes > bucket_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(shard)
        total += nbytes
    if bucket:
        yield bucket


@dataclass(slots=True, eq=False)
class _LoadedBucket:
    """Shards of one bucket.

    done: the event after the loading; None if nothing is loaded.
    in_use: memory that must be kept until the event ``done``.
    """

    results: list[LoadedShard]
    done: Any = None
    in_use: Any = None


class _ShardLoading:
    def __init__(
        self, device: torch.device, dtypes: OutputDtypes, deltas: Mapping[str, list[Delta]], shows: ShownShards
    ) -> None:
        self._device, self._dtypes, self._deltas, self._shows = device, dtypes, deltas, shows
        self.streams = Streams(device)
        self._cast_buffer = CastBuffer(device, self.streams)
        self.copies = HostCopies(self.streams, MOST_THREADS, CHUNK_BYTES)

    @disable_autograd
    @defer_garbage_collection
    def launch(self, bucket: list[SourceShard]) -> _LoadedBucket:
        """Begins to load a bucket of shards, without waiting for the device.

        Outputs are allocated on the caller's stream, and loading waits for that stream.
        """
        results: list[LoadedShard] = []
        pieces: list[Piece] = []
        in_blocks: list[tuple[SourceShard, torch.Tensor, torch.Tensor]] = []
        for shard in bucket:
            spec, local, dtype = shard.spec, shard.local.detach(), self._dtypes.choose(shard.spec)
            merged = spec.names[0] in self._deltas
            is_finished = local.device == self._device and local.dtype == dtype
            if not merged and (self._shows == "unmerged" or (self._shows == "finished" and is_finished)):
                results.append(LoadedShard(spec, local.view(shard.shape), shard.place, is_copy=False))
                continue
            target = torch.empty(local.shape, dtype=dtype, device=self._device)
            results.append(LoadedShard(spec, target.view(shard.shape), shard.place, is_copy=True))
            if merged and shard.place.offset is None:
                whole = torch.empty(local.shape, dtype=local.dtype, device=self._device)
                pieces.append(Piece(whole, local, "", 0))
                in_blocks.append((shard, whole, target))
            else:
                pieces.append(Piece(target, local, spec.names[0], shard.place.offset or 0))
        if not pieces:
            return _LoadedBucket(results)
        return _LoadedBucket(results, self._load(pieces, in_blocks), (pieces, in_blocks))

    def _load(self, pieces: list[Piece], in_blocks: list[tuple[SourceShard, torch.Tensor, torch.Tensor]]) -> Any:
        try:
            loader = Loader(self._device, self.streams, self._cast_buffer, self.copies)
            loader.begin(pieces, self._deltas.keys())
            loader.finish(self._deltas)
            with self.streams.use_gathering_stream():
                for shard, whole, target in in_blocks:
                    self._merge_blocks(shard, whole, target)
        except BaseException:
            self.streams.wait(self._record_all())
            raise
        return self._record_all()

    def _record_all(self) -> Any:
        with self.streams.use_gathering_stream():
            return self.streams.record_gathering()

    def _merge_blocks(self, shard: SourceShard, whole: torch.Tensor, target: torch.Tensor) -> None:
        """Adds the adapters' products to a shard that is not one range of the flattened weight.

        The shard consists of blocks, and each block gets the block of the product with the same rows and columns.
        """
        values = whole.view(shard.shape)
        for (rows, columns), own in shard.place.held_part(shard.spec.shape).list_blocks():
            for delta in self._deltas[shard.spec.names[0]]:
                values[own] = values[own] + delta.block(rows, columns)
        target.view(shard.shape).copy_(values)

    def yield_results(self, launched: _LoadedBucket) -> Iterator[LoadedShard]:
        """Yields the shards for use on the caller's stream, and drops each reference once its shard was yielded."""
        self.streams.wait(launched.done)
        launched.in_use = None
        launched.results.reverse()
        while launched.results:
            yield launched.results.pop()
