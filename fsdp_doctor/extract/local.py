"""The iterator over this rank's shards on the device, cast and merged as full tensors are. No weight is gathered."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_doctor.extract import lora as adapters
from fsdp_doctor.extract.agreement import ComparedPlan, PlanMismatch
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.full import BUCKET_BYTES, TensorStream, announced, tensor_stream
from fsdp_doctor.extract.host_copies import HostCopies
from fsdp_doctor.extract.kept_plans import Arguments, plan_of
from fsdp_doctor.extract.loader import CastBuffer, Loader, Piece
from fsdp_doctor.extract.lora import Delta, Lora, LoraAdapter
from fsdp_doctor.extract.own_shards import OwnShard, ShardPlace, own_shards
from fsdp_doctor.extract.pipeline import CHUNK_BYTES, MOST_THREADS
from fsdp_doctor.extract.plan import Plan, buckets, most_bytes, signature
from fsdp_doctor.extract.rank_groups import refusal
from fsdp_doctor.extract.sources import Source, TensorSpec
from fsdp_doctor.extract.streams import HomeStream, Streams
from fsdp_doctor.extract.without_autograd import without_autograd
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection


class LocalShard(NamedTuple):
    """What a rank holds of one tensor.

    tensor: on the device; of an FSDP1 flat shard 1-D, else as the rank's part is shaped, and empty where it has none.
    shape: of the whole tensor.
    """

    name: str
    tensor: torch.Tensor
    shape: torch.Size
    place: ShardPlace


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardRequest:
    """One call's arguments, checked against the model.

    plan, shards: of the extraction with the same arguments. sources, adapters, dtypes: what of it is asked for, how.
    """

    plan: Plan
    shards: Sequence[torch.Tensor]
    sources: Sequence[Source]
    adapters: Mapping[str, list[LoraAdapter]]
    dtypes: OutputDtypes
    bucket_bytes: int

    @property
    def device(self) -> torch.device:
        return self.plan.device


def refuse_unknown(request: ShardRequest) -> None:
    """Raises PlanMismatch where other ranks may have other tensors under one name; plain ones it cannot know alone."""
    if unknown := request.plan.groups.unknown():
        raise PlanMismatch(refusal(unknown))


def request_of(
    model: nn.Module, dtype: torch.dtype | None, keep_dtype: Collection[str], bucket_bytes: int, lora: Lora
) -> ShardRequest:
    plan, shards = plan_of(model, Arguments.given(None, dtype, keep_dtype, bucket_bytes, lora))
    return ShardRequest(
        plan=plan,
        shards=shards,
        sources=plan.sources,
        adapters=plan.adapters,
        dtypes=plan.dtypes,
        bucket_bytes=bucket_bytes,
    )


class LoadedShard(NamedTuple):
    """As :class:`LocalShard`, with all names of the tensor. is_copy: whether its memory is no parameter's."""

    spec: TensorSpec
    tensor: torch.Tensor
    place: ShardPlace
    is_copy: bool


def local_shards(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
) -> Iterator[LocalShard]:
    """Yields what this rank holds of every parameter and every persistent buffer: (name, tensor, global shape, place).

    Names, their order, dtypes and arguments are those of :func:`full_tensors`; tied names share a tensor. Every name
    comes on every rank, with an empty tensor where the rank has nothing of it. A yielded tensor belongs to the caller
    and is ready on the stream that is current when it is asked for. Nothing is gathered and no other rank is
    needed, unless the model has adapters and they are merged: their factors are gathered before the first shard, for
    which every rank must call, as for :func:`full_tensors`, and who stops or raises makes the others raise RankLeft.

    Device memory in use at once, beside what the caller keeps: two buckets, or one and the largest shard; 24 MiB where
    shards are cast or merged; the factors of all adapters.

    Raises as :func:`full_tensors`, but does not notice plain parameters that differ between the ranks;
    LayoutError (RuntimeError) for placements that are no division into shards.
    """
    with announced_where_merged(model, lora):
        request = request_of(model, dtype, keep_dtype, bucket_bytes, lora)
        refuse_unknown(request)
    return _named(request, factor_stream(request))


@contextlib.contextmanager
def announced_where_merged(model: nn.Module, lora: Lora) -> Iterator[None]:
    """Tells the other ranks that this one was refused, if they will wait for it: to gather the adapters' factors."""
    try:
        yield
    except Exception:
        if lora not in ("base", "adapter") and _has_adapters(model):
            with announced(model):
                raise
        raise


def _has_adapters(model: nn.Module) -> bool:
    with contextlib.suppress(Exception):
        return adapters.read(adapters.adapter_modules(reader.innermost(model))).found
    return False


def _named(request: ShardRequest, factors: TensorStream | None) -> Iterator[LocalShard]:
    home = HomeStream(request.device)
    with contextlib.closing(home.run(loaded_shards(request, gathered_deltas(request, factors), own=True))) as shards:
        for spec, tensor, place, _ in shards:
            for name in spec.names:
                home.hand_out(tensor)
                yield LocalShard(name, tensor, spec.shape, place)
            del tensor


def loaded_shards(request: ShardRequest, deltas: Mapping[str, list[Delta]], *, own: bool) -> Generator[LoadedShard]:
    """Every shard once, without another rank. deltas: of :func:`gathered_deltas`.

    own: copies what already lies on the device as it is to be, instead of showing it.
    """
    loading = _ShardLoading(request.device, request.dtypes, deltas, own)
    pending: collections.deque[_LoadedBucket] = collections.deque()
    buckets = _buckets(own_shards(request.sources, request.shards), request.dtypes, request.bucket_bytes)
    try:
        for bucket in buckets:
            pending.append(loading.launch(bucket))
            if len(pending) > 1:
                yield from loading.results(pending.popleft())
        while pending:
            yield from loading.results(pending.popleft())
    finally:
        for launched in pending:
            loading.wait(launched)
        loading.close()
        if deltas:
            private.release_workspaces(request.device)


def factor_stream(request: ShardRequest) -> TensorStream | None:
    """What will gather the adapters' factors: begun here, so that who lets go of it unread tells the other ranks.

    Where no adapter is active here, it compares that with the other ranks. None for a model without adapters.
    """
    plan = request.plan
    if not plan.merges:
        return None
    # Each once, in the order of the model, so in the same order on every rank.
    names = dict.fromkeys(name for many in request.adapters.values() for one in many for name in (one.a, one.b))
    factors, dtypes = [plan.factors[name] for name in names], OutputDtypes()
    # The factors of one unit of FSDP1 are as many units.
    gathering = replace(
        plan,
        sources=factors,
        adapters={},
        factors={},
        dtypes=dtypes,
        buckets=list(buckets(factors, dtypes, request.bucket_bytes, {})),
        most_bytes=most_bytes(factors, dtypes, request.bucket_bytes),
        ready=frozenset(),
        compared=ComparedPlan(
            signature(factors, dtypes, f"factors bucket_bytes={request.bucket_bytes}", request.adapters)
        ),
    )
    return tensor_stream(gathering, request.shards)


def gathered_deltas(request: ShardRequest, factors: TensorStream | None) -> dict[str, list[Delta]]:
    """What is to be merged into which weight. Every rank must call it, if there are factors to gather."""
    full = {name: tensor for spec, tensor in factors or () for name in spec.names}
    return {weight: [_delta(one, full) for one in many] for weight, many in request.adapters.items()}


def _delta(adapter: LoraAdapter, factors: Mapping[str, torch.Tensor]) -> Delta:
    return Delta(factors[adapter.a], factors[adapter.b], adapter.scaling, adapter.transposed)


def _buckets(shards: Iterable[OwnShard], dtypes: OutputDtypes, bucket_bytes: int) -> Iterator[list[OwnShard]]:
    bucket: list[OwnShard] = []
    held = 0
    for shard in shards:
        nbytes = shard.local.numel() * dtypes.of(shard.spec).itemsize
        if bucket and held + nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(shard)
        held += nbytes
    if bucket:
        yield bucket


@dataclass(slots=True, eq=False)
class _LoadedBucket:
    """done: the event after its loading; None where nothing is loaded. in_use: memory that it needs until then."""

    results: list[LoadedShard]
    done: Any
    in_use: Any = None


class _ShardLoading:
    def __init__(
        self, device: torch.device, dtypes: OutputDtypes, deltas: Mapping[str, list[Delta]], own: bool
    ) -> None:
        self._device, self._dtypes, self._deltas, self._own = device, dtypes, deltas, own
        self._streams = Streams(device)
        self._cast_buffer = CastBuffer(device, self._streams)
        self._copies = HostCopies(self._streams, MOST_THREADS, CHUNK_BYTES)

    @without_autograd
    @without_garbage_collection
    def launch(self, bucket: list[OwnShard]) -> _LoadedBucket:
        """Outputs are allocated on the caller's stream; loading waits for it, and nothing waits for the device."""
        results: list[LoadedShard] = []
        pieces: list[Piece] = []
        in_blocks: list[tuple[OwnShard, torch.Tensor, torch.Tensor]] = []
        for shard in bucket:
            spec, local, dtype = shard.spec, shard.local.detach(), self._dtypes.of(shard.spec)
            merged = spec.names[0] in self._deltas
            if not (self._own or merged) and local.device == self._device and local.dtype == dtype:
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
            return _LoadedBucket(results, None)
        return _LoadedBucket(results, self._load(pieces, in_blocks), (pieces, in_blocks))

    def _load(self, pieces: list[Piece], in_blocks: list[tuple[OwnShard, torch.Tensor, torch.Tensor]]) -> Any:
        try:
            loader = Loader(self._device, self._streams, self._cast_buffer, self._copies)
            loader.begin([_Pieces(pieces)], self._deltas.keys())
            loader.finish(self._deltas)
            with self._streams.gathering():
                for shard, whole, target in in_blocks:
                    self._merge_blocks(shard, whole, target)
        except BaseException:
            self._streams.wait(self._after_all())
            raise
        return self._after_all()

    def _after_all(self) -> Any:
        with self._streams.gathering():
            return self._streams.gathered()

    def _merge_blocks(self, shard: OwnShard, whole: torch.Tensor, target: torch.Tensor) -> None:
        """A shard that is no range of the flattened weight: each block of it gets its block of the product."""
        values = whole.view(shard.shape)
        for (rows, columns), own in shard.place.held_part(shard.spec.shape).blocks():
            for delta in self._deltas[shard.spec.names[0]]:
                values[own] = values[own] + delta.block(rows, columns)
        target.view(shard.shape).copy_(values)

    def results(self, launched: _LoadedBucket) -> Iterator[LoadedShard]:
        """The caller's stream has them once it gets there; nothing here holds one that was handed out."""
        self.wait(launched)
        launched.in_use = None
        launched.results.reverse()
        while launched.results:
            yield launched.results.pop()

    def wait(self, launched: _LoadedBucket) -> None:
        self._streams.wait(launched.done)

    def close(self) -> None:
        self._copies.close()


class _Pieces:
    """For the loader, of no collective."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def pieces(self) -> list[Piece]:
        return self._pieces

    def copies(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        return (), ()
