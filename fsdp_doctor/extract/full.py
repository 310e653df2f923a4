"""The iterator over full tensors, and what it would yield."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from fsdp_doctor.extract import lora as adapters
from fsdp_doctor.extract.agreement import Agreement
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.lora import Lora
from fsdp_doctor.extract.pipeline import Pipeline, largest
from fsdp_doctor.extract.plan import buckets, shard_groups, signature
from fsdp_doctor.extract.sources import Source, TensorSpec, compute_device, sources_of, specs
from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True)
class WeightInfo:
    """What :func:`full_tensors` would yield under a name: the global shape, and the dtype that is asked for."""

    shape: torch.Size
    dtype: torch.dtype


def full_tensors(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) for every parameter and every persistent buffer, in one order on every rank.

    Every rank of the group over which the model is sharded must call it with the same arguments and
    iterate to the end. They compare what they are about to gather first, and before each bucket; a rank
    that stops early or raises makes the others raise RankLeft, instead of leaving them in a
    collective. Under HSDP each replica's shard group is on its own.

    Names are those of the model before it was wrapped (by FSDP1, DDP, activation checkpointing,
    torch.compile, peft). Tied parameters come under each of their names and share one tensor, gathered
    once. A yielded tensor belongs to the caller and may be kept; it never aliases the model. It is
    ready on the stream that is current when it is asked for, as the result of any operation of torch.

    Device memory in use at once, beside what the caller keeps: two buckets, or one and the largest tensor,
    and 128 MiB where shards are cast or merged.

    model: under FSDP2 (``fully_shard``; any mesh and placements), FSDP1 (``FullyShardedDataParallel``,
        ``use_orig_params`` or not), DDP or nothing; any offload; half-moved modules too.
    device: where the yielded tensors lie. It must be the device on which the model's groups gather,
        and that is the default; a model without shards may be asked for anywhere.
    dtype: cast to it, each shard before it is gathered; by default every tensor has its own dtype (the
        fp32 masters under mixed precision). keep_dtype: names, or patterns as fnmatch has them, of
        tensors that are not cast.
    bucket_bytes: device memory of one bucket, in bytes.
    lora: ``merged`` the weights with their active adapters added, as the model computes (out of
        place: peft's ``merge_adapter`` changes the weights, and a generator that is read after
        ``unmerge_adapter`` yields the base, verl PR 6782); ``base`` without any adapter; ``adapter``
        the one active adapter alone, under the names of peft's adapter files. A model without
        adapters has only weights.

    Raises, before any collective: ValueError, TypeError for arguments that make no sense; RuntimeError
    for a tensor on the meta device, or a process group that is missing or has no backend for the device;
    NotImplementedError for adapters that cannot be merged (DoRA, and kinds other than LoRA). On every
    rank: PlanMismatch where the ranks hold different models or were given different arguments.
    """
    with announced(model):
        request = request_of(model, device, dtype, keep_dtype, bucket_bytes, lora)
    return _named(extract(request))


def weights_info(
    model: nn.Module, *, dtype: torch.dtype | None = None, keep_dtype: Collection[str] = (), lora: Lora = "merged"
) -> dict[str, WeightInfo]:
    """What :func:`full_tensors` would yield, in its order: no communication, no copy, no device is touched.

    Any rank may call it alone (verl's ``get_actor_weights_info``, which PR 4726 mends, gathers).
    Arguments and errors are those of :func:`full_tensors`.
    """
    request = request_of(model, None, dtype, keep_dtype, BUCKET_BYTES, lora)
    return {
        name: WeightInfo(spec.shape, request.dtypes.of(spec))
        for source in request.sources
        for spec in specs(source)
        for name in spec.names
    }


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call's arguments, checked against the model.

    sources: what is yielded. all_sources: that and the rest of the model, adapters among it.
    """

    all_sources: list[Source]
    sources: list[Source]
    adapters: dict[str, list[adapters.LoraAdapter]]
    dtypes: OutputDtypes
    device: torch.device
    bucket_bytes: int
    lora: Lora


@without_garbage_collection
def request_of(
    model: nn.Module,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    keep_dtype: Collection[str],
    bucket_bytes: int,
    lora: Lora,
) -> Request:
    adapters.check(lora)
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    held = reader.read(model)
    everything = sources_of(held)
    sources, to_merge = adapters.select(reader.innermost(model), everything, lora)
    dtypes = OutputDtypes(dtype, (keep_dtype,) if isinstance(keep_dtype, str) else tuple(keep_dtype))
    dtypes.check(sources)
    computes = compute_device(held, everything)
    return Request(
        all_sources=everything,
        sources=sources,
        adapters=to_merge,
        dtypes=dtypes,
        device=_device(device, computes, bool(shard_groups(everything))),
        bucket_bytes=bucket_bytes,
        lora=lora,
    )


def _device(asked: torch.device | str | None, computes: torch.device, is_sharded: bool) -> torch.device:
    if asked is None:
        return computes
    device = torch.device(asked)
    if not is_sharded:
        return device
    if device.type != computes.type or device.index not in (None, computes.index):
        raise ValueError(f"device={device}: the model's shards are gathered on {computes}")
    return computes


@contextlib.contextmanager
def announced(model: nn.Module) -> Iterator[None]:
    """Tells the other ranks that this one was refused, where it can be told who they are."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            Agreement(_ranks(sources_of(reader.read(model)))).leave(f"{type(error).__name__}: {error}")
        raise


def _ranks(sources: Sequence[Source]) -> tuple[int, ...]:
    """All that take part: of the shard groups of a model the largest has the others in it."""
    return max((shard_group.ranks for shard_group in shard_groups(sources)), key=len, default=(0,))


_T = TypeVar("_T")


class TensorStream(Iterator[_T]):
    """Closing it, or letting go of it, before the end tells the other ranks, even before the first tensor."""

    def __init__(self, items: Generator[_T], agreement: Agreement) -> None:
        self._items = items
        self._agreement = agreement

    def __next__(self) -> _T:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self._agreement.leave(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        self._agreement.leave("its caller stopped")
        self._items.close()

    def __del__(self) -> None:
        self.close()


def extract(request: Request) -> TensorStream[tuple[TensorSpec, torch.Tensor]]:
    """Every full tensor once, with all of its names."""
    sources, dtypes = request.sources, request.dtypes
    agreement = Agreement(_ranks(request.all_sources))
    factors = adapters.factors(request.all_sources, request.adapters)
    extra = {
        weight: 2 * sum(s.numel * s.dtype.itemsize for a in many for f in (a.a, a.b) for s in specs(factors[f]))
        for weight, many in request.adapters.items()
    }
    settings = f"dtype={dtypes.dtype} bucket_bytes={request.bucket_bytes} lora={request.lora}"
    agreement.expect(lambda: signature(sources, dtypes, settings))
    plan = buckets(sources, dtypes, request.bucket_bytes, extra)
    most_bytes = request.bucket_bytes + max(request.bucket_bytes, largest(sources, dtypes))
    return TensorStream(Pipeline(request.device, agreement, request.adapters, factors).run(plan, most_bytes), agreement)


def _named(tensors: TensorStream[tuple[TensorSpec, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
    """Each tensor under each of its names."""
    with contextlib.closing(tensors):
        for spec, tensor in tensors:
            for name in spec.names:
                yield name, tensor
            del tensor
