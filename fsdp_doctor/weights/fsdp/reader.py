"""Reader of a sharded model: lists every tensor that it holds, once, with all of its names, and every FSDP unit.

Only attributes are read, in any state of the model. Nothing is copied or communicated, and no device is touched.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.forms import CodeFinder, describe_form, has_strides
from fsdp_doctor.weights.fsdp.private import fsdp1, fsdp2
from fsdp_doctor.weights.fsdp.private.fsdp1 import FlatSlice as FlatSlice, Fsdp1Unit as Fsdp1Unit
from fsdp_doctor.weights.fsdp.private.fsdp2 import Fsdp2Unit as Fsdp2Unit, list_unsharded_parameters


# A model may have a hundred thousand: a frozen one would cost four times as much to make.
@dataclass(slots=True, eq=False)
class ModelTensor:
    """Parameter or buffer.

    names: the names in the model before it was wrapped, in the order of its modules; several if the tensor is tied.
    tensor: the parameter or buffer; the sharded parameter even while the module has the unsharded one.
    shown: the tensor that the modules have now.
    unit: the innermost FSDP2 module around the tensor; None if there is none.
    form: a description of the tensor's form if its memory does not hold its values, see ``forms``; otherwise empty.
    placed: the tensor with its global shape, mesh and placements. This is ``tensor``, except for experts that were
        divided before FSDP sharded them. For these, it is a DTensor without elements, and ``tensor`` is a part of this
        DTensor, see ``expert_groups``.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    shown: torch.Tensor
    unit: Fsdp2Unit | None
    form: str = ""
    placed: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.placed = self.tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelContents:
    """Contents of a model, in the order of its modules.

    fsdp1_units: FSDP1 units; their parameters are not in ``parameters``.
    parameters: all other parameters.
    buffers: the persistent buffers, which a state dict contains.
    transient_buffers: the other buffers.
    stray_pieces: names of parameters that are pieces of one FSDP1 unit's flat parameter but lie in a module of another
        unit, for example tied across units with ``use_orig_params``: torch gathers them only for their own unit.
    ambiguous: names that several tensors have once the words inserted by wrappers are removed.
    extra_states: the state dict's keys for what ``get_extra_state`` returns, which may be any objects.
    ddp_ranks: the ranks of a DDP wrapper; empty without DDP.
    """

    fsdp1_units: tuple[Fsdp1Unit, ...]
    fsdp2_units: tuple[Fsdp2Unit, ...]
    parameters: tuple[ModelTensor, ...]
    buffers: tuple[ModelTensor, ...]
    transient_buffers: tuple[ModelTensor, ...]
    stray_pieces: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    extra_states: tuple[str, ...] = ()
    ddp_ranks: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the model's largest mesh or FSDP1 unit, replicas included; without either, the ranks of DDP."""
        return max(self.list_ranks_of_parts(), key=len, default=self.ddp_ranks)

    def list_ranks_of_parts(self) -> list[tuple[int, ...]]:
        """Lists the ranks of each mesh and of each FSDP1 unit, in the mesh's or unit's order."""
        placed = (parameter.placed for parameter in self.parameters)
        meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in placed if isinstance(tensor, DTensor)}
        on_meshes = [tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values()]
        return [*on_meshes, *(unit.ranks for unit in self.fsdp1_units)]

    @property
    def refusal(self) -> str:
        """Reason why the model can be neither extracted nor loaded; empty if it can."""
        if self.ambiguous:
            return describe_ambiguous(self.ambiguous)
        if self.lost_shards:
            return (
                f"{join_some(self.lost_shards)} was moved while it was unsharded, as a manual offload does "
                "after a step that raised: the shard is lost. Build and wrap the model again, and load a "
                "checkpoint"
            )
        if not self.stray_pieces:
            return ""
        return (
            f"{join_some(self.stray_pieces)} is a piece of another FSDP1 unit's flat parameter, because it was "
            "tied before the model was wrapped: its module cannot use the piece. Put tied parameters into one "
            "FSDP1 unit"
        )

    def list_tensors(self) -> Iterator[ModelTensor]:
        """Yields the parameters and persistent buffers, except those in FSDP1 units."""
        yield from self.parameters
        yield from self.buffers

    @property
    def lost_shards(self) -> list[str]:
        """Names of the flat parameters of FSDP1 units that have lost their shards."""
        return [unit.flat_name for unit in self.fsdp1_units if unit.has_lost_shard]

    def find_unreadable(self, *, but_strided: bool = False) -> dict[str, str]:
        """Describes each tensor of a state dict whose memory does not hold its values; the keys are the tensors' first
        names.

        but_strided: whether to leave out tensors whose strides can be read, and tensors in FSDP1 units. A call that
            does not need the values of these tensors can skip them.
        """
        tensors = [tensor for tensor in self.list_tensors() if tensor.form]
        forms = {t.names[0]: t.form for t in tensors if not (but_strided and has_strides(t.tensor))}
        in_units = [] if but_strided else [unit.forms.items() for unit in self.fsdp1_units]
        return forms | dict(itertools.chain.from_iterable(in_units))

    def drop_without_strides(self) -> ModelContents:
        """Returns the contents without tensors whose shape and strides cannot be read."""

        def keep(tensors: tuple[ModelTensor, ...]) -> tuple[ModelTensor, ...]:
            return tuple(tensor for tensor in tensors if not tensor.form or has_strides(tensor.tensor))

        return replace(
            self,
            parameters=keep(self.parameters),
            buffers=keep(self.buffers),
            transient_buffers=keep(self.transient_buffers),
        )

    def list_unused(self, *, but_followed: bool = False) -> list[str]:
        """Lists the names of FSDP2 modules' parameters that the next forward will not use.

        Such a parameter was assigned, or was given other memory, after the first forward.

        but_followed: whether to leave out parameters whose new memory the module would use after ``follow_moved``.
        """
        replaced = [(module, key) for unit in self.fsdp2_units for module, key in unit.replaced]
        shown = [getattr(module, key, None) for module, key in replaced]
        moved = [p for unit in self.fsdp2_units for p, can_follow in unit.moved if not (but_followed and can_follow)]
        unused = set(map(id, [*shown, *moved]))
        named = [tensor.names[0] for tensor in self.parameters if unused & {id(tensor.tensor), id(tensor.shown)}]
        missing = [place for place, tensor in zip(replaced, shown, strict=True) if tensor is None]
        return [*named, *(f"{type(module).__name__}.{key}" for module, key in missing)]

    def list_all_names(self) -> Iterator[tuple[str, ...]]:
        """Yields all names of each parameter and each persistent buffer, also in FSDP1 units."""
        yield from (tensor.names for tensor in self.list_tensors())
        yield from (names for unit in self.fsdp1_units for names in unit.names)


def describe_ambiguous(names: Sequence[str]) -> str:
    """Returns a sentence that says that several tensors of a model would have each of these names."""
    return (
        f"several tensors of the model have the name {join_some(names)} after removing the words that wrappers "
        "insert into module names, so all but one would be lost: rename the modules"
    )


def check_model(model: object) -> None:
    """Raises TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        hint = "; pass named tensors as tensors=, together with their model" if isinstance(model, Mapping) else ""
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}{hint}")


def read(model: nn.Module) -> ModelContents:
    """Reads the contents of a model. Any rank may call it alone, also before the first forward.

    Raises TypeError unless ``model`` is a module.
    """
    check_model(model)
    modules = private.list_module_tensors(find_innermost(model))
    is_wrapped = False
    for module_tensors in modules:
        prefix = strip_wrappers(module_tensors.prefix)
        is_wrapped = is_wrapped or prefix != module_tensors.prefix
        module_tensors.prefix = prefix
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
    codes = CodeFinder(modules)
    fsdp1_units = _read_fsdp1_units(modules, codes)
    parameters = _read_parameters(modules, fsdp1_units, fsdp2_units, sharded, codes)
    stray = [p for p in parameters if fsdp1.is_flattened(p.tensor)] if fsdp1_units else []
    return ModelContents(
        fsdp1_units=fsdp1_units,
        fsdp2_units=tuple(fsdp2_units.values()),
        parameters=parameters,
        stray_pieces=tuple(name for parameter in stray for name in parameter.names),
        ambiguous=_find_ambiguous(modules, fsdp1_units) if is_wrapped else (),
        extra_states=tuple(
            f"{m.prefix}_extra_state"
            for m in modules
            if type(m.module).get_extra_state is not nn.Module.get_extra_state
        ),
        ddp_ranks=_find_ddp_ranks(model),
        buffers=_read_buffers(modules, fsdp2_units, codes, persistent=True),
        transient_buffers=_read_buffers(modules, fsdp2_units, codes, persistent=False),
    )


def find_open_step(model: nn.Module, contents: ModelContents) -> private.OpenStep | None:
    """Returns the part of a training step that has begun and has not ended, for example because it raised; None between
    steps.
    """
    found = {unit.open_step for unit in contents.fsdp1_units} | {fsdp2.find_open_step(fsdp2.list_states(model))}
    return "backward" if "backward" in found else "forward" if "forward" in found else None


def _find_ambiguous(modules: list[private.ModuleTensors], fsdp1_units: tuple[Fsdp1Unit, ...]) -> tuple[str, ...]:
    """Finds names under which two modules have different tensors.

    Parameters in FSDP1 units are included, although they may not be attributes of the modules now.
    """
    in_units = collections.Counter(name for unit in fsdp1_units for names in unit.names for name in names)
    ambiguous = dict.fromkeys(name for name, number in in_units.items() if number > 1)
    first: dict[str, torch.Tensor] = {}
    for module_tensors in modules:
        for key, tensor in (*module_tensors.parameters.items(), *module_tensors.buffers.items()):
            name = module_tensors.prefix + key
            if tensor is not None and first.setdefault(name, tensor) is not tensor:
                ambiguous[name] = None
    return tuple(ambiguous)


def _find_ddp_ranks(model: nn.Module) -> tuple[int, ...]:
    while not isinstance(model, DistributedDataParallel):
        if (compiled := private.find_compiled_module(model)) is None:
            return ()
        model = compiled
    return tuple(dist.get_process_group_ranks(model.process_group))


def find_innermost(model: nn.Module) -> nn.Module:
    """Returns the model without the wrappers of DDP and torch.compile around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (compiled := private.find_compiled_module(model)) is not None:
            model = compiled
        else:
            return model


def _read_fsdp1_units(modules: list[private.ModuleTensors], codes: CodeFinder) -> tuple[Fsdp1Unit, ...]:
    """Reads each FSDP1 unit once, under its module's first name."""
    owners = {id(module_tensors.module): module_tensors for module_tensors in modules}
    prefixes: dict[int, list[str]] = {}
    for module_tensors in modules:
        prefixes.setdefault(id(module_tensors.module), []).append(module_tensors.prefix)
    units: dict[int, Fsdp1Unit] = {}
    for module_tensors in modules:
        handle = fsdp1.find_flat_handle(module_tensors.module)
        if handle is not None and id(handle) not in units:
            places = fsdp1.list_flat_names(handle)
            names = tuple(_list_names(of_one, module_tensors.prefix, prefixes) for of_one in places)
            unit = units[id(handle)] = Fsdp1Unit(
                prefix=module_tensors.prefix, names=names, shown={}, module=module_tensors.module, _handle=handle
            )
            for (first, *_), its_names, shape in zip(places, names, unit.shapes, strict=True):
                owner = owners.get(id(first.module))
                if owner and (form := codes.describe(owner, first.name, unit.flat_parameter, shape)):
                    unit.forms[its_names[0]] = form
    return tuple(units.values())


def _list_names(places: list[fsdp1.PlaceInModule], unit: str, prefixes: dict[int, list[str]]) -> tuple[str, ...]:
    """Lists the names of a parameter: one for each name of the module, or modules, that have it.

    unit: the prefix of the unit's names, used for a module that is no longer in the model.
    """
    names = [
        name
        for place in places
        for name in (
            [f"{prefix}{place.name}" for prefix in prefixes.get(id(place.module), ())]
            or [strip_wrappers(unit + place.name_in_unit)]
        )
    ]
    return tuple(dict.fromkeys(names))


def _read_parameters(
    modules: list[private.ModuleTensors],
    fsdp1_units: tuple[Fsdp1Unit, ...],
    fsdp2_units: dict[int, Fsdp2Unit],
    sharded: dict[int, nn.Parameter],
    codes: CodeFinder,
) -> tuple[ModelTensor, ...]:
    """Reads the parameters that are in no FSDP1 unit.

    Also fills ``shown`` of each FSDP1 unit with the parameters that its modules have now.
    """
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
                form = describe_form(private.read_local_tensor(tensor)) or codes.describe(module_tensors, key, tensor)
                parameters[id(tensor)] = ModelTensor((name,), tensor, shown, unit, form)
    return tuple(parameters.values())


def _read_buffers(
    modules: list[private.ModuleTensors], fsdp2_units: dict[int, Fsdp2Unit], codes: CodeFinder, *, persistent: bool
) -> tuple[ModelTensor, ...]:
    buffers: dict[int, ModelTensor] = {}
    for module_tensors in modules:
        for key, buffer in module_tensors.buffers.items():
            if buffer is not None and (key not in module_tensors.non_persistent) == persistent:
                if id(buffer) not in buffers:
                    unit = fsdp2_units.get(id(module_tensors.fsdp2_state))
                    form = describe_form(private.read_local_tensor(buffer))
                    form = form or codes.describe(module_tensors, key, buffer)
                    buffers[id(buffer)] = ModelTensor((), buffer, buffer, unit, form)
                buffers[id(buffer)].names += (module_tensors.prefix + key,)
    return tuple(buffers.values())
