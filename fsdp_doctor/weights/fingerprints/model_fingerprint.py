"""Computes the fingerprint of a sharded model, and the fingerprints that it would have after common mistakes.

Each rank sums its shards, and the sums are added over the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from typing_extensions import Self, assert_never

from fsdp_doctor.weights.extract.full import (
    ClosingIterator,
    ExtractionComparison,
    TensorStream,
    announce_errors,
    start_extraction,
    yield_each_name,
)
from fsdp_doctor.weights.extract.local import (
    LoadedShard,
    ShardRequest,
    announce_errors_where_merged,
    divide_shard,
    gather_deltas,
    load_shards,
    refuse_unknown,
    request_shards,
    start_factor_stream,
)
from fsdp_doctor.weights.extract.lora import Lora
from fsdp_doctor.weights.extract.plan import BUCKET_BYTES, Arguments, Plan, describe_plan
from fsdp_doctor.weights.fingerprints.block_fingerprints import make_unsummed, swap_halves
from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
from fsdp_doctor.weights.fingerprints.differences import FingerprintVariant
from fsdp_doctor.weights.fingerprints.fingerprint_set import (
    FingerprintError,
    Fingerprints,
    TensorFingerprint,
    reduce_to_lanes,
)
from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock
from fsdp_doctor.weights.fingerprints.summing import FingerprintSums, divide_shard_into_blocks, divide_shard_into_parts
from fsdp_doctor.weights.fsdp.decorators import disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.dtypes import name_dtype
from fsdp_doctor.weights.fsdp.expert_groups import Experts
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.names.hub_names import Names
from fsdp_doctor.weights.transport.agreement import Agreement, ComparedPlan
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.shard_places import SourceShard, read_own_shards
from fsdp_doctor.weights.transport.sources import (
    FlatUnit,
    OutputDtypes,
    Placed,
    Plain,
    Rows,
    Source,
    TensorSpec,
    list_specs,
)
from fsdp_doctor.weights.transport.transfers import TensorTransfer

_INTERMEDIATE_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_BlocksOf: TypeAlias = Callable[[LoadedShard], list[IndexedBlock]]


@run_for_model
@disable_autograd
def fingerprint(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
    names: Names = "model",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
    combined: bool = True,
) -> Fingerprints:
    """Computes 128 bits for each tensor that :func:`full_tensors` would yield with the same arguments, without a
    gather.

    A fingerprint does not depend on the strategy, sharding, offload or number of ranks, and equals the fingerprint of
    the unsharded model; ``fsdp_doctor.weights.fingerprints.keyed_sum`` says which changes it detects. Each rank casts,
    merges and sums its shards on the device; the model is not changed. An all-reduce over each group that divides
    tensors adds the sums, 24 bytes for each tensor; under HSDP each replica has its own sums. Shards on the host are
    copied to the device; to avoid this copy, :meth:`FingerprintSums.watch` sums the tensors of an extraction as they
    pass.

    Every rank of the group over which the model is sharded must call it with the same arguments. The ranks compare
    their models before the all-reduce, as in :func:`full_tensors`, and no rank is left waiting.

    names, experts, tensors: see :func:`full_tensors`. Checkpoints from ``save_pretrained`` and engines use the Hub's
        names; :func:`fingerprint_variants` uses the model's.
    combined: whether the sums of all ranks are added. False returns only this rank's part of the sums, for
        :func:`combine_fingerprints`, and calls no collective except to gather the factors of adapters.

    Device memory: the same as for :func:`local_shards`, and 64 MiB for shards that are copied or cast. Raises the
    errors of :func:`full_tensors`.
    """
    repeated = RepeatedFingerprint(
        model,
        dtype=dtype,
        keep_dtype=keep_dtype,
        bucket_bytes=bucket_bytes,
        lora=lora,
        names=names,
        experts=experts,
        tensors=tensors,
    )
    if combined:
        repeated.start()
        return repeated.read()
    with announce_errors_where_merged(model, lora):
        request = repeated.request()
        refuse_unknown(request)
    deltas = gather_deltas(request, start_factor_stream(request))
    return _by_all_names(_list_parts(request), _sum_shards(request, deltas).fingerprints().tensors)


class RepeatedFingerprint:
    """Computes the :func:`fingerprint` of one model at each weight sync, without waiting for the device.

    The arguments are the same as for :func:`fingerprint`. Use :meth:`full_tensors` to send the weights and sum them in
    the same pass, or :meth:`start` to sum them if they are sent in another way. Both methods keep a table of the
    addresses that are read, until the tensors move. A call of either costs an all-reduce and two copies of 24 bytes for
    each tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        keep_dtype: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        lora: Lora = "merged",
        names: Names = "model",
        experts: Experts | None = None,
        tensors: GivenTensors | None = None,
    ) -> None:
        self._model, self._tensors = model, tensors
        self._arguments = functools.partial(
            Arguments.check,
            dtype=dtype,
            keep_dtype=keep_dtype,
            bucket_bytes=bucket_bytes,
            lora=lora,
            names=names,
            experts=experts,
        )
        self._sums = FingerprintSums()
        self._summed: tuple[Plan, list[int]] | None = None
        self._gathered: _GatheredSums | None = None
        self._added: _SumsOverRanks | None = None

    def full_tensors(self, *, in_step: bool = False) -> ClosingIterator[tuple[str, torch.Tensor]]:
        """Yields the same as :func:`full_tensors`, and sums this rank's shards in one launch for each gathered bucket.

        The shards are summed on the device after the cast and the merge, while the next bucket is gathered, so
        offloaded shards are copied to the device only once. :meth:`read` returns the sums after the iteration has
        ended. Either every rank or no rank must take its tensors from this method. Raises the errors of
        :func:`full_tensors`.
        """
        self._added = None
        with announce_errors(self._model):
            request = self.request(in_step=in_step)
            if self._gathered is None or self._gathered.made_for is not request.plan:
                self._gathered = _GatheredSums(request)
            gathered = self._gathered
            added = gathered.make_sums()
        watch = functools.partial(gathered.add, added.rows)
        return ClosingIterator(self._yield_and_add(start_extraction(gathered.plan, request.shards, watch), added))

    def _yield_and_add(self, tensors: TensorStream, added: _SumsOverRanks) -> Generator[tuple[str, torch.Tensor]]:
        specs = _list_parts(self._gathered.request) if self._gathered is not None else []
        yield from yield_each_name(tensors)
        tensors.hand_out(added.rows)
        added.add()
        self._added, self._specs = added, specs

    @disable_autograd
    def start(self) -> None:
        """Sums the shards on the current stream: in one launch, or one for each 64 MiB of copies.

        Copies are made of shards that are offloaded, cast or merged. Every rank must call it. Raises the errors of
        :func:`fingerprint`.
        """
        with announce_errors(self._model):
            request = self.request()
        summed = request.plan, [shard.data_ptr() for shard in request.shards]
        deltas = gather_deltas(request, start_factor_stream(request))
        with _agree_on_request(
            request, f"fingerprints dtype={request.arguments.dtype} lora={request.arguments.lora} {request.plan.names}"
        ) as agree:
            if summed != self._summed or not self._sums.repeat():
                self._sums, self._summed = _sum_shards(request, deltas), summed
            added = _SumsOverRanks.of(request, self._sums)
            agree()
            added.add()
            self._added, self._specs = added, _list_parts(request)

    @disable_autograd
    def read(self) -> Fingerprints:
        """Returns the fingerprint of the last :meth:`start` or :meth:`full_tensors`.

        Waits for the device; no other rank is needed. Raises RuntimeError before the first call of either method, and
        while an iteration has not ended.
        """
        if self._added is None:
            raise RuntimeError("nothing was summed: call start(), or iterate over full_tensors() to its end")
        return _by_all_names(self._specs, self._added.read())

    def request(self, *, in_step: bool = False) -> ShardRequest:
        return request_shards(self._model, self._arguments(in_step=in_step), self._tensors)


def _list_parts(request: ShardRequest) -> list[TensorSpec]:
    """Lists what is summed separately: the tensors or, where the Hub's names divide a tensor, its parts."""
    names = request.plan.names
    return [part for source in request.sources for spec in list_specs(source) for part, _ in names.list_parts(spec)]


def _by_all_names(every: Sequence[TensorSpec], by_first_name: Mapping[str, TensorFingerprint]) -> Fingerprints:
    tensors = {name: by_first_name[spec.names[0]] for spec in every for name in spec.names}
    return Fingerprints(tensors, tuple(spec.names for spec in every if len(spec.names) > 1))


@run_for_model
def fingerprint_variants(
    model: nn.Module,
    names: Collection[str],
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    lora: Lora = "merged",
    experts: Experts | None = None,
) -> dict[str, list[FingerprintVariant]]:
    """Computes the fingerprints that some tensors would have after each common mistake, for
    ``compare_fingerprints(variants=...)``.

    The mistakes are: the last two dims are transposed; the halves of a dim are swapped, for each dim of even length (a
    fused ``gate_up_proj``); the tensor is first cast to float16, bfloat16 or a float8; the tensor is cast to one of
    these dtypes and back. The model is read once for each mistake. The arguments must be the same as for
    :func:`fingerprint`.

    Every rank must call it with the same names, as for :func:`fingerprint`. Raises the errors of :func:`fingerprint`,
    and FingerprintError for a name that the model does not have.
    """
    with announce_errors(model):
        arguments = Arguments.check(dtype=dtype, keep_dtype=keep_dtype, lora=lora, experts=experts)
        request = request_shards(model, arguments)
        sources = _restrict(request.sources, names)
        known = {name for source in sources for spec in list_specs(source) for name in spec.names}
        if unknown := sorted(set(names) - known):
            raise FingerprintError(f"the model has no {unknown[0]}")
        adapters = {name: factors for name, factors in request.adapters.items() if name in known}
        request = replace(request, sources=sources, adapters=adapters)
    deltas = gather_deltas(request, start_factor_stream(request))
    with _agree_on_request(request, f"variants of fingerprints dtype={dtype} lora={lora}") as agree:
        sums = [
            (variant, _SumsOverRanks.of(request, of_variant)) for variant, of_variant in _sum_variants(request, deltas)
        ]
        agree()
        for _, over_ranks in sums:
            over_ranks.add()
    by_first_name: dict[str, list[FingerprintVariant]] = {}
    for variant, over_ranks in sums:
        for name, tensor in over_ranks.read().items():
            if tensor.is_whole:
                by_first_name.setdefault(name, []).append(replace(variant, lanes=tensor.lanes))
    every = [spec for source in request.sources for spec in list_specs(source)]
    return {name: by_first_name.get(spec.names[0], []) for spec in every for name in spec.names if name in names}


@contextlib.contextmanager
def _agree_on_request(request: ShardRequest, settings: str) -> Iterator[Callable[[], object]]:
    """Context that yields a function which compares the models of all ranks, and waits for the comparison.

    An error in the body is reported to the other ranks.
    """
    agreement = Agreement(request.plan.ranks)
    agreement.expect(
        lambda: ComparedPlan(describe_plan(request.sources, request.dtypes, settings, request.adapters)),
        ExtractionComparison(request.plan.groups, request.shards, request.device),
    )
    with agreement.announce_leaving():
        yield agreement.proceed
        agreement.end()


def _sum_shards(request: ShardRequest, deltas: Mapping[str, list[Delta]]) -> FingerprintSums:
    """Sums this rank's part of each tensor; a tied tensor is summed once, under the first of its names.

    Tensors that the same process groups divide are summed one after another.
    """
    sums = FingerprintSums(repeats=True)
    request = replace(request, sources=_list_by_groups(request.sources))
    with contextlib.closing(load_shards(request, deltas, shows="finished")) as shards:
        for shard in shards:
            for part in divide_shard(request.plan.names, shard):
                _add_shard(sums, part)
                del part
            del shard
    sums.flush()
    return sums


def _add_shard(sums: FingerprintSums, shard: LoadedShard, blocks_of: _BlocksOf | None = None) -> None:
    spec, tensor, place, is_copy = shard
    blocks = divide_shard_into_blocks(tensor, spec.shape, place) if blocks_of is None else blocks_of(shard)
    part = make_unsummed(tensor.dtype, spec.shape, blocks)
    sums.add_blocks(spec.names[0], part, blocks, memory=None if is_copy else tensor)


def _list_by_groups(sources: Sequence[Source]) -> list[Source]:
    """Sorts the tensors by the groups that divide them, in the order in which these groups first occur.

    The order is the same on every rank.
    """
    by_groups: dict[tuple[int, ...], list[Source]] = {}
    for source in sources:
        by_groups.setdefault(tuple(map(id, _find_dividing_groups(source))), []).append(source)
    return list(itertools.chain.from_iterable(by_groups.values()))


class _GatheredSums:
    """Sums of this rank's shards, made while an extraction gathers the shards.

    The table of each launch is kept by the bucket's number.

    made_for: the plan of the extraction, to detect later that the model has another plan.
    plan: a copy of the plan that equals the plans of other ranks only if these ranks sum, too.
    """

    @disable_autograd
    def __init__(self, request: ShardRequest) -> None:
        # Shards that are kept here would keep their memory.
        self.request, self.made_for = replace(request, shards=()), request.plan
        lines = ["with fingerprints", *request.plan.compared.lines]
        self.plan = replace(request.plan, compared=ComparedPlan(lines))
        shards = read_own_shards(_list_by_groups(request.sources), request.shards)
        self._parts = [
            (part.spec.names[0], TensorFingerprint(dtype, tuple(part.spec.shape), 0, part.place.numel, (0, 0)))
            for shard in shards
            for dtype in (name_dtype(request.dtypes.choose(shard.spec)),)
            for part in self._divide(shard)
        ]
        begin = [(0, 0, part.num_summed) for _, part in self._parts]
        self._begin = torch.tensor(begin, dtype=torch.int64, device="cpu").view(-1, 3).to(request.device)
        self._by_groups = _count_rows(request, self._parts)
        self._numbers = {name: number for number, (name, _) in enumerate(self._parts)}
        self._kept: dict[int, tuple[list[tuple[int, int]], BlockSums]] = {}

    @disable_autograd
    def make_sums(self) -> _SumsOverRanks:
        """Returns new sums of the same tensors, with both lanes zero."""
        return _SumsOverRanks(self._parts, self._begin.clone(), self._by_groups)

    def add(self, rows: torch.Tensor, bucket: int, transfers: Sequence[TensorTransfer]) -> None:
        staged = [memory for transfer in transfers for memory in transfer.list_staged()]
        places = [(memory.untyped_storage().data_ptr(), memory.data_ptr()) for memory in staged]
        known, kept = self._kept.pop(bucket, ([], None))
        if kept is not None and (known == places or kept.move(known, places)):
            kept.add(rows[:, :2])
            self._kept[bucket] = places, kept
            return
        sums = BlockSums(self._list_blocks(transfers), rows.device)
        sums.add(rows[:, :2])
        if sums.reads_only({storage for storage, _ in places}) and sums.release_memory():
            self._kept[bucket] = places, sums

    def _list_blocks(self, transfers: Sequence[TensorTransfer]) -> list[IndexedBlock]:
        blocks = []
        for part in (p for transfer in transfers for shard in transfer.list_own_shards() for p in self._divide(shard)):
            for block in divide_shard_into_blocks(part.tensor, part.spec.shape, part.place):
                block.number = self._numbers[part.spec.names[0]]
                blocks.append(block)
        return blocks

    def _divide(self, shard: SourceShard) -> Iterator[LoadedShard]:
        loaded = LoadedShard(shard.spec, shard.local.view(shard.shape), shard.place, is_copy=True)
        return divide_shard(self.request.plan.names, loaded)


class _SumsOverRanks:
    """Sums of this rank's parts of tensors, and the device memory to add them over the groups that divide the tensors.

    The object is made before the ranks agree, so that no rank waits in a collective for a rank that is out of memory.
    Neither the constructor nor ``add`` waits for the device.

    parts: (name, the part that is summed) of each tensor, in the order of ``_list_by_groups``.
    rows: the sums in the same order, in the form of :meth:`FingerprintSums.rows`.
    by_groups: (process groups, number of rows that are added over them), in the same order.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, TensorFingerprint]],
        rows: torch.Tensor,
        by_groups: Sequence[tuple[list[dist.ProcessGroup], int]],
    ) -> None:
        self._parts, self.rows = parts, rows
        is_pinned = rows.device.type != "cpu"
        self._on_host = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        self._done: Any = None
        numbers = [number for _, number in by_groups]
        self._by_groups = list(zip([groups for groups, _ in by_groups], rows.split(numbers), strict=True))

    @classmethod
    def of(cls, request: ShardRequest, sums: FingerprintSums) -> Self:
        """Makes the object for this rank's ``sums`` of a request; ``add`` then adds them over the ranks."""
        parts = sums.named_parts()
        return cls(parts, sums.rows(request.device), _count_rows(request, parts))

    @disable_autograd
    def add(self) -> None:
        """Adds the sums of all ranks to this rank's sums. Every rank must call it."""
        for groups, rows in self._by_groups:
            for group in groups:
                dist.all_reduce(rows, group=group)
        self._on_host.copy_(self.rows, non_blocking=True)
        device = self.rows.device
        if device.type != "cpu":
            self._done = torch.get_device_module(device).current_stream(device).record_event()

    def read(self) -> dict[str, TensorFingerprint]:
        if self._done is not None:
            self._done.synchronize()
        return {
            name: TensorFingerprint(part.dtype, part.shape, 0, num_summed, reduce_to_lanes(lanes))
            for (name, part), (*lanes, num_summed) in zip(self._parts, self._on_host.tolist(), strict=True)
        }


def _count_rows(
    request: ShardRequest, parts: Sequence[tuple[str, TensorFingerprint]]
) -> list[tuple[list[dist.ProcessGroup], int]]:
    """Counts consecutive parts that are divided by the same process groups. Returns (groups, number of parts)."""
    groups_of = {
        part.names[0]: groups
        for source in request.sources
        for groups in (_find_dividing_groups(source),)
        for spec in list_specs(source)
        for part, _ in request.plan.names.list_parts(spec)
    }
    counted = []
    for _, named in itertools.groupby(parts, key=lambda named: [id(group) for group in groups_of[named[0]]]):
        names = [name for name, _ in named]
        counted.append((groups_of[names[0]], len(names)))
    return counted


def _find_dividing_groups(source: Source) -> list[dist.ProcessGroup]:
    match source:
        case Plain():
            return []
        case Rows() | FlatUnit():
            return [source.shard_group.group]
        case Placed():
            mesh, placements = source.mesh, source.placements
            return [mesh.get_group(dim) for dim, p in enumerate(placements) if not isinstance(p, Replicate)]
        case _:
            assert_never(source)


def _restrict(sources: Sequence[Source], names: Collection[str]) -> list[Source]:
    """Returns the sources of the tensors with these names."""
    wanted = set(names)
    chosen: list[Source] = []
    for source in sources:
        if isinstance(source, FlatUnit):
            if spans := tuple(span for span in source.spans if not wanted.isdisjoint(span.spec.names)):
                chosen.append(replace(source, spans=spans))
        elif not wanted.isdisjoint(source.spec.names):
            chosen.append(source)
    return chosen


def _sum_variants(
    request: ShardRequest, deltas: Mapping[str, list[Delta]]
) -> Iterator[tuple[FingerprintVariant, FingerprintSums]]:
    """Yields, for each common mistake, the variant without lanes and this rank's sums of the affected tensors."""
    dims = max((len(spec.shape) for source in request.sources for spec in list_specs(source)), default=0)
    yield FingerprintVariant("transposed", "transposed", (0, 0)), _sum_variant(request, deltas, _transpose_blocks)
    for dim in range(dims):
        variant = FingerprintVariant("halves swapped", f"the halves of dim {dim} are swapped", (0, 0))
        yield variant, _sum_variant(request, deltas, functools.partial(_swap_halves, dim=dim))
    # Integers are buffers, which are sources of their own.
    floating = replace(request, sources=[s for s in request.sources if list_specs(s)[0].dtype.is_floating_point])
    for dtype in _INTERMEDIATE_DTYPES:
        variant = FingerprintVariant("cast twice", f"cast twice: to {name_dtype(dtype)} and back", (0, 0))
        yield variant, _sum_variant(floating, deltas, back_from=dtype)
        variant = FingerprintVariant("cast twice", f"cast twice: to {name_dtype(dtype)} first", (0, 0))
        yield variant, _sum_variant(floating, deltas, first_to=dtype)


def _sum_variant(
    request: ShardRequest,
    deltas: Mapping[str, list[Delta]],
    blocks_of: _BlocksOf | None = None,
    *,
    first_to: torch.dtype | None = None,
    back_from: torch.dtype | None = None,
) -> FingerprintSums:
    """Sums this rank's part of the tensors that a mistake changes, by first name.

    first_to: a dtype to which the tensors are cast before the cast to the fingerprint's dtype.
    back_from: a dtype to which the tensors are cast, and back, after the cast to the fingerprint's dtype.
    """
    dtypes = {spec.names[0]: request.dtypes.choose(spec) for source in request.sources for spec in list_specs(source)}
    read = request if first_to is None else replace(request, dtypes=OutputDtypes(first_to))
    sums = FingerprintSums()
    with contextlib.closing(load_shards(read, deltas, shows="finished")) as shards:
        for shard in shards:
            dtype = dtypes[shard.spec.names[0]]
            if back_from == dtype or (first_to is not None and (first_to == dtype or shard.spec.dtype == dtype)):
                continue
            tensor = shard.tensor if back_from is None else shard.tensor.to(back_from)
            _add_shard(sums, LoadedShard(shard.spec, tensor.to(dtype), shard.place, is_copy=True), blocks_of)
            del shard, tensor
    sums.flush()
    return sums


def _transpose_blocks(shard: LoadedShard) -> list[IndexedBlock]:
    shape = shard.spec.shape
    if len(shape) < 2:
        return []
    strides = (*compute_row_major_strides(shape)[:-2], 1, shape[-2])
    return divide_shard_into_blocks(shard.tensor, shape, shard.place, strides)


def _swap_halves(shard: LoadedShard, dim: int) -> list[IndexedBlock]:
    shape = shard.spec.shape
    return [
        block
        for part, offsets in divide_shard_into_parts(shard.tensor, shape, shard.place)
        for block in swap_halves(part, offsets, shape, dim)
    ]
