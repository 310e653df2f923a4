"""The reference: what the weights are, found without any path under test.

Right after the training step, before any manual offload or staging (both can corrupt), each rank
synchronizes, copies its local shards to the host, and the shards are joined by hand from the
placements, over the control group. Nothing here calls ``state_dict``, ``full_tensor`` or an
unshard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.fsdp import fsdp1, fsdp2, private

_BATCH_BYTES = 256 << 20
# The optimizer under test is AdamW. A rank without a piece of a parameter cannot tell its state's names.
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")

Slices = tuple[slice, ...]


class LayoutError(RuntimeError):
    """Shards that do not fit together as their placements say: the reference cannot be trusted."""


@dataclass(kw_only=True)
class Reference:
    """All tensors are on the host, in the parameters' own dtypes.

    full: every name of the state dict, tied names sharing one tensor.
    parameters: the names of the parameters, each once, under its first name.
    local: this rank's shard of each FSDP2 entry.
    flat: this rank's shard of each FSDP1 unit without its padding, under the unit's prefix.
    optimizer: ``<parameter>.<state>`` for every state of every parameter, unsharded.
    """

    full: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    local: dict[str, torch.Tensor] = field(default_factory=dict)
    flat: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    buffer_names: frozenset[str] = frozenset()

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers alone."""
        return {name: self.full[name] for name in self.buffer_names}


@dataclass(frozen=True)
class _Part:
    """This rank's part of something, and what to do with all ranks' parts, flat and in rank order."""

    local: torch.Tensor
    join: Callable[[list[torch.Tensor]], None]


def take(model: nn.Module, optimizer: torch.optim.Optimizer | None, runtime: Runtime) -> Reference:
    """Joins the shards of the model, and of the optimizer's state if one is given.

    Every rank must call it. Raises LayoutError where the shards do not fit together.
    """
    runtime.synchronize()
    reference = Reference(buffer_names=frozenset(name for name, _ in fsdp1.buffers(model)))
    parts = list(_unit_parts(reference, model, optimizer))
    parts += _entry_parts(reference, model, optimizer)
    for part, pieces in zip(parts, _gather([part.local for part in parts], runtime), strict=True):
        part.join(pieces)
    _add_tied_names(reference, model)
    return reference


def shard_slices(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int) -> Slices:
    """Which part of a tensor of ``shape`` a rank holds, with torch.chunk's division.

    Mesh dimensions are applied from the first to the last; each cuts what the ones before left.
    """
    where = (mesh.mesh == rank).nonzero()[0].tolist()
    begin, end = [0] * len(shape), list(shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise LayoutError(f"the doctor cannot join shards placed as {placement}")
        dim = placement.dim
        length = end[dim] - begin[dim]
        chunk = -(-length // mesh.size(mesh_dim))
        first = min(begin[dim] + chunk * where[mesh_dim], end[dim])
        begin[dim], end[dim] = first, min(first + chunk, end[dim])
    return tuple(slice(b, e) for b, e in zip(begin, end, strict=True))


def _entry_parts(reference: Reference, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[_Part]:
    """FSDP2's parameters, plain parameters and buffers, each tensor once."""
    # With use_orig_params the modules show the units' parameters too, tied ones under each of their names.
    tied = {name for prefix, handle in fsdp1.units(model) for name, _ in fsdp1.unit_names(prefix, handle)[1]}
    in_units = set(reference.parameters) | tied
    seen: set[int] = set()
    for name, tensor in fsdp2.entries(model):
        if id(tensor) in seen or name in in_units or isinstance(tensor, FlatParameter):
            continue
        seen.add(id(tensor))
        local = _to_host(fsdp2.local_tensor(tensor))
        reference.local[name] = local
        yield _Part(local, _joiner(reference.full, name, tensor))
        if name in reference.buffer_names:
            continue
        reference.parameters.append(name)
        for key, state in (optimizer.state.get(tensor, {}) if optimizer else {}).items():
            yield _Part(_to_host(fsdp2.local_tensor(state)), _joiner(reference.optimizer, f"{name}.{key}", state))


def _joiner(into: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], None]:
    """Puts the full tensor of a DTensor under ``name``, joined by its placements."""

    def join(pieces: list[torch.Tensor]) -> None:
        if not isinstance(tensor, DTensor):
            into[name] = pieces[dist.get_rank()].view(tensor.shape)
            return
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        replicas: dict[str, torch.Tensor] = {}
        for rank, piece in enumerate(pieces):
            slices = shard_slices(tensor.shape, tensor.device_mesh, tensor.placements, rank)
            target = full[slices]
            if target.numel() != piece.numel():
                raise LayoutError(
                    f"rank {rank} holds {piece.numel()} elements of {name}, {tuple(tensor.shape)}, "
                    f"where {tensor.placements} gives it {target.numel()}"
                )
            if not torch.equal(replicas.setdefault(str(slices), piece).view(torch.uint8), piece.view(torch.uint8)):
                raise LayoutError(f"the replicas of {name} differ, the one of rank {rank} from one before it")
            target.copy_(piece.view(target.shape))
        into[name] = full

    return join


def _unit_parts(reference: Reference, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[_Part]:
    """FSDP1's units: flat shards, joined in rank order and cut along the unit's metadata."""
    for prefix, handle in fsdp1.units(model):
        names, _ = fsdp1.unit_names(prefix, handle)
        reference.parameters += names
        local = _to_host(private.flat_shard(handle))
        reference.flat[prefix] = local[: local.numel() - private.shard_padding(handle)]
        yield _Part(local, _cutter(reference.full, names, "", handle))
        if optimizer is None:
            continue
        if not handle.flat_param.requires_grad:
            continue
        flat_state = optimizer.state.get(handle.flat_param)
        if flat_state is None:
            yield from _original_state_parts(reference, names, handle, optimizer)
            continue
        for key, state in flat_state.items():
            yield _Part(_to_host(state), _cutter(reference.optimizer, names, f".{key}", handle))


def _cutter(
    into: dict[str, torch.Tensor], names: list[str], suffix: str, handle: Any
) -> Callable[[list[torch.Tensor]], None]:
    """Cuts the joined flat parameter, or a flat state of it, into the parameters' own."""

    def cut(pieces: list[torch.Tensor]) -> None:
        held = _of_shard_group(pieces, handle)
        scalar = held[0].numel() == 1 and suffix == ".step"
        views = [held[0].view(())] * len(names) if scalar else private.unflatten(handle, torch.cat(held))
        for name, view in zip(names, views, strict=True):
            into[name + suffix] = view.clone()

    return cut


def _original_state_parts(
    reference: Reference, names: list[str], handle: Any, optimizer: torch.optim.Optimizer
) -> Iterator[_Part]:
    """With use_orig_params each rank's state holds the piece of the parameter that is in its shard, or nothing."""
    for name, shape, parameter in zip(
        names, private.original_shapes(handle), private.original_parameters(handle), strict=True
    ):
        own = dict(optimizer.state.get(parameter, {}))
        for key in _ADAM_STATE:
            local = _to_host(own[key]) if key in own else torch.empty(0)
            yield _Part(local, _stitcher(reference.optimizer, f"{name}.{key}", shape, handle))


def _stitcher(
    into: dict[str, torch.Tensor], name: str, shape: torch.Size, handle: Any
) -> Callable[[list[torch.Tensor]], None]:
    def stitch(pieces: list[torch.Tensor]) -> None:
        held = [piece for piece in _of_shard_group(pieces, handle) if piece.numel()]
        if not held:
            # A frozen parameter has no state.
            return
        into[name] = held[0].view(()) if name.endswith(".step") else torch.cat(held).view(shape)

    return stitch


def _of_shard_group(pieces: list[torch.Tensor], handle: Any) -> list[torch.Tensor]:
    """The pieces of the ranks over which this rank's unit is sharded; its own where it is not."""
    if not private.is_sharded(handle):
        return [pieces[dist.get_rank()]]
    return [pieces[rank] for rank in dist.get_process_group_ranks(private.shard_group(handle))]


def _add_tied_names(reference: Reference, model: nn.Module) -> None:
    """Tied names share the tensor of the name that was joined."""
    for prefix, handle in fsdp1.units(model):
        for name, primary in fsdp1.unit_names(prefix, handle)[1]:
            reference.full[name] = reference.full[primary]
    first_name: dict[int, str] = {}
    for name, tensor in fsdp2.entries(model):
        if isinstance(tensor, FlatParameter):
            continue
        primary = first_name.setdefault(id(tensor), name)
        if name not in reference.full:
            reference.full[name] = reference.full[primary]
            reference.local[name] = reference.local[primary]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the host that nothing else writes to."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _gather(tensors: list[torch.Tensor], runtime: Runtime) -> Iterator[list[torch.Tensor]]:
    """For each tensor every rank's counterpart, flat and in rank order; lengths may differ."""
    mine = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    lengths = [torch.empty_like(mine) for _ in range(runtime.world_size)]
    dist.all_gather(lengths, mine, group=runtime.control)
    longest = torch.stack(lengths).amax(dim=0).tolist()
    for begin, end in batches([n * t.element_size() for n, t in zip(longest, tensors, strict=True)]):
        yield from _gather_batch(tensors[begin:end], [own[begin:end].tolist() for own in lengths], runtime)


def batches(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of tensors, by their sizes in bytes, that are moved in one go."""
    begin, held = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and held + size > _BATCH_BYTES:
            yield begin, index
            begin, held = index, 0
        held += size
    if begin < len(sizes):
        yield begin, len(sizes)


def _gather_batch(
    tensors: list[torch.Tensor], lengths: list[list[int]], runtime: Runtime
) -> Iterator[list[torch.Tensor]]:
    """One collective over the bytes of all the tensors, each rank's padded to the longest rank's."""
    sizes = [[n * t.element_size() for n, t in zip(own, tensors, strict=True)] for own in lengths]
    padded = torch.zeros(max(sum(own) for own in sizes), dtype=torch.uint8)
    torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors], out=padded[: sum(sizes[runtime.rank])])
    everyone = [torch.empty_like(padded) for _ in range(runtime.world_size)]
    dist.all_gather(everyone, padded, group=runtime.control)
    split = [data[: sum(own)].split(own) for data, own in zip(everyone, sizes, strict=True)]
    for index, tensor in enumerate(tensors):
        # A clone, because a slice of bytes need not begin where the dtype wants it to.
        yield [pieces[index].clone().view(tensor.dtype) for pieces in split]
