"""FSDP1. A handle is a unit's ``FlatParamHandle``: there is no public way to a flat parameter's metadata."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from fsdp_doctor.fsdp.private.access import get


def flat_handle(module: nn.Module) -> Any:
    """The handle of an FSDP1 unit that owns parameters, ``FullyShardedDataParallel._handle``; None for any other."""
    return get(module, "_handle") if isinstance(module, FullyShardedDataParallel) else None


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """``FlatParameter``, which torch.distributed.fsdp imports and does not export."""
    return isinstance(tensor, FlatParameter)


def fsdp1_lazy_init(model: FullyShardedDataParallel) -> None:
    """What the first forward does before it computes, and makes the local shards: ``_runtime_utils._lazy_init``."""
    from torch.distributed.fsdp import _runtime_utils

    get(_runtime_utils, "_lazy_init")(model, model)


def flat_parameter(handle: Any) -> nn.Parameter:
    """The unit's flat parameter, in whatever state it is: ``FlatParamHandle.flat_param``."""
    parameter: nn.Parameter = get(handle, "flat_param")
    return parameter


def is_initialized(handle: Any) -> bool:
    """Whether lazy initialization made ``FlatParameter._local_shard``."""
    return hasattr(get(handle, "flat_param"), "_local_shard")


def flat_shard(handle: Any) -> torch.Tensor:
    """This rank's shard as torch's next unshard in full precision reads it: 1-D, as long as every other rank's.

    While the unit is sharded that is ``FlatParameter.data``: ``summon_full_params``, a state dict, and without mixed
    precision the forward gather it. It is other memory than ``FlatParameter._local_shard`` after lazy initialization
    under ``CPUOffload(offload_params=True)``, which pins a copy, and after ``Module.cpu()``. While the unit is
    unsharded it is ``_local_shard``, to which a reshard returns. With ``use_orig_params`` an original parameter that
    was given other memory is first written back (``FlatParamHandle._writeback_orig_params``): then this is a copy.
    """
    shard = _sharded_flat(handle)
    if replaced := _replaced_originals(handle, shard):
        shard = shard.clone()
        with torch.no_grad():
            for original, begin in replaced:
                shard[begin : begin + original.numel()].copy_(original.view(-1))
    return shard


def flat_memories(handle: Any) -> list[torch.Tensor]:
    """Every memory that this rank's shard has now, 1-D: one in ordinary states, two where ``_local_shard`` is another.

    A forward under mixed precision reads ``_local_shard``; everything else reads the first one.
    """
    shard = _sharded_flat(handle)
    local = getattr(get(handle, "flat_param"), "_local_shard", shard).detach()
    return [shard] if is_same_memory(shard, local) else [shard, local]


def attributes_with_weights(handle: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """(every attribute that has this rank's shard, the original parameters' parts of it or None), as they are now.

    For verification, which must not rely on which of them is read: ``FlatParameter.data`` where it is as long as the
    shard, ``_local_shard``, and with ``use_orig_params`` ``_params``, where they are sharded.
    """
    flat_param = get(handle, "flat_param")
    data = flat_param.detach()
    local = getattr(flat_param, "_local_shard", data).detach()
    shards = [data, local] if data.shape == local.shape else [local]
    originals: list[torch.Tensor | None] = []
    for original, part in zip(get(flat_param, "_params") or (), get(flat_param, "_shard_param_infos"), strict=False):
        is_part = part.in_shard and original.numel() == part.numel_in_shard
        originals.append(original.detach().reshape(-1) if is_part else None)
    return shards, originals


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors begin at the same address of the same device."""
    return tensor.device == other.device and tensor.data_ptr() == other.data_ptr()


def unite_memories(handle: Any) -> None:
    """Gives a sharded unit one memory again, with the values that its next unshard would read, as a reshard does.

    Original parameters are written back and made views again. ``_local_shard`` stays another memory where it lies on
    another device: :func:`flat_memories` has both. ``FlatParamHandle._writeback_orig_params``, ``_use_sharded_views``.
    """
    flat_param, shard = get(handle, "flat_param"), _sharded_flat(handle)
    replaced = _replaced_originals(handle, shard)
    if replaced:
        get(handle, "_writeback_orig_params")()
    local = getattr(flat_param, "_local_shard", shard)
    united = not is_same_memory(shard, local) and local.device == shard.device
    if united:
        with torch.no_grad():
            local.detach().copy_(shard)
        flat_param.data = local
    if get(handle, "_use_orig_params") and (replaced or united):
        get(handle, "_use_sharded_views")()


def _sharded_flat(handle: Any) -> torch.Tensor:
    """``FlatParameter.data`` while it is this rank's shard, otherwise ``_local_shard``."""
    flat_param = get(handle, "flat_param")
    data: torch.Tensor = flat_param.detach()
    local: torch.Tensor | None = getattr(flat_param, "_local_shard", None)
    if local is None:
        return data
    # A unit in a shard group of one computes with `_mp_shard`, which is as long as the shard.
    low_precision = getattr(flat_param, "_mp_shard", None)
    is_unsharded = data.shape != local.shape or (low_precision is not None and is_same_memory(data, low_precision))
    return local.detach() if is_unsharded else data


def _shown(handle: Any) -> list[Any]:
    """What the modules have under the names of the original parameters, None where they have nothing."""
    return [getattr(module, name, None) for name, module, _ in get(get(handle, "flat_param"), "_param_infos")]


def _replaced_originals(handle: Any, shard: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """(parameter, where its part of this rank's shard begins) of those that are no views of it.

    With ``use_orig_params``, while the modules have sharded parameters: ``FlatParameter._shard_param_infos``,
    ``FlatParamHandle._skipped_use_sharded_views``.
    """
    flat_param = get(handle, "flat_param")
    if not get(handle, "_use_orig_params") or get(handle, "_skipped_use_sharded_views"):
        return []
    if not is_same_memory(flat_param.detach(), shard):
        return []
    begin_of_shard, size = shard.data_ptr(), shard.element_size()
    replaced: list[tuple[torch.Tensor, int]] = []
    for shown, part in zip(_shown(handle), get(flat_param, "_shard_param_infos"), strict=True):
        if not part.in_shard or not isinstance(shown, nn.Parameter):
            continue
        where = begin_of_shard + part.offset_in_shard * size
        if shown.numel() and (shown.data_ptr() != where or shown.device != shard.device):
            replaced.append((shown, part.offset_in_shard))
    return replaced


def host_gradient(handle: Any) -> torch.Tensor | None:
    """What a unit under ``CPUOffload`` keeps for its gradient, as long as it lives: ``FlatParameter._cpu_grad``."""
    return getattr(get(handle, "flat_param"), "_cpu_grad", None)


def shard_padding(handle: Any) -> int:
    """How many elements at the end of this rank's flat shard are padding: ``_shard_numel_padded``.

    The attribute exists only on a sharded unit.
    """
    return int(getattr(get(handle, "flat_param"), "_shard_numel_padded", 0))


class PlaceInModule(NamedTuple):
    """One place of a unit's parameter: a module, the parameter's name in it, and its name relative to the unit."""

    module: nn.Module
    name: str
    name_in_unit: str


def flat_names(handle: Any) -> list[list[PlaceInModule]]:
    """For each parameter of a unit, in the order of the flat parameter, the places that have it.

    Its own comes first, then those to which it is tied within the unit. ``FlatParameter._param_infos`` and
    ``_shared_param_infos``.
    """
    flat_param = get(handle, "flat_param")
    places = [[_place(module, name, path)] for name, module, path in get(flat_param, "_param_infos")]
    index_of = {(id(place.module), place.name): index for index, (place,) in enumerate(places)}
    for name, module, path, primary_name, primary_module, _ in get(flat_param, "_shared_param_infos"):
        places[index_of[id(primary_module), primary_name]].append(_place(module, name, path))
    return places


def _place(module: nn.Module, name: str, path: str) -> PlaceInModule:
    return PlaceInModule(module, name, f"{path}.{name}" if path else name)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a piece of some unit's flat parameter: ``_common_utils._is_fsdp_flattened``."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def flat_layout(handle: Any) -> list[torch.Tensor]:
    """The unit's parameters, in the order of the names, as views of its whole flat parameter on the meta device.

    The flat parameter keeps each parameter's strides, and with ``use_orig_params`` an alignment gap between two:
    ``FlatParamHandle._get_unflat_views``.
    """
    size = get(handle.flat_param, "_unpadded_unsharded_size").numel()
    flat = torch.empty(size, dtype=handle.flat_param.dtype, device="meta")
    return [view.detach() for view in get(handle, "_get_unflat_views")(flat)]


def original_shapes(handle: Any) -> list[torch.Size]:
    """The unsharded shapes of the unit's parameters, in the order of the names: ``FlatParameter._shapes``."""
    return list(get(handle.flat_param, "_shapes"))


def original_parameters(handle: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(the unit's parameters in the order of the names, those of the tied names); none without ``use_orig_params``.

    ``FlatParameter._params`` and ``_shared_params``, which are None without it.
    """
    flat_param = get(handle, "flat_param")
    return list(get(flat_param, "_params") or ()), list(get(flat_param, "_shared_params") or ())


def module_views(handle: Any) -> list[torch.Tensor]:
    """What the modules have in the place of their parameters, where those are none: ``FlatParameter._param_infos``."""
    places = [(info.module, info.param_name) for info in get(get(handle, "flat_param"), "_param_infos")]
    shown = [vars(module).get(name) for module, name in places]
    return [tensor for tensor in shown if isinstance(tensor, torch.Tensor)]


def keeps_originals(handle: Any) -> bool:
    """Whether the unit was made with ``use_orig_params``: ``FlatParamHandle._use_orig_params``."""
    return bool(get(handle, "_use_orig_params"))


def is_sharded(handle: Any) -> bool:
    """False where torch turned the unit into NO_SHARD, as it does for a shard group of one."""
    return bool(get(handle, "uses_sharded_strategy"))


def shard_group(handle: Any) -> dist.ProcessGroup:
    """The group over which one unit is sharded: ``FlatParamHandle.process_group``."""
    return get(handle, "process_group")  # type: ignore[no-any-return]


def replica_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Under HYBRID_SHARD, the ranks that hold the same shard: ``FullyShardedDataParallel._inter_node_pg``."""
    return getattr(module, "_inter_node_pg", None)


def reshard_flat(handle: Any) -> None:
    """Frees a unit's unsharded parameters, which the root keeps after a forward without a backward.

    As ``_runtime_utils._reshard`` does: ``FlatParamHandle.needs_unshard``, ``.reshard``, ``.post_reshard``, and
    ``_prefetched``, which says that they are there already.
    """
    if is_sharded(handle) and is_initialized(handle) and not get(handle, "needs_unshard")():
        get(handle, "reshard")(True)
        get(handle, "post_reshard")()
        handle._prefetched = False


def is_summoned(handle: Any) -> bool:
    """Whether ``summon_full_params`` will write over the shards when it ends: ``FlatParamHandle._training_state``."""
    return str(get(get(handle, "_training_state"), "name")) == "SUMMON_FULL_PARAMS"


def compute_device(handle: Any) -> torch.device:
    """The device that the unit computes on: ``FlatParamHandle.device``."""
    device: torch.device = get(handle, "device")
    return device


def offloads_parameters(handle: Any) -> bool:
    """Whether the unit is under ``CPUOffload(offload_params=True)``: ``FlatParamHandle._offload_params``."""
    return bool(get(handle, "_offload_params"))


def flat_param_to(handle: Any, device: torch.device, *, non_blocking: bool) -> None:
    """Moves one unit's shard as verl's manual offload does: ``FlatParamHandle.flat_param_to``.

    ``_local_shard`` must follow by hand, or the next unshard would read the old one. A unit under
    ``CPUOffload(offload_params=True)`` stays where torch put it.
    """
    if get(handle, "_offload_params"):
        return
    get(handle, "flat_param_to")(device, non_blocking=non_blocking)
    handle.flat_param._local_shard = handle.flat_param.data
