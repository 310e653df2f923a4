"""Sharding like verl's: ``fully_shard`` and ``FullyShardedDataParallel``, decoder layer by decoder layer."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import assert_never

from fsdp_doctor.case import models
from fsdp_doctor.matrix.axes import Offload, OffloadWay, Sharding
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.expert_groups import list_expert_meshes, place_experts
from fsdp_doctor.weights.fsdp.reader import ModelContents
from fsdp_doctor.weights.fsdp.shards import LayoutError, LocalPart, compute_part

# Where a model has the mesh along which its experts are hidden.
_EXPERTS_MESH = "hidden_experts_mesh"


def shard_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    kind: Sharding = Sharding.FULL,
    compute_dtype: torch.dtype | None,
    offload: Offload,
    pin_memory: bool,
) -> nn.Module:
    """Shards the model in place: each decoder layer, the embedding if it is untied, and the root. Every rank must call
    this.

    compute_dtype: the dtype of mixed precision; None for no mixed precision.
    """
    mp_policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    units = models.find_decoder_layers(model)
    embedding = models.find_input_embedding(model)
    shard: Callable[..., Any] = private.replicate if kind is Sharding.REPLICATE else fully_shard
    options: dict[str, Any] = {"mp_policy": mp_policy}
    offloaded = find_offloaded_units(model, offload)

    how: dict[str, Any] = {"pin_memory": pin_memory}
    by_phase = {"offload_after_backward": False}

    def choose_policy(unit: nn.Module) -> Any:
        match offload.way:
            case OffloadWay.BY_PHASE:
                return CPUOffloadPolicy(**how, **by_phase)
            case OffloadWay.BY_PARAMETER:
                # What is a DTensor belongs to a unit within this one.
                own = ((name, each) for name, each in unit.named_parameters() if not isinstance(each, DTensor))
                return {name: CPUOffloadPolicy(**how) for name, each in own if each.ndim > 1}
            case OffloadWay.PARTIAL | OffloadWay.MOVED | OffloadWay.AROUND_STEP | None:
                return CPUOffloadPolicy(**how) if unit in offloaded else OffloadPolicy()
            case _:
                assert_never(offload.way)

    match kind:
        case Sharding.EXPERTS:
            options["shard_placement_fn"] = _place_experts_apart(model, mesh)
        case Sharding.TP:
            for layer in units:
                parallelize_module(layer, mesh["tp"], _TENSOR_PARALLEL)
            mesh = mesh["fsdp"]
        case Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
            for layer in units:
                experts = layer.get_submodule("mlp.experts")
                divide_experts(experts, mesh["ep"], hidden=kind is Sharding.HIDDEN_EXPERTS)
                shard(experts, mesh=mesh["fsdp"], offload_policy=choose_policy(layer), **options)
            if kind is Sharding.HIDDEN_EXPERTS:
                setattr(model, _EXPERTS_MESH, mesh["ep"])
            mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("all",))
        case Sharding.FULL | Sharding.HSDP | Sharding.SIZE1 | Sharding.REPLICATE:
            pass
        case _:
            assert_never(kind)
    for unit in (*units, *([embedding] if embedding is not None else []), model):
        shard(unit, mesh=mesh, offload_policy=choose_policy(unit), **options)
    return model


def explain_no_offload(offload: Offload) -> str:
    """Explains why the installed torch does not support the offload; empty if it does."""
    match offload.way:
        case OffloadWay.BY_PHASE if "offload_after_backward" not in inspect.signature(CPUOffloadPolicy).parameters:
            return f"the CPUOffloadPolicy of torch {torch.__version__} has no phases (pytorch#192441)"
        case OffloadWay.BY_PARAMETER if not hasattr(torch.distributed.fsdp, "cpu_offload_by_budget"):
            return f"fully_shard of torch {torch.__version__} takes no policy by parameter (pytorch#188120)"
        case _:
            return ""


def find_offloaded_units(model: nn.Module, offload: Offload) -> tuple[nn.Module, ...]:
    """Finds the modules to shard under CPUOffloadPolicy or CPUOffload, in a model that is not sharded yet."""
    if offload.policy:
        return tuple(model.modules())
    return tuple(models.find_decoder_layers(model)[1::2]) if offload.way is OffloadWay.PARTIAL else ()


# Of a decoder layer as transformers writes it. Not the attention: its norms see only the heads of one rank.
_TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def divide_experts(module: Any, mesh: DeviceMesh, *, hidden: bool) -> None:
    """Keeps only this rank's part of the fused experts, and makes the rank compute only with this part.

    The experts are fused as in transformers 5. All ranks of the mesh must be given the same tokens; the ranks add up
    the outputs of their experts.

    hidden: whether the part is a plain parameter; otherwise it is a DTensor.
    """
    for name, full in list(module.named_parameters()):
        part = full.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        if not hidden:
            part = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(part))

    def forward(tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, weights = (
            DTensor.from_local(each, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
            for each in (tokens, weights)
        )
        both = module.gate_up_proj, module.down_proj
        gate_up, down = (each.to_local() if isinstance(each, DTensor) else each for each in both)
        total, first = torch.zeros_like(tokens), mesh.get_local_rank() * len(down)
        for index in range(len(down)):
            gate, up = nn.functional.linear(tokens, gate_up[index]).chunk(2, dim=-1)
            weight = torch.where(chosen == first + index, weights, 0).sum(dim=-1, keepdim=True)
            total = total + nn.functional.linear(module.act_fn(gate) * up, down[index]) * weight
        summed = DTensor.from_local(total, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local()

    module.forward = forward


def read_contents(model: nn.Module) -> ModelContents:
    """Reads the contents of a sharded model.

    Each group's experts that are hidden from FSDP are described as a part of the tensor of all experts.
    """
    return place_experts(reader.read(model), list_expert_meshes(find_experts_mesh(model)))


def find_stated_part(tensor: torch.Tensor) -> LocalPart | None:
    """Returns this rank's part of a tensor if the framework states it in ``__create_chunk_list__``; None if the
    placements determine it.
    """
    chunk = private.read_stated_chunk(tensor)
    if chunk is None:
        return None
    return LocalPart.from_slices(tuple(slice(begin, begin + size) for begin, size in zip(*chunk, strict=True)))


def compute_stated_parts(tensor: DTensor, sizes: Sequence[int]) -> list[LocalPart]:
    """Computes every rank's part of a tensor whose framework states the parts. The parts must follow one another in
    rank order.

    Raises LayoutError unless one dim is sharded over a mesh of one dim, and the parts make up the whole tensor.

    sizes: the number of elements on each rank.
    """
    (placement, *others), shape = tensor.placements, tensor.shape
    if others or not isinstance(placement, Shard):
        raise LayoutError(f"a tensor of stated parts is placed as {tensor.placements}, and not sharded along one dim")
    dim, row = placement.dim, max(shape.numel() // max(shape[placement.dim], 1), 1)
    ends = list(itertools.accumulate(size // row for size in sizes))
    if ends[-1] != shape[dim] or sum(sizes) != shape.numel():
        raise LayoutError(f"the ranks hold {list(sizes)} elements of a tensor of {tuple(shape)}")
    whole = [slice(0, length) for length in shape]
    cuts = zip((0, *ends), ends, strict=False)
    return [LocalPart.from_slices((*whole[:dim], slice(*cut), *whole[dim + 1 :])) for cut in cuts]


def compute_tensor_part(rank: int, tensor: DTensor) -> LocalPart:
    """Computes the part of a tensor that a rank holds; see :func:`compute_part`."""
    return _compute_part(rank, tensor.shape, tensor.device_mesh, tuple(tensor.placements))


@functools.cache
def _compute_part(rank: int, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> LocalPart:
    # Each case asks for the same parts, and torch computes the ranks of a mesh each time that they are read.
    return compute_part(rank, shape, mesh.mesh, placements)


@functools.cache
def list_ranks(mesh: DeviceMesh) -> frozenset[int]:
    """Lists the ranks of a mesh."""
    return frozenset(mesh.mesh.flatten().tolist())


def find_experts_mesh(model: nn.Module) -> DeviceMesh | None:
    """Returns the mesh over which the model's experts are divided without DTensors; None if there is none."""
    mesh: DeviceMesh | None = getattr(model, _EXPERTS_MESH, None)
    return mesh


def _place_experts_apart(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Returns a placement function that puts the experts on a mesh of the same ranks with another process group."""
    apart = private.make_placement(_make_separate_mesh(mesh.device_type))
    experts = {id(parameter) for name, parameter in model.named_parameters() if ".experts." in name}
    return lambda parameter: apart if id(parameter) in experts else None


@functools.cache
def _make_separate_mesh(device_type: str) -> DeviceMesh:
    """Makes a mesh of all ranks with its own process group; ``init_device_mesh`` would use the default group."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("expert_fsdp",))


def shard_fsdp1(
    model: nn.Module,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None,
    offload: Offload,
    use_orig_params: bool,
) -> FullyShardedDataParallel:
    """Wraps each decoder layer and the root with FSDP1. Every rank must call this.

    mesh: the mesh to shard over; None for one group of all ranks.
    compute_dtype: the dtype of mixed precision; None for no mixed precision.
    """
    strategy = ShardingStrategy.FULL_SHARD if mesh is None or mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    mixed_precision = None
    if compute_dtype is not None:
        mixed_precision = MixedPrecision(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float32,
            # peft casts what goes into an adapter to the dtype of its shards.
            cast_forward_inputs=not _are_all_trained(model),
        )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=_wrap_policy(model, find_offloaded_units(model, offload)),
        device_id=device,
        device_mesh=mesh,
        sharding_strategy=strategy,
        mixed_precision=mixed_precision,
        cpu_offload=CPUOffload(offload_params=True) if offload.policy else None,
        use_orig_params=use_orig_params,
    )


def _are_all_trained(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _wrap_policy(model: nn.Module, offloaded: tuple[nn.Module, ...]) -> Any:
    """Makes the policy that wraps each decoder layer and, if some parameters are frozen, each leaf module that is
    trained.

    verl wraps such leaf modules for LoRA, since a flat parameter is trained as a whole or not at all.

    offloaded: the units under CPUOffload, with all modules below them.
    """
    layer_classes = {type(layer) for layer in models.find_decoder_layers(model)}
    if _are_all_trained(model) and not offloaded:
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes)
    on_host = {module for unit in offloaded for module in unit.modules()}
    trains_all = _are_all_trained(model)

    def choose_options(module: nn.Module) -> bool | dict[str, Any]:
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        is_leaf = not trains_all and trains and not any(module.children())
        is_unit = type(module) in layer_classes or is_leaf
        return {"cpu_offload": CPUOffload(offload_params=True)} if is_unit and module in on_host else is_unit

    return CustomPolicy(choose_options)
