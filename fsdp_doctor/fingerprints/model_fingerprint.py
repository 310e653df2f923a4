"""The fingerprint of a sharded model: each rank sums its shards, and the sums are added."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from typing_extensions import assert_never

from fsdp_doctor.extract.agreement import Agreement, ComparedPlan
from fsdp_doctor.extract.full import BUCKET_BYTES, OfExtraction, announced
from fsdp_doctor.extract.local import (
    LoadedShard,
    ShardRequest,
    announced_where_merged,
    factor_stream,
    gathered_deltas,
    loaded_shards,
    refuse_unknown,
    request_of,
)
from fsdp_doctor.extract.lora import Delta, Lora
from fsdp_doctor.extract.plan import signature
from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, Source, TensorSpec, specs
from fsdp_doctor.extract.without_autograd import without_autograd
from fsdp_doctor.fingerprints.fingerprint_set import Fingerprints, TensorFingerprint, lanes_of
from fsdp_doctor.fingerprints.summing import FingerprintSums, blocks_of_shard, to_be_summed


@without_autograd
def fingerprint(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    lora: Lora = "merged",
    combined: bool = True,
) -> Fingerprints:
    """128 bits for each name of what :func:`full_tensors` would yield with the same arguments; nothing is gathered.

    The same for every strategy, sharding, offload and number of ranks, and for the unsharded model; what the sum
    detects and what not is said in ``fsdp_doctor.fingerprints.keyed_sum``. Each rank sums its shards on the
    device, after the cast and the merge, which change nothing in the model; then the sums, 24 bytes a tensor, are added
    by an all-reduce over each group that divides tensors, so under HSDP each replica has its own. Shards on the host
    cross the link once more; :meth:`FingerprintSums.watch` sums the tensors of an extraction as they pass instead.

    Every rank of the group over which the model is sharded must call it with the same arguments; they compare
    what they have before the all-reduce, as in :func:`full_tensors`, and none is left waiting.

    combined: False for what this rank has of the sums, without a collective (except for the factors of adapters), for
        :func:`combine_fingerprints`.

    Device memory as :func:`local_shards`, and 64 MiB where shards do not lie on the device as they are summed.

    Raises as :func:`full_tensors`.
    """
    announcing = announced(model) if combined else announced_where_merged(model, lora)
    with announcing:
        request = request_of(model, dtype, keep_dtype, bucket_bytes, lora)
        if not combined:
            refuse_unknown(request)
    deltas = gathered_deltas(request, factor_stream(request))
    if not combined:
        return _with_ties(request, _own(request, deltas))
    settings = f"fingerprints dtype={dtype} lora={lora}"
    with agreed(request, settings) as agree:
        sums = GroupSums(request.sources, _own(request, deltas), request.device)
        agree()
        added = sums.added()
    return _with_ties(request, added)


@contextlib.contextmanager
def agreed(request: ShardRequest, settings: str) -> Iterator[Callable[[], object]]:
    """Yields what compares the ranks' models and waits for all of them; who raises tells the others instead."""
    agreement = Agreement(request.plan.ranks)
    agreement.expect(
        lambda: ComparedPlan(signature(request.sources, request.dtypes, settings, request.adapters)),
        OfExtraction(request.plan.groups, request.shards, request.device),
    )
    with agreement.leaving():
        yield agreement.proceed
        agreement.end()


def _own(request: ShardRequest, deltas: Mapping[str, list[Delta]]) -> dict[str, TensorFingerprint]:
    """By the first name of each tensor: what this rank's shards add."""
    sums = FingerprintSums()
    with contextlib.closing(loaded_shards(request, deltas, own=False)) as shards:
        for shard in shards:
            _add(sums, shard)
            del shard
    return dict(sums.fingerprints().tensors)


def _add(sums: FingerprintSums, shard: LoadedShard) -> None:
    spec, tensor, place, is_copy = shard
    blocks = blocks_of_shard(tensor, spec.shape, place)
    one = to_be_summed(tensor.dtype, spec.shape, blocks)
    sums.add_blocks(spec.names[0], one, blocks, held=tensor.nbytes * is_copy)


class GroupSums:
    """What this rank adds to each tensor's sums, and the memory to add it over the groups that divide them.

    Made before the ranks agree, so that no rank waits in a collective for one that has not the memory.
    """

    def __init__(self, sources: Sequence[Source], own: Mapping[str, TensorFingerprint], device: torch.device) -> None:
        together: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], list[str]]] = {}
        for source in sources:
            groups = _dividing_groups(source)
            _, names = together.setdefault(tuple(map(id, groups)), (groups, []))
            names += [spec.names[0] for spec in specs(source)]
        self._own = own
        self._together = [
            (groups, names, _numbers([own[name] for name in names], device))
            for groups, names in together.values()
            if groups
        ]

    def added(self) -> dict[str, TensorFingerprint]:
        """The sums of all ranks. Every rank must call it, with the same sources."""
        added = dict(self._own)
        for groups, names, numbers in self._together:
            for group in groups:
                dist.all_reduce(numbers, group=group)
            for name, (*lanes, num_summed) in zip(names, numbers.tolist(), strict=True):
                one = self._own[name]
                added[name] = TensorFingerprint(one.dtype, one.shape, 0, num_summed, lanes_of(lanes))
        return added


def _dividing_groups(source: Source) -> list[dist.ProcessGroup]:
    match source:
        case Plain():
            return []
        case Rows() | FlatUnit():
            return [source.shard_group.group]
        case Placed():
            mesh, placements = source.mesh, source.placements
            return [mesh.get_group(dim) for dim, one in enumerate(placements) if not isinstance(one, Replicate)]
        case _:
            assert_never(source)


def _numbers(sums: Iterable[TensorFingerprint], device: torch.device) -> torch.Tensor:
    """A row for each tensor."""
    rows = [(*map(_signed, one.lanes), one.num_summed) for one in sums]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)


def _signed(lane: int) -> int:
    return lane - (1 << 64) if lane >> 63 else lane


def _with_ties(request: ShardRequest, by_first_name: dict[str, TensorFingerprint]) -> Fingerprints:
    """Under every name, in the order of the extraction."""
    every: list[TensorSpec] = [spec for source in request.sources for spec in specs(source)]
    tensors = {name: by_first_name[spec.names[0]] for spec in every for name in spec.names}
    return Fingerprints(tensors, tuple(spec.names for spec in every if len(spec.names) > 1))
