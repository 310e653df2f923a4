"""Every private name of torch that the project uses, and nothing else.

Each function says for what there is no public API. Read in the source, and run, on the versions
in ``CHECKED``; where a name is gone, :class:`PrivateApiGone` says which and for which torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, OffloadPolicy
from torch.distributed.tensor import DTensor

# On CPU ranks; 2.11.0 on two H200s.
CHECKED = ("2.6.0", "2.7.0", "2.11.0", "2.13.0", "2.15.0")


class PrivateApiGone(RuntimeError):
    """A private name of torch that the doctor relies on does not exist in this version."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}; fsdp-doctor was checked on torch {', '.join(CHECKED)}"
        )


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise PrivateApiGone(f"{type(owner).__name__}.{name}") from None


def fsdp1_units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(module name, FlatParamHandle) of each FSDP1 unit that owns parameters, in module order.

    ``FullyShardedDataParallel._handle``: there is no public way to a flat parameter's metadata.
    """
    seen: set[int] = set()
    for prefix, module in _modules(model):
        if isinstance(module, FullyShardedDataParallel) and id(module) not in seen:
            seen.add(id(module))
            handle = _get(module, "_handle")
            if handle is not None:
                yield prefix.removesuffix("."), handle


def sharded_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """For each parameter that an FSDP2 module shows in place of its shards now, by its id: the sharded one.

    After a forward without a backward the root still shows its parameters unsharded, in the compute
    dtype. ``FSDPModule._get_fsdp_state``, ``FSDPState._fsdp_param_group`` (``_fsdp_param_groups`` in newer
    versions), ``FSDPParam.sharded_param``: there is no public way to the masters while they are not shown.
    """
    found: dict[int, nn.Parameter] = {}
    # One list of modules given to fully_shard has one state.
    states = {id(state): state for _, module in _modules(model) if (state := _fsdp2_state(module)) is not None}
    for group in (group for state in states.values() for group in _fsdp2_groups(state)):
        for parameter in group.fsdp_params:
            for shown in ("_unsharded_param", "_sharded_post_forward_param"):
                if (other := getattr(parameter, shown, None)) is not None:
                    found[id(other)] = _get(parameter, "sharded_param")
    return found


def _fsdp2_state(module: nn.Module) -> Any:
    return _get(module, "_get_fsdp_state")() if isinstance(module, FSDPModule) else None


def _fsdp2_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [_get(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def fsdp2_unit(state: Any) -> tuple[torch.device, OffloadPolicy, bool] | None:
    """(compute device, offload policy, whether lazily initialized) of one FSDP2 module; None if it owns no parameter.

    ``state`` is its ``FSDPState``. ``FSDPParamGroup.device``, ``.offload_policy``, ``FSDPState._is_root``, which is
    None until the first forward: no public name says under which policy a module was sharded.
    """
    for group in _fsdp2_groups(state):
        return _get(group, "device"), _get(group, "offload_policy"), _get(state, "_is_root") is not None
    return None


def tensors_of_modules(model: nn.Module) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """(prefix of its names, FSDPState, its own parameters, its own buffers) of every module, under every name.

    The state is that of the innermost FSDP2 module that it is or lies in, None outside of any; a name may have
    None for a tensor. ``Module._parameters``, ``_buffers``, ``_modules``: as :func:`_modules`.
    """
    waiting: list[tuple[str, nn.Module, Any]] = [("", model, None)]
    while waiting:
        prefix, module, state = waiting.pop()
        state = _fsdp2_state(module) or state
        yield prefix, state, _get(module, "_parameters"), _get(module, "_buffers")
        children = [(f"{prefix}{name}.", m, state) for name, m in _get(module, "_modules").items() if m is not None]
        waiting += reversed(children)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a DTensor wraps, itself; any other tensor is its own: ``DTensor._local_tensor``.

    The public ``to_local()`` makes a view of a parameter's in newer versions, which costs 3 us.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of its names, module) of every module, under every name, in the order of ``named_modules``.

    ``Module._modules``: the public walk is a generator in a generator for each level, and extraction walks a
    model of tens of thousands of modules each time.
    """
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        yield prefix, module
        children = [(f"{prefix}{name}.", m) for name, m in _get(module, "_modules").items() if m is not None]
        waiting += reversed(children)


def fsdp1_lazy_init(model: FullyShardedDataParallel) -> None:
    """What the first forward does before it computes: ``_runtime_utils._lazy_init``.

    verl calls it before a manual offload; the local shards do not exist before it.
    """
    from torch.distributed.fsdp import _runtime_utils

    _get(_runtime_utils, "_lazy_init")(model, model)


def flat_shard(handle: Any) -> torch.Tensor:
    """This rank's shard of the flat parameter, 1-D, padded to the same length on every rank.

    ``FlatParameter._local_shard`` once lazy initialization made it, ``.data`` before that.
    """
    flat_param = _get(handle, "flat_param")
    shard: torch.Tensor = getattr(flat_param, "_local_shard", flat_param.data)
    return shard.detach()


def flat_parameter(handle: Any) -> tuple[torch.Tensor, bool]:
    """(the unit's flat parameter as it is registered, whether lazily initialized): ``FlatParamHandle.flat_param``."""
    flat_param = _get(handle, "flat_param")
    return flat_param, hasattr(flat_param, "_local_shard")


def offloads_parameters(handle: Any) -> bool:
    """Whether the unit is under ``CPUOffload(offload_params=True)``: ``FlatParamHandle._offload_params``."""
    return bool(_get(handle, "_offload_params"))


def shard_padding(handle: Any) -> int:
    """How many elements at the end of this rank's flat shard are padding: ``_shard_numel_padded``.

    The attribute exists only on a sharded unit.
    """
    return int(getattr(_get(handle, "flat_param"), "_shard_numel_padded", 0))


def flat_names(handle: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """(parameter names, [(name of a tied parameter, the name that it is tied to)]) of one unit.

    Names are relative to the unit: ``FlatParameter._fqns`` and ``_shared_param_infos``.
    """
    flat_param = _get(handle, "flat_param")
    tied = [
        (_join(module_name, name), _join(primary_module_name, primary_name))
        for name, _, module_name, primary_name, _, primary_module_name in _get(flat_param, "_shared_param_infos")
    ]
    return list(_get(flat_param, "_fqns")), tied


def unflatten(handle: Any, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of the unit's parameters into its whole flat parameter, in the order of the names.

    ``flat``: the rank's shards joined in rank order, 1-D, padding at the end allowed. The flat
    parameter keeps each parameter's strides, and with ``use_orig_params`` an alignment gap
    between two: ``FlatParamHandle._get_unflat_views``.
    """
    size = _get(handle.flat_param, "_unpadded_unsharded_size").numel()
    return [view.detach() for view in _get(handle, "_get_unflat_views")(flat[:size])]


def flat_layout(handle: Any) -> list[torch.Tensor]:
    """The unit's parameters, in the order of the names, as views of a flat parameter on the meta device."""
    size = _get(handle.flat_param, "_unpadded_unsharded_size").numel()
    flat = torch.empty(size, dtype=handle.flat_param.dtype, device="meta")
    return [view.detach() for view in _get(handle, "_get_unflat_views")(flat)]


def flat_param_to(handle: Any, device: torch.device, *, non_blocking: bool) -> None:
    """Moves one unit's shard as verl's manual offload does: ``FlatParamHandle.flat_param_to``.

    ``_local_shard`` must follow by hand, or the next unshard would read the old one. A unit under
    ``CPUOffload(offload_params=True)`` stays where torch put it.
    """
    if _get(handle, "_offload_params"):
        return
    _get(handle, "flat_param_to")(device, non_blocking=non_blocking)
    handle.flat_param._local_shard = handle.flat_param.data


def shard_group(handle: Any) -> dist.ProcessGroup:
    """The group over which one unit is sharded: ``FlatParamHandle.process_group``."""
    group: dist.ProcessGroup = _get(handle, "process_group")
    return group


def keeps_originals(handle: Any) -> bool:
    """Whether the unit was made with ``use_orig_params``: ``FlatParamHandle._use_orig_params``."""
    return bool(_get(handle, "_use_orig_params"))


def original_parameters(handle: Any) -> list[nn.Parameter]:
    """With ``use_orig_params``, the unit's own parameters: ``FlatParameter._params``."""
    parameters: list[nn.Parameter] = _get(handle.flat_param, "_params")
    return parameters


def registered_originals(handle: Any) -> list[nn.Parameter]:
    """The unit's parameters as its modules have them, tied ones too; none without ``use_orig_params``.

    ``FlatParameter._params`` and ``_shared_params``, which are None without it.
    """
    flat_param = _get(handle, "flat_param")
    return [*(_get(flat_param, "_params") or ()), *(_get(flat_param, "_shared_params") or ())]


def original_shapes(handle: Any) -> list[torch.Size]:
    """The unsharded shapes of the unit's parameters, in the order of the names: ``FlatParameter._shapes``."""
    return list(_get(handle.flat_param, "_shapes"))


def is_sharded(handle: Any) -> bool:
    """False where torch turned the unit into NO_SHARD, as it does for a shard group of one."""
    return bool(_get(handle, "uses_sharded_strategy"))


def compute_device(handle: Any) -> torch.device:
    """The device that the unit computes on: ``FlatParamHandle.device``."""
    device: torch.device = _get(handle, "device")
    return device


def parameters_and_buffers(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, torch.Tensor]]]:
    """([(name, parameter)], [(name, buffer)]) of all that a state dict has, under every name, in its order.

    ``Module._non_persistent_buffers_set``: only ``state_dict()`` tells the buffers apart in public, and that
    is a path under test. ``Module._parameters``, ``_buffers``: as :func:`_modules`.
    """
    parameters: list[tuple[str, nn.Parameter]] = []
    buffers: list[tuple[str, torch.Tensor]] = []
    for prefix, module in _modules(model):
        transient = _get(module, "_non_persistent_buffers_set")
        parameters += [(prefix + name, p) for name, p in _get(module, "_parameters").items() if p is not None]
        buffers += [
            (prefix + name, buffer)
            for name, buffer in _get(module, "_buffers").items()
            if buffer is not None and name not in transient
        ]
    return parameters, buffers


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on the device: ``ProcessGroup._device_types``."""
    return any(kind.type == device.type for kind in _get(group, "_device_types"))


def release_workspaces(device: torch.device) -> None:
    """Gives back what cuBLAS keeps for each stream that has multiplied.

    ``torch._C._cuda_clearCublasWorkspaces``: there is no public name. The next product takes it anew. Without
    it, or on another device, nothing is given back.
    """
    if device.type == "cuda":
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def default_store() -> dist.Store:
    """The store that the default process group was made with: ``distributed_c10d._get_default_store``."""
    from torch.distributed import distributed_c10d

    store: dist.Store = _get(distributed_c10d, "_get_default_store")()
    return store


def all_gather(group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
    """One coalesced all-gather of several tensors; an input may be its rank's part of the output.

    ``ProcessGroup.allgather_into_tensor_coalesced``, which torch 2.13 deprecates for
    ``all_gather_single_coalesced``: in public there are only all-gathers of one tensor.
    """
    gather = getattr(group, "all_gather_single_coalesced", None) or _get(group, "allgather_into_tensor_coalesced")
    work: dist.Work = gather(outputs, inputs)
    return work
