"""The modules of a model, DTensors, FSDP2, process groups, memory, and what paths yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Shard, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_doctor.fsdp.private.access import get

WRAPPER_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile put into the names of what they wrap.

``FSDP_WRAPPED_MODULE`` and ``_CHECKPOINT_WRAPPED_MODULE`` stand in private modules, ``_orig_mod`` in none.
"""


OperatorMode = TorchDispatchMode
"""``torch.utils._python_dispatch``: what sees every operator, the backward's too, has no public name."""


ITEM = torch.ops.aten._local_scalar_dense.default
"""What ``Tensor.item`` calls; a dispatch mode sees it under this name alone."""


MODULE_CALL = nn.Module._call_impl.__code__
"""What every call of a module goes through, its hooks too: ``Module.__call__`` is an alias of another function."""


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
            state = get(module, "_get_fsdp_state")()
        own = get(module, "_parameters"), get(module, "_buffers"), get(module, "_non_persistent_buffers_set")
        found.append(OwnTensors(prefix, module, state, *own))
        children = [(f"{prefix}{name}.", m, state) for name, m in get(module, "_modules").items() if m is not None]
        waiting += reversed(children)
    return found


def modules_and_tensors(model: nn.Module) -> tuple[list[nn.Module], list[Any], list[torch.Tensor | None]]:
    """Every module, what each names in which order, and every tensor that it has: as above, with as little as can be.

    A name of a submodule that is None stands in a tuple of its own.
    """
    modules: list[nn.Module] = [model]
    names: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for place, module in enumerate(modules):
        own = module.__dict__
        if children := own["_modules"]:
            names.append((place, *(name if child is not None else (name,) for name, child in children.items())))
            modules += [child for child in children.values() if child is not None]
        if parameters := own["_parameters"]:
            names.append((place, *parameters))
            tensors += parameters.values()
        if buffers := own["_buffers"]:
            names.append((place, *buffers, *own["_non_persistent_buffers_set"]))
            tensors += buffers.values()
    return modules, names, tensors


def compiled_module(model: nn.Module) -> nn.Module | None:
    """The module inside of what ``torch.compile`` made of it: ``OptimizedModule._orig_mod``. None for any other."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def hooks_of_a_step(module: nn.Module) -> list[Any]:
    """By their numbers, the hooks that run in a forward or a backward: no public name lists what is registered."""
    return [get(module, f"_{when}_hooks") for when in ("forward_pre", "forward", "backward_pre", "backward")]


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
        return int(get(placement, "split_factor"))
    return 1 if isinstance(placement, Shard) else None


# FSDP2.

_SHOWN_IN_ITS_PLACE = ("_unsharded_param", "_sharded_post_forward_param")


def unsharded_parameters(state: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """(what an FSDP2 module shows now or showed last in place of its shard, the sharded parameter).

    After a forward without a backward the root still shows its parameters unsharded, in the compute dtype.
    ``state``: its ``FSDPState``. ``_fsdp_param_group`` (``_fsdp_param_groups`` in newer versions),
    ``FSDPParam.sharded_param``: there is no public way to the masters while they are not shown.
    """
    for group in fsdp2_groups(state):
        for parameter in group.fsdp_params:
            for shown in _SHOWN_IN_ITS_PLACE:
                if (other := getattr(parameter, shown, None)) is not None:
                    yield other, get(parameter, "sharded_param")


def replaced_parameters(state: Any) -> list[tuple[nn.Module, str]]:
    """The places, of a tied parameter each, at which an initialized FSDP2 module gathers another one than is there now.

    ``state``: its ``FSDPState``. ``FSDPParam._module_info``: a unit looks at its modules again in ``Module._apply`` and
    in a load, so what ``setattr`` puts there, as tying does, is gone at the next forward.
    """
    places: list[tuple[nn.Module, str]] = []
    for group in fsdp2_groups(state):
        for parameter in group.fsdp_params:
            info = get(parameter, "_module_info")
            if not info.shared_modules and info.module._parameters.get(info.param_name) is parameter.sharded_param:
                continue
            own = [getattr(parameter, name, None) for name in ("sharded_param", *_SHOWN_IN_ITS_PLACE)]
            modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
            for module, name in zip(modules, names, strict=True):
                if not any(getattr(module, name, None) is one for one in own):
                    places.append((module, name))
    return places


def moved_parameters(state: Any) -> list[tuple[Any, nn.Parameter]]:
    """(its FSDPParam, a sharded parameter whose memory is not what an FSDP2 module gathers from).

    ``state``: its ``FSDPState``. ``FSDPParam._sharded_param_data`` is what it gathers, padded, and the parameter's
    shard a part of it. A unit looks for it anew in ``Module._apply``, in a load and at its first forward
    (``FSDPParamGroup._reset_sharded_params``), so memory that a parameter is given by ``torch.utils.swap_tensors``, or
    as ``_local_tensor``, is not used. A shard of another class is asked for what is gathered itself.
    """
    found = []
    for group in fsdp2_groups(state):
        if get(group, "_reset_sharded_params"):
            for held in group.fsdp_params[:1]:
                get(held, "_sharded_param_data"), get(held, "sharded_param")
            # There may be a hundred thousand, which each extraction looks at.
            for held in group.fsdp_params:
                local = held.sharded_param._local_tensor
                if local.data_ptr() != held._sharded_param_data.data_ptr() and local.numel():
                    found.append((held, held.sharded_param))
    return [(held, parameter) for held, parameter in found if type(local_tensor(parameter)) is torch.Tensor]


def can_follow(held: Any) -> bool:
    """Whether an ``FSDPParam`` can gather from the memory that its parameter has now.

    That is, whether the parameter is placed as it was when it was sharded (``_sharding_spec``), in the same dtype
    (``orig_dtype``).
    """
    parameter, spec = get(held, "sharded_param"), get(held, "_sharding_spec")
    is_placed = (parameter.device_mesh, parameter.placements, parameter.shape) == (
        spec.mesh,
        spec.placements,
        spec.shape,
    )
    return is_placed and parameter.dtype == get(held, "orig_dtype") and bool(local_tensor(parameter).is_contiguous())


def follow_moved(state: Any) -> None:
    """Makes an FSDP2 module gather from the memory that its parameters have now: ``FSDPParam.reset_sharded_param``.

    As a ``load_state_dict`` of the whole model does, for which torch calls it. It also pads and pins.
    """
    for held, _ in moved_parameters(state):
        get(held, "reset_sharded_param")()


def recast_parameters(state: Any) -> list[nn.Parameter]:
    """The sharded parameters of an initialized FSDP2 module in another dtype than it noted at its first forward.

    ``state``: its ``FSDPState``. ``FSDPParam.orig_dtype``, by which it sizes its buffers and casts its gradients.
    """
    held = [parameter for group in fsdp2_groups(state) for parameter in group.fsdp_params]
    pairs = [(get(parameter, "sharded_param"), get(parameter, "orig_dtype")) for parameter in held]
    return [parameter for parameter, noted in pairs if parameter.dtype != noted]


def trained_together(state: Any) -> list[list[nn.Parameter]]:
    """The parameters that train of each group, whose gradients are reduced in one buffer: ``FSDPParam.sharded_param``.

    ``state``: its ``FSDPState``.
    """
    held = [[get(parameter, "sharded_param") for parameter in group.fsdp_params] for group in fsdp2_groups(state)]
    return [[parameter for parameter in group if parameter.requires_grad] for group in held]


def fsdp2_groups(state: Any) -> list[Any]:
    """The ``FSDPParamGroup``s of an ``FSDPState``; none if its module owns no parameter."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [get(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def fsdp2_unit(state: Any) -> tuple[torch.device, OffloadPolicy, bool] | None:
    """(compute device, offload policy, whether lazily initialized) of one FSDP2 module; None if it owns no parameter.

    ``state``: its ``FSDPState``. ``FSDPParamGroup.device``, ``.offload_policy``, ``FSDPState._is_root``, which is
    None until the first forward: no public name says under which policy a module was sharded.
    """
    for group in fsdp2_groups(state):
        return get(group, "device"), get(group, "offload_policy"), get(state, "_is_root") is not None
    return None


def fsdp2_precision(state: Any) -> MixedPrecisionPolicy:
    """``FSDPState._mp_policy``: no public name says with which mixed precision a module was sharded."""
    policy: MixedPrecisionPolicy = get(state, "_mp_policy")
    return policy


def follow_materialized(state: Any, parameter: nn.Parameter) -> None:
    """Makes an FSDP2 module use the memory that one of its sharded parameters has been given.

    ``state``: its ``FSDPState``. ``FSDPParam.reset_sharded_param``: ``Module.to_empty``, through which torch calls
    it, empties the whole model. It also pads and pins, so a parameter's local tensor may be another one after it.
    """
    for group in fsdp2_groups(state):
        for held in group.fsdp_params:
            if get(held, "sharded_param") is parameter:
                get(held, "reset_sharded_param")()


def placement_on(mesh: DeviceMesh) -> Any:
    """``ShardPlacementResult`` of a parameter with a mesh of its own; it and ``FSDPMeshInfo`` have no public names."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return get(_fsdp_common, "ShardPlacementResult")(None, get(_fsdp_common, "FSDPMeshInfo")(mesh, shard_mesh_dim=0))


def has_placements_on_meshes() -> bool:
    """Whether there is a ``ShardPlacementResult``: in torch 2.12 and newer, as is ``replicate`` in its present form."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def replicate(module: nn.Module, **options: Any) -> Any:
    """``replicate`` on FSDP2's code: the public function of that name is DDP's."""
    from torch.distributed._composable import replicate_with_fsdp

    return get(replicate_with_fsdp, "replicate")(module, **options)


# Process groups, memory and copies.


def has_backend_for(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on the device: ``ProcessGroup._device_types``."""
    return any(kind.type == device.type for kind in get(group, "_device_types"))


def default_store() -> dist.Store:
    """The store that the default process group was made with: ``distributed_c10d._get_default_store``."""
    from torch.distributed import distributed_c10d

    store: dist.Store = get(distributed_c10d, "_get_default_store")()
    return store


def all_gather(group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
    """One coalesced all-gather of several tensors; an input may be its rank's part of the output.

    ``ProcessGroup.allgather_into_tensor_coalesced``, which torch 2.13 deprecates for
    ``all_gather_single_coalesced``: in public there are only all-gathers of one tensor.
    """
    gather = getattr(group, "all_gather_single_coalesced", None) or get(group, "allgather_into_tensor_coalesced")
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
