"""Private names of torch that the project uses, and nothing else; ``fsdp1`` and ``fsdp2`` have the names of the
FSDPs.

Each function says for what there is no public API. Read in the source, and run, on the versions in ``CHECKED``; where
a name is gone, :class:`PrivateApiGone` says which and for which torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Shard, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

_P = ParamSpec("_P")
_T = TypeVar("_T")
# On CPU ranks; 2.11.0 on two H200s.
CHECKED = ("2.6.0", "2.7.0", "2.11.0", "2.13.0", "2.15.0")


class PrivateApiGone(RuntimeError):
    """A private name of torch that the doctor relies on does not exist in this version."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}; fsdp-doctor was checked on torch {', '.join(CHECKED)}"
        )


def get(owner: Any, name: str) -> Any:
    """``getattr`` that raises PrivateApiGone."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise PrivateApiGone(f"{type(owner).__name__}.{name}") from None


OpenStep: TypeAlias = Literal["forward", "backward"]
"""The part of a training step that has begun and has not ended."""
OperatorMode = TorchDispatchMode
"""``torch.utils._python_dispatch``: what sees every operator, the backward's too, has no public name."""
ITEM = torch.ops.aten._local_scalar_dense.default
"""What ``Tensor.item`` calls; a dispatch mode sees it under this name alone."""
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""What ``Tensor.reshape`` calls for a copy that it has made; a dispatch mode sees it under this name alone."""
MODULE_CALL = nn.Module._call_impl.__code__
"""What every call of a module goes through, its hooks too: ``Module.__call__`` is an alias of another function."""


# Modules.


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSwitches:
    """Settings of one unit's gradient reduction, as last set; the defaults are torch's.

    synchronizes: whether a backward reduces its gradients. all_reduces: over the replicas, too.
    ends: whether a backward is the last before the optimizer's step, at whose end torch waits for what it has reduced.
    divided_by: the text of what a gradient is divided by, where that was set. num_ranks: of its mesh, torch's divisor.
    """

    synchronizes: bool = True
    all_reduces: bool = True
    ends: bool = True
    divided_by: str | None = None
    num_ranks: int = 1

    @property
    def effects(self) -> tuple[bool, bool, bool, str]:
        """Describes what a backward does under these switches: setting the divisor to torch's own changes nothing."""
        return self.synchronizes, self.all_reduces, self.ends, self.divided_by or str(self.num_ranks)


@dataclass(slots=True, eq=False)
class ModuleTensors:
    """One module under one name, with its direct parameters and buffers; a name may have None for a tensor.

    fsdp2_state: the FSDPState of the innermost FSDP2 module that it is or lies in, None outside of any.
    """

    prefix: str
    module: nn.Module
    fsdp2_state: Any
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]


def list_module_tensors(model: nn.Module) -> list[ModuleTensors]:
    """Lists every module, under every name, in the order of ``named_modules``.

    ``Module._modules``, ``_parameters``, ``_buffers``: the public walk is a generator in a generator for each level,
    and a model of tens of thousands of modules is read for each extraction. ``_non_persistent_buffers_set``: only
    ``state_dict()`` tells the buffers apart in public, and that is a method under test.
    """
    modules: list[ModuleTensors] = []
    waiting: list[tuple[str, nn.Module, Any]] = [("", model, None)]
    while waiting:
        prefix, module, state = waiting.pop()
        if isinstance(module, FSDPModule):
            state = get(module, "_get_fsdp_state")()
        tensors = get(module, "_parameters"), get(module, "_buffers"), get(module, "_non_persistent_buffers_set")
        modules.append(ModuleTensors(prefix, module, state, *tensors))
        children = [(f"{prefix}{name}.", m, state) for name, m in get(module, "_modules").items() if m is not None]
        waiting += reversed(children)
    return modules


def list_modules_and_tensors(model: nn.Module) -> tuple[list[nn.Module], list[Any], list[torch.Tensor | None]]:
    """Lists every module, the names in each, and every tensor: ``list_module_tensors`` for comparisons, as cheap as can
    be.

    The name of a submodule that is None stands in a tuple.
    """
    modules: list[nn.Module] = [model]
    names: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for place, module in enumerate(modules):
        attributes = module.__dict__
        if children := attributes["_modules"]:
            names.append((place, *(name if child is not None else (name,) for name, child in children.items())))
            modules += [child for child in children.values() if child is not None]
        if parameters := attributes["_parameters"]:
            names.append((place, *parameters))
            tensors += parameters.values()
        if buffers := attributes["_buffers"]:
            names.append((place, *buffers, *attributes["_non_persistent_buffers_set"]))
            tensors += buffers.values()
    return modules, names, tensors


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """``Module._modules``: ``named_children`` yields a module that has two names only under the first."""
    children: dict[str, nn.Module | None] = get(module, "_modules")
    return children


def find_compiled_module(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` wrapped: ``OptimizedModule._orig_mod``. None for any other.

    Among the module's own: FSDP1's has every attribute of what it wraps.
    """
    inner = getattr(model, "_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def wrap_compiled_call(module: nn.Module, before: Callable[..., Any]) -> bool:
    """Has ``before(module, arguments, options)`` run before a module that ``Module.compile`` compiled, and not in it.

    A hook would be compiled: ``Module._compiled_call_impl``. Returns False for a module that is not compiled so.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return False

    def call(*arguments: Any, **options: Any) -> Any:
        before(module, arguments, options)
        return compiled(*arguments, **options)

    module._compiled_call_impl = call
    return True


def find_running_step(modules: Collection[nn.Module]) -> OpenStep | None:
    """Returns the part of a step that runs in this thread, of which the caller is a part, as a hook is.

    ``torch._C._current_graph_task_id``: no public name says whether a backward runs.
    """
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    own = set(map(id, modules))
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL and id(frame.f_locals.get("self")) in own:
            return "forward"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def leave_uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has a function run as it is where it is called in what ``torch.compile`` compiles.

    ``torch.compiler.disable`` imports the compiler, and costs time in each call, so it is used while frames of this
    thread are compiled. ``_torchdynamo_disable``: where the compiler reads that it must not follow a call.
    """
    uncompiled: list[Callable[_P, _T]] = []

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not _compiles_frames():
            return function(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(function))
        return uncompiled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return run


def _compiles_frames() -> bool:
    """``torch._C._dynamo.eval_frame.get_eval_frame_callback``: no public name says whether frames are compiled.

    Where it is missing they are taken for compiled, once the compiler was imported.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    find = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return find is None or find() not in (None, False)


def read_stream_key(device: torch.device) -> Any:
    """Tells the current streams of a device apart, not the CPU's: ``torch._C._cuda_getCurrentRawStream``.

    ``torch.cuda.current_stream`` makes an object each time, and this is asked for each tensor.
    """
    if device.type == "cuda" and device.index is not None:
        return get(torch._C, "_cuda_getCurrentRawStream")(device.index)
    return torch.get_device_module(device.type).current_stream(device)


def read_device_index(device_type: str) -> int:
    """Reads the current device's index: ``torch._C._cuda_getDevice``, by which torch.cuda.current_device asks."""
    if device_type == "cuda" and torch.cuda.is_initialized():
        return int(get(torch._C, "_cuda_getDevice")())
    return int(torch.get_device_module(device_type).current_device())


def storage_key(tensor: torch.Tensor) -> int:
    """Tells the storages of tensors apart, also on the meta device, where all begin at 0: ``UntypedStorage._cdata``."""
    return int(get(tensor.untyped_storage(), "_cdata"))


def list_step_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks of a forward or a backward by their numbers: no public name lists the registered hooks."""
    return [get(module, f"_{when}_hooks") for when in ("forward_pre", "forward", "backward_pre", "backward")]


def list_optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Lists what runs before a step of the optimizer: ``register_step_pre_hook`` has no counterpart that reads."""
    return list(get(optimizer, "_optimizer_step_pre_hooks").values())


def run_fsdp1_lazy_init(model: FullyShardedDataParallel) -> None:
    """Does what the first forward does before it computes, and makes the local shards.

    Calls ``_runtime_utils._lazy_init``.
    """
    from torch.distributed.fsdp import _runtime_utils

    get(_runtime_utils, "_lazy_init")(model, model)


# DTensors.


# Subclasses of torchao around one plain tensor, which is the weight that trains: they convert it to float8, int8 or
# ternary where it is gathered or multiplied. Read in torchao 0.18.
_PLAIN_INSIDE = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "TrainingWeightWrapperBaseTensor": "_data",
    "ScaledGroupedMMTensor": "_data",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
}


def read_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part as it lies, half-moved or not: ``DTensor._local_tensor``. A plain tensor is its own.

    For a subclass that holds the weight as one plain tensor, this is that tensor. Nothing is copied, and no collective
    is called. In newer versions the public ``to_local()`` makes a view of a parameter's local tensor, which costs time.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if kind is torch.Tensor or kind is nn.Parameter or (inside := _find_plain_inside(kind)) is None:
        return local
    plain: torch.Tensor = get(local, inside)
    return plain


@functools.cache
def _find_plain_inside(kind: type) -> str | None:
    names = [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "torchao"]
    return next((_PLAIN_INSIDE[name] for name in names if name in _PLAIN_INSIDE), None)


def read_spec(tensor: DTensor) -> Any:
    """Returns mesh, placements and the whole's shape, strides and dtype: ``DTensor._spec``, in public one by one."""
    return tensor._spec


def find_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which it is a slice, or itself: ``DeviceMesh._get_root_mesh``, before of ``_mesh_resources``."""
    if (find := getattr(mesh, "_get_root_mesh", None)) is None:
        from torch.distributed import device_mesh

        find = functools.partial(get(get(device_mesh, "_mesh_resources"), "get_root_mesh"), mesh)
    root: DeviceMesh = find()
    return root


def count_interleaved(placement: Placement) -> int | None:
    """Returns into how many stretches a dim is cut before each is sharded; None for what shards no dim.

    1 for ``Shard``. ``_StridedShard.split_factor``: what ``fully_shard`` makes of a dim that tensor parallelism
    sharded first has no public name, and is a Shard in older versions only.
    """
    if isinstance(placement, getattr(placement_types, "_StridedShard", ())):
        return int(get(placement, "split_factor"))
    return 1 if isinstance(placement, Shard) else None


def make_placement(mesh: DeviceMesh) -> Any:
    """``ShardPlacementResult`` of a parameter with a separate mesh; it and ``FSDPMeshInfo`` have no public names."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return get(_fsdp_common, "ShardPlacementResult")(None, get(_fsdp_common, "FSDPMeshInfo")(mesh, shard_mesh_dim=0))


def has_placements_on_meshes() -> bool:
    """Returns whether there is a ``ShardPlacementResult``.

    It is in torch 2.12 and newer, as is ``replicate`` in its present form.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def replicate(module: nn.Module, **options: Any) -> Any:
    """``replicate`` on FSDP2's code: the public function of that name is DDP's."""
    from torch.distributed._composable import replicate_with_fsdp

    return get(replicate_with_fsdp, "replicate")(module, **options)


# Process groups, memory and copies.


def has_backend_for(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether the group has a backend for tensors on the device: ``ProcessGroup._device_types``."""
    return any(kind.type == device.type for kind in get(group, "_device_types"))


def find_default_store() -> dist.Store:
    """Returns the default process group's store: ``distributed_c10d._get_default_store``."""
    from torch.distributed import distributed_c10d

    store: dist.Store = get(distributed_c10d, "_get_default_store")()
    return store


def all_gather(group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
    """Gathers several tensors in one coalesced collective; an input may be its rank's part of the output.

    ``ProcessGroup.allgather_into_tensor_coalesced``, which torch 2.13 deprecates for
    ``all_gather_single_coalesced``: in public there are only all-gathers of one tensor.
    """
    gather = getattr(group, "all_gather_single_coalesced", None) or get(group, "allgather_into_tensor_coalesced")
    work: dist.Work = gather(outputs, inputs)
    return work


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies each source into its target, in one kernel where possible: ``torch._foreach_copy_``.

    Public functions need a call for each.
    """
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def make_views_like(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a 1-D tensor, one after another, with the tensors' shapes: ``_nn.unflatten_dense_tensors``, one call."""
    return torch._C._nn.unflatten_dense_tensors(flat, tensors)


def release_workspaces(device: torch.device) -> None:
    """Gives back what cuBLAS keeps for each stream that has multiplied: ``torch._C._cuda_clearCublasWorkspaces``.

    There is no public name. The next product takes it anew; without CUDA nothing is given back.
    """
    if device.type == "cuda":
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


# What methods yield.


def is_sharded_tensor(value: object) -> bool:
    """``torch.distributed._shard.sharded_tensor``: FSDP1's sharded state dicts without a device mesh are made of it."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def make_weak_reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """``torch.utils.weak.TensorWeakRef``, which is undocumented.

    ``weakref.ref`` may return a tensor whose memory torch has already taken over without telling Python.
    """
    from torch.utils.weak import TensorWeakRef

    reference: Callable[[], torch.Tensor | None] = TensorWeakRef(tensor)
    return reference
