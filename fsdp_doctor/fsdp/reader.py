"""The one reader of a sharded model: every tensor that it holds, once, with all of its names, and every FSDP unit.

Only attributes are read, in any state of the model: nothing is copied or communicated, no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.errors import join_some
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrap_name
from fsdp_doctor.fsdp.private import fsdp1
from fsdp_doctor.fsdp.private.fsdp1 import FlatSlice as FlatSlice, Fsdp1Unit as Fsdp1Unit
from fsdp_doctor.fsdp.private.fsdp2 import Fsdp2Unit as Fsdp2Unit, list_unsharded_parameters


# A model may have a hundred thousand: a frozen one would cost four times as much to make.
@dataclass(slots=True, eq=False)
class ModelTensor:
    """One parameter or buffer.

    names: as in the model before it was wrapped, in the order of its modules; several for a tied one.
    tensor: of a parameter that FSDP2 shows unsharded now, the sharded one; shown: what the modules have now.
    unit: the innermost FSDP2 module around it, None outside of any.
    placed: what has its global shape, mesh and placements: ``tensor``; or of experts that were divided before FSDP
    sharded them, a DTensor without elements, of which ``tensor`` is a part, see ``expert_groups``.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    shown: torch.Tensor
    unit: Fsdp2Unit | None
    placed: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.placed = self.tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelContents:
    """All that a model holds, in the order of its modules.

    fsdp1_units: their parameters are not among ``parameters``.
    parameters; buffers: those that a state dict has; transient_buffers: the others.
    stray_pieces: names of parameters that are pieces of an FSDP1 unit's flat parameter in a module of another unit, as
    a parameter is that was tied across units with ``use_orig_params``: torch gathers them for their own unit alone.
    ddp_ranks: those of DDP around it, if any.
    """

    fsdp1_units: tuple[Fsdp1Unit, ...]
    fsdp2_units: tuple[Fsdp2Unit, ...]
    parameters: tuple[ModelTensor, ...]
    buffers: tuple[ModelTensor, ...]
    transient_buffers: tuple[ModelTensor, ...]
    stray_pieces: tuple[str, ...] = ()
    ddp_ranks: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the largest part of the model, replicas included; empty where nothing says which they are."""
        return max(self.list_ranks_of_parts(), key=len, default=self.ddp_ranks)

    def list_ranks_of_parts(self) -> list[tuple[int, ...]]:
        """The ranks of each mesh and of each FSDP1 unit, in their order there."""
        placed = (parameter.placed for parameter in self.parameters)
        meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in placed if isinstance(tensor, DTensor)}
        on_meshes = [tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
        return [*on_meshes, *(unit.ranks for unit in self.fsdp1_units)]

    @property
    def stray_sentence(self) -> str:
        """Why the model can be neither extracted nor loaded, where it has stray pieces."""
        return (
            f"{join_some(self.stray_pieces)} is a piece of the flat parameter of another FSDP1 unit, to which it was "
            "tied before the model was wrapped: its module cannot use it. Put tied parameters into one FSDP1 unit"
        )

    def list_tensors(self) -> Iterator[ModelTensor]:
        """The parameters and buffers of a state dict, without those in FSDP1 units."""
        yield from self.parameters
        yield from self.buffers

    def list_unused(self, *, but_followed: bool = False) -> list[str]:
        """The names of what FSDP2 modules have as parameters and will not compute with at their next forward.

        It was assigned after their first one, or has been given other memory since. but_followed: without those whose
        new memory the module would use after ``follow_moved``.
        """
        replaced = [(module, key) for unit in self.fsdp2_units for module, key in unit.replaced]
        shown = [getattr(module, key, None) for module, key in replaced]
        moved = [p for unit in self.fsdp2_units for p, can_follow in unit.moved if not (but_followed and can_follow)]
        unused = set(map(id, [*shown, *moved]))
        named = [tensor.names[0] for tensor in self.parameters if unused & {id(tensor.tensor), id(tensor.shown)}]
        missing = [place for place, tensor in zip(replaced, shown, strict=True) if tensor is None]
        return [*named, *(f"{type(module).__name__}.{key}" for module, key in missing)]

    def list_all_names(self) -> Iterator[tuple[str, ...]]:
        """All names of each parameter and of each buffer of a state dict, those in FSDP1 units too."""
        yield from (tensor.names for tensor in self.list_tensors())
        yield from (names for unit in self.fsdp1_units for names in unit.names)


def read(model: nn.Module) -> ModelContents:
    """Any rank may call it alone, before the first forward too."""
    modules = private.list_module_tensors(find_innermost(model))
    for module_tensors in modules:
        module_tensors.prefix = unwrap_name(module_tensors.prefix)
    states = {
        id(module_tensors.fsdp2_state): module_tensors.fsdp2_state
        for module_tensors in modules
        if module_tensors.fsdp2_state is not None
    }
    fsdp2_units = {key: unit for key, state in states.items() if (unit := Fsdp2Unit.read(state)) is not None}
    # FSDP2 may show others in their place.
    sharded = {
        id(shown): known_parameter
        for state in states.values()
        for shown, known_parameter in list_unsharded_parameters(state)
    }
    fsdp1_units = _read_fsdp1_units(modules)
    parameters = _read_parameters(modules, fsdp1_units, fsdp2_units, sharded)
    stray = [p for p in parameters if fsdp1.is_flattened(p.tensor)] if fsdp1_units else []
    return ModelContents(
        fsdp1_units=fsdp1_units,
        fsdp2_units=tuple(fsdp2_units.values()),
        parameters=parameters,
        stray_pieces=tuple(name for parameter in stray for name in parameter.names),
        ddp_ranks=_find_ddp_ranks(model),
        buffers=_read_buffers(modules, fsdp2_units, persistent=True),
        transient_buffers=_read_buffers(modules, fsdp2_units, persistent=False),
    )


def _find_ddp_ranks(model: nn.Module) -> tuple[int, ...]:
    while not isinstance(model, DistributedDataParallel):
        if (compiled := private.find_compiled_module(model)) is None:
            return ()
        model = compiled
    return tuple(dist.get_process_group_ranks(model.process_group))


def find_innermost(model: nn.Module) -> nn.Module:
    """The model without DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (compiled := private.find_compiled_module(model)) is not None:
            model = compiled
        else:
            return model


def _read_fsdp1_units(modules: list[private.ModuleTensors]) -> tuple[Fsdp1Unit, ...]:
    """Each once, under its module's first name."""
    prefixes: dict[int, list[str]] = {}
    for module_tensors in modules:
        prefixes.setdefault(id(module_tensors.module), []).append(module_tensors.prefix)
    units: dict[int, Fsdp1Unit] = {}
    for module_tensors in modules:
        handle = fsdp1.find_flat_handle(module_tensors.module)
        if handle is not None and id(handle) not in units:
            names = tuple(
                _list_names(places, module_tensors.prefix, prefixes) for places in fsdp1.list_flat_names(handle)
            )
            units[id(handle)] = Fsdp1Unit(
                prefix=module_tensors.prefix, names=names, shown={}, module=module_tensors.module, _handle=handle
            )
    return tuple(units.values())


def _list_names(places: list[fsdp1.PlaceInModule], unit: str, prefixes: dict[int, list[str]]) -> tuple[str, ...]:
    """Every name of a parameter: a module that the model has in several places has its parameter in each of them.

    unit: the prefix of the unit's names, for a module that is not in the model any more.
    """
    names = [
        name
        for place in places
        for name in (
            [f"{prefix}{place.name}" for prefix in prefixes.get(id(place.module), ())]
            or [unwrap_name(unit + place.name_in_unit)]
        )
    ]
    return tuple(dict.fromkeys(names))


def _read_parameters(
    modules: list[private.ModuleTensors],
    fsdp1_units: tuple[Fsdp1Unit, ...],
    fsdp2_units: dict[int, Fsdp2Unit],
    sharded: dict[int, nn.Parameter],
) -> tuple[ModelTensor, ...]:
    """Those that are in no FSDP1 unit; the others that modules have now are added to their units' ``shown``."""
    unit_of = {name: unit for unit in fsdp1_units for names in unit.names for name in names}
    parameters: dict[int, ModelTensor] = {}
    for module_tensors in modules:
        prefix, unit = module_tensors.prefix, fsdp2_units.get(id(module_tensors.fsdp2_state))
        for key, shown in module_tensors.parameters.items():
            if shown is None:
                continue
            name = prefix + key
            tensor = sharded.get(id(shown), shown) if sharded else shown
            if (known := parameters.get(id(tensor))) is not None:
                known.names += (name,)
            elif unit_of and name in unit_of:
                unit_of[name].shown[name] = shown
            elif not unit_of or not fsdp1.is_flat_parameter(tensor):
                parameters[id(tensor)] = ModelTensor((name,), tensor, shown, unit)
    return tuple(parameters.values())


def _read_buffers(
    modules: list[private.ModuleTensors], fsdp2_units: dict[int, Fsdp2Unit], *, persistent: bool
) -> tuple[ModelTensor, ...]:
    buffers: dict[int, ModelTensor] = {}
    for module_tensors in modules:
        for key, buffer in module_tensors.buffers.items():
            if buffer is not None and (key not in module_tensors.non_persistent) == persistent:
                unit = fsdp2_units.get(id(module_tensors.fsdp2_state))
                model_tensor = buffers.setdefault(id(buffer), ModelTensor((), buffer, buffer, unit))
                model_tensor.names += (module_tensors.prefix + key,)
    return tuple(buffers.values())
