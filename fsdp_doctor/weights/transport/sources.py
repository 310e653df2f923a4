"""Tensors of a model, and how each is gathered. Only attributes are read, and no device is touched."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.reader import FlatSlice, Fsdp1Unit, ModelContents, ModelTensor


@dataclass(slots=True, eq=False)
class ShardGroup:
    """Ranks over which tensors are sharded.

    rank: this rank's index among these ranks.
    device: the device of the collectives.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    size: int
    rank: int
    device: torch.device


# A model may have tens of thousands of tensors, so these classes are cheap to instantiate: they are not frozen, which
# would double the cost. Nothing changes the instances.
@dataclass(slots=True, eq=False, kw_only=True)
class TensorSpec:
    """Description of one full tensor: all its names, its global shape, and its dtype.

    form: a description of the tensor's form if its values cannot be read, otherwise empty.
    """

    names: tuple[str, ...]
    shape: torch.Size
    numel: int
    dtype: torch.dtype
    form: str = ""


# A source's place is the index of this rank's part among the model's shards, which are read anew for each extraction.
@dataclass(slots=True, eq=False, kw_only=True)
class Plain:
    """Tensor that is whole on every rank: a buffer, an ignored or replicated parameter, or any tensor of an unsharded
    model.

    part: the tensor's range in the shard of an FSDP1 unit that is not sharded; None if the tensor is the shard.
    """

    spec: TensorSpec
    place: int
    part: FlatSlice | None = None

    def view_whole(self, shard: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            return shard
        return shard.as_strided(self.part.shape, self.part.stride, shard.storage_offset() + self.part.offset)


@dataclass(slots=True, eq=False, kw_only=True)
class Rows:
    """Tensor with the placement Shard(0) over one shard group, divided like torch.chunk.

    Rank r holds the elements [r * chunk, (r + 1) * chunk) of the flattened tensor, as far as they exist. The parts,
    joined in the order of the ranks, are therefore the tensor, with padding only at the end.
    """

    spec: TensorSpec
    place: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_group: ShardGroup
    chunk: int

    @property
    def held(self) -> int:
        """Number of elements on this rank."""
        return min(max(self.spec.numel - self.shard_group.rank * self.chunk, 0), self.chunk)


@dataclass(slots=True, eq=False, kw_only=True)
class Placed:
    """DTensor that is neither Plain nor Rows (other dims, several mesh dims); DTensor's own redistribution
    gathers it.
    """

    spec: TensorSpec
    place: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    stride: tuple[int, ...]
    shard_group: ShardGroup


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """Parameter in an FSDP1 unit: the elements [offset, offset + numel) of the unit's flat parameter."""

    spec: TensorSpec
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class FlatUnit:
    """FSDP1 unit: rank r holds the elements [r * chunk, (r + 1) * chunk) of the flat parameter."""

    spans: tuple[Span, ...]
    place: int
    shard_group: ShardGroup
    chunk: int


Source: TypeAlias = Plain | Rows | Placed | FlatUnit


def list_specs(source: Source) -> list[TensorSpec]:
    return [span.spec for span in source.spans] if isinstance(source, FlatUnit) else [source.spec]


@dataclass(frozen=True)
class OutputDtypes:
    """Dtypes in which the tensors are gathered and yielded.

    dtype: the dtype of floating-point tensors; None if each tensor keeps its own dtype.
    keep: patterns of names of tensors that always keep their own dtype.
    """

    dtype: torch.dtype | None = None
    keep: Collection[str] = ()

    def choose(self, spec: TensorSpec) -> torch.dtype:
        if self.dtype is None or not spec.dtype.is_floating_point:
            return spec.dtype
        is_kept = any(fnmatch.fnmatchcase(name, pattern) for name in spec.names for pattern in self.keep)
        return spec.dtype if is_kept else self.dtype

    def check(self, sources: Sequence[Source]) -> None:
        """Raises TypeError for a dtype that is not floating-point, ValueError for a pattern that matches no tensor."""
        names = [name for source in sources for spec in list_specs(source) for name in spec.names]
        for pattern in self.keep:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"keep_dtype: no parameter and no buffer is called {pattern}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, not {self.dtype}")


def list_sources(contents: ModelContents) -> list[Source]:
    """Lists each parameter and persistent buffer once, in the order of the model; FSDP1's units come first.

    Raises RuntimeError for a parameter that is only a piece of another unit's flat parameter, for different tensors
    with one name, and for a lost shard.
    """
    if contents.refusal:
        raise RuntimeError(contents.refusal)
    groups = _ShardGroups()
    units = [source for place, unit in enumerate(contents.fsdp1_units) for source in _make_unit_sources(place, unit)]
    return [
        *units,
        *(
            _make_source(place, tensor, groups)
            for place, tensor in enumerate(contents.list_tensors(), len(contents.fsdp1_units))
        ),
    ]


def list_shards(contents: ModelContents) -> list[torch.Tensor]:
    """Lists this rank's present shards, each at the index ``place`` of its source."""
    units = [unit.shard for unit in contents.fsdp1_units]
    return [*units, *(private.read_local_tensor(tensor.tensor) for tensor in contents.list_tensors())]


def check_shards(sources: Sequence[Source], shards: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError for a shard on the meta device or of a wrong length, and for a group without a backend."""
    for source in sources:
        if shards[source.place].is_meta:
            name = list_specs(source)[0].names[0]
            raise RuntimeError(f"{name} is on the meta device: initialize the model before extracting it")
        if not isinstance(source, Plain) and not private.has_backend_for(
            source.shard_group.group, source.shard_group.device
        ):
            raise RuntimeError(
                f"the model's process group has no backend for {source.shard_group.device.type}: initialize it with "
                f'one, as in init_process_group("cpu:gloo,cuda:nccl")'
            )
        if isinstance(source, Rows) and shards[source.place].numel() != source.held:
            raise RuntimeError(
                f"{source.spec.names[0]}: this rank holds {shards[source.place].numel()} elements, but its "
                f"placements give it {source.held}"
            )


def compute_device(contents: ModelContents, sources: Sequence[Source]) -> torch.device:
    """Returns the device of the model's collectives; for a model without shards, the device of its parameters."""
    for source in sources:
        if not isinstance(source, Plain):
            return source.shard_group.device
    for parameter in contents.parameters:
        if isinstance(parameter.placed, DTensor):
            return find_device(parameter.placed.device_mesh.device_type)
    for unit in contents.fsdp1_units:
        return unit.compute_device
    return next((parameter.tensor.device for parameter in contents.parameters), torch.device("cpu"))


def find_device(device_type: str) -> torch.device:
    """Returns this rank's device of the given type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _make_source(place: int, model_tensor: ModelTensor, groups: _ShardGroups) -> Source:
    tensor = model_tensor.placed
    spec = TensorSpec(
        names=model_tensor.names,
        shape=tensor.shape,
        numel=tensor.numel(),
        dtype=tensor.dtype,
        form=model_tensor.form,
    )
    if not isinstance(tensor, DTensor):
        return Plain(spec=spec, place=place)
    if not dist.is_initialized():
        raise RuntimeError("the model is sharded, but torch.distributed is not initialized, or no longer initialized")
    mesh, placements = tensor.device_mesh, tensor.placements
    split = [dim for dim, placement in enumerate(placements) if type(placement) is not Replicate]
    if not split:
        return Plain(spec=spec, place=place)
    placement = placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0 or not tensor.is_contiguous():
        return Placed(
            spec=spec,
            place=place,
            mesh=mesh,
            placements=placements,
            stride=tensor.stride(),
            shard_group=groups.find_for_mesh(mesh),
        )
    shard_group = groups.find_for_dim(mesh, split[0])
    if shard_group.size == 1:
        return Plain(spec=spec, place=place)
    length = spec.shape[0]
    chunk = -(-length // shard_group.size) * (spec.numel // length) if length else 0
    return Rows(spec=spec, place=place, mesh=mesh, placements=placements, shard_group=shard_group, chunk=chunk)


class _ShardGroups:
    """Shard groups of a model. Each mesh is read once, since there are few meshes and many tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], ShardGroup] = {}

    def find_for_dim(self, mesh: DeviceMesh, dim: int) -> ShardGroup:
        key = id(mesh), dim
        if key not in self._known:
            self._known[key] = shard_group(mesh.get_group(dim), find_device(mesh.device_type))
        return self._known[key]

    def find_for_mesh(self, mesh: DeviceMesh) -> ShardGroup:
        """Makes the group of all ranks of a mesh of several dims.

        The backends of the first dim's process group are taken for those of all dims.
        """
        key = id(mesh), -1
        if key not in self._known:
            ranks = tuple(mesh.mesh.flatten().tolist())
            first = self.find_for_dim(mesh, 0)
            place = ranks.index(dist.get_rank())
            self._known[key] = replace(first, ranks=ranks, size=len(ranks), rank=place)
        return self._known[key]


def shard_group(group: dist.ProcessGroup, device: torch.device) -> ShardGroup:
    ranks = tuple(dist.get_process_group_ranks(group))
    return ShardGroup(group=group, ranks=ranks, size=len(ranks), rank=dist.get_rank(group), device=device)


def _make_unit_sources(place: int, unit: Fsdp1Unit) -> Iterator[FlatUnit | Plain]:
    if unit.is_recast:
        raise RuntimeError(
            f"{unit.flat_name} was cast after the first forward, and FSDP1 keeps it in two dtypes: cast it "
            "back to the old dtype"
        )
    local = unit.shard
    parts = [
        (
            TensorSpec(
                names=names,
                shape=part.shape,
                numel=part.shape.numel(),
                dtype=local.dtype,
                form=unit.forms.get(names[0], ""),
            ),
            part,
        )
        for names, part in zip(unit.names, unit.read_layout(), strict=True)
    ]
    if unit.is_sharded:
        yield FlatUnit(
            spans=tuple(Span(spec=spec, offset=part.offset, stride=part.stride) for spec, part in parts),
            place=place,
            shard_group=shard_group(unit.group, unit.compute_device),
            chunk=local.numel(),
        )
        return
    for spec, part in parts:
        yield Plain(spec=spec, place=place, part=part)
