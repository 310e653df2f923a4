"""The iterator over full tensors, and what it would yield."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.extract.agreement import Agreement, PlanMismatch
from fsdp_doctor.extract.kept_plans import Arguments, plan_of
from fsdp_doctor.extract.lora import Lora
from fsdp_doctor.extract.pipeline import Pipeline
from fsdp_doctor.extract.plan import Plan, ranks_of
from fsdp_doctor.extract.rank_groups import Comparison, read_groups, refusal
from fsdp_doctor.extract.sources import TensorSpec, sources_of, specs
from fsdp_doctor.extract.streams import HomeStream
from fsdp_doctor.fsdp import reader

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
    iterate to the end. They compare what they are about to gather, and give their word for 1, 2, 4, ...
    buckets at a time; a rank that stops early or raises launches what it gave its word for and makes the
    others raise RankLeft, instead of leaving them in a collective. It does so when it lets go of the iterator.
    Under HSDP each replica's shard group is on its own.

    Names are those of the model before it was wrapped (by FSDP1, DDP, activation checkpointing,
    torch.compile, peft). Tied parameters come under each of their names and share one tensor, gathered
    once. A yielded tensor belongs to the caller and may be kept; it never aliases the model. It is
    ready on the stream that is current when it is asked for, as the result of any operation of torch; that may be
    another one each time. What is in the stream that was current at the call, and in that of the first tensor, is
    waited for before a shard is read.

    What does not change between two calls for a model is worked out in the first and kept; a model that has
    changed is noticed. Which shards it has is looked up in the call, their values as they are read: a training
    step waits until the iteration has ended.

    Device memory in use at once, with the tensor that the caller had last: two buckets, or one and the largest
    tensor. By default that is 1.25 GiB at most, unless a tensor is larger than 768 MiB. Where most of the model
    is in tensors larger than a bucket, as in fused experts, it is one of them more.

    model: under FSDP2 (``fully_shard``; any mesh and placements), FSDP1 (``FullyShardedDataParallel``,
        ``use_orig_params`` or not), DDP or nothing; any offload; half-moved modules too.
    device: where the yielded tensors lie. It must be the device on which the model's groups gather,
        and that is the default; a model without shards may be asked for anywhere.
    dtype: floating-point tensors are cast to it, each shard before it is gathered; integers, bools and complex
        numbers are left as they are. By default every tensor has its own dtype (the fp32 masters under mixed
        precision). keep_dtype: names, or patterns as fnmatch has them, of tensors that are not cast.
    bucket_bytes: device memory of one bucket, in bytes. Where the largest tensor needs the memory anyway, a bucket is
        larger, up to four times, and a unit of FSDP1 is gathered whole.
    lora: ``merged`` the weights with their active adapters added, as the model computes (out of
        place: peft's ``merge_adapter`` changes the weights, and a generator that is read after
        ``unmerge_adapter`` yields the base, verl PR 6782); ``base`` without any adapter; ``adapter``
        the one active adapter alone, under the names of peft's adapter files. A model without
        adapters has only weights.

    Raises, before any collective: ValueError, TypeError for arguments that make no sense; RuntimeError
    for a tensor on the meta device, or a process group that is missing or has no backend for the device;
    NotImplementedError for adapters that cannot be merged (DoRA, and kinds other than LoRA). On every
    rank: PlanMismatch where the ranks hold different models or were given different arguments, and where groups of them
    have other tensors under one name, as of experts, which is looked for once for a plan that is kept.
    """
    with announced(model):
        arguments = Arguments.given(device, dtype, keep_dtype, bucket_bytes, lora)
    return _named(extract(model, arguments))


def weights_info(
    model: nn.Module, *, dtype: torch.dtype | None = None, keep_dtype: Collection[str] = (), lora: Lora = "merged"
) -> dict[str, WeightInfo]:
    """What :func:`full_tensors` would yield, in its order: no communication, no copy, no device is touched.

    Any rank may call it alone (verl's ``get_actor_weights_info``, which PR 4726 mends, gathers).
    Arguments and errors are those of :func:`full_tensors`.
    """
    plan, _ = plan_of(model, Arguments.given(None, dtype, keep_dtype, BUCKET_BYTES, lora))
    return {
        name: WeightInfo(spec.shape, plan.dtypes.of(spec))
        for source in plan.sources
        for spec in specs(source)
        for name in spec.names
    }


@contextlib.contextmanager
def announced(model: nn.Module) -> Iterator[None]:
    """Tells the other ranks that this one was refused: all, where its model does not say who they are."""
    try:
        yield
    except Exception as error:
        # Without a process group there are no others.
        with contextlib.suppress(Exception):
            Agreement(_ranks_of(model)).leave(f"{type(error).__name__}: {error}")
        raise


def _ranks_of(model: nn.Module) -> tuple[int, ...]:
    with contextlib.suppress(Exception):
        held = reader.read(model)
        ranks = read_groups(held).ranks or ranks_of(sources_of(held))
        if len(ranks) > 1:
            return ranks
    return tuple(range(dist.get_world_size()))


class TensorStream(Iterator[tuple[TensorSpec, torch.Tensor]]):
    """Closing it, or letting go of it, before the end tells the other ranks, even before the first tensor.

    A tensor may be used in the stream that is current when it is taken, and in others after ``hand_out`` there.
    """

    def __init__(self, pipeline: Pipeline, agreement: Agreement, home: HomeStream) -> None:
        self.hand_out = home.hand_out
        self._items = home.run(pipeline.run())
        self._agreement = agreement

    def __next__(self) -> tuple[TensorSpec, torch.Tensor]:
        try:
            spec, tensor = next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            self._agreement.leave(f"{type(error).__name__}: {error}")
            raise
        self.hand_out(tensor)
        return spec, tensor

    def close(self) -> None:
        self._agreement.leave("its caller stopped")
        self._items.close()

    def __del__(self) -> None:
        self.close()


def extract(model: nn.Module, arguments: Arguments) -> TensorStream:
    """Every full tensor once, with all of its names."""
    with announced(model):
        plan, shards = plan_of(model, arguments)
    return tensor_stream(plan, shards)


class OfExtraction(Comparison):
    """Raises PlanMismatch on every rank where groups of them have other tensors under one name."""

    def conclude(self, conclusion: str) -> None:
        super().conclude(conclusion)
        if self.conflicts:
            raise PlanMismatch(refusal(self.conflicts))


def tensor_stream(plan: Plan, shards: Sequence[torch.Tensor]) -> TensorStream:
    agreement = Agreement(plan.ranks)
    agreement.expect(lambda: plan.compared, OfExtraction(plan.groups, shards, plan.device))
    with agreement.leaving():
        pipeline = Pipeline(plan, shards, agreement)
    return TensorStream(pipeline, agreement, HomeStream(plan.device))


def _named(tensors: TensorStream) -> Generator[tuple[str, torch.Tensor]]:
    """Each tensor under each of its names."""
    with contextlib.closing(tensors):
        for spec, tensor in tensors:
            yield spec.names[0], tensor
            for name in spec.names[1:]:
                tensors.hand_out(tensor)
                yield name, tensor
            del tensor
