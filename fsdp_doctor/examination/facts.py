"""The facts of a live model on one rank: where each tensor lies, and what a load, an offload or a switch has left.

Only attributes are read: nothing is changed or communicated, no value is looked at, no device is waited for.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection
from fsdp_doctor.fsdp.names import unwrapped
from fsdp_doctor.fsdp.reader import Fsdp1Unit, Fsdp2Unit, HeldModel, HeldTensor
from fsdp_doctor.memory.snapshot import device_bytes, storages

CPU = torch.device("cpu")
TensorKind: TypeAlias = Literal["fsdp2", "fsdp1", "dtensor", "plain", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnit:
    """A ``fully_shard`` module or an FSDP1 unit, without its parameters.

    compute_device: where its parameters are gathered and used. policy: whether it is under CPUOffloadPolicy, or
    CPUOffload(offload_params=True); pins: whether that policy pins the shards. initialized: whether torch's lazy
    initialization, at the first forward, was done.
    """

    strategy: Literal["fsdp1", "fsdp2"]
    compute_device: torch.device
    policy: bool
    pins: bool
    initialized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh, or the shard group of an FSDP1 unit.

    names: of its dims, empty if they have none. carries_cpu: whether every dim's group has a backend for CPU tensors;
    None if there is no group to ask.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    device_type: str
    carries_cpu: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorState:
    """Everything about a tensor but its name and shape; tensors that are alike share one object.

    kind: ``fsdp2``, ``fsdp1`` (a flat parameter), ``dtensor`` (outside of FSDP), ``plain`` or ``buffer``.
    wrapper_device: the device that the parameter reports. device: where this rank's part of it lies.
    pinned: None off the CPU and without elements.
    placements, mesh: of a DTensor; an FSDP1 unit has a mesh alone.
    even: whether every rank holds equally many elements, as under FSDP1, which pads; None if it is not sharded.
    unit: None for a tensor that FSDP does not manage, such as an ignored parameter or a buffer.
    """

    kind: TensorKind
    wrapper_device: torch.device
    device: torch.device
    pinned: bool | None
    dtype: torch.dtype
    placements: tuple[Placement, ...] = ()
    mesh: Mesh | None = None
    even: bool | None = None
    unit: FsdpUnit | None = None

    @property
    def policy(self) -> bool:
        return self.unit is not None and self.unit.policy


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One parameter or buffer under one name.

    name: as in the model before it was wrapped; of an FSDP1 unit its module's and ``flat_param``.
    tied_to: the first name of the same tensor, empty for that name itself.
    shape, local_shape: of the whole tensor, and of this rank's part.
    holds: the names of the parameters in an FSDP1 unit.
    """

    name: str
    tied_to: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    state: TensorState
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """Tensors of an optimizer's state that are alike.

    entry: their key, such as ``exp_avg``. names: of their parameters. home: where this rank's part of those parameters
    lies. scalar: whether they have no dimensions, as ``step``.
    """

    entry: str
    device: torch.device
    pinned: bool
    home: torch.device
    scalar: bool
    names: tuple[str, ...]


ByState: TypeAlias = dict[TensorState, list[TensorFacts]]


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """What a load may have left behind.

    held, unheld: the names of the parameters that train, by whether the optimizer has them; empty without an optimizer.
    holds_masters: whether it has parameters in their stead that are in a dtype of more bits, as masters are.
    rounded: the names of parameters with a state in a floating dtype of fewer bits; rounded_entries: the state's keys.
    untied: pairs of names that the model's configuration ties, and that are two tensors.
    replaced: names under which modules have other parameters, or other memory, than FSDP2 gathers.
    recast: the names of parameters of another dtype than FSDP2 expects.
    second_memories: the FSDP1 units whose local shard is other memory than their flat parameter.
    stray_pieces: the names of parameters that are pieces of another FSDP1 unit's flat parameter.
    """

    held: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    holds_masters: bool = False
    rounded: tuple[str, ...] = ()
    rounded_entries: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    replaced: tuple[str, ...] = ()
    recast: tuple[str, ...] = ()
    second_memories: tuple[str, ...] = ()
    stray_pieces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """How the gradients of the next backward are reduced: names of parameters, of FSDP1 those of flat parameters.

    unsynchronized: whose gradients stay on their rank. unreplicated: whose gradients are not reduced over the replicas.
    open_ended: whose next backward is declared not to be the last before the optimizer's step. divided: by each divisor
    that was set in place of the number of ranks. unmanaged: that train without being sharded, beside what FSDP shards
    over several ranks. mixed: of several dtypes, which train in one unit of FSDP2 before its first forward.
    """

    unsynchronized: tuple[str, ...] = ()
    unreplicated: tuple[str, ...] = ()
    open_ended: tuple[str, ...] = ()
    divided: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unmanaged: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory that is kept beside the shards: names of tensors, and bytes.

    unsharded: parameters that stand unsharded beside their shards; all_unsharded: whether all do. gradients: on the
    device, of shards that were offloaded by hand. former: flat parameters whose former memory the modules' parameters
    keep after such an offload. copies: (number of tensors, bytes) of each dictionary with most of the model's names and
    with device memory that is not the model's.
    """

    unsharded: tuple[str, ...] = ()
    unsharded_bytes: int = 0
    all_unsharded: bool = False
    gradients: tuple[str, ...] = ()
    gradient_bytes: int = 0
    former: tuple[str, ...] = ()
    former_bytes: int = 0
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A model as this rank sees it.

    wrapper: the class around the model. by_state, buffers_by_state: the parameters and buffers, those that are alike
    together. units: the different ones. compute_device: of the first of them; None for a model that is not FSDP.
    stream_idle: whether the calling thread's current stream of the compute device had nothing left to do; None if that
    does not matter, or the stream cannot be asked.
    """

    wrapper: str
    parameters: tuple[TensorFacts, ...] = field(repr=False)
    buffers: tuple[TensorFacts, ...] = field(repr=False)
    optimizer: tuple[OptimizerFacts, ...] = field(repr=False)
    by_state: ByState = field(repr=False)
    buffers_by_state: ByState = field(repr=False)
    load: LoadFacts = field(repr=False)
    memory: MemoryFacts = field(repr=False)
    gradients: GradientFacts = field(repr=False)
    units: tuple[FsdpUnit, ...]
    compute_device: torch.device | None
    stream_idle: bool | None


@without_garbage_collection
def read(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Facts:
    """One rank alone may call it, in any state of the model, before the first forward too."""
    contents = reader.read(model)
    units = [*map(_unit_facts, contents.fsdp1_units), *map(_unit_facts, contents.fsdp2_units)]
    parameters, buffers = _Rows(), _Rows()
    of_units = [parameters.add_flat(_flat_facts(unit), unit) for unit in contents.fsdp1_units]
    of_parameters = parameters.add(contents.parameters, "plain")
    buffers.add((*contents.buffers, *contents.transient_buffers), "buffer")
    optimizer_facts: tuple[OptimizerFacts, ...] = ()
    if optimizer is not None:
        facts_of = {id(p.tensor): facts for p, facts in zip(contents.parameters, of_parameters, strict=True)}
        for unit, facts in zip(contents.fsdp1_units, of_units, strict=True):
            facts_of |= {id(tensor): facts for tensor in unit.optimized}
        optimizer_facts = _optimizer_facts(optimizer, facts_of)
    compute_device = units[0].compute_device if units else None
    num_copied = count_left_by_copy((parameters.by_state, buffers.by_state), optimizer_facts)
    return Facts(
        wrapper=type(model).__name__,
        parameters=tuple(parameters.rows),
        buffers=tuple(buffers.rows),
        optimizer=optimizer_facts,
        by_state=parameters.by_state,
        buffers_by_state=buffers.by_state,
        load=_load_facts(model, contents, optimizer),
        memory=_memory_facts(contents),
        gradients=_gradient_facts(model, contents),
        units=tuple(dict.fromkeys(units)),
        compute_device=compute_device,
        stream_idle=_is_stream_idle(compute_device) if num_copied else None,
    )


def count_left_by_copy(tensors: tuple[ByState, ...], optimizer: tuple[OptimizerFacts, ...]) -> int:
    """How many tensors lie in pinned memory without a policy that pins: as ``.to("cpu", non_blocking=True)`` leaves."""
    pinned = [rows for by_state in tensors for state, rows in by_state.items() if state.pinned and not state.policy]
    first_names = sum(not row.tied_to for rows in pinned for row in rows)
    return first_names + sum(len(facts.names) for facts in optimizer if facts.pinned)


def same_device(one: torch.device, other: torch.device) -> bool:
    """A device without an index is any of its kind."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _unit_facts(unit: Fsdp1Unit | Fsdp2Unit) -> FsdpUnit:
    if isinstance(unit, Fsdp1Unit):
        pins = unit.offloads
    else:
        pins = isinstance(unit.policy, CPUOffloadPolicy) and unit.policy.pin_memory
    return FsdpUnit(
        strategy="fsdp1" if isinstance(unit, Fsdp1Unit) else "fsdp2",
        compute_device=unit.compute_device,
        policy=unit.offloads,
        pins=pins,
        initialized=unit.is_initialized,
    )


class _Rows:
    """Collects tensors. A model may have a hundred thousand, in a few states, each of which is made once."""

    def __init__(self) -> None:
        self.rows: list[TensorFacts] = []
        self.by_state: ByState = {}
        self._known: dict[tuple[Any, ...], tuple[TensorFacts, list[TensorFacts]]] = {}
        self._meshes: dict[int, Mesh] = {}

    def add(self, tensors: Iterable[HeldTensor], kind: Literal["plain", "buffer"]) -> list[TensorFacts]:
        """Adds a row for every name, and returns those of the first names."""
        added: list[TensorFacts] = []
        for held in tensors:
            tensor, unit = held.tensor, held.unit
            local = private.local_tensor(tensor)
            layout = (id(tensor.device_mesh), tensor.placements, id(unit)) if isinstance(tensor, DTensor) else None
            pinned = local.is_cpu and local.is_pinned()
            key = (tensor.device, local.device, pinned, tensor.dtype, tensor.shape, local.shape, layout)
            if (alike := self._known.get(key)) is None:
                state = self._state(tensor, local, kind, unit)
                facts = TensorFacts(held.names[0], "", tensor.shape, local.shape, state)
                alike = self._known[key] = facts, self.by_state.setdefault(state, [])
            like, rows = alike
            # Shapes are shared too: to make two for each of a hundred thousand rows takes Python long.
            facts = TensorFacts(held.names[0], "", like.shape, like.local_shape, like.state)
            added.append(facts)
            self.rows.append(facts)
            rows.append(facts)
            if len(held.names) > 1:
                self._add_tied(facts, held.names)
        return added

    def add_flat(self, facts: TensorFacts, unit: Fsdp1Unit) -> TensorFacts:
        self.rows.append(facts)
        self.by_state.setdefault(facts.state, []).append(facts)
        for names in unit.names:
            self._add_tied(replace(facts, holds=()), names)
        return facts

    def _add_tied(self, facts: TensorFacts, names: tuple[str, ...]) -> None:
        tied = [replace(facts, name=name, tied_to=names[0]) for name in names[1:]]
        self.rows += tied
        self.by_state[facts.state] += tied

    def _state(
        self, tensor: torch.Tensor, local: torch.Tensor, kind: TensorKind, unit: Fsdp2Unit | None
    ) -> TensorState:
        plain = TensorState(
            kind=kind, wrapper_device=tensor.device, device=local.device, pinned=_pinned(local), dtype=tensor.dtype
        )
        if not isinstance(tensor, DTensor):
            return plain
        of_fsdp2 = _unit_facts(unit) if unit is not None and kind != "buffer" else None
        return replace(
            plain,
            kind="fsdp2" if of_fsdp2 is not None else "dtensor",
            placements=tuple(tensor.placements),
            mesh=self._mesh(tensor.device_mesh),
            even=_is_even(tensor),
            unit=of_fsdp2,
        )

    def _mesh(self, mesh: DeviceMesh) -> Mesh:
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = Mesh(
                names=tuple(mesh.mesh_dim_names or ()),
                shape=tuple(mesh.shape),
                device_type=mesh.device_type,
                carries_cpu=_has_backends_for_cpu(mesh),
            )
        return self._meshes[id(mesh)]


def _pinned(local: torch.Tensor) -> bool | None:
    return local.is_pinned() if local.is_cpu and local.numel() else None


def _has_backends_for_cpu(mesh: DeviceMesh) -> bool | None:
    if not dist.is_initialized():
        return None
    return all(private.has_backend_for(mesh.get_group(dim), CPU) for dim in range(mesh.ndim))


def _is_even(tensor: DTensor) -> bool | None:
    """Shards of shards of a dimension are even where it divides by the product of the mesh's dims."""
    parts: dict[int, int] = {}
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # Shard, and the strided one of a model that tensor parallelism sharded first, which is no Shard.
        if (dim := getattr(placement, "dim", None)) is not None:
            parts[dim] = parts.get(dim, 1) * size
    return all(tensor.shape[dim] % count == 0 for dim, count in parts.items()) if parts else None


def _flat_facts(unit: Fsdp1Unit) -> TensorFacts:
    flat = unit.flat_parameter
    # A unit that torch does not shard uses the flat parameter itself; a policy keeps the CPU's memory all the same.
    local = unit.memories[-1] if unit.is_sharded or unit.offloads else flat
    # While it is unsharded, the flat parameter is another tensor than the shard, and may be elsewhere.
    is_shown = unit.is_sharded and flat.shape == local.shape
    state = TensorState(
        kind="fsdp1",
        wrapper_device=flat.device if is_shown else local.device,
        device=local.device,
        pinned=_pinned(local),
        dtype=local.dtype,
        mesh=Mesh(
            names=(),
            shape=(unit.group.size(),),
            device_type=unit.compute_device.type,
            carries_cpu=private.has_backend_for(unit.group, CPU),
        ),
        even=True if unit.is_sharded else None,
        unit=_unit_facts(unit),
    )
    length = sum(shape.numel() for shape in unit.shapes)
    holds = tuple(names[0] for names in unit.names)
    return TensorFacts(f"{unit.prefix}flat_param", "", (length,), local.shape, state, holds)


def _optimizer_facts(optimizer: torch.optim.Optimizer, facts_of: dict[int, TensorFacts]) -> tuple[OptimizerFacts, ...]:
    """Ignores the state of other models' parameters."""
    by_home: dict[torch.device, dict[tuple[str, torch.device, bool, bool], list[str]]] = {}
    for parameter, entries in optimizer.state.items():
        if (facts := facts_of.get(id(parameter))) is None:
            continue
        alike = by_home.setdefault(facts.state.device, {})
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                local = private.local_tensor(value)
                key = (entry, local.device, local.is_cpu and local.is_pinned(), not local.dim())
                alike.setdefault(key, []).append(facts.name)
    return tuple(
        OptimizerFacts(entry=entry, device=device, pinned=pinned, home=home, scalar=scalar, names=tuple(names))
        for home, alike in by_home.items()
        for (entry, device, pinned, scalar), names in alike.items()
    )


def _is_stream_idle(device: torch.device | None) -> bool | None:
    """Asks without waiting. Only the current stream of this thread can be asked; there is no list of streams."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    return bool(torch.get_device_module(device.type).current_stream(device).query())


def _load_facts(model: nn.Module, contents: HeldModel, optimizer: torch.optim.Optimizer | None) -> LoadFacts:
    facts = LoadFacts(
        untied=tuple(_untied(model, contents)),
        replaced=tuple(_replaced(model, contents)),
        recast=_names(contents, [parameter for unit in contents.fsdp2_units for parameter in unit.recast]),
        second_memories=tuple(_second_memories(contents)),
        stray_pieces=contents.stray_pieces,
    )
    if optimizer is None:
        return facts
    names = {id(parameter): name for name, parameter in _parameters(contents)}
    in_groups = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, id(p) in in_groups) for name, p in _parameters(contents) if p.requires_grad]
    bits = max((_bits(parameter) for _, parameter in _parameters(contents)), default=0)
    others = [parameter for key, parameter in in_groups.items() if key not in names]
    rounded = list(_rounded(optimizer, names))
    return replace(
        facts,
        held=tuple(name for name, is_held in trained if is_held),
        unheld=tuple(name for name, is_held in trained if not is_held),
        holds_masters=bool(others) and min(map(_bits, others)) > bits,
        rounded=tuple(dict.fromkeys(name for name, _ in rounded)),
        rounded_entries=tuple(dict.fromkeys(entry for _, entry in rounded)),
    )


def _replaced(model: nn.Module, contents: HeldModel) -> Iterator[str]:
    if places := [place for unit in contents.fsdp2_units for place in unit.replaced]:
        prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        yield from (unwrapped(prefixes[id(module)] + name) for module, name in places)
    yield from _names(contents, [parameter for unit in contents.fsdp2_units for parameter, _ in unit.moved])


def _second_memories(contents: HeldModel) -> Iterator[str]:
    """Units with two memories on one device; on two devices the unit is half-moved, which is another finding."""
    for unit in contents.fsdp1_units:
        memories = unit.memories
        if len(memories) > 1 and memories[0].device == memories[1].device:
            yield unit.flat_name


def _names(contents: HeldModel, parameters: list[nn.Parameter]) -> tuple[str, ...]:
    wanted = set(map(id, parameters))
    return tuple(tensor.names[0] for tensor in contents.parameters if id(tensor.tensor) in wanted)


def _parameters(contents: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) of all that an optimizer made now would have."""
    yield from ((tensor.names[0], tensor.tensor) for tensor in contents.parameters)
    for unit in contents.fsdp1_units:
        if unit.keeps_originals:
            yield from ((names[0], tensor) for names, tensor in zip(unit.names, unit.originals, strict=True))
        else:
            yield f"{unit.prefix}flat_param", unit.flat_parameter


def _rounded(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names:
            continue
        for entry, value in entries.items():
            is_moment = isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()
            if is_moment and _bits(value) < _bits(parameter):
                yield names[id(parameter)], entry


def _bits(tensor: torch.Tensor) -> int:
    """The bits of a floating dtype; 0 for another."""
    return torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else 0


def _untied(model: nn.Module, contents: HeldModel) -> Iterator[tuple[str, str]]:
    first_name = {name: names[0] for names in contents.all_names() for name in names}
    for prefix, module in model.named_modules():
        root = unwrapped(f"{prefix}." if prefix else "")
        for one, other in ((root + one, root + other) for one, other in _tied_by_configuration(module).items()):
            if {one, other} <= first_name.keys() and first_name[one] != first_name[other]:
                yield one, other


def _tied_by_configuration(module: nn.Module) -> Mapping[str, str]:
    """Maps the name of a weight to that of the one to which a model of transformers ties it.

    Before transformers 5 that is always the embedding's.
    """
    # The class's attribute, because FullyShardedDataParallel returns the attributes of the module that it wraps.
    tied = getattr(type(module), "_tied_weights_keys", None) or {}
    if not tied or not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        return {}
    if isinstance(tied, Mapping):
        return tied
    get_embedding: Any = getattr(module, "get_input_embeddings", None)
    embedding = get_embedding() if get_embedding is not None else None
    names = [name for name, child in module.named_modules() if child is embedding]
    return {name: f"{unwrapped(names[0])}.weight" for name in tied} if names else {}


def _gradient_facts(model: nn.Module, contents: HeldModel) -> GradientFacts:
    names_of: dict[int, list[str]] = {}
    for parameter in contents.parameters:
        if parameter.unit is not None and isinstance(parameter.tensor, DTensor):
            names_of.setdefault(id(parameter.unit), []).append(parameter.names[0])
    reduced = [(names_of.get(id(unit), []), unit.switches) for unit in contents.fsdp2_units]
    reduced += [([f"{unit.prefix}flat_param"], unit.switches) for unit in contents.fsdp1_units]
    divided: dict[str, list[str]] = {}
    # The gradients of experts on some ranks come from the tokens of all ranks of the largest unit.
    num_ranks = max((switches.num_ranks for _, switches in reduced), default=1)
    for names, switches in reduced:
        if switches.divided_by not in (None, str(switches.num_ranks), str(num_ranks)):
            divided.setdefault(switches.divided_by, []).extend(names)
    return GradientFacts(
        unsynchronized=tuple(name for names, switches in reduced if not switches.synchronizes for name in names),
        unreplicated=tuple(
            name for names, switches in reduced if switches.synchronizes and not switches.all_reduces for name in names
        ),
        open_ended=tuple(name for names, switches in reduced if not switches.ends for name in names),
        divided=tuple((divisor, tuple(names)) for divisor, names in divided.items()),
        unmanaged=tuple(_unmanaged(model, contents)),
        mixed=tuple(_mixed(contents)),
    )


def _unmanaged(model: nn.Module, contents: HeldModel) -> Iterator[str]:
    is_over_several_ranks = any(unit.group.size() > 1 for unit in contents.fsdp1_units) or any(
        p.unit is not None and isinstance(p.tensor, DTensor) and p.tensor.device_mesh.size() > 1
        for p in contents.parameters
    )
    # DDP around the model reduces their gradients.
    if is_over_several_ranks and not isinstance(model, DistributedDataParallel):
        for parameter in contents.parameters:
            if parameter.tensor.requires_grad and not isinstance(parameter.tensor, DTensor):
                yield parameter.names[0]


def _mixed(contents: HeldModel) -> Iterator[str]:
    names = {id(parameter.tensor): parameter.names[0] for parameter in contents.parameters}
    for unit in contents.fsdp2_units:
        for parameters in [] if unit.is_initialized else unit.trained_together:
            if len({parameter.dtype for parameter in parameters}) > 1:
                yield from (names[id(parameter)] for parameter in parameters if id(parameter) in names)


def _memory_facts(contents: HeldModel) -> MemoryFacts:
    unsharded = [(name, tensor) for name, tensor in _unsharded(contents) if _device_bytes([tensor])]
    gradients = list(_gradients_left(contents))
    former = [(name, tensor) for name, tensor in _views_of_former_memory(contents) if _device_bytes([tensor])]
    sharded = [*(tensor for tensor in contents.parameters if tensor.unit is not None), *contents.fsdp1_units]
    return MemoryFacts(
        unsharded=tuple(name for name, _ in unsharded),
        unsharded_bytes=_device_bytes(tensor for _, tensor in unsharded),
        all_unsharded=bool(sharded) and len(unsharded) == len(sharded),
        gradients=tuple(name for name, _ in gradients),
        gradient_bytes=_device_bytes(gradient for _, gradient in gradients),
        former=tuple(dict.fromkeys(name for name, _ in former)),
        former_bytes=_device_bytes(view for _, view in former),
        copies=tuple(_copies(contents)),
    )


def _unsharded(contents: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((p.names[0], p.shown) for p in contents.parameters if p.shown is not p.tensor)
    for unit in contents.fsdp1_units:
        flat = unit.flat_parameter.detach()
        if unit.is_sharded and flat.shape != unit.memories[0].shape:
            yield unit.flat_name, flat


def _gradients_left(contents: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients of shards that were offloaded by hand."""
    for parameter in contents.parameters:
        by_hand = parameter.unit is not None and not parameter.unit.offloads
        if by_hand and parameter.tensor.grad is not None and private.local_tensor(parameter.tensor).is_cpu:
            yield parameter.names[0], parameter.tensor.grad
    for unit in contents.fsdp1_units:
        if not unit.offloads and unit.memories[0].is_cpu:
            yield from ((unit.flat_name, owner.grad) for owner in unit.optimized if owner.grad is not None)


def _views_of_former_memory(contents: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """In a unit that is not sharded the modules have views of the flat parameter, which do not move with it."""
    for unit in contents.fsdp1_units:
        if not unit.is_sharded and not unit.offloads:
            present = {id(storage) for storage in storages(unit.flat_parameter.detach())}
            for view in unit.views:
                if present.isdisjoint(map(id, storages(view))):
                    yield unit.flat_name, view


def _copies(contents: HeldModel) -> Iterator[tuple[int, int]]:
    """Recognizes a state dict by its keys: they have dots, unlike those of the dictionaries of modules."""
    names = [names[0] for names in contents.all_names() if "." in names[0]]
    known = {id(storage) for tensor in _tensors_of(contents) for storage in storages(tensor)}
    for dictionary in gc.get_objects():
        if type(dictionary) not in (dict, OrderedDict) or len(dictionary) <= 1:
            continue
        if names and names[0] in dictionary and 2 * sum(name in dictionary for name in names) > len(names):
            tensors = [value for value in dictionary.values() if isinstance(value, torch.Tensor)]
            others = [tensor for tensor in tensors if known.isdisjoint(map(id, storages(tensor)))]
            if nbytes := _device_bytes(others):
                yield len(others), nbytes


def _tensors_of(contents: HeldModel) -> Iterator[torch.Tensor]:
    for tensor in (*contents.parameters, *contents.buffers, *contents.transient_buffers):
        yield from (tensor.tensor, tensor.shown)
    for unit in contents.fsdp1_units:
        yield from (*unit.memories, unit.flat_parameter.detach(), *unit.shown.values())


def _device_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Device memory of the tensors, each storage once."""
    unique = {id(storage): storage for tensor in tensors for storage in storages(tensor)}
    return sum(device_bytes(storage) for storage in unique.values() if storage.device.type != "cpu")
