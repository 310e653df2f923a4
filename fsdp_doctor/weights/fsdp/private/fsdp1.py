"""FSDP1: every use of a unit's ``FlatParamHandle``, since no public name gives a flat parameter's metadata."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from fsdp_doctor.weights.fsdp.private import GradientSwitches, OpenStep, get


@dataclass(frozen=True)
class FlatSlice:
    """Place of one parameter in a unit's flat parameter: ``flat.as_strided(shape, stride, offset)``."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Fsdp1Unit:
    """FSDP1 module that owns parameters, all of them in one flat parameter.

    prefix: the prefix of the unit's names, empty or ending with a dot.
    names: all names of each parameter, in the order of the flat parameter; tied names come last.
    shown: the parameters that the modules have now, by each name; empty without ``use_orig_params``, unless the unit is
        unsharded.
    forms: descriptions of parameters that hold codes of a quantization, by first name, see the module ``forms``.
    """

    prefix: str
    names: tuple[tuple[str, ...], ...]
    shown: dict[str, torch.Tensor]
    module: nn.Module
    _handle: Any
    forms: dict[str, str] = field(default_factory=dict)

    @property
    def flat_name(self) -> str:
        """Name under which FSDP1 registers the flat parameter."""
        return f"{self.prefix}_flat_param"

    @property
    def flat_parameter(self) -> nn.Parameter:
        """Flat parameter: this rank's shard, or the whole parameter while unsharded. Private:
        ``FlatParamHandle.flat_param``.
        """
        parameter: nn.Parameter = get(self._handle, "flat_param")
        return parameter

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, see :func:`read_flat_shard`. Its last ``padding`` elements belong to no parameter."""
        return read_flat_shard(self._handle)

    @property
    def memories(self) -> list[torch.Tensor]:
        """1-D tensors in whose memory this rank's shard is now: usually one; two if ``_local_shard`` has other memory.

        A forward under mixed precision reads ``_local_shard``; all other code reads the first of the two.
        """
        shard = _find_sharded_flat(self._handle)
        local = getattr(self.flat_parameter, "_local_shard", shard).detach()
        return [shard] if _is_same_memory(shard, local) else [shard, local]

    @property
    def attributes_with_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Pair (shards, parts): the tensors that hold this rank's shard now, and each original parameter's part of it,
        or None.

        A verification uses all of them, because it must not assume which attribute torch reads. Private: with
        ``use_orig_params`` the sharded ``FlatParameter._params``.
        """
        flat_param = self.flat_parameter
        parts: list[torch.Tensor | None] = []
        for original, info in zip(
            get(flat_param, "_params") or (), get(flat_param, "_shard_param_infos"), strict=False
        ):
            is_part = info.in_shard and original.numel() == info.numel_in_shard
            parts.append(original.detach().reshape(-1) if is_part else None)
        return self.memories, parts

    @property
    def has_lost_shard(self) -> bool:
        """True if the unit has lost this rank's shard, because other data has taken the shard's place.

        The shard then has another length than the unit's shards (``FlatParameter._sharded_size``) or, in a shard group
        of one and within a step, another dtype than the parameters (``FlatParamHandle._orig_param_dtype``).

        A manual offload stores the flat parameter as the local shard. If the unit is unsharded at that time, the
        shard's place is taken by the whole flat parameter or, in a shard group of one, by the cast copy with which the
        unit computes.
        """
        shard = self.shard
        if not self.is_sharded:
            return self.open_step is not None and shard.dtype != get(self._handle, "_orig_param_dtype")
        return not shard.is_meta and shard.numel() != get(self.flat_parameter, "_sharded_size").numel()

    @property
    def is_recast(self) -> bool:
        """True if the unit was cast after lazy initialization; a cast leaves the local shard in the earlier dtype."""
        return len({memory.dtype for memory in self.memories}) > 1

    def unite_memories(self) -> None:
        """Makes a sharded unit's flat parameter, local shard and original parameters share memory again, as a reshard
        does.

        The memory has the values that the next unshard would read. ``_local_shard`` stays separate if it is on another
        device. Private: ``FlatParamHandle._writeback_orig_params``, ``_use_sharded_views``.
        """
        handle = self._handle
        flat_param, shard = self.flat_parameter, _find_sharded_flat(handle)
        replaced = _find_replaced_originals(handle, shard)
        if replaced:
            get(handle, "_writeback_orig_params")()
        local = getattr(flat_param, "_local_shard", shard)
        is_copied = not _is_same_memory(shard, local) and local.device == shard.device
        if is_copied:
            with torch.no_grad():
                local.detach().copy_(shard)
            flat_param.data = local
        if self.keeps_originals and (replaced or is_copied):
            get(handle, "_use_sharded_views")()

    @property
    def host_gradient(self) -> torch.Tensor | None:
        """Pinned memory, as large as the shard, in which a unit under CPUOffload keeps its gradient; None without it.

        Private: ``_cpu_grad``.
        """
        return getattr(self.flat_parameter, "_cpu_grad", None)

    @property
    def padding(self) -> int:
        """Number of padding elements at the end of this rank's shard.

        Private: ``_shard_numel_padded``, which only sharded units have.
        """
        return int(getattr(self.flat_parameter, "_shard_numel_padded", 0))

    @property
    def is_initialized(self) -> bool:
        """True if lazy initialization, at the first forward, has made ``FlatParameter._local_shard``."""
        return hasattr(self.flat_parameter, "_local_shard")

    @property
    def is_sharded(self) -> bool:
        """True if the unit is sharded; False if torch uses NO_SHARD, as it does in a shard group of one rank.

        Private: ``FlatParamHandle.uses_sharded_strategy``; the module's ``sharding_strategy`` is not documented either.
        """
        return bool(get(self._handle, "uses_sharded_strategy"))

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group over which the unit is sharded. Private: ``FlatParamHandle.process_group``."""
        return get(self._handle, "process_group")  # type: ignore[no-any-return]

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks with the same shard under HYBRID_SHARD; None under other strategies.

        Private: ``_inter_node_pg`` of the module.
        """
        return getattr(self.module, "_inter_node_pg", None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a shard of the unit, replicas included.

        Private: ``FullyShardedDataParallel._device_mesh``. Under HYBRID_SHARD without a mesh, each rank's two groups
        are a row and a column of a grid.
        """
        if self.replica_group is None:
            return tuple(dist.get_process_group_ranks(self.group))
        if (mesh := getattr(self.module, "_device_mesh", None)) is not None:
            return tuple(mesh.mesh.flatten().tolist())
        row, column = map(dist.get_process_group_ranks, (self.group, self.replica_group))
        return tuple(sorted({rank + other - dist.get_rank() for rank in row for other in column}))

    @property
    def switches(self) -> GradientSwitches:
        """Settings of the gradient reduction.

        Private: ``_sync_gradients`` of the module, which is False during ``no_sync()``.
        """
        return GradientSwitches(synchronizes=get(self.module, "_sync_gradients"))

    @property
    def is_summoned(self) -> bool:
        """True if the unit is in ``summon_full_params``, which will write over the shards at its end.

        Private: ``FlatParamHandle._training_state``.
        """
        return str(get(get(self._handle, "_training_state"), "name")) == "SUMMON_FULL_PARAMS"

    @property
    def open_step(self) -> OpenStep | None:
        """Part of a training step that has begun and has not ended, for example because it raised; None between steps.

        Private: ``FlatParamHandle._training_state``.
        """
        stage = str(get(get(self._handle, "_training_state"), "name"))
        if stage in ("BACKWARD_PRE", "BACKWARD_POST"):
            return "backward"
        return "forward" if stage == "FORWARD" else None

    @property
    def is_unsharded(self) -> bool:
        """True if the unit has its parameters unsharded now. Private: ``FlatParamHandle.needs_unshard``."""
        return self.is_sharded and self.is_initialized and not get(self._handle, "needs_unshard")()

    def reshard(self) -> None:
        """Frees the unsharded parameters, which the root keeps after a forward without a backward.

        A unit in a shard group of one has nothing to free, but may show the copy with which it computes. The steps are
        those of ``_runtime_utils._reshard``. Private: ``FlatParamHandle.reshard``, ``.post_reshard``, and
        ``_prefetched``, which marks the parameters as already gathered.
        """
        handle = self._handle
        if self.is_unsharded or _shows_low_precision(self.flat_parameter):
            get(handle, "reshard")(self.is_sharded)
            get(handle, "post_reshard")()
            handle._prefetched = False

    @property
    def compute_device(self) -> torch.device:
        """Device on which the unit computes. Private: ``FlatParamHandle.device``."""
        device: torch.device = get(self._handle, "device")
        return device

    @property
    def offloads(self) -> bool:
        """True if the unit is under ``CPUOffload(offload_params=True)``.

        Private: ``FlatParamHandle._offload_params``.
        """
        return bool(get(self._handle, "_offload_params"))

    @property
    def keeps_originals(self) -> bool:
        """True under ``use_orig_params``, where the optimizer has the original parameters and not the flat parameter.

        Private: ``FlatParamHandle._use_orig_params``.
        """
        return bool(get(self._handle, "_use_orig_params"))

    @property
    def originals(self) -> list[nn.Parameter]:
        """This rank's parts of the original parameters, which an optimizer has, in the order of the names.

        Empty without ``use_orig_params``. Private: ``FlatParameter._params``.
        """
        return list(get(self.flat_parameter, "_params") or ())

    @property
    def optimized(self) -> list[nn.Parameter]:
        """Parameters that an optimizer may have, including tied ones. Private: ``FlatParameter._shared_params``."""
        return [self.flat_parameter, *self.originals, *(get(self.flat_parameter, "_shared_params") or ())]

    @property
    def views(self) -> list[torch.Tensor]:
        """Views of the flat parameter that were made at its last use.

        Without ``use_orig_params``, these are the modules' present tensors (``FlatParameter._param_infos``). With
        ``use_orig_params``, these are the tensors that a forward keeps for its backward, until the next forward
        (``FlatParameter._tensors``).
        """
        if self.keeps_originals:
            return [tensor for tensor in get(self.flat_parameter, "_tensors") or () if tensor is not None]
        places = [(info.module, info.param_name) for info in get(self.flat_parameter, "_param_infos")]
        shown = [vars(module).get(name) for module, name in places]
        return [tensor for tensor in shown if isinstance(tensor, torch.Tensor)]

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the unsharded parameters, in the order of the names. Private: ``FlatParameter._shapes``."""
        return list(get(self.flat_parameter, "_shapes"))

    def read_layout(self) -> list[FlatSlice]:
        """Reads the place of each parameter in the flat parameter, in the order of the names.

        The flat parameter keeps each parameter's strides and, with ``use_orig_params``, has alignment gaps. Private:
        ``FlatParamHandle._get_unflat_views``, called for a flat parameter on the meta device.
        """
        flat_param = self.flat_parameter
        size = get(flat_param, "_unpadded_unsharded_size").numel()
        views = get(self._handle, "_get_unflat_views")(torch.empty(size, dtype=flat_param.dtype, device="meta"))
        return [FlatSlice(view.shape, view.stride(), int(view.storage_offset())) for view in views]

    def move_to(self, device: torch.device, *, non_blocking: bool) -> None:
        """Moves the shard as verl's manual offload does, with ``FlatParamHandle.flat_param_to``.

        ``_local_shard`` is set by hand, since the next unshard would otherwise read the old memory. A unit under
        ``CPUOffload(offload_params=True)`` is not moved.
        """
        if not self.offloads:
            get(self._handle, "flat_param_to")(device, non_blocking=non_blocking)
            self._handle.flat_param._local_shard = self._handle.flat_param.data


def close_forward(model: nn.Module) -> None:
    """Resets the FSDP1 units of a model to the idle state between two steps, after a forward that raised.

    The hook that reduces a unit's gradient stays registered after such a forward, so the next forward would register no
    new hook. Under an offload, the flat parameter moves for each forward, and autograd drops the old hook: the next
    step would use the previous step's gradient. Private: ``FlatParameter._post_backward_hook_state``, and
    ``_post_backward_hook_handle`` if the forward was compiled.
    """
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        module.training_state = type(get(module, "training_state")).IDLE
        if (handle := find_flat_handle(module)) is not None:
            handle._training_state = type(get(handle, "_training_state")).IDLE
            attributes = vars(get(handle, "flat_param"))
            if (state := attributes.pop("_post_backward_hook_state", None)) is not None:
                state[-1].remove()
            if (hook := attributes.pop("_post_backward_hook_handle", None)) is not None:
                hook.remove()


def find_flat_handle(module: nn.Module) -> Any:
    """Returns the handle of an FSDP1 unit that owns parameters; None for any other module.

    Private: ``FullyShardedDataParallel._handle``.
    """
    return get(module, "_handle") if isinstance(module, FullyShardedDataParallel) else None


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a ``FlatParameter``, which torch.distributed.fsdp imports and does not export."""
    return isinstance(tensor, FlatParameter)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter is a piece of a unit's flat parameter.

    Private: ``_common_utils._is_fsdp_flattened``.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


def read_plan_facts(handle: Any) -> Any:
    """Reads the facts about a unit on which an extraction's plan depends.

    Private: ``FlatParamHandle.uses_sharded_strategy``, ``.process_group``.
    """
    shard = read_flat_shard(handle)
    is_sharded, group = get(handle, "uses_sharded_strategy"), get(handle, "process_group")
    return weakref.ref(handle), is_sharded, group, shard.shape, shard.dtype, shard.device


def read_flat_shard(handle: Any) -> torch.Tensor:
    """Reads this rank's shard as torch's next unshard in full precision would read it: 1-D, of the same length on each
    rank.

    While the unit is sharded, the result is ``FlatParameter.data``. This memory is gathered by ``summon_full_params``,
    by a state dict and, without mixed precision, by the forward. After lazy initialization under
    ``CPUOffload(offload_params=True)``, which pins a copy, and after ``Module.cpu()``, the result is not in the memory
    of ``FlatParameter._local_shard``. While the unit is unsharded, the result is ``_local_shard``, to which a reshard
    returns. With ``use_orig_params``, an original parameter that was given other memory is first written back
    (``FlatParamHandle._writeback_orig_params``); in this case the result is a copy.
    """
    shard = _find_sharded_flat(handle)
    if replaced := _find_replaced_originals(handle, shard):
        shard = shard.clone()
        with torch.no_grad():
            for original, begin in replaced:
                shard[begin : begin + original.numel()].copy_(original.view(-1))
    return shard


def _is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors begin at the same address of the same device."""
    return tensor.device == other.device and tensor.data_ptr() == other.data_ptr()


def _find_sharded_flat(handle: Any) -> torch.Tensor:
    """Returns ``FlatParameter.data`` if it is this rank's shard now, otherwise ``_local_shard``."""
    flat_param = get(handle, "flat_param")
    data: torch.Tensor = flat_param.detach()
    local: torch.Tensor | None = getattr(flat_param, "_local_shard", None)
    if local is None:
        return data
    return local.detach() if data.shape != local.shape or _shows_low_precision(flat_param) else data


def _shows_low_precision(flat_param: nn.Parameter) -> bool:
    """Returns whether the data of a flat parameter is the cast copy of the shard, ``_mp_shard``.

    A unit in a shard group of one computes with this copy, which is as long as the shard.
    """
    low_precision = getattr(flat_param, "_mp_shard", None)
    return low_precision is not None and _is_same_memory(flat_param.detach(), low_precision)


def _find_replaced_originals(handle: Any, shard: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Lists (parameter, begin of its part of the shard) for each original parameter that is not a view of the shard.

    Empty without ``use_orig_params``, and while the modules do not have sharded parameters. Private:
    ``FlatParameter._param_infos``, ``_shard_param_infos``, ``FlatParamHandle._skipped_use_sharded_views``.
    """
    flat_param = get(handle, "flat_param")
    if not get(handle, "_use_orig_params") or get(handle, "_skipped_use_sharded_views"):
        return []
    if not _is_same_memory(flat_param.detach(), shard):
        return []
    shown = [getattr(module, name, None) for name, module, _ in get(flat_param, "_param_infos")]
    begin_of_shard, size = shard.data_ptr(), shard.element_size()
    replaced: list[tuple[torch.Tensor, int]] = []
    for parameter, info in zip(shown, get(flat_param, "_shard_param_infos"), strict=True):
        if not info.in_shard or not isinstance(parameter, nn.Parameter):
            continue
        address = begin_of_shard + info.offset_in_shard * size
        if parameter.numel() and (parameter.data_ptr() != address or parameter.device != shard.device):
            replaced.append((parameter, info.offset_in_shard))
    return replaced


class PlaceInModule(NamedTuple):
    """Place of a unit's parameter: a module, the parameter's name in it, and the name relative to the unit."""

    module: nn.Module
    name: str
    name_in_unit: str


def list_flat_names(handle: Any) -> list[list[PlaceInModule]]:
    """Lists, for each parameter of a unit, the attributes of modules that hold it, in the order of the flat parameter.

    The first entry of each list holds the parameter; the other entries are tied to it within the unit. Private:
    ``FlatParameter._param_infos`` and ``_shared_param_infos``.
    """
    flat_param = get(handle, "flat_param")
    places = [[_make_place(module, name, path)] for name, module, path in get(flat_param, "_param_infos")]
    index_of = {(id(place.module), place.name): index for index, (place,) in enumerate(places)}
    for name, module, path, primary_name, primary_module, _ in get(flat_param, "_shared_param_infos"):
        places[index_of[id(primary_module), primary_name]].append(_make_place(module, name, path))
    return places


def _make_place(module: nn.Module, name: str, path: str) -> PlaceInModule:
    return PlaceInModule(module, name, f"{path}.{name}" if path else name)
