"""The facts of a live model on one rank: the device of each parameter, buffer and tensor of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.forms import describe_form
from fsdp_doctor.weights.fsdp.reader import Fsdp1Unit, Fsdp2Unit, ModelContents, ModelTensor
from fsdp_doctor.weights.names.hub_names import HubNamesUnknown, list_shapes, revert_names
from fsdp_doctor.weights.names.views import NamesError

CPU = torch.device("cpu")
TensorKind: TypeAlias = Literal["fsdp2", "fsdp1", "dtensor", "plain", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnit:
    """The settings of a ``fully_shard`` module or an FSDP1 unit.

    compute_device: the device on which the unit's parameters are gathered and used.
    policy: whether the unit uses CPUOffloadPolicy or CPUOffload(offload_params=True).
    pins: whether the offload policy pins the shards.
    initialized: whether torch has run its lazy initialization, which happens at the first forward.
    """

    strategy: Literal["fsdp1", "fsdp2"]
    compute_device: torch.device
    policy: bool
    pins: bool
    initialized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh, or the shard group of an FSDP1 unit.

    names: the names of the dimensions; empty if they have no names.
    carries_cpu: whether the process group of every dimension has a backend for CPU tensors; None if torch.distributed
        is not initialized.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    device_type: str
    carries_cpu: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorState:
    """The properties of a tensor except its name and shape; equal tensors share one object.

    kind: ``fsdp2``, ``fsdp1`` (a flat parameter), ``dtensor`` (outside of FSDP), ``plain`` or ``buffer``.
    wrapper_device: the device that the parameter reports.
    device: the device of this rank's part of the tensor.
    pinned: whether the memory is pinned; None for a tensor that is not on the CPU, has no elements or is not dense.
    placements: the placements of a DTensor; empty for any other tensor.
    mesh: the mesh of a DTensor or of an FSDP1 unit; None for any other tensor.
    even: whether every rank holds the same number of elements (always under FSDP1, which pads); None if not sharded.
    unit: the FSDP unit; None for a tensor that FSDP does not manage, such as an ignored parameter or a buffer.
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

    name: the name in the model before wrapping; for an FSDP1 unit, the module's name followed by ``flat_param``.
    tied_to: the first name of the same tensor; empty if ``name`` is the first name.
    shape: the shape of the whole tensor.
    local_shape: the shape of this rank's part.
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
    """A group of equal tensors of an optimizer's state.

    entry: the key of the tensors in the state, such as ``exp_avg``.
    names: the names of the parameters to which the tensors belong.
    home: the device of this rank's part of the parameters.
    scalar: whether the tensors have no dimensions, such as ``step``.
    """

    entry: str
    device: torch.device
    pinned: bool
    home: torch.device
    scalar: bool
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFacts:
    """The names that ``save_pretrained`` of transformers 5 would give the model's tensors on the Hub.

    model_names: the number of names of parameters and buffers in the model.
    others: for each name in the model that differs on the Hub, the names there; several for a fused tensor whose parts
        are separate on the Hub.
    unknown: the reason why the Hub's names are unknown; empty if they are known.
    refused: the reason why the tensors cannot be given the Hub's names; empty if they can.
    """

    model_names: int
    others: Mapping[str, tuple[str, ...]] = field(repr=False)
    unknown: str = ""
    refused: str = ""


ByState: TypeAlias = dict[TensorState, list[TensorFacts]]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The state of a model as this rank sees it.

    wrapper: the class name of the outermost module.
    by_state: the parameters, grouped by their state.
    buffers_by_state: the buffers, grouped by their state.
    units: the distinct settings of the FSDP units.
    names: the model's names and the Hub's.
    compute_device: the compute device of the first unit; None for a model without FSDP.
    stream_idle: whether the calling thread's current stream of the compute device was idle; None if no tensor shows
        traces of a non-blocking copy, or if the device has no streams.
    open_step: the part of a training step that began, did not end and is not running now, usually because it raised;
        None between two steps.
    """

    wrapper: str
    parameters: tuple[TensorFacts, ...] = field(repr=False)
    buffers: tuple[TensorFacts, ...] = field(repr=False)
    optimizer: tuple[OptimizerFacts, ...] = field(repr=False)
    by_state: ByState = field(repr=False)
    buffers_by_state: ByState = field(repr=False)
    units: tuple[FsdpUnit, ...]
    names: NameFacts
    compute_device: torch.device | None
    stream_idle: bool | None
    open_step: private.OpenStep | None


def read_facts(model: nn.Module, contents: ModelContents, optimizer: torch.optim.Optimizer | None) -> Facts:
    units = [*map(_read_unit, contents.fsdp1_units), *map(_read_unit, contents.fsdp2_units)]
    parameters, buffers = _Rows(), _Rows()
    of_units = [parameters.add_flat(_read_flat_parameter(unit), unit) for unit in contents.fsdp1_units]
    of_parameters = parameters.add(contents.parameters, "plain")
    buffers.add((*contents.buffers, *contents.transient_buffers), "buffer")
    optimizer_facts: tuple[OptimizerFacts, ...] = ()
    if optimizer is not None:
        facts_of = {id(p.tensor): facts for p, facts in zip(contents.parameters, of_parameters, strict=True)}
        for unit, facts in zip(contents.fsdp1_units, of_units, strict=True):
            facts_of |= {id(tensor): facts for tensor in unit.optimized}
        optimizer_facts = _read_optimizer(optimizer, facts_of)
    compute_device = units[0].compute_device if units else None
    num_copied = count_left_by_copy((parameters.by_state, buffers.by_state), optimizer_facts)
    return Facts(
        wrapper=type(model).__name__,
        parameters=tuple(parameters.rows),
        buffers=tuple(buffers.rows),
        optimizer=optimizer_facts,
        by_state=parameters.by_state,
        buffers_by_state=buffers.by_state,
        units=tuple(dict.fromkeys(units)),
        names=_read_names(model, contents),
        compute_device=compute_device,
        stream_idle=_is_stream_idle(compute_device) if num_copied else None,
        open_step=None if private.find_running_step(list(model.modules())) else reader.find_open_step(model, contents),
    )


def _read_names(model: nn.Module, contents: ModelContents) -> NameFacts:
    shapes, others = list_shapes(contents), dict[str, list[str]]()
    try:
        for name, view in revert_names(model, shapes).items():
            if name != view.name:
                others.setdefault(view.name, []).append(name)
    except HubNamesUnknown as error:
        return NameFacts(model_names=len(shapes), others={}, unknown=str(error))
    except NamesError as error:
        return NameFacts(model_names=len(shapes), others={}, refused=str(error))
    return NameFacts(model_names=len(shapes), others={name: tuple(of_hub) for name, of_hub in others.items()})


def count_left_by_copy(tensors: tuple[ByState, ...], optimizer: tuple[OptimizerFacts, ...]) -> int:
    """Counts the pinned tensors outside of an offload policy, such as results of ``.to("cpu", non_blocking=True)``."""
    pinned = [rows for by_state in tensors for state, rows in by_state.items() if state.pinned and not state.policy]
    first_names = sum(not row.tied_to for rows in pinned for row in rows)
    return first_names + sum(len(facts.names) for facts in optimizer if facts.pinned)


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Compares two devices; a device without an index equals every device of its type."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def _read_unit(unit: Fsdp1Unit | Fsdp2Unit) -> FsdpUnit:
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
    """Collects rows of tensors.

    A model may have a hundred thousand tensors, but only a few distinct states, so each state is made once and shared.
    """

    def __init__(self) -> None:
        self.rows: list[TensorFacts] = []
        self.by_state: ByState = {}
        self._known: dict[tuple[Any, ...], tuple[TensorFacts, list[TensorFacts]]] = {}
        self._meshes: dict[int, Mesh] = {}

    def add(self, tensors: Iterable[ModelTensor], kind: Literal["plain", "buffer"]) -> list[TensorFacts]:
        """Adds a row for every name of every tensor, and returns the row of each tensor's first name."""
        added: list[TensorFacts] = []
        for entry in tensors:
            tensor, unit = entry.tensor, entry.unit
            local = private.read_local_tensor(tensor)
            layout = (id(tensor.device_mesh), tensor.placements, id(unit)) if isinstance(tensor, DTensor) else None
            pinned = local.is_cpu and not (entry.form and describe_form(local)) and local.is_pinned()
            key = (tensor.device, local.device, pinned, tensor.dtype, tensor.shape, local.shape, layout)
            if (alike := self._known.get(key)) is None:
                state = self._read_state(tensor, local, kind, unit)
                facts = TensorFacts(entry.names[0], "", tensor.shape, local.shape, state)
                alike = self._known[key] = facts, self.by_state.setdefault(state, [])
            like, rows = alike
            # Shapes are shared too: to make two for each of a hundred thousand rows takes Python long.
            facts = TensorFacts(entry.names[0], "", like.shape, like.local_shape, like.state)
            added.append(facts)
            self.rows.append(facts)
            rows.append(facts)
            if len(entry.names) > 1:
                self._add_tied(facts, entry.names)
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

    def _read_state(
        self, tensor: torch.Tensor, local: torch.Tensor, kind: TensorKind, unit: Fsdp2Unit | None
    ) -> TensorState:
        plain = TensorState(
            kind=kind, wrapper_device=tensor.device, device=local.device, pinned=_is_pinned(local), dtype=tensor.dtype
        )
        if not isinstance(tensor, DTensor):
            return plain
        of_fsdp2 = _read_unit(unit) if unit is not None and kind != "buffer" else None
        return replace(
            plain,
            kind="fsdp2" if of_fsdp2 is not None else "dtensor",
            placements=tuple(tensor.placements),
            mesh=self._read_mesh(tensor.device_mesh),
            even=_is_even(tensor),
            unit=of_fsdp2,
        )

    def _read_mesh(self, mesh: DeviceMesh) -> Mesh:
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = Mesh(
                names=tuple(mesh.mesh_dim_names or ()),
                shape=tuple(mesh.shape),
                device_type=mesh.device_type,
                carries_cpu=all(private.has_backend_for(mesh.get_group(dim), CPU) for dim in range(mesh.ndim))
                if dist.is_initialized()
                else None,
            )
        return self._meshes[id(mesh)]


def _is_pinned(local: torch.Tensor) -> bool | None:
    return local.is_pinned() if local.is_cpu and local.numel() and not describe_form(local) else None


def _is_even(tensor: DTensor) -> bool | None:
    """Returns whether all shards of a DTensor have equal size; None if it is not sharded.

    A dimension that several mesh dimensions shard must be divisible by the product of their sizes.
    """
    parts: dict[int, int] = {}
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # Shard, and the strided one of a model that tensor parallelism sharded first, which is no Shard.
        if (dim := getattr(placement, "dim", None)) is not None:
            parts[dim] = parts.get(dim, 1) * size
    return all(tensor.shape[dim] % count == 0 for dim, count in parts.items()) if parts else None


def _read_flat_parameter(unit: Fsdp1Unit) -> TensorFacts:
    flat = unit.flat_parameter
    # A unit that torch does not shard uses the flat parameter itself; a policy keeps the CPU's memory all the same.
    local = unit.memories[-1] if unit.is_sharded or unit.offloads else flat
    # While it is unsharded, the flat parameter is another tensor than the shard, and may be elsewhere.
    is_shown = unit.is_sharded and flat.shape == local.shape
    state = TensorState(
        kind="fsdp1",
        wrapper_device=flat.device if is_shown else local.device,
        device=local.device,
        pinned=_is_pinned(local),
        dtype=local.dtype,
        mesh=Mesh(
            names=(),
            shape=(unit.group.size(),),
            device_type=unit.compute_device.type,
            carries_cpu=private.has_backend_for(unit.group, CPU),
        ),
        even=True if unit.is_sharded else None,
        unit=_read_unit(unit),
    )
    length = sum(shape.numel() for shape in unit.shapes)
    holds = tuple(names[0] for names in unit.names)
    return TensorFacts(f"{unit.prefix}flat_param", "", (length,), local.shape, state, holds)


def _read_optimizer(optimizer: torch.optim.Optimizer, facts_of: dict[int, TensorFacts]) -> tuple[OptimizerFacts, ...]:
    """Groups equal tensors of the optimizer's state, and ignores the state of other models' parameters."""
    by_home: dict[torch.device, dict[tuple[str, torch.device, bool, bool], list[str]]] = {}
    for parameter, entries in optimizer.state.items():
        if (facts := facts_of.get(id(parameter))) is None:
            continue
        alike = by_home.setdefault(facts.state.device, {})
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                local = private.read_local_tensor(value)
                key = (entry, local.device, local.is_cpu and local.is_pinned(), not local.dim())
                alike.setdefault(key, []).append(facts.name)
    return tuple(
        OptimizerFacts(entry=entry, device=device, pinned=pinned, home=home, scalar=scalar, names=tuple(names))
        for home, alike in by_home.items()
        for (entry, device, pinned, scalar), names in alike.items()
    )


def _is_stream_idle(device: torch.device | None) -> bool | None:
    """Returns, without waiting, whether this thread's current stream is idle; torch has no list of other streams."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    return bool(torch.get_device_module(device.type).current_stream(device).query())
