"""FSDP1. A handle is a unit's ``FlatParamHandle``: there is no public way to a flat parameter's metadata."""

from __future__ import annotations

from typing import Any

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
    """This rank's shard of the flat parameter, 1-D, padded to the same length on every rank.

    ``FlatParameter._local_shard`` once lazy initialization made it, ``.data`` before that.
    """
    flat_param = get(handle, "flat_param")
    shard: torch.Tensor = getattr(flat_param, "_local_shard", flat_param.data)
    return shard.detach()


def host_gradient(handle: Any) -> torch.Tensor | None:
    """What a unit under ``CPUOffload`` keeps for its gradient, as long as it lives: ``FlatParameter._cpu_grad``."""
    return getattr(get(handle, "flat_param"), "_cpu_grad", None)


def shard_padding(handle: Any) -> int:
    """How many elements at the end of this rank's flat shard are padding: ``_shard_numel_padded``.

    The attribute exists only on a sharded unit.
    """
    return int(getattr(get(handle, "flat_param"), "_shard_numel_padded", 0))


def flat_names(handle: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """(parameter names, [(name of a tied parameter, the name that it is tied to)]) of one unit.

    Names are relative to the unit: ``FlatParameter._fqns`` and ``_shared_param_infos``.
    """
    flat_param = get(handle, "flat_param")
    tied = [
        (_join(module_name, name), _join(primary_module_name, primary_name))
        for name, _, module_name, primary_name, _, primary_module_name in get(flat_param, "_shared_param_infos")
    ]
    return list(get(flat_param, "_fqns")), tied


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


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
