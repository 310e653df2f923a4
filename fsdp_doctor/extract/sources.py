"""What there is to extract from a model on this rank: names, shapes, and where this rank's part lies.

Only attributes are read. Nothing is copied, nothing is communicated, no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.fsdp import fsdp1, fsdp2, private


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

    entry: TensorSpec
    local: torch.Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Rows:
    """Shard(0) over one shard_group, divided as torch.chunk does.

    Rank r holds the elements [r * chunk, (r + 1) * chunk) of the flattened tensor, as far as there are
    any. So the parts joined in rank order are the tensor, and what is padded is its tail.
    """

    entry: TensorSpec
    tensor: DTensor
    shard_group: ShardGroup
    chunk: int

    def local(self) -> torch.Tensor:
        """This rank's part as it lies, 1-D. Raises RuntimeError where it is not as long as it must be."""
        held = min(max(self.entry.numel - self.shard_group.rank * self.chunk, 0), self.chunk)
        # Without autograd it is the local tensor itself: no copy, no collective, half-moved or not.
        local = self.tensor.to_local().reshape(-1)
        if local.numel() != held:
            raise RuntimeError(
                f"{self.entry.names[0]}: this rank holds {local.numel()} elements where "
                f"{self.tensor.placements} gives it {held}"
            )
        return local


@dataclass(slots=True, eq=False, kw_only=True)
class Placed:
    """Any other DTensor (other dims, several mesh dims): DTensor's own redistribution gathers it."""

    entry: TensorSpec
    tensor: DTensor
    shard_group: ShardGroup


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """One parameter in an FSDP1 unit: the elements [offset, offset + numel) of the unit's flat parameter."""

    entry: TensorSpec
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class FlatUnit:
    """An FSDP1 unit: rank r holds the elements [r * S, (r + 1) * S) of the flat parameter; local is 1-D, S long."""

    spans: tuple[Span, ...]
    local: torch.Tensor
    shard_group: ShardGroup


Source: TypeAlias = Plain | Rows | Placed | FlatUnit


def entries(source: Source) -> list[TensorSpec]:
    return [span.entry for span in source.spans] if isinstance(source, FlatUnit) else [source.entry]


def innermost(model: nn.Module) -> nn.Module:
    """The model without what keeps it whole: DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


@torch.no_grad()
def read(model: nn.Module) -> list[Source]:
    """Every parameter and persistent buffer of the model, each once, in the order of the model.

    FSDP1's units come first. Raises RuntimeError for a tensor on the meta device.
    """
    units = list(_units(model))
    in_units = {name for unit in units for entry in entries(unit) for name in entry.names}
    shard_groups = _ShardGroups()
    rest = [_source(names, tensor, shard_groups) for names, tensor in _tensors(model, in_units)]
    return [*units, *rest]


def compute_device(model: nn.Module, sources: list[Source]) -> torch.device:
    """Where the model's collectives run; for a model without shards, where its parameters are."""
    for source in sources:
        if not isinstance(source, Plain):
            return source.shard_group.device
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is not None:
        return device_of(mesh.device_type)
    for _, handle in fsdp1.units(model):
        return private.compute_device(handle)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def device_of(device_type: str) -> torch.device:
    """This rank's device of that type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _tensors(model: nn.Module, in_units: set[str]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    sharded = private.sharded_parameters(model)
    for name, shown in fsdp2.entries(model):
        tensor = sharded.get(id(shown), shown)
        if name not in in_units and not isinstance(tensor, FlatParameter):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        if tensor.is_meta:
            raise RuntimeError(f"{names[key][0]} is on the meta device: initialize the model before extracting it")
        yield tuple(names[key]), tensor


def _source(names: tuple[str, ...], tensor: torch.Tensor, shard_groups: _ShardGroups) -> Source:
    entry = TensorSpec(names=names, shape=tensor.shape, numel=tensor.numel(), dtype=tensor.dtype)
    if not isinstance(tensor, DTensor):
        return Plain(entry=entry, local=tensor.detach())
    _require_process_group()
    mesh, placements = tensor.device_mesh, tensor.placements
    split = [dim for dim, placement in enumerate(placements) if type(placement) is not Replicate]
    if not split:
        return Plain(entry=entry, local=tensor.to_local())
    placement = placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0 or not tensor.is_contiguous():
        return Placed(entry=entry, tensor=tensor, shard_group=shard_groups.of_mesh(mesh))
    shard_group = shard_groups.of_dim(mesh, split[0])
    if shard_group.size == 1:
        return Plain(entry=entry, local=tensor.to_local())
    length = entry.shape[0]
    chunk = -(-length // shard_group.size) * (entry.numel // length) if length else 0
    return Rows(entry=entry, tensor=tensor, shard_group=shard_group, chunk=chunk)


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
        """All ranks of a mesh of several dims; the group, of the first, stands for what it can carry."""
        key = id(mesh), -1
        if key not in self._known:
            ranks = tuple(mesh.mesh.flatten().tolist())
            first = self.of_dim(mesh, 0)
            place = ranks.index(dist.get_rank())
            self._known[key] = replace(first, ranks=ranks, size=len(ranks), rank=place)
        return self._known[key]


def shard_group(group: dist.ProcessGroup, device: torch.device) -> ShardGroup:
    """Raises RuntimeError for a process group that cannot carry the device."""
    if not private.carries(group, device):
        raise RuntimeError(
            f"the model's process group has no backend for {device.type}: initialize it with one, as in "
            f'init_process_group("cpu:gloo,cuda:nccl")'
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    return ShardGroup(group=group, ranks=ranks, size=len(ranks), rank=dist.get_rank(group), device=device)


def _units(model: nn.Module) -> Iterator[FlatUnit | Plain]:
    for prefix, handle in fsdp1.units(model):
        names, tied = fsdp1.unit_names(prefix, handle)
        aliases: dict[str, list[str]] = {name: [name] for name in names}
        for name, primary in tied:
            aliases[primary].append(name)
        local = private.flat_shard(handle)
        if local.is_meta:
            raise RuntimeError(f"{names[0]} is on the meta device: initialize the model before extracting it")
        spans = tuple(
            Span(
                entry=TensorSpec(names=tuple(aliases[name]), shape=view.shape, numel=view.numel(), dtype=local.dtype),
                offset=int(view.storage_offset()),
                stride=view.stride(),
            )
            for name, view in zip(names, private.flat_layout(handle), strict=True)
        )
        if private.is_sharded(handle):
            yield FlatUnit(
                spans=spans,
                local=local,
                shard_group=shard_group(private.shard_group(handle), private.compute_device(handle)),
            )
            continue
        for span in spans:
            view = local.as_strided(span.entry.shape, span.stride, local.storage_offset() + span.offset)
            yield Plain(entry=span.entry, local=view)
