"""Private names of torch that the project uses, and nothing else; ``fsdp1`` and ``fsdp2`` have the private names of
FSDP.

Each function names the private API, and says why no public API is enough. All names were read in torch's source, and
run, on the versions in ``CHECKED``. If a name is gone, :class:`PrivateApiGone` says which, and for which torch.
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
    """Error for a private name of torch that fsdp-doctor relies on and that the installed version does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}; fsdp-doctor was checked on torch {', '.join(CHECKED)}"
        )


def get(owner: Any, name: str) -> Any:
    """Gets an attribute; raises PrivateApiGone if it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise PrivateApiGone(f"{type(owner).__name__}.{name}") from None


OpenStep: TypeAlias = Literal["forward", "backward"]
"""The part of a training step that has begun and has not ended."""
OperatorMode = TorchDispatchMode
"""Mode that sees every operator, also those of a backward; ``torch.utils._python_dispatch`` has no public name."""
ITEM = torch.ops.aten._local_scalar_dense.default
"""Operator that ``Tensor.item`` calls; a dispatch mode sees it only under this name."""
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""Operator that ``Tensor.reshape`` calls on a copy that it has made; a dispatch mode sees it only under this name."""
MODULE_CALL = nn.Module._call_impl.__code__
"""Code that every call of a module and its hooks runs; ``Module.__call__`` is an alias of another function."""


# Modules.


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSwitches:
    """Settings of one unit's gradient reduction, as last set; the defaults are torch's.

    synchronizes: whether a backward reduces the unit's gradients.
    all_reduces: whether a backward also reduces the gradients over the replicas.
    ends: whether a backward is the last before the optimizer's step, so that torch waits for the reductions at the end
        of the backward.
    divided_by: the divisor of the gradients as text, if it was set.
    num_ranks: the number of ranks of the unit's mesh, by which torch divides by default.
    """

    synchronizes: bool = True
    all_reduces: bool = True
    ends: bool = True
    divided_by: str | None = None
    num_ranks: int = 1

    @property
    def effects(self) -> tuple[bool, bool, bool, str]:
        """Tuple (synchronizes, all_reduces, ends, divisor), equal for units whose gradients are reduced in the same
        way.

        If no divisor was set, the number of ranks is the divisor, as in torch.
        """
        return self.synchronizes, self.all_reduces, self.ends, self.divided_by or str(self.num_ranks)


@dataclass(slots=True, eq=False)
class ModuleTensors:
    """Module under one of its names, with its direct parameters and buffers, which may be None.

    fsdp2_state: the FSDPState of the innermost FSDP2 module that contains or is this module; None if there is none.
    """

    prefix: str
    module: nn.Module
    fsdp2_state: Any
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]


def list_module_tensors(model: nn.Module) -> list[ModuleTensors]:
    """Lists every module, once for each of its names, in the order of ``named_modules``.

    Private: ``Module._modules``, ``_parameters`` and ``_buffers``, because the public walk nests a generator for each
    level, and a model of tens of thousands of modules is read for each extraction; ``_non_persistent_buffers_set``,
    because the only public way to find persistent buffers is ``state_dict()``, which is one of the methods that
    fsdp-doctor tests.
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
    """Returns (modules, names, tensors) of a model, read as cheaply as possible, to detect a change of the model.

    ``names`` has the names in each module; the names of submodules that are None are listed a second time. Private:
    ``Module._modules``, ``_parameters`` and ``_buffers``, as in :func:`list_module_tensors`.
    """
    modules: list[nn.Module] = [model]
    names: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for place, module in enumerate(modules):
        attributes = module.__dict__
        if children := attributes["_modules"]:
            names.append((place, *children))
            present = [child for child in children.values() if child is not None]
            modules += present
            if len(present) < len(children):
                names.append([name for name, child in children.items() if child is None])
        if parameters := attributes["_parameters"]:
            names.append((place, *parameters))
            tensors += parameters.values()
        if buffers := attributes["_buffers"]:
            names.append((place, *buffers, *attributes["_non_persistent_buffers_set"]))
            tensors += buffers.values()
    return modules, names, tensors


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns a module's children by name.

    Private: ``Module._modules``, because ``named_children`` yields a module with two names only under the first.
    """
    children: dict[str, nn.Module | None] = get(module, "_modules")
    return children


def find_compiled_module(model: nn.Module) -> nn.Module | None:
    """Returns the module that ``torch.compile`` wrapped; None if ``model`` is not such a wrapper.

    Private: ``OptimizedModule._orig_mod``. The name is looked up in ``_modules``, because an FSDP1 module has every
    attribute of the module that it wraps.
    """
    inner = getattr(model, "_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


def wrap_compiled_call(module: nn.Module, before: Callable[..., Any]) -> bool:
    """Makes a module compiled by ``Module.compile`` call ``before(module, arguments, options)`` first, outside of
    compiled code.

    Returns False for a module that is not compiled in this way. Private: ``Module._compiled_call_impl``, because a hook
    would be compiled.
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
    """Returns the part of a training step in which this thread is, for example in a hook; None outside of a step.

    Private: ``torch._C._current_graph_task_id``, because no public name says whether a backward is running.
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
    """Makes a function run uncompiled even when code that ``torch.compile`` compiles calls it.

    ``torch.compiler.disable`` imports the compiler and slows each call, so it is used only while frames of this thread
    are compiled. Private: ``_torchdynamo_disable``, by which the compiler sees that it must not trace into a function.
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
    """Returns whether frames of this thread are being compiled. If torch cannot tell, the answer is True once the
    compiler was imported.

    Private: ``torch._dynamo``, whose presence among the imported modules shows that the compiler was imported.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    find = _find_callback_reader()
    return find is None or find() not in (None, False)


@functools.cache
def _find_callback_reader() -> Callable[[], Any] | None:
    """Returns torch's function that reads this thread's callback for compiling frames; None if this torch has none.

    Private: ``torch._C._dynamo.eval_frame.get_eval_frame_callback``, because no public name gives this.
    """
    return getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)


def find_place_reader(device: torch.device) -> Callable[[], tuple[int, Any]]:
    """Returns a function that reads the index of the current device and a key of the current stream of ``device``.

    Different streams have different keys. The device must not be the CPU, and must be initialized. Private:
    ``torch._C._cuda_getDevice`` and ``_cuda_getCurrentRawStream``. The function is called for each tensor, and
    ``torch.cuda.current_stream`` makes an object each time.
    """
    if device.type == "cuda" and device.index is not None:
        read_index, read_stream, index = (
            get(torch._C, "_cuda_getDevice"),
            get(torch._C, "_cuda_getCurrentRawStream"),
            device.index,
        )
        return lambda: (read_index(), read_stream(index))
    module = torch.get_device_module(device.type)
    return lambda: (module.current_device(), module.current_stream(device))


def read_device_index(device_type: str) -> int:
    """Returns the index of the current device of this type.

    Private: ``torch._C._cuda_getDevice``, which ``torch.cuda.current_device`` calls.
    """
    if device_type == "cuda" and torch.cuda.is_initialized():
        return int(get(torch._C, "_cuda_getDevice")())
    return int(torch.get_device_module(device_type).current_device())


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a key that differs between storages, even on the meta device, where all addresses are 0.

    Private: ``UntypedStorage._cdata``.
    """
    return int(get(tensor.untyped_storage(), "_cdata"))


def list_step_hooks(module: nn.Module) -> list[Any]:
    """Returns four dicts of a module's hooks: forward pre-hooks, forward hooks, backward pre-hooks and backward hooks.

    No public name lists the registered hooks.
    """
    return [get(module, f"_{when}_hooks") for when in ("forward_pre", "forward", "backward_pre", "backward")]


def list_optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Lists the hooks that run before a step of the optimizer.

    No public name lists the hooks that ``register_step_pre_hook`` added.
    """
    return list(get(optimizer, "_optimizer_step_pre_hooks").values())


def run_fsdp1_lazy_init(model: FullyShardedDataParallel) -> None:
    """Runs FSDP1's lazy initialization, which makes the local shards and would otherwise run in the first forward.

    Private: ``_runtime_utils._lazy_init``.
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
    """Returns this rank's part of a tensor, even if a DTensor reports another device; a plain tensor is returned
    unchanged.

    For a subclass that holds the weight as one plain tensor, returns the plain tensor. Nothing is copied, and no
    collective is called. Private: ``DTensor._local_tensor``, because in newer versions ``to_local()`` makes a view of a
    parameter's local tensor, which costs time.
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
    """Returns the mesh and placements, and the shape, strides and dtype of the whole tensor, as one object.

    Private: ``DTensor._spec``; through public names, each of these is read separately.
    """
    return tensor._spec


def find_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh from which ``mesh`` was sliced; ``mesh`` itself if it is not a slice.

    Private: ``DeviceMesh._get_root_mesh``; in older versions a method of ``_mesh_resources``.
    """
    if (find := getattr(mesh, "_get_root_mesh", None)) is None:
        from torch.distributed import device_mesh

        find = functools.partial(get(get(device_mesh, "_mesh_resources"), "get_root_mesh"), mesh)
    root: DeviceMesh = find()
    return root


def read_stated_chunk(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (offsets, sizes) of this rank's part of a DTensor if a framework has stated them, otherwise None.

    A framework that does not shard like ``torch.chunk`` states them for distributed checkpoints. Private:
    ``__create_chunk_list__`` on the local tensor, which ``DTensor`` asks first.
    """
    stated = getattr(read_local_tensor(tensor), "__create_chunk_list__", None) if isinstance(tensor, DTensor) else None
    if stated is None:
        return None
    (chunk,) = stated()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def count_interleaved(placement: Placement) -> int | None:
    """Returns the number of stretches into which a dim is cut before each is sharded; None if ``placement`` shards no
    dim.

    The result is 1 for ``Shard``. Private: ``_StridedShard.split_factor``. ``_StridedShard`` is the placement that
    ``fully_shard`` gives to a dim that tensor parallelism has already sharded. Only in older versions is
    ``_StridedShard`` a subclass of Shard.
    """
    if isinstance(placement, getattr(placement_types, "_StridedShard", ())):
        return int(get(placement, "split_factor"))
    return 1 if isinstance(placement, Shard) else None


def make_placement(mesh: DeviceMesh) -> Any:
    """Makes the ``ShardPlacementResult`` for a parameter that is sharded over ``mesh`` instead of its module's mesh.

    ``ShardPlacementResult`` and ``FSDPMeshInfo`` have no public names.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return get(_fsdp_common, "ShardPlacementResult")(None, get(_fsdp_common, "FSDPMeshInfo")(mesh, shard_mesh_dim=0))


def has_placements_on_meshes() -> bool:
    """Returns whether torch has ``ShardPlacementResult``.

    torch 2.12 and newer have this class, and also the present form of ``replicate``.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def replicate(module: nn.Module, **options: Any) -> Any:
    """Applies the ``replicate`` that is built on FSDP2; the public function of this name is DDP's."""
    from torch.distributed._composable import replicate_with_fsdp

    return get(replicate_with_fsdp, "replicate")(module, **options)


# Process groups, memory and copies.


def has_backend_for(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether the group has a backend for tensors on the device. Private: ``ProcessGroup._device_types``."""
    return any(kind.type == device.type for kind in get(group, "_device_types"))


def find_default_store() -> dist.Store:
    """Returns the default process group's store. Private: ``distributed_c10d._get_default_store``."""
    from torch.distributed import distributed_c10d

    store: dist.Store = get(distributed_c10d, "_get_default_store")()
    return store


def all_gather(group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
    """Gathers several tensors in one coalesced collective; an input may be a view of this rank's part of its output.

    Private: ``ProcessGroup.allgather_into_tensor_coalesced``, which torch 2.13 deprecates in favour of
    ``all_gather_single_coalesced``. Public all-gathers take one tensor.
    """
    gather = getattr(group, "all_gather_single_coalesced", None) or get(group, "allgather_into_tensor_coalesced")
    work: dist.Work = gather(outputs, inputs)
    return work


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copies each source into its target, in one kernel if possible.

    Private: ``torch._foreach_copy_``; public functions need one call for each tensor.
    """
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def make_views_like(flat: torch.Tensor, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns consecutive views of a 1-D tensor with the shapes of ``tensors``.

    Private: ``_nn.unflatten_dense_tensors``, which makes all of them in one call.
    """
    return torch._C._nn.unflatten_dense_tensors(flat, tensors)


def release_workspaces(device: torch.device) -> None:
    """Frees the workspaces that cuBLAS keeps for each stream that ran a matrix product; does nothing without CUDA.

    The next product allocates a workspace again. Private: ``torch._C._cuda_clearCublasWorkspaces``, since there is no
    public name.
    """
    if device.type == "cuda":
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


# What methods yield.


def is_sharded_tensor(value: object) -> bool:
    """Returns whether ``value`` is a ShardedTensor, which FSDP1's sharded state dicts have without a device mesh.

    Private: ``torch.distributed._shard.sharded_tensor``.
    """
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def make_weak_reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Returns a weak reference to a tensor.

    Undocumented: ``torch.utils.weak.TensorWeakRef``. ``weakref.ref`` may return a tensor whose memory torch has already
    taken over without telling Python.
    """
    from torch.utils.weak import TensorWeakRef

    reference: Callable[[], torch.Tensor | None] = TensorWeakRef(tensor)
    return reference
