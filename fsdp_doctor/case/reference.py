"""Reference: the model's weights, read without any method under test.

Right after the training step, before any manual offload or staging (both can corrupt weights), each rank synchronizes
and copies its local shards to the host. The shards are joined by hand, according to the placements, over the control
group. Nothing here calls ``state_dict``, ``full_tensor`` or an unshard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.case import codes
from fsdp_doctor.case.optimizers import read_values
from fsdp_doctor.case.runtime import Runtime
from fsdp_doctor.case.sharding import (
    compute_stated_parts,
    compute_tensor_part,
    find_stated_part,
    list_ranks,
    read_contents,
)
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.reader import Fsdp1Unit, ModelContents
from fsdp_doctor.weights.fsdp.shards import LayoutError, LocalPart

_BATCH_BYTES = 256 << 20
# In the same order on every rank.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass(kw_only=True)
class Reference:
    """Values that a method must deliver. Tensors are on the host, in the parameters' own dtypes.

    full: the tensors of the state dict, under all names. Tied names share one tensor. For 4-bit codes, the weights that
        the codes stand for.
    codes: the joined 4-bit codes of those weights, by name.
    parameters: the first name of each parameter.
    buffer_names: the names of the persistent buffers.
    local: this rank's shard of each tensor that is in no FSDP1 unit, under the tensor's first name.
    flat: this rank's shard of each FSDP1 unit without its padding, under the flat parameter's name.
    optimizer: every state of every parameter, unsharded, under ``<parameter>.<state>``.
    """

    full: dict[str, torch.Tensor] = field(default_factory=dict)
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    buffer_names: frozenset[str] = frozenset()
    local: dict[str, torch.Tensor] = field(default_factory=dict)
    flat: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)

    def list_buffers(self) -> dict[str, torch.Tensor]:
        """Lists only the persistent buffers."""
        return {name: self.full[name] for name in self.buffer_names}


@dataclass(frozen=True)
class _Part:
    """Part of a tensor on this rank, and the function that joins the parts of all ranks, flat and in rank order."""

    local: torch.Tensor
    join: Callable[[list[torch.Tensor]], None]


def take(model: nn.Module, optimizer: torch.optim.Optimizer | None, runtime: Runtime) -> Reference:
    """Joins the shards of the model, and of the optimizer's state if an optimizer is given.

    Every rank must call it. Raises LayoutError if the shards do not fit together.
    """
    runtime.synchronize()
    contents = read_contents(model)
    reference = Reference(buffer_names=frozenset(name for buffer in contents.buffers for name in buffer.names))
    stated_keys = _gather_stated_keys(contents, optimizer, runtime)
    of_units = _list_unit_parts(reference, contents, optimizer)
    parts = [*of_units, *_list_tensor_parts(reference, contents, optimizer, stated_keys)]
    for part, pieces in zip(parts, _gather([part.local for part in parts], runtime), strict=True):
        part.join(pieces)
    weights = codes.decode(model, reference.full)
    reference.codes = {name: reference.full[name] for name in weights}
    reference.full |= weights
    # The other names of tied tensors.
    for names in (
        *(names for unit in contents.fsdp1_units for names in unit.names),
        *(t.names for t in contents.list_tensors()),
    ):
        reference.full |= dict.fromkeys(names[1:], reference.full[names[0]])
    return reference


def _list_tensor_parts(
    reference: Reference,
    contents: ModelContents,
    optimizer: torch.optim.Optimizer | None,
    stated_keys: Mapping[str, Sequence[str]],
) -> Iterator[_Part]:
    """Yields the parts of tensors that are in no FSDP1 unit: FSDP2's parameters, plain parameters and buffers.

    Also yields the parts of these parameters' optimizer state.

    stated_keys: the result of :func:`_gather_stated_keys`.
    """
    for tensor in contents.list_tensors():
        name = tensor.names[0]
        local = reference.local[name] = _copy_to_host(private.read_local_tensor(tensor.tensor))
        yield _Part(local, _make_joiner(reference.full, name, tensor.placed))
    for parameter in contents.parameters:
        name = parameter.names[0]
        reference.parameters.append(name)
        states = dict(_list_states(optimizer, parameter.tensor))
        if name in stated_keys:
            for key in stated_keys[name]:
                local = _copy_to_host(read_values(states[key])) if key in states else torch.empty(0)
                yield _Part(local, _make_state_joiner(reference.optimizer, f"{name}.{key}", parameter.tensor))
            continue
        for key, state in states.items():
            local = _copy_to_host(read_values(state))
            placed = parameter.placed if state.shape == parameter.tensor.shape else state
            yield _Part(local, _make_joiner(reference.optimizer, f"{name}.{key}", placed, state.dtype))


def _gather_stated_keys(
    contents: ModelContents, optimizer: torch.optim.Optimizer | None, runtime: Runtime
) -> dict[str, list[str]]:
    """Gathers the names of each parameter's optimizer states that any rank has, by the parameter's first name.

    Only parameters are listed whose local tensor has ``__create_chunk_list__``. A rank that holds no part of such a
    parameter may lack the parameter's states.
    """
    stated = [parameter for parameter in contents.parameters if find_stated_part(parameter.tensor) is not None]
    if not stated:
        return {}
    mine = [[key for key, _ in _list_states(optimizer, parameter.tensor)] for parameter in stated]
    everyone: list[list[list[str]]] = [[] for _ in range(runtime.world_size)]
    dist.all_gather_object(everyone, mine, group=runtime.control)
    of_parameters = zip(*everyone, strict=True)
    return {
        parameter.names[0]: list(dict.fromkeys(itertools.chain(*sorted(keys, key=len, reverse=True))))
        for parameter, keys in zip(stated, of_parameters, strict=True)
    }


def _make_state_joiner(
    into: dict[str, torch.Tensor], name: str, parameter: torch.Tensor
) -> Callable[[list[torch.Tensor]], None]:
    """Makes a function that joins an optimizer state of a parameter of :func:`_gather_stated_keys`."""

    def join(pieces: list[torch.Tensor]) -> None:
        held = next(piece for piece in pieces if len(piece))
        if name.endswith(".step"):
            into[name] = held.view(())
        else:
            _make_joiner(into, name, parameter, held.dtype)(pieces)

    return join


def _list_states(optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Lists a parameter's states in the order of torch's optimizers, since a load may leave different orders on the
    ranks.
    """
    states = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    return sorted(states.items(), key=lambda state: (state[0] != "step", state[0]))


def _make_joiner(
    into: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> Callable[[list[torch.Tensor]], None]:
    def join(pieces: list[torch.Tensor]) -> None:
        if not isinstance(tensor, DTensor):
            into[name] = pieces[dist.get_rank()].view(tensor.shape)
            return
        full = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
        replicas: dict[LocalPart, torch.Tensor] = {}
        owners = list_ranks(tensor.device_mesh)
        if find_stated_part(tensor) is not None:
            held = [pieces[rank] for rank in tensor.device_mesh.mesh.flatten().tolist()]
            for part, piece in zip(compute_stated_parts(tensor, [len(each) for each in held]), held, strict=True):
                part.write(full, piece)
            into[name] = full
            return
        for rank, piece in enumerate(pieces):
            if rank not in owners:  # its own mesh, over which it has the same tensor
                continue
            part = compute_tensor_part(rank, tensor)
            if part.shape.numel() != piece.numel():
                raise LayoutError(
                    f"rank {rank} holds {piece.numel()} elements of {name}, {tuple(tensor.shape)}, "
                    f"where {tensor.placements} gives it {part.shape.numel()}"
                )
            if not torch.equal(replicas.setdefault(part, piece).view(torch.uint8), piece.view(torch.uint8)):
                raise LayoutError(f"the replicas of {name} differ, the one of rank {rank} from one before it")
            part.write(full, piece)
        into[name] = full

    return join


def _list_unit_parts(
    reference: Reference, contents: ModelContents, optimizer: torch.optim.Optimizer | None
) -> Iterator[_Part]:
    """Yields the parts of FSDP1's units: flat shards, which are joined in rank order and cut by the unit's metadata."""
    for unit in contents.fsdp1_units:
        names = [names[0] for names in unit.names]
        reference.parameters += names
        # What a state dict and summon_full_params take: FlatParameter.data, while it is this rank's shard.
        local = _copy_to_host(unit.attributes_with_weights[0][0])
        reference.flat[unit.flat_name] = local[: local.numel() - unit.padding]
        yield _Part(local, _make_cutter(reference.full, names, "", unit))
        if optimizer is None or not unit.flat_parameter.requires_grad:
            continue
        if unit.keeps_originals:
            yield from _list_original_state_parts(reference, names, unit, optimizer)
            continue
        for key, state in _list_states(optimizer, unit.flat_parameter):
            yield _Part(_copy_to_host(read_values(state)), _make_cutter(reference.optimizer, names, f".{key}", unit))


def _make_cutter(
    into: dict[str, torch.Tensor], names: list[str], suffix: str, unit: Fsdp1Unit
) -> Callable[[list[torch.Tensor]], None]:
    """Makes a function that cuts the joined flat parameter, or a flat state of it, into its parameters."""

    def cut(pieces: list[torch.Tensor]) -> None:
        shards = _select_shard_group(pieces, unit)
        if shards[0].numel() == 1 and suffix == ".step":
            views = [shards[0].view(())] * len(names)
        else:
            flat = torch.cat(shards)
            views = [flat.as_strided(place.shape, place.stride, place.offset) for place in unit.read_layout()]
        for name, view in zip(names, views, strict=True):
            into[name + suffix] = view.clone()

    return cut


def _list_original_state_parts(
    reference: Reference, names: list[str], unit: Fsdp1Unit, optimizer: torch.optim.Optimizer
) -> Iterator[_Part]:
    """Lists the parts of the optimizer's state under use_orig_params.

    The state on each rank holds the piece of the parameter that is in the rank's shard, or nothing.
    """
    # A rank without a piece of a parameter has no state of it, and has the same keys of others.
    keys = sorted({key for state in optimizer.state.values() for key in state}, key=lambda key: (key != "step", key))
    for name, shape, parameter in zip(names, unit.shapes, unit.originals, strict=True):
        states = dict(optimizer.state.get(parameter, {}))
        for key in keys:
            local = _copy_to_host(read_values(states[key])) if key in states else torch.empty(0)
            yield _Part(local, _make_stitcher(reference.optimizer, f"{name}.{key}", shape, unit))


def _make_stitcher(
    into: dict[str, torch.Tensor], name: str, shape: torch.Size, unit: Fsdp1Unit
) -> Callable[[list[torch.Tensor]], None]:
    def stitch(pieces: list[torch.Tensor]) -> None:
        held = [piece for piece in _select_shard_group(pieces, unit) if piece.numel()]
        if not held:
            # A frozen parameter has no state.
            return
        into[name] = held[0].view(()) if name.endswith(".step") else torch.cat(held).view(shape)

    return stitch


def _select_shard_group(pieces: list[torch.Tensor], unit: Fsdp1Unit) -> list[torch.Tensor]:
    """Selects the pieces of the ranks over which the unit is sharded; for an unsharded unit, only this rank's piece."""
    if not unit.is_sharded:
        return [pieces[dist.get_rank()]]
    return [pieces[rank] for rank in dist.get_process_group_ranks(unit.group)]


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a contiguous copy on the host, to which nothing else writes."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _gather(tensors: list[torch.Tensor], runtime: Runtime) -> Iterator[list[torch.Tensor]]:
    """Yields every rank's counterpart of each tensor, flat and in rank order; lengths may differ.

    The dtype comes from the ranks that hold elements; other ranks may not know it.
    """
    mine = torch.tensor([(tensor.nbytes, _DTYPES.index(tensor.dtype)) for tensor in tensors]).view(-1, 2)
    everyone = [torch.empty_like(mine) for _ in range(runtime.world_size)]
    dist.all_gather(everyone, mine, group=runtime.control)
    sizes = torch.stack([of_rank[:, 0] for of_rank in everyone])
    holders = sizes.argmax(dim=0).tolist()
    dtypes = [_DTYPES[int(everyone[holder][index, 1])] for index, holder in enumerate(holders)]
    for begin, end in divide_into_batches(sizes.amax(dim=0).tolist()):
        pieces = _gather_batch(tensors[begin:end], sizes[:, begin:end].tolist(), runtime)
        for dtype, parts in zip(dtypes[begin:end], pieces, strict=True):
            yield [part.view(dtype) for part in parts]


def divide_into_batches(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Divides tensors into ranges that are each moved at once. Yields (first index, index after the last).

    sizes: the tensors' sizes in bytes.
    """
    begin, total = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > _BATCH_BYTES:
            yield begin, index
            begin, total = index, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)


def _gather_batch(
    tensors: list[torch.Tensor], sizes: list[list[int]], runtime: Runtime
) -> Iterator[list[torch.Tensor]]:
    """Gathers the bytes of all the tensors in one collective. Each rank's bytes are padded to the length of the
    longest.
    """
    padded = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
    torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors], out=padded[: sum(sizes[runtime.rank])])
    everyone = [torch.empty_like(padded) for _ in range(runtime.world_size)]
    dist.all_gather(everyone, padded, group=runtime.control)
    split = [data[: sum(of_rank)].split(of_rank) for data, of_rank in zip(everyone, sizes, strict=True)]
    for index in range(len(tensors)):
        # A clone, because a slice of bytes need not begin where the dtype wants it to.
        yield [pieces[index].clone() for pieces in split]
