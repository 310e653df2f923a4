"""The one reader of a sharded model: every tensor that it holds, once, with all of its names, and every FSDP1 unit.

Only attributes are read, in any state of the model: nothing is copied or communicated, no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


@dataclass(frozen=True, kw_only=True)
class Fsdp2Unit:
    """What ``fully_shard`` made of one module, or list of modules, that owns parameters.

    is_initialized: whether torch's lazy initialization, at the first forward, was done.
    """

    compute_device: torch.device
    policy: OffloadPolicy
    is_initialized: bool


# A model may have a hundred thousand: a frozen one would cost four times as much to make.
@dataclass(slots=True, eq=False)
class HeldTensor:
    """One parameter or buffer.

    names: as in the model before it was wrapped, in the order of its modules; several for a tied one.
    tensor: of a parameter that FSDP2 shows unsharded now, the sharded one; shown: what the modules have now.
    unit: the innermost FSDP2 module around it, None outside of any.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    shown: torch.Tensor
    unit: Fsdp2Unit | None


@dataclass(frozen=True)
class FlatSlice:
    """Where one parameter lies in a unit's flat parameter: as ``flat.as_strided(shape, stride, offset)``."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Fsdp1Unit:
    """An FSDP1 module that owns parameters, all of them in one flat parameter.

    prefix: of its names, empty or with a dot at its end. names: of each parameter, in the order of the flat
    parameter, all of its names, the tied ones after its own. shown: those that the modules have now as parameters of
    their own, by each name; without ``use_orig_params`` none, unless it is unsharded.
    """

    prefix: str
    names: tuple[tuple[str, ...], ...]
    shown: dict[str, torch.Tensor]
    _handle: Any

    @property
    def flat_name(self) -> str:
        """The name under which FSDP1 registers the flat parameter."""
        return f"{self.prefix}_flat_param"

    @property
    def flat_parameter(self) -> nn.Parameter:
        """As it is now: this rank's shard, or the whole while it is unsharded."""
        return private.flat_parameter(self._handle)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, 1-D, as long as every other rank's: its last ``padding`` elements are no parameter's."""
        return private.flat_shard(self._handle)

    @property
    def padding(self) -> int:
        return private.shard_padding(self._handle)

    @property
    def is_initialized(self) -> bool:
        """Whether torch's lazy initialization, at the first forward, was done."""
        return private.is_initialized(self._handle)

    @property
    def is_sharded(self) -> bool:
        """False in a shard group of one, where every rank's shard is the whole flat parameter."""
        return private.is_sharded(self._handle)

    @property
    def group(self) -> dist.ProcessGroup:
        """The shard group."""
        return private.shard_group(self._handle)

    @property
    def compute_device(self) -> torch.device:
        return private.compute_device(self._handle)

    @property
    def offloads(self) -> bool:
        """Whether it is under CPUOffload(offload_params=True)."""
        return private.offloads_parameters(self._handle)

    @property
    def keeps_originals(self) -> bool:
        """Whether it was made with use_orig_params, so that the optimizer has each parameter's part of the shard."""
        return private.keeps_originals(self._handle)

    @property
    def originals(self) -> list[nn.Parameter]:
        """With use_orig_params, what the optimizer has of each parameter, in the order of the names."""
        return private.original_parameters(self._handle)[0]

    @property
    def optimized(self) -> list[nn.Parameter]:
        """All by which an optimizer may know the unit's parameters."""
        originals, tied = private.original_parameters(self._handle)
        return [self.flat_parameter, *originals, *tied]

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the parameters, in the order of the names."""
        return private.original_shapes(self._handle)

    def layout(self) -> list[FlatSlice]:
        """Where the parameters lie in the flat parameter, in the order of the names."""
        views = private.flat_layout(self._handle)
        return [FlatSlice(view.shape, view.stride(), int(view.storage_offset())) for view in views]

    def move_to(self, device: torch.device, *, non_blocking: bool) -> None:
        """As a framework's manual offload does; a unit under CPUOffload stays where it is."""
        private.flat_param_to(self._handle, device, non_blocking=non_blocking)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldModel:
    """All that a model holds, in the order of its modules.

    fsdp1_units: what they hold is not among the parameters.
    parameters; buffers: those that a state dict has; transient_buffers: the others.
    """

    fsdp1_units: tuple[Fsdp1Unit, ...]
    fsdp2_units: tuple[Fsdp2Unit, ...]
    parameters: tuple[HeldTensor, ...]
    buffers: tuple[HeldTensor, ...]
    transient_buffers: tuple[HeldTensor, ...]

    def tensors(self) -> Iterator[HeldTensor]:
        """The parameters and buffers of a state dict, without those in FSDP1 units."""
        yield from self.parameters
        yield from self.buffers


def read(model: nn.Module) -> HeldModel:
    """Any rank may call it alone, before the first forward too."""
    modules = private.own_tensors(innermost(model))
    units = _fsdp1_units(modules)
    unit_of = {name: unit for unit in units for names in unit.names for name in names}
    states = {id(own.fsdp2_state): own.fsdp2_state for own in modules if own.fsdp2_state is not None}
    fsdp2_units = {key: _fsdp2_unit(state) for key, state in states.items()}
    sharded = {id(shown): held for state in states.values() for shown, held in private.unsharded_parameters(state)}
    parameters: dict[int, HeldTensor] = {}
    buffers: dict[int, HeldTensor] = {}
    transient_buffers: dict[int, HeldTensor] = {}
    for own in modules:
        prefix, unit = unwrapped(own.prefix), fsdp2_units.get(id(own.fsdp2_state))
        for key, shown in own.parameters.items():
            if shown is None:
                continue
            name = prefix + key
            tensor = sharded.get(id(shown), shown) if sharded else shown
            if (known := parameters.get(id(tensor))) is not None:
                known.names += (name,)
            elif not units or (name not in unit_of and not private.is_flat_parameter(tensor)):
                parameters[id(tensor)] = HeldTensor((name,), tensor, shown, unit)
            elif name in unit_of:
                unit_of[name].shown[name] = shown
        for key, buffer in own.buffers.items():
            if buffer is not None:
                found = transient_buffers if key in own.non_persistent else buffers
                held = found.setdefault(id(buffer), HeldTensor((), buffer, buffer, unit))
                held.names += (prefix + key,)
    return HeldModel(
        fsdp1_units=units,
        fsdp2_units=tuple(unit for unit in fsdp2_units.values() if unit is not None),
        parameters=tuple(parameters.values()),
        buffers=tuple(buffers.values()),
        transient_buffers=tuple(transient_buffers.values()),
    )


def innermost(model: nn.Module) -> nn.Module:
    """The model without what keeps it whole: DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (compiled := private.compiled_module(model)) is not None:
            model = compiled
        else:
            return model


def _fsdp2_unit(state: Any) -> Fsdp2Unit | None:
    if (found := private.fsdp2_unit(state)) is None:
        return None
    device, policy, is_initialized = found
    return Fsdp2Unit(compute_device=device, policy=policy, is_initialized=is_initialized)


def _fsdp1_units(modules: list[private.OwnTensors]) -> tuple[Fsdp1Unit, ...]:
    """Each once, under its module's first name."""
    units: dict[int, Fsdp1Unit] = {}
    for own in modules:
        handle = private.flat_handle(own.module)
        if handle is not None and id(handle) not in units:
            prefix = unwrapped(own.prefix)
            units[id(handle)] = Fsdp1Unit(prefix=prefix, names=_names(prefix, handle), shown={}, _handle=handle)
    return tuple(units.values())


def _names(prefix: str, handle: Any) -> tuple[tuple[str, ...], ...]:
    own, tied = private.flat_names(handle)
    names = {name: [unwrapped(prefix + name)] for name in own}
    for name, primary in tied:
        names[primary].append(unwrapped(prefix + name))
    return tuple(map(tuple, names.values()))
