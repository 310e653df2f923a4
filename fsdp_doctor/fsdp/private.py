"""Every private name of torch that the project uses, and nothing else.

Each function says for what there is no public API. Read in the source, and run, on the versions
in ``CHECKED``; where a name is gone, :class:`PrivateApiGone` says which and for which torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Shard, placement_types

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


WRAPPER_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile put into the names of what they wrap.

``FSDP_WRAPPED_MODULE`` and ``_CHECKPOINT_WRAPPED_MODULE`` stand in private modules, ``_orig_mod`` in none.
"""


# The modules of a model.


@dataclass(slots=True, eq=False)
class OwnTensors:
    """One module under one name, and what it owns itself; a name may have None for a tensor.

    fsdp2_state: the FSDPState of the innermost FSDP2 module that it is or lies in, None outside of any.
    """

    prefix: str
    module: nn.Module
    fsdp2_state: Any
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]


def own_tensors(model: nn.Module) -> list[OwnTensors]:
    """Every module, under every name, in the order of ``named_modules``.

    ``Module._modules``, ``_parameters``, ``_buffers``: the public walk is a generator in a generator for each level,
    and a model of tens of thousands of modules is read for each extraction. ``_non_persistent_buffers_set``: only
    ``state_dict()`` tells the buffers apart in public, and that is a path under test.
    """
    found: list[OwnTensors] = []
    waiting: list[tuple[str, nn.Module, Any]] = [("", model, None)]
    while waiting:
        prefix, module, state = waiting.pop()
        if isinstance(module, FSDPModule):
            state = _get(module, "_get_fsdp_state")()
        own = _get(module, "_parameters"), _get(module, "_buffers"), _get(module, "_non_persistent_buffers_set")
        found.append(OwnTensors(prefix, module, state, *own))
        children = [(f"{prefix}{name}.", m, state) for name, m in _get(module, "_modules").items() if m is not None]
        waiting += reversed(children)
    return found


def modules_and_tensors(model: nn.Module) -> tuple[list[nn.Module], list[Any], list[torch.Tensor | None]]:
    """Every module, what it names in which order, and every tensor that it has: as above, with as little as can be."""
    modules: list[nn.Module] = [model]
    names: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        own = module.__dict__
        if children := own["_modules"]:
            names.append((*children,))
            modules += [child for child in children.values() if child is not None]
        if parameters := own["_parameters"]:
            names.append((*parameters, len(modules)))
            tensors += parameters.values()
        if buffers := own["_buffers"]:
            names.append((*buffers, len(modules), *own["_non_persistent_buffers_set"]))
            tensors += buffers.values()
    return modules, names, tensors


def compiled_module(model: nn.Module) -> nn.Module | None:
    """The module inside of what ``torch.compile`` made of it: ``OptimizedModule._orig_mod``. None for any other."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


# DTensors.


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as it lies, half-moved or not; a plain tensor is its own: ``DTensor._local_tensor``.

    No copy, no collective. The public ``to_local()`` makes a view of a parameter's in newer versions, which costs 3 us.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placed_as(tensor: DTensor) -> Any:
    """Mesh, placements, and the shape, strides and dtype of the whole: ``DTensor._spec``, in public one by one."""
    return tensor._spec


def num_interleaved(placement: Placement) -> int | None:
    """Into how many stretches a dim is cut before each is sharded; None for what shards no dim.

    1 for ``Shard``. ``_StridedShard.split_factor``: what ``fully_shard`` makes of a dim that tensor parallelism
    sharded first has no public name, and is a Shard in older versions only.
    """
    if isinstance(placement, getattr(placement_types, "_StridedShard", ())):
        return int(_get(placement, "split_factor"))
    return 1 if isinstance(placement, Shard) else None


# FSDP2.


def unsharded_parameters(state: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """(what an FSDP2 module shows now or showed last in place of its shard, the sharded parameter).

    After a forward without a backward the root still shows its parameters unsharded, in the compute dtype.
    ``state``: its ``FSDPState``. ``_fsdp_param_group`` (``_fsdp_param_groups`` in newer versions),
    ``FSDPParam.sharded_param``: there is no public way to the masters while they are not shown.
    """
    for group in _fsdp2_groups(state):
        for parameter in group.fsdp_params:
            for shown in ("_unsharded_param", "_sharded_post_forward_param"):
                if (other := getattr(parameter, shown, None)) is not None:
                    yield other, _get(parameter, "sharded_param")


def _fsdp2_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [_get(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def fsdp2_unit(state: Any) -> tuple[torch.device, OffloadPolicy, bool] | None:
    """(compute device, offload policy, whether lazily initialized) of one FSDP2 module; None if it owns no parameter.

    ``state``: its ``FSDPState``. ``FSDPParamGroup.device``, ``.offload_policy``, ``FSDPState._is_root``, which is
    None until the first forward: no public name says under which policy a module was sharded.
    """
    for group in _fsdp2_groups(state):
        return _get(group, "device"), _get(group, "offload_policy"), _get(state, "_is_root") is not None
    return None


def follow_materialized(state: Any, parameter: nn.Parameter) -> None:
    """Makes an FSDP2 module use the memory that one of its sharded parameters has been given.

    ``state``: its ``FSDPState``. ``FSDPParam.reset_sharded_param``: ``Module.to_empty``, through which torch calls
    it, empties the whole model. It also pads and pins, so a parameter's local tensor may be another one after it.
    """
    for group in _fsdp2_groups(state):
        for held in group.fsdp_params:
            if _get(held, "sharded_param") is parameter:
                _get(held, "reset_sharded_param")()


def placement_on(mesh: DeviceMesh) -> Any:
    """``ShardPlacementResult`` of a parameter with a mesh of its own; it and ``FSDPMeshInfo`` have no public names."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return _get(_fsdp_common, "ShardPlacementResult")(None, _get(_fsdp_common, "FSDPMeshInfo")(mesh, shard_mesh_dim=0))


def has_placements_on_meshes() -> bool:
    """Whether there is a ``ShardPlacementResult``: in torch 2.12 and newer, as is ``replicate`` in its present form."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def replicate(module: nn.Module, **options: Any) -> Any:
    """``replicate`` on FSDP2's code: the public function of that name is DDP's."""
    from torch.distributed._composable import replicate_with_fsdp

    return _get(replicate_with_fsdp, "replicate")(module, **options)


# FSDP1. A handle is a unit's ``FlatParamHandle``: there is no public way to a flat parameter's metadata.


def flat_handle(module: nn.Module) -> Any:
    """The handle of an FSDP1 unit that owns parameters, ``FullyShardedDataParallel._handle``; None for any other."""
    return _get(module, "_handle") if isinstance(module, FullyShardedDataParallel) else None


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """``FlatParameter``, which torch.distributed.fsdp imports and does not export."""
    return isinstance(tensor, FlatParameter)


def fsdp1_lazy_init(model: FullyShardedDataParallel) -> None:
    """What the first forward does before it computes, and makes the local shards: ``_runtime_utils._lazy_init``."""
    from torch.distributed.fsdp import _runtime_utils

    _get(_runtime_utils, "_lazy_init")(model, model)


def flat_parameter(handle: Any) -> nn.Parameter:
    """The unit's flat parameter, in whatever state it is: ``FlatParamHandle.flat_param``."""
    parameter: nn.Parameter = _get(handle, "flat_param")
    return parameter


def is_initialized(handle: Any) -> bool:
    """Whether lazy initialization made ``FlatParameter._local_shard``."""
    return hasattr(_get(handle, "flat_param"), "_local_shard")


def flat_shard(handle: Any) -> torch.Tensor:
    """This rank's shard of the flat parameter, 1-D, padded to the same length on every rank.

    ``FlatParameter._local_shard`` once lazy initialization made it, ``.data`` before that.
    """
    flat_param = _get(handle, "flat_param")
    shard: torch.Tensor = getattr(flat_param, "_local_shard", flat_param.data)
    return shard.detach()


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


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def flat_layout(handle: Any) -> list[torch.Tensor]:
    """The unit's parameters, in the order of the names, as views of its whole flat parameter on the meta device.

    The flat parameter keeps each parameter's strides, and with ``use_orig_params`` an alignment gap between two:
    ``FlatParamHandle._get_unflat_views``.
    """
    size = _get(handle.flat_param, "_unpadded_unsharded_size").numel()
    flat = torch.empty(size, dtype=handle.flat_param.dtype, device="meta")
    return [view.detach() for view in _get(handle, "_get_unflat_views")(flat)]


def original_shapes(handle: Any) -> list[torch.Size]:
    """The unsharded shapes of the unit's parameters, in the order of the names: ``FlatParameter._shapes``."""
    return list(_get(handle.flat_param, "_shapes"))


def original_parameters(handle: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(the unit's parameters in the order of the names, those of the tied names); none without ``use_orig_params``.

    ``FlatParameter._params`` and ``_shared_params``, which are None without it.
    """
    flat_param = _get(handle, "flat_param")
    return list(_get(flat_param, "_params") or ()), list(_get(flat_param, "_shared_params") or ())


def keeps_originals(handle: Any) -> bool:
    """Whether the unit was made with ``use_orig_params``: ``FlatParamHandle._use_orig_params``."""
    return bool(_get(handle, "_use_orig_params"))


def is_sharded(handle: Any) -> bool:
    """False where torch turned the unit into NO_SHARD, as it does for a shard group of one."""
    return bool(_get(handle, "uses_sharded_strategy"))


def shard_group(handle: Any) -> dist.ProcessGroup:
    """The group over which one unit is sharded: ``FlatParamHandle.process_group``."""
    return _get(handle, "process_group")  # type: ignore[no-any-return]


def replica_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Under HYBRID_SHARD, the ranks that hold the same shard: ``FullyShardedDataParallel._inter_node_pg``."""
    return getattr(module, "_inter_node_pg", None)


def reshard_flat(handle: Any) -> None:
    """Frees a unit's unsharded parameters, which the root keeps after a forward without a backward.

    As ``_runtime_utils._reshard`` does: ``FlatParamHandle.needs_unshard``, ``.reshard``, ``.post_reshard``, and
    ``_prefetched``, which says that they are there already.
    """
    if is_sharded(handle) and is_initialized(handle) and not _get(handle, "needs_unshard")():
        _get(handle, "reshard")(True)
        _get(handle, "post_reshard")()
        handle._prefetched = False


def is_summoned(handle: Any) -> bool:
    """Whether ``summon_full_params`` will write over the shards when it ends: ``FlatParamHandle._training_state``."""
    return str(_get(_get(handle, "_training_state"), "name")) == "SUMMON_FULL_PARAMS"


def compute_device(handle: Any) -> torch.device:
    """The device that the unit computes on: ``FlatParamHandle.device``."""
    device: torch.device = _get(handle, "device")
    return device


def offloads_parameters(handle: Any) -> bool:
    """Whether the unit is under ``CPUOffload(offload_params=True)``: ``FlatParamHandle._offload_params``."""
    return bool(_get(handle, "_offload_params"))


def flat_param_to(handle: Any, device: torch.device, *, non_blocking: bool) -> None:
    """Moves one unit's shard as verl's manual offload does: ``FlatParamHandle.flat_param_to``.

    ``_local_shard`` must follow by hand, or the next unshard would read the old one. A unit under
    ``CPUOffload(offload_params=True)`` stays where torch put it.
    """
    if _get(handle, "_offload_params"):
        return
    _get(handle, "flat_param_to")(device, non_blocking=non_blocking)
    handle.flat_param._local_shard = handle.flat_param.data


# Process groups, memory and copies.


def has_backend_for(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on the device: ``ProcessGroup._device_types``."""
    return any(kind.type == device.type for kind in _get(group, "_device_types"))


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


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies each source into its target, in one kernel where it can: ``torch._foreach_copy_``, in public one each."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def views_like(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a 1-D tensor, one after another, with the tensors' shapes: ``_nn.unflatten_dense_tensors``, one call."""
    return torch._C._nn.unflatten_dense_tensors(flat, tensors)


def release_workspaces(device: torch.device) -> None:
    """Gives back what cuBLAS keeps for each stream that has multiplied.

    ``torch._C._cuda_clearCublasWorkspaces``: there is no public name. The next product takes it anew. Without
    it, or on another device, nothing is given back.
    """
    if device.type == "cuda":
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


# What paths yield.


def is_sharded_tensor(value: object) -> bool:
    """``torch.distributed._shard.sharded_tensor``: FSDP1's sharded state dicts without a device mesh are made of it."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def weak_reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """``torch.utils.weak.TensorWeakRef``, which is undocumented.

    ``weakref.ref`` may return a tensor whose memory torch has already taken over without telling Python.
    """
    from torch.utils.weak import TensorWeakRef

    reference: Callable[[], torch.Tensor | None] = TensorWeakRef(tensor)
    return reference
