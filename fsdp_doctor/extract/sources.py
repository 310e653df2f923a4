"""What there is to extract from a model, and how each tensor of it is gathered.

Only attributes are read. Nothing is copied, nothing is communicated, no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.reader import Fsdp1Unit, HeldModel, HeldTensor


@dataclass(slots=True, eq=False)
class ShardGroup:
    """The ranks over which tensors are sharded, and this rank's place among them.

    device: where the group's collectives run.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    size: int
    rank: int
    device: torch.device


# A model may have tens of thousands of tensors, so none of these costs more to make than it must:
# they are not frozen, which would double it. Nothing changes them.
@dataclass(slots=True, eq=False, kw_only=True)
class TensorSpec:
    """One full tensor: every name of it, its global shape, its elements, its own dtype."""

    names: tuple[str, ...]
    shape: torch.Size
    numel: int
    dtype: torch.dtype


@dataclass(slots=True, eq=False, kw_only=True)
class Plain:
    """Whole on every rank: a buffer, an ignored parameter, a replicated one, a model without shards."""

    spec: TensorSpec
    local: torch.Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Rows:
    """Shard(0) over one shard group, divided as torch.chunk does.

    Rank r holds the elements [r * chunk, (r + 1) * chunk) of the flattened tensor, as far as there are
    any. So the parts joined in rank order are the tensor, and what is padded is its tail.
    """

    spec: TensorSpec
    tensor: DTensor
    shard_group: ShardGroup
    chunk: int

    def local(self) -> torch.Tensor:
        """This rank's part as it lies, 1-D. Raises RuntimeError where it is not as long as it must be."""
        held = min(max(self.spec.numel - self.shard_group.rank * self.chunk, 0), self.chunk)
        local = private.local_tensor(self.tensor).reshape(-1)
        if local.numel() != held:
            raise RuntimeError(
                f"{self.spec.names[0]}: this rank holds {local.numel()} elements where "
                f"{self.tensor.placements} gives it {held}"
            )
        return local


@dataclass(slots=True, eq=False, kw_only=True)
class Placed:
    """Any other DTensor (other dims, several mesh dims): DTensor's own redistribution gathers it."""

    spec: TensorSpec
    tensor: DTensor
    shard_group: ShardGroup


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """One parameter in an FSDP1 unit: the elements [offset, offset + numel) of the unit's flat parameter."""

    spec: TensorSpec
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class FlatUnit:
    """An FSDP1 unit: rank r holds the elements [r * S, (r + 1) * S) of the flat parameter; local is 1-D, S long."""

    spans: tuple[Span, ...]
    local: torch.Tensor
    shard_group: ShardGroup


Source: TypeAlias = Plain | Rows | Placed | FlatUnit


def specs(source: Source) -> list[TensorSpec]:
    """Of the tensors that it holds."""
    return [span.spec for span in source.spans] if isinstance(source, FlatUnit) else [source.spec]


@torch.no_grad()
def sources_of(held: HeldModel) -> list[Source]:
    """Every parameter and persistent buffer of the model, each once, in the order of the model.

    FSDP1's units come first. Raises RuntimeError for a tensor on the meta device.
    """
    groups = _ShardGroups()
    units = [source for unit in held.fsdp1_units for source in _unit_sources(unit)]
    return [*units, *(_source(tensor, groups) for tensor in held.tensors())]


def compute_device(held: HeldModel, sources: Sequence[Source]) -> torch.device:
    """Where the model's collectives run; for a model without shards, where its parameters are."""
    for source in sources:
        if not isinstance(source, Plain):
            return source.shard_group.device
    for parameter in held.parameters:
        if isinstance(parameter.tensor, DTensor):
            return device_of(parameter.tensor.device_mesh.device_type)
    for unit in held.fsdp1_units:
        return unit.compute_device
    return next((parameter.tensor.device for parameter in held.parameters), torch.device("cpu"))


def device_of(device_type: str) -> torch.device:
    """This rank's device of that type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _source(held: HeldTensor, groups: _ShardGroups) -> Source:
    tensor = held.tensor
    _require_values(tensor, held.names)
    spec = TensorSpec(names=held.names, shape=tensor.shape, numel=tensor.numel(), dtype=tensor.dtype)
    if not isinstance(tensor, DTensor):
        return Plain(spec=spec, local=tensor.detach())
    _require_process_group()
    mesh, placements = tensor.device_mesh, tensor.placements
    split = [dim for dim, placement in enumerate(placements) if type(placement) is not Replicate]
    if not split:
        return Plain(spec=spec, local=private.local_tensor(tensor))
    placement = placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0 or not tensor.is_contiguous():
        return Placed(spec=spec, tensor=tensor, shard_group=groups.of_mesh(mesh))
    shard_group = groups.of_dim(mesh, split[0])
    if shard_group.size == 1:
        return Plain(spec=spec, local=private.local_tensor(tensor))
    length = spec.shape[0]
    chunk = -(-length // shard_group.size) * (spec.numel // length) if length else 0
    return Rows(spec=spec, tensor=tensor, shard_group=shard_group, chunk=chunk)


def _require_values(tensor: torch.Tensor, names: Sequence[str]) -> None:
    if tensor.is_meta:
        raise RuntimeError(f"{names[0]} is on the meta device: initialize the model before extracting it")


def _require_process_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError("the model is sharded, and torch.distributed is not initialized, or not any more")


class _ShardGroups:
    """A model has few meshes and many tensors: each mesh is asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], ShardGroup] = {}

    def of_dim(self, mesh: DeviceMesh, dim: int) -> ShardGroup:
        key = id(mesh), dim
        if key not in self._known:
            self._known[key] = shard_group(mesh.get_group(dim), device_of(mesh.device_type))
        return self._known[key]

    def of_mesh(self, mesh: DeviceMesh) -> ShardGroup:
        """All ranks of a mesh of several dims; the group, of the first, stands for the backends of all."""
        key = id(mesh), -1
        if key not in self._known:
            ranks = tuple(mesh.mesh.flatten().tolist())
            first = self.of_dim(mesh, 0)
            place = ranks.index(dist.get_rank())
            self._known[key] = replace(first, ranks=ranks, size=len(ranks), rank=place)
        return self._known[key]


def shard_group(group: dist.ProcessGroup, device: torch.device) -> ShardGroup:
    """Raises RuntimeError for a process group without a backend for the device."""
    if not private.has_backend_for(group, device):
        raise RuntimeError(
            f"the model's process group has no backend for {device.type}: initialize it with one, as in "
            f'init_process_group("cpu:gloo,cuda:nccl")'
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    return ShardGroup(group=group, ranks=ranks, size=len(ranks), rank=dist.get_rank(group), device=device)


def _unit_sources(unit: Fsdp1Unit) -> Iterator[FlatUnit | Plain]:
    local = unit.shard
    _require_values(local, unit.names[0])
    spans = tuple(
        Span(
            spec=TensorSpec(names=names, shape=place.shape, numel=place.shape.numel(), dtype=local.dtype),
            offset=place.offset,
            stride=place.stride,
        )
        for names, place in zip(unit.names, unit.layout(), strict=True)
    )
    if unit.is_sharded:
        yield FlatUnit(spans=spans, local=local, shard_group=shard_group(unit.group, unit.compute_device))
        return
    for span in spans:
        view = local.as_strided(span.spec.shape, span.stride, local.storage_offset() + span.offset)
        yield Plain(spec=span.spec, local=view)
