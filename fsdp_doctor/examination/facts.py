"""Where each tensor of a model lies, as this rank can read it: attributes alone.

Nothing is changed, nothing is communicated, no device is waited for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_doctor.extract.sources import innermost
from fsdp_doctor.fsdp import fsdp1, private
from fsdp_doctor.fsdp.names import unwrapped

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnit:
    """What is common to the parameters of a ``fully_shard`` module or of an FSDP1 unit.

    strategy: ``fsdp2`` or ``fsdp1``.
    compute_device: where its parameters are gathered and used.
    policy: whether it is under CPUOffloadPolicy, or CPUOffload(offload_params=True).
    pins: whether that policy pins the shards.
    initialized: whether torch's lazy initialization, at the first forward, was done.
    """

    strategy: str
    compute_device: torch.device
    policy: bool
    pins: bool
    initialized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh; of an FSDP1 unit the group over which it is sharded.

    names: of its dims, empty where they have none.
    carries_cpu: whether every dim's group has a backend for CPU tensors; None where there is no group to ask.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    device_type: str
    carries_cpu: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorState:
    """All that is not a name or a shape; tensors that are alike in it share one object.

    kind: ``fsdp2``, ``fsdp1`` (a flat parameter), ``dtensor`` (outside of FSDP), ``plain`` or ``buffer``.
    wrapper_device: what the parameter itself says. device: where this rank's part of it lies.
    pinned: None where it cannot be known or means nothing: off the CPU, and without elements.
    placements, mesh: of a DTensor; an FSDP1 unit has a mesh alone.
    even: whether every rank holds equally much; FSDP1 pads, so it does. None for what is not sharded.
    unit: None for what FSDP does not manage, such as an ignored parameter or a buffer.
    """

    kind: str
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

    name: as in the model before it was wrapped; an FSDP1 unit's is its module's and ``flat_param``.
    tied_to: the first name of the same tensor, empty for that one itself.
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

    entry: their key, such as ``exp_avg``. names: of their parameters.
    home: where this rank's part of those parameters lies. scalar: without dimensions, as ``step``.
    """

    entry: str
    device: torch.device
    pinned: bool
    home: torch.device
    scalar: bool
    names: tuple[str, ...]


ByState: TypeAlias = dict[TensorState, list[TensorFacts]]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A model as this rank sees it.

    by_state: the parameters again, those that are alike together; buffers_by_state the buffers.
    units: the different ones. compute_device: of the first of them; None for a model that is not FSDP.
    wrapper: the class around the model.
    stream_idle: whether the calling thread's current stream of the compute device had nothing left to do; None
        where it was not asked, being of no interest, or cannot be.
    """

    wrapper: str
    parameters: tuple[TensorFacts, ...] = field(repr=False)
    buffers: tuple[TensorFacts, ...] = field(repr=False)
    optimizer: tuple[OptimizerFacts, ...] = field(repr=False)
    by_state: ByState = field(repr=False)
    buffers_by_state: ByState = field(repr=False)
    units: tuple[FsdpUnit, ...]
    compute_device: torch.device | None
    stream_idle: bool | None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """So many rows start it several times, it walks all that the process has, and nothing here is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def read(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Facts:
    """One rank alone may call it, in any state of the model, before the first forward too."""
    units, parameters, buffers = _Units(), _Rows(), _Rows()
    in_units = _read_flat(model, units, parameters)
    sharded = private.sharded_parameters(model)
    inner = innermost(model)
    for prefix, fsdp_state, own, own_buffers in private.tensors_of_modules(inner):
        unit, prefix = units.of_fsdp2(fsdp_state), unwrapped(prefix)
        for name, shown in own.items():
            if shown is not None and id(shown) not in in_units:
                tensor = sharded.get(id(shown), shown)
                parameters.add(prefix + name, tensor, "plain", unit)
        for name, buffer in own_buffers.items():
            if buffer is not None:
                buffers.add(prefix + name, buffer, "buffer", None)
    held = _optimizer_facts(optimizer, parameters.first) if optimizer is not None else ()
    compute_device = units.known[0].compute_device if units.known else None
    copied = left_by_copy((parameters.by_state, buffers.by_state), held)
    return Facts(
        wrapper=type(model).__name__,
        parameters=tuple(parameters.all),
        buffers=tuple(buffers.all),
        optimizer=held,
        by_state=parameters.by_state,
        buffers_by_state=buffers.by_state,
        units=tuple(units.known),
        compute_device=compute_device,
        stream_idle=_stream_idle(compute_device) if copied else None,
    )


def left_by_copy(tensors: tuple[ByState, ...], optimizer: tuple[OptimizerFacts, ...]) -> int:
    """How many tensors lie in pinned memory where no policy pins: ``.to("cpu", non_blocking=True)`` leaves them so."""
    pinned = [rows for by_state in tensors for state, rows in by_state.items() if state.pinned and not state.policy]
    shown = sum(not row.tied_to for rows in pinned for row in rows)
    return shown + sum(len(facts.names) for facts in optimizer if facts.pinned)


def same_device(one: torch.device, other: torch.device) -> bool:
    """A device without an index is any of its kind."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


class _Units:
    """The different units, in the order in which they are met."""

    def __init__(self) -> None:
        self.known: list[FsdpUnit] = []
        self._by_state: dict[int, FsdpUnit | None] = {}

    def of_fsdp2(self, fsdp_state: Any) -> FsdpUnit | None:
        if fsdp_state is None:
            return None
        if id(fsdp_state) not in self._by_state:
            self._by_state[id(fsdp_state)] = self._fsdp2(fsdp_state)
        return self._by_state[id(fsdp_state)]

    def of_fsdp1(self, handle: Any, initialized: bool) -> FsdpUnit:
        policy = private.offloads_parameters(handle)
        device = private.compute_device(handle)
        unit = FsdpUnit(strategy="fsdp1", compute_device=device, policy=policy, pins=policy, initialized=initialized)
        return self._one(unit)

    def _fsdp2(self, fsdp_state: Any) -> FsdpUnit | None:
        if (found := private.fsdp2_unit(fsdp_state)) is None:
            return None
        device, policy, initialized = found
        offloads = isinstance(policy, CPUOffloadPolicy)
        pins = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        unit = FsdpUnit(strategy="fsdp2", compute_device=device, policy=offloads, pins=pins, initialized=initialized)
        return self._one(unit)

    def _one(self, unit: FsdpUnit) -> FsdpUnit:
        if unit not in self.known:
            self.known.append(unit)
        return self.known[self.known.index(unit)]


class _Rows:
    """Collects tensors. A model may have a hundred thousand, in a few states: a state is made once."""

    def __init__(self) -> None:
        self.all: list[TensorFacts] = []
        self.by_state: ByState = {}
        self.first: dict[int, TensorFacts] = {}
        self._known: dict[tuple[Any, ...], tuple[TensorFacts, list[TensorFacts]]] = {}
        self._meshes: dict[int, Mesh] = {}

    def add(self, name: str, tensor: torch.Tensor, kind: str, unit: FsdpUnit | None) -> None:
        if (tied := self.first.get(id(tensor))) is not None:
            self._append(self.by_state[tied.state], replace(tied, name=name, tied_to=tied.name))
            return
        local = private.local_part(tensor)
        layout = (id(tensor.device_mesh), tensor.placements, id(unit)) if isinstance(tensor, DTensor) else None
        pinned = local.is_cpu and local.is_pinned()
        key = (tensor.device, local.device, pinned, tensor.dtype, tensor.shape, local.shape, layout)
        if (alike := self._known.get(key)) is None:
            state = self._state(tensor, local, kind, unit)
            facts = TensorFacts(name, "", tensor.shape, local.shape, state)
            alike = self._known[key] = facts, self.by_state.setdefault(state, [])
        like, rows = alike
        # What is alike is shared: two shapes for each of a hundred thousand rows are work for the garbage collector.
        facts = self.first[id(tensor)] = TensorFacts(name, "", like.shape, like.local_shape, like.state)
        self.all.append(facts)
        rows.append(facts)

    def add_flat(self, facts: TensorFacts, tied: list[tuple[str, str]], tensors: list[torch.Tensor]) -> None:
        """tied: (name, the name that it is tied to). tensors: by which an optimizer knows them."""
        rows = self.by_state.setdefault(facts.state, [])
        self._append(rows, facts)
        self.first |= {id(tensor): facts for tensor in tensors}
        for name, primary in tied:
            self._append(rows, replace(facts, name=name, tied_to=primary, holds=()))

    def _append(self, rows: list[TensorFacts], facts: TensorFacts) -> None:
        self.all.append(facts)
        rows.append(facts)

    def _state(self, tensor: torch.Tensor, local: torch.Tensor, kind: str, unit: FsdpUnit | None) -> TensorState:
        plain = TensorState(
            kind=kind, wrapper_device=tensor.device, device=local.device, pinned=_pinned(local), dtype=tensor.dtype
        )
        if not isinstance(tensor, DTensor):
            return plain
        return replace(
            plain,
            kind=unit.strategy if unit is not None else "dtensor",
            placements=tuple(tensor.placements),
            mesh=self._mesh(tensor.device_mesh),
            even=_is_even(tensor),
            unit=unit,
        )

    def _mesh(self, mesh: DeviceMesh) -> Mesh:
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = Mesh(
                names=tuple(mesh.mesh_dim_names or ()),
                shape=tuple(mesh.shape),
                device_type=mesh.device_type,
                carries_cpu=_carry_cpu(mesh),
            )
        return self._meshes[id(mesh)]


def _pinned(local: torch.Tensor) -> bool | None:
    return local.is_pinned() if local.is_cpu and local.numel() else None


def _carry_cpu(mesh: DeviceMesh) -> bool | None:
    if not dist.is_initialized():
        return None
    return all(private.carries(mesh.get_group(dim), CPU) for dim in range(mesh.ndim))


def _is_even(tensor: DTensor) -> bool | None:
    """Shards of shards of a dimension are even where it divides by the product of the mesh's dims."""
    parts: dict[int, int] = {}
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # Shard, and the strided one of a model that tensor parallelism sharded first, which is no Shard.
        if (dim := getattr(placement, "dim", None)) is not None:
            parts[dim] = parts.get(dim, 1) * size
    return all(tensor.shape[dim] % count == 0 for dim, count in parts.items()) if parts else None


def _read_flat(model: nn.Module, units: _Units, rows: _Rows) -> set[int]:
    """Adds a row for each FSDP1 unit; the ids of all parameters that are one or views into one."""
    ids: set[int] = set()
    for prefix, handle in fsdp1.units(innermost(model)):
        flat, initialized = private.flat_parameter(handle)
        names, tied = fsdp1.unit_names(prefix, handle)
        unit = units.of_fsdp1(handle, initialized)
        facts = _flat_facts(f"{prefix}flat_param", handle, flat, unit, tuple(names))
        tensors = [flat, *private.registered_originals(handle)]
        rows.add_flat(facts, tied, tensors)
        ids |= {id(tensor) for tensor in tensors}
    return ids


def _flat_facts(name: str, handle: Any, flat: torch.Tensor, unit: FsdpUnit, holds: tuple[str, ...]) -> TensorFacts:
    is_sharded = private.is_sharded(handle)
    # A unit that torch does not shard uses the flat parameter itself; a policy still keeps the CPU's beside it.
    local = private.flat_shard(handle) if is_sharded or unit.policy else flat
    # While it is unsharded, the flat parameter is another tensor than the shard, and rightly elsewhere.
    is_shown = is_sharded and flat.shape == local.shape
    group = private.shard_group(handle)
    state = TensorState(
        kind="fsdp1",
        wrapper_device=flat.device if is_shown else local.device,
        device=local.device,
        pinned=_pinned(local),
        dtype=local.dtype,
        mesh=Mesh(
            names=(),
            shape=(group.size(),),
            device_type=unit.compute_device.type,
            carries_cpu=private.carries(group, CPU),
        ),
        even=True if is_sharded else None,
        unit=unit,
    )
    length = sum(shape.numel() for shape in private.original_shapes(handle))
    return TensorFacts(name, "", (length,), local.shape, state, holds)


def _optimizer_facts(
    optimizer: torch.optim.Optimizer, parameters: dict[int, TensorFacts]
) -> tuple[OptimizerFacts, ...]:
    """State of what is no parameter of the model is left out: an optimizer may have several models."""
    by_home: dict[torch.device, dict[tuple[str, torch.device, bool, bool], list[str]]] = {}
    for parameter, entries in optimizer.state.items():
        if (facts := parameters.get(id(parameter))) is None:
            continue
        alike = by_home.setdefault(facts.state.device, {})
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                local = private.local_part(value)
                key = (entry, local.device, local.is_cpu and local.is_pinned(), not local.dim())
                alike.setdefault(key, []).append(facts.name)
    return tuple(
        OptimizerFacts(entry=entry, device=device, pinned=pinned, home=home, scalar=scalar, names=tuple(names))
        for home, alike in by_home.items()
        for (entry, device, pinned, scalar), names in alike.items()
    )


def _stream_idle(device: torch.device | None) -> bool | None:
    """Asks, and does not wait. Only the current stream of this thread can be asked; there is no list of streams."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    return bool(torch.get_device_module(device.type).current_stream(device).query())
