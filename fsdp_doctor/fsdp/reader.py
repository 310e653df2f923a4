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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.errors import some
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


@dataclass(frozen=True)
class Fsdp2Unit:
    """What ``fully_shard`` made of one module, or list of modules, that owns parameters.

    is_initialized: whether torch's lazy initialization, at the first forward, was done. state: its FSDPState.
    """

    compute_device: torch.device
    policy: OffloadPolicy
    is_initialized: bool
    state: Any

    @property
    def offloads(self) -> bool:
        """Whether it is under CPUOffloadPolicy."""
        return isinstance(self.policy, CPUOffloadPolicy)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The policy that it was sharded with; without mixed precision all of its dtypes are None."""
        return private.fsdp2_precision(self.state)

    @property
    def replaced(self) -> list[tuple[nn.Module, str]]:
        """Modules and names under which they have another parameter than the one that it goes on gathering."""
        return private.replaced_parameters(self.state) if self.is_initialized else []

    @property
    def moved(self) -> list[tuple[nn.Parameter, bool]]:
        """Its parameters that have other memory than it goes on gathering from, and whether it can gather from that."""
        return [(parameter, private.can_follow(held)) for held, parameter in private.moved_parameters(self.state)]

    def follow_moved(self) -> None:
        """From now on it gathers from the memory that its parameters have."""
        private.follow_moved(self.state)

    @property
    def recast(self) -> list[nn.Parameter]:
        """Its parameters that were given another dtype after its first forward."""
        return private.recast_parameters(self.state) if self.is_initialized else []

    @property
    def trained_together(self) -> list[list[nn.Parameter]]:
        """Its parameters that train, those together whose gradients are reduced in one buffer."""
        return private.trained_together(self.state)

    @property
    def switches(self) -> private.GradientSwitches:
        """How it reduces its gradients."""
        return private.fsdp2_switches(self.state)

    def follow_materialized(self, parameter: nn.Parameter) -> None:
        """After one of its parameters was given memory: the unit gathers from there, padded and pinned as it needs."""
        private.follow_materialized(self.state, parameter)


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
    _module: nn.Module

    @property
    def module(self) -> nn.Module:
        """The FSDP1 module itself."""
        return self._module

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
        """This rank's shard as the next unshard in full precision, ``summon_full_params`` or a state dict, reads it.

        1-D, as long as every other rank's: its last ``padding`` elements are no parameter's. With ``use_orig_params`` a
        copy where an original parameter was given other memory.
        """
        return private.flat_shard(self._handle)

    @property
    def memories(self) -> list[torch.Tensor]:
        """Every memory that the shard has now: one, or two where the next unshard and the reshard after it differ."""
        return private.flat_memories(self._handle)

    @property
    def attributes_with_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """(every attribute of torch's that has this rank's shard, the original parameters' parts of it or None)."""
        return private.attributes_with_weights(self._handle)

    @property
    def is_recast(self) -> bool:
        """Whether it was cast after lazy initialization, which left its local shard in the dtype of before."""
        return len({memory.dtype for memory in self.memories}) > 1

    def unite_memories(self) -> None:
        """Makes the shard one memory again where it lies on one device, as torch's reshard does."""
        private.unite_memories(self._handle)

    @property
    def host_gradient(self) -> torch.Tensor | None:
        """Pinned, on the host, as large as the shard: where a unit under CPUOffload has its gradients."""
        return private.host_gradient(self._handle)

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
    def replica_group(self) -> dist.ProcessGroup | None:
        """Under HYBRID_SHARD, the ranks of all shard groups that hold the same shard."""
        return private.replica_group(self._module)

    @property
    def switches(self) -> private.GradientSwitches:
        """How it reduces its gradients."""
        return private.fsdp1_switches(self._module)

    @property
    def is_summoned(self) -> bool:
        """Whether it is inside of ``summon_full_params``, which writes over its shards at the end."""
        return private.is_summoned(self._handle)

    def reshard(self) -> None:
        """Lets go of what a forward without a backward left unsharded."""
        private.reshard_flat(self._handle)

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
    def views(self) -> list[torch.Tensor]:
        """Without use_orig_params, what the modules have now: views of what the flat parameter was, when last used."""
        return private.module_views(self._handle)

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

    fsdp1_units: their parameters are not among ``parameters``.
    parameters; buffers: those that a state dict has; transient_buffers: the others.
    stray_pieces: names of parameters that are pieces of an FSDP1 unit's flat parameter in a module of another unit, as
    a parameter is that was tied across units with ``use_orig_params``: torch gathers them for their own unit alone.
    """

    fsdp1_units: tuple[Fsdp1Unit, ...]
    fsdp2_units: tuple[Fsdp2Unit, ...]
    parameters: tuple[HeldTensor, ...]
    buffers: tuple[HeldTensor, ...]
    transient_buffers: tuple[HeldTensor, ...]
    stray_pieces: tuple[str, ...] = ()

    @property
    def stray_sentence(self) -> str:
        """Why the model can be neither extracted nor loaded, where it has stray pieces."""
        return (
            f"{some(self.stray_pieces)} is a piece of the flat parameter of another FSDP1 unit, to which it was tied "
            "before the model was wrapped: its module cannot use it. Put tied parameters into one FSDP1 unit"
        )

    def tensors(self) -> Iterator[HeldTensor]:
        """The parameters and buffers of a state dict, without those in FSDP1 units."""
        yield from self.parameters
        yield from self.buffers

    def unused(self, *, but_followed: bool = False) -> list[str]:
        """The names of what FSDP2 modules have as parameters, and do not compute with at their next forward.

        It was assigned after their first one, or has been given other memory since. but_followed: without those whose
        new memory the module would use after ``follow_moved``.
        """
        replaced = [(module, key) for unit in self.fsdp2_units for module, key in unit.replaced]
        shown = [getattr(module, key, None) for module, key in replaced]
        moved = [p for unit in self.fsdp2_units for p, can_follow in unit.moved if not (but_followed and can_follow)]
        wanted = set(map(id, [*shown, *moved]))
        found = [tensor.names[0] for tensor in self.parameters if wanted & {id(tensor.tensor), id(tensor.shown)}]
        return [
            *found,
            *(f"{type(m).__name__}.{key}" for (m, key), one in zip(replaced, shown, strict=True) if one is None),
        ]

    def all_names(self) -> Iterator[tuple[str, ...]]:
        """All names of each parameter and of each buffer of a state dict, those in FSDP1 units too."""
        yield from (tensor.names for tensor in self.tensors())
        yield from (names for unit in self.fsdp1_units for names in unit.names)


def read(model: nn.Module) -> HeldModel:
    """Any rank may call it alone, before the first forward too."""
    modules = _modules(model)
    fsdp1_units, fsdp2_units = _fsdp1_units(modules), _fsdp2_units(modules)
    parameters = _parameters(modules, fsdp1_units, fsdp2_units)
    stray = [p for p in parameters if private.is_flattened(p.tensor)] if fsdp1_units else []
    return HeldModel(
        fsdp1_units=fsdp1_units,
        fsdp2_units=tuple(unit for unit in fsdp2_units.values() if unit is not None),
        parameters=parameters,
        stray_pieces=tuple(name for parameter in stray for name in parameter.names),
        buffers=_buffers(modules, fsdp2_units, persistent=True),
        transient_buffers=_buffers(modules, fsdp2_units, persistent=False),
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


def _modules(model: nn.Module) -> list[private.OwnTensors]:
    """All of them, with unwrapped prefixes."""
    modules = private.own_tensors(innermost(model))
    for own in modules:
        own.prefix = unwrapped(own.prefix)
    return modules


def _fsdp1_units(modules: list[private.OwnTensors]) -> tuple[Fsdp1Unit, ...]:
    """Each once, under its module's first name."""
    prefixes: dict[int, list[str]] = {}
    for own in modules:
        prefixes.setdefault(id(own.module), []).append(own.prefix)
    units: dict[int, Fsdp1Unit] = {}
    for own in modules:
        handle = private.flat_handle(own.module)
        if handle is not None and id(handle) not in units:
            names = tuple(_names_of(places, own.prefix, prefixes) for places in private.flat_names(handle))
            units[id(handle)] = Fsdp1Unit(prefix=own.prefix, names=names, shown={}, _handle=handle, _module=own.module)
    return tuple(units.values())


def _names_of(places: list[private.PlaceInModule], unit: str, prefixes: dict[int, list[str]]) -> tuple[str, ...]:
    """Every name of a parameter: a module that the model has in several places has its parameter in each of them.

    unit: the prefix of the unit's names, for a module that is not in the model any more.
    """
    names = [
        name
        for place in places
        for name in (
            [f"{prefix}{place.name}" for prefix in prefixes.get(id(place.module), ())]
            or [unwrapped(unit + place.name_in_unit)]
        )
    ]
    return tuple(dict.fromkeys(names))


def _fsdp2_units(modules: list[private.OwnTensors]) -> dict[int, Fsdp2Unit | None]:
    """By the id of its state; None for a module that owns no parameter."""
    units: dict[int, Fsdp2Unit | None] = {}
    for own in modules:
        if own.fsdp2_state is not None and id(own.fsdp2_state) not in units:
            found = private.fsdp2_unit(own.fsdp2_state)
            units[id(own.fsdp2_state)] = Fsdp2Unit(*found, own.fsdp2_state) if found is not None else None
    return units


def _parameters(
    modules: list[private.OwnTensors],
    fsdp1_units: tuple[Fsdp1Unit, ...],
    fsdp2_units: dict[int, Fsdp2Unit | None],
) -> tuple[HeldTensor, ...]:
    """Those that are in no FSDP1 unit; the others that modules have now are added to their units."""
    unit_of = {name: unit for unit in fsdp1_units for names in unit.names for name in names}
    sharded = _sharded_parameters(modules)
    found: dict[int, HeldTensor] = {}
    for own in modules:
        prefix, unit = own.prefix, fsdp2_units.get(id(own.fsdp2_state))
        for key, shown in own.parameters.items():
            if shown is None:
                continue
            name = prefix + key
            tensor = sharded.get(id(shown), shown) if sharded else shown
            if (known := found.get(id(tensor))) is not None:
                known.names += (name,)
            elif unit_of and name in unit_of:
                unit_of[name].shown[name] = shown
            elif not unit_of or not private.is_flat_parameter(tensor):
                found[id(tensor)] = HeldTensor((name,), tensor, shown, unit)
    return tuple(found.values())


def _sharded_parameters(modules: list[private.OwnTensors]) -> dict[int, nn.Parameter]:
    """The sharded parameter by the id of the one that an FSDP2 module shows in its place."""
    states = {id(own.fsdp2_state): own.fsdp2_state for own in modules if own.fsdp2_state is not None}
    return {id(shown): held for state in states.values() for shown, held in private.unsharded_parameters(state)}


def _buffers(
    modules: list[private.OwnTensors], fsdp2_units: dict[int, Fsdp2Unit | None], *, persistent: bool
) -> tuple[HeldTensor, ...]:
    found: dict[int, HeldTensor] = {}
    for own in modules:
        for key, buffer in own.buffers.items():
            if buffer is not None and (key not in own.non_persistent) == persistent:
                unit = fsdp2_units.get(id(own.fsdp2_state))
                held = found.setdefault(id(buffer), HeldTensor((), buffer, buffer, unit))
                held.names += (own.prefix + key,)
    return tuple(found.values())
