"""What an optimizer trains of a sharded model: whole parameters' shards, parts of them, or flat parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.reader import Fsdp1Unit, HeldModel
from fsdp_doctor.fsdp.shards import Slices
from fsdp_doctor.load.layouts import InFlatParameter, Layout, Layouts, ShardsOfUnit
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.targets import LoadedModel, home


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretch:
    """One parameter of the model in one parameter of the optimizer.

    shape: of the full one. place: where this rank's part of it lies in the optimizer's flat one; None for all of it.
    """

    names: tuple[str, ...]
    shape: torch.Size
    layout: Layout
    place: Slices | None = None

    def part_of(self, state: torch.Tensor) -> torch.Tensor:
        """Of a tensor like the optimizer's parameter, what belongs to this one: a view."""
        local = private.local_tensor(state)
        if self.place is not None:
            return local[self.place]
        if not isinstance(self.layout, InFlatParameter):
            return local
        return self.layout.arranged(local) if local.shape == self.shape else local.view(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Optimized:
    """One parameter of the optimizer. group: the index of its param group. home: where it lies in a training step."""

    parameter: torch.Tensor
    group: int
    home: torch.device
    stretches: tuple[Stretch, ...]

    @property
    def names(self) -> list[str]:
        """The first of each stretch."""
        return [stretch.names[0] for stretch in self.stretches]

    @property
    def has_elements(self) -> bool:
        """Of what is empty on a rank FSDP1's optimizers have no state there."""
        return isinstance(self.parameter, DTensor) or self.parameter.numel() > 0


def optimized(held: HeldModel, place: LoadedModel, optimizer: torch.optim.Optimizer) -> list[Optimized]:
    """Raises LoadError for a parameter that is none of the model's."""
    known = {id(parameter): (home, stretches) for parameter, home, stretches in _known(held, place)}
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise LoadError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have: "
                    "make it after the model was sharded, or loaded with assign=True"
                )
            at, stretches = known[id(parameter)]
            found.append(Optimized(parameter=parameter, group=index, home=at, stretches=stretches))
    return found


def _known(held: HeldModel, place: LoadedModel) -> Iterator[tuple[torch.Tensor, torch.device, tuple[Stretch, ...]]]:
    layouts = Layouts(place.ranks, place.meshes)
    for unit in held.fsdp1_units:
        at = torch.device("cpu") if unit.offloads else unit.compute_device
        yield from ((parameter, at, stretches) for parameter, stretches in _of_unit(unit, place))
    for parameter in held.parameters:
        tensor = parameter.tensor
        if private.local_tensor(tensor).is_meta:
            raise LoadError(f"{parameter.names[0]} is on the meta device: load the model first")
        stretch = Stretch(names=parameter.names, shape=tensor.shape, layout=layouts.of(tensor))
        yield tensor, home(parameter, place.device), (stretch,)


def _of_unit(unit: Fsdp1Unit, place: LoadedModel) -> Iterator[tuple[nn.Parameter, tuple[Stretch, ...]]]:
    shards = ShardsOfUnit(unit, place.first)
    parts = [
        (names, slot.shape, InFlatParameter(shards, slot.offset, slot.stride))
        for names, slot in zip(unit.names, unit.layout(), strict=True)
    ]
    flat = tuple(Stretch(names=n, shape=s, layout=layout, place=layout.place(s)) for n, s, layout in parts)
    yield unit.flat_parameter, flat
    for original, (names, shape, layout) in zip(unit.originals, parts, strict=False):
        yield original, (Stretch(names=names, shape=shape, layout=layout),)
