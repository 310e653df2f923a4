"""What a tensor's fingerprint would be after one of the usual mistakes: computed on the trainer, for what differs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from fsdp_doctor.extract.dtypes import OutputDtypes, dtype_name
from fsdp_doctor.extract.full import BUCKET_BYTES, announced
from fsdp_doctor.extract.local import (
    LoadedShard,
    ShardRequest,
    factor_stream,
    gathered_deltas,
    loaded_shards,
    request_of,
    row_major,
)
from fsdp_doctor.extract.lora import Delta, Lora
from fsdp_doctor.extract.sources import FlatUnit, Source, specs
from fsdp_doctor.fingerprints.differences import FingerprintVariant, VariantKind
from fsdp_doctor.fingerprints.fingerprint_set import FingerprintError, Lanes, TensorFingerprint
from fsdp_doctor.fingerprints.indexed_blocks import IndexedBlock, grid_block
from fsdp_doctor.fingerprints.model_fingerprint import GroupSums, agreed
from fsdp_doctor.fingerprints.summing import FingerprintSums, blocks_of_shard, parts_of_shard, to_be_summed

_INTERMEDIATE = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_Blocks: TypeAlias = Callable[[LoadedShard], list[IndexedBlock]]


def fingerprint_variants(
    model: nn.Module,
    names: Collection[str],
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    lora: Lora = "merged",
) -> dict[str, list[FingerprintVariant]]:
    """Of the tensors of these names, the fingerprints after a mistake: for ``compare_fingerprints(variants=...)``.

    Transposed in the last two dims; with the halves of a dim swapped, for each dim of even length (a fused
    ``gate_up_proj``); cast to float16, bfloat16 or a float8 first, or to one of them and back. The model is read once
    for each mistake. The arguments are those that :func:`fingerprint` was given.

    Every rank must call it with the same names, as :func:`fingerprint`. Raises as that, and FingerprintError for
    a name that the model does not have.
    """
    with announced(model):
        request = _restricted(request_of(model, dtype, keep_dtype, BUCKET_BYTES, lora), set(names))
    deltas = gathered_deltas(request, factor_stream(request))
    with agreed(request, f"variants of fingerprints dtype={dtype} lora={lora}") as agree:
        sums = [(variant, _group_sums(request, own)) for variant, own in _variants(request, deltas)]
        agree()
        found = [(variant, _whole(one.added())) for variant, one in sums]
    by_first_name: dict[str, list[FingerprintVariant]] = {}
    for variant, lanes_of_all in found:
        for name, lanes in lanes_of_all.items():
            by_first_name.setdefault(name, []).append(replace(variant, lanes=lanes))
    every = [spec for source in request.sources for spec in specs(source)]
    return {name: by_first_name.get(spec.names[0], []) for spec in every for name in spec.names if name in names}


def _restricted(request: ShardRequest, names: set[str]) -> ShardRequest:
    """To the tensors of these names."""
    sources: list[Source] = []
    for source in request.sources:
        if isinstance(source, FlatUnit):
            spans = tuple(span for span in source.spans if names & set(span.spec.names))
            if spans:
                sources.append(replace(source, spans=spans))
        elif names & set(source.spec.names):
            sources.append(source)
    known = {name for source in sources for spec in specs(source) for name in spec.names}
    if unknown := sorted(names - known):
        raise FingerprintError(f"the model has no {unknown[0]}")
    adapters = {name: many for name, many in request.adapters.items() if name in known}
    return replace(request, sources=sources, adapters=adapters)


def _variants(
    request: ShardRequest, deltas: Mapping[str, list[Delta]]
) -> Iterator[tuple[FingerprintVariant, dict[str, TensorFingerprint]]]:
    """Each, still without sums, and what this rank adds to those of the tensors for which it is one, by first name."""
    dims = max((len(spec.shape) for source in request.sources for spec in specs(source)), default=0)
    yield _of("transposed", "transposed"), _sums(request, deltas, _transposed)
    for dim in range(dims):
        swapped = functools.partial(_halves_swapped, dim=dim)
        yield _of("halves swapped", f"the halves of dim {dim} are swapped"), _sums(request, deltas, swapped)
    floating = _floating(request)
    for between in _INTERMEDIATE:
        via = dtype_name(between)
        back = _sums(floating, deltas, _as_it_is, back_from=between)
        yield _of("cast twice", f"cast twice: to {via} and back"), back
        first = _sums(floating, deltas, _as_it_is, first_to=between)
        yield _of("cast twice", f"cast twice: to {via} first"), first


def _of(kind: VariantKind, detail: str) -> FingerprintVariant:
    return FingerprintVariant(kind, detail, (0, 0))


def _group_sums(request: ShardRequest, own: dict[str, TensorFingerprint]) -> GroupSums:
    chosen = [kept for source in request.sources if (kept := _kept(source, own))]
    return GroupSums(chosen, own, request.device)


def _whole(added: Mapping[str, TensorFingerprint]) -> dict[str, Lanes]:
    return {name: one.lanes for name, one in added.items() if one.is_whole}


def _floating(request: ShardRequest) -> ShardRequest:
    """A model's tensors that can be cast; integers stand beside them as buffers."""
    sources = [source for source in request.sources if specs(source)[0].dtype.is_floating_point]
    return replace(request, sources=sources)


def _sums(
    request: ShardRequest,
    deltas: Mapping[str, list[Delta]],
    blocks_of: _Blocks,
    *,
    first_to: torch.dtype | None = None,
    back_from: torch.dtype | None = None,
) -> dict[str, TensorFingerprint]:
    """Of the tensors for which the variant is one, by first name: what this rank adds.

    first_to: a dtype before that of the fingerprint. back_from: one after it, from which it comes back.
    """
    wanted = {spec.names[0]: request.dtypes.of(spec) for source in request.sources for spec in specs(source)}
    reading = request if first_to is None else replace(request, dtypes=OutputDtypes(first_to))
    sums = FingerprintSums()
    with contextlib.closing(loaded_shards(reading, deltas, own=False)) as shards:
        for shard in shards:
            dtype = wanted[shard.spec.names[0]]
            if back_from == dtype or (first_to is not None and (first_to == dtype or shard.spec.dtype == dtype)):
                continue
            tensor = shard.tensor if back_from is None else shard.tensor.to(back_from)
            cast = LoadedShard(shard.spec, tensor.to(dtype), shard.place, is_copy=True)
            blocks = blocks_of(cast)
            one = to_be_summed(dtype, shard.spec.shape, blocks)
            sums.add_blocks(shard.spec.names[0], one, blocks, held=cast.tensor.nbytes)
            del shard, tensor, cast
    return dict(sums.fingerprints().tensors)


def _kept(source: Source, names: Collection[str]) -> Source | None:
    if isinstance(source, FlatUnit):
        spans = tuple(span for span in source.spans if span.spec.names[0] in names)
        return replace(source, spans=spans) if spans else None
    return source if source.spec.names[0] in names else None


def _as_it_is(shard: LoadedShard) -> list[IndexedBlock]:
    return blocks_of_shard(shard.tensor, shard.spec.shape, shard.place)


def _transposed(shard: LoadedShard) -> list[IndexedBlock]:
    shape = shard.spec.shape
    if len(shape) < 2:
        return []
    strides = (*row_major(shape)[:-2], 1, shape[-2])
    return blocks_of_shard(shard.tensor, shape, shard.place, strides)


def _halves_swapped(shard: LoadedShard, dim: int) -> list[IndexedBlock]:
    shape = shard.spec.shape
    if dim >= len(shape) or shape[dim] % 2:
        return []
    half = shape[dim] // 2
    return [
        block
        for part, offsets in parts_of_shard(shard.tensor, shape, shard.place)
        for block in _moved_blocks(part, offsets, shape, dim, half)
    ]


def _moved_blocks(
    part: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], dim: int, half: int
) -> Iterator[IndexedBlock]:
    """Of one block, what lies in the lower half to the upper one and the other way round."""
    inside = min(max(half - offsets[dim], 0), part.shape[dim])
    for begin, length, moved in ((0, inside, half), (inside, part.shape[dim] - inside, -half)):
        if length:
            target = list(offsets)
            target[dim] += begin + moved
            yield grid_block(0, part.narrow(dim, begin, length).contiguous(), target, row_major(shape))
