"""Parts of parameters, buffers and moments that this rank holds, and the values that each part should have.

The parts are computed only from placements and flat layouts, on each rank separately and without a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.case.optimizers import read_values
from fsdp_doctor.case.sharding import compute_tensor_part, find_stated_part, read_contents
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.reader import FlatSlice, Fsdp1Unit, ModelContents, ModelTensor

Full = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalPiece:
    """Part of one tensor on this rank.

    names: all names of a tied parameter; for a moment only ``<parameter>.<state>``.
    shown: the tensor that the model or the optimizer refers to: sharded, but for FSDP1 possibly unsharded.
    device: the device that the tensor reports, or reported before it was unsharded.
    held: this rank's part in its present memory, which can be written.
    copies: other tensors from which FSDP1 may take this part, in a forward, a state dict or a reshard.
    expected: the right values on the host, flat or of the part's shape; None if no unsharded tensor has any of these
        names.
    """

    names: tuple[str, ...]
    shown: torch.Tensor
    device: torch.device
    held: torch.Tensor
    expected: torch.Tensor | None
    copies: tuple[torch.Tensor, ...] = ()

    @property
    def everywhere(self) -> tuple[torch.Tensor, ...]:
        """All tensors that must have the expected values."""
        return (self.held, *self.copies)

    @property
    def name(self) -> str:
        return self.names[0]


def list_model_pieces(model: nn.Module, full: Full) -> list[LocalPiece]:
    """Lists this rank's part of every parameter and every buffer of a state dict, each once."""
    contents = read_contents(model)
    return [
        *_list_unit_pieces(contents, full),
        *(_make_tensor_piece(tensor, full) for tensor in contents.list_tensors()),
    ]


def list_optimizer_pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: Full
) -> tuple[list[LocalPiece], list[str]]:
    """Returns (this rank's parts of the optimizer's moments, the names of the moments that the optimizer lacks).

    states: every state of every parameter, unsharded, as ``<parameter>.<state>``.
    """
    contents = read_contents(model)
    tensors = {name: tensor for tensor in contents.parameters for name in tensor.names}
    places = {name: place for unit in contents.fsdp1_units for place in _list_places(unit) for name in place.names}
    pieces: list[LocalPiece] = []
    missing: list[str] = []
    for name, full in states.items():
        parameter, _, key = name.rpartition(".")
        if parameter in tensors:
            tensor = tensors[parameter]
            state = optimizer.state.get(tensor.tensor, {}).get(key)
            is_alike = state is None or state.shape == tensor.tensor.shape
            piece = _make_piece(name, state, full, tensor.placed if is_alike else state)
            if piece is None and may_lack_state(tensor.tensor):
                continue
        else:
            piece = _read_state_in_unit(places[parameter], optimizer, name, full)
        if piece is None:
            missing.append(name)
        elif piece.held.numel():
            pieces.append(piece)
    return pieces, missing


def may_lack_state(parameter: torch.Tensor) -> bool:
    """Returns whether the optimizer may lack a parameter's state on this rank: the framework gives this rank none of
    the parameter's elements.
    """
    return private.read_stated_chunk(parameter) is not None and not private.read_local_tensor(parameter).numel()


def write(pieces: list[LocalPiece]) -> None:
    """Writes the expected values of each piece into the model's or the optimizer's tensors."""
    with torch.no_grad():
        for piece in pieces:
            if piece.expected is not None:
                for held in piece.everywhere:
                    held.copy_(piece.expected.view(held.shape))


def cut_part(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the unsharded tensor ``full``, cut as ``tensor`` is.

    A DTensor is cut as its framework states in ``__create_chunk_list__``, otherwise by its placements. Any other tensor
    is not cut.
    """
    if not isinstance(tensor, DTensor):
        return full
    return (find_stated_part(tensor) or compute_tensor_part(dist.get_rank(), tensor)).read(full)


def _make_tensor_piece(tensor: ModelTensor, full: Full) -> LocalPiece:
    whole = next((full[name] for name in tensor.names if name in full), None)
    return LocalPiece(
        names=tensor.names,
        shown=tensor.tensor,
        device=tensor.tensor.device,
        held=private.read_local_tensor(tensor.tensor).detach(),
        expected=cut_part(tensor.placed, whole) if whole is not None else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Place of one parameter in an FSDP1 unit.

    index: the parameter's index in the unit.
    mine: the elements of the flat parameter that belong to the parameter and are in this rank's shard.
    begin: the position of the first of these elements in the shard.
    """

    unit: Fsdp1Unit
    index: int
    names: tuple[str, ...]
    slice: FlatSlice
    mine: range
    begin: int

    def cut_part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's elements of the unsharded parameter, in the order of the flat parameter."""
        flat = torch.empty(self.slice.shape.numel(), dtype=full.dtype)
        flat.as_strided(self.slice.shape, self.slice.stride).copy_(full)
        return flat[self.mine.start - self.slice.offset : self.mine.stop - self.slice.offset]


def _list_places(unit: Fsdp1Unit) -> Iterator[_Place]:
    length = unit.attributes_with_weights[0][0].numel()
    shard_begin = dist.get_rank(unit.group) * length if unit.is_sharded else 0
    for index, (names, place) in enumerate(zip(unit.names, unit.read_layout(), strict=True)):
        first = max(place.offset, shard_begin)
        mine = range(first, max(first, min(place.offset + place.shape.numel(), shard_begin + length)))
        yield _Place(unit=unit, index=index, names=names, slice=place, mine=mine, begin=first - shard_begin)


def _list_unit_pieces(contents: ModelContents, full: Full) -> Iterator[LocalPiece]:
    for unit in contents.fsdp1_units:
        shards, originals = unit.attributes_with_weights
        for place in _list_places(unit):
            whole = next((full[name] for name in place.names if name in full), None)
            # The last one is the local shard, to which every reshard returns.
            *copies, part = (shard[place.begin : place.begin + len(place.mine)] for shard in shards)
            if originals and (original := originals[place.index]) is not None:
                copies.append(original)
            yield LocalPiece(
                names=place.names,
                shown=unit.flat_parameter,
                device=(unit.flat_parameter if len(shards) > 1 else part).device,
                held=part,
                copies=tuple(copies),
                expected=place.cut_part(whole) if whole is not None else None,
            )


def _read_state_in_unit(
    place: _Place, optimizer: torch.optim.Optimizer, name: str, full: torch.Tensor
) -> LocalPiece | None:
    """Returns this rank's part of a parameter's state, from the state of the flat parameter or of the original
    parameter; None if the optimizer has no such state.
    """
    unit = place.unit
    if not len(place.mine):
        return LocalPiece(names=(name,), shown=full, device=full.device, held=full.new_empty(0), expected=None)
    parameter = unit.originals[place.index] if unit.keeps_originals else unit.flat_parameter
    state = optimizer.state.get(parameter, {}).get(name.rpartition(".")[2])
    if state is None or state.ndim == 0 or full.ndim == 0:
        return _make_piece(name, state, full, full)
    begin = 0 if unit.keeps_originals else place.begin
    held = read_values(state).reshape(-1)[begin : begin + len(place.mine)]
    expected = place.cut_part(full)
    return LocalPiece(names=(name,), shown=state, device=state.device, held=held, expected=expected)


def _make_piece(name: str, state: torch.Tensor | None, full: torch.Tensor, placed: torch.Tensor) -> LocalPiece | None:
    """Returns this rank's part of a state tensor; None if there is no state.

    placed: a tensor with the placements of the state.
    """
    if state is None:
        return None
    held = read_values(state)
    expected = cut_part(placed, full) if state.ndim else full
    return LocalPiece(names=(name,), shown=state, device=state.device, held=held, expected=expected)
