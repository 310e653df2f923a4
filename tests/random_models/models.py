"""Random models and what happens to them before they are read: the same for a seed on every rank, and each time.

A model is a tree of modules whose forward uses every parameter. Its parameters are of many shapes (none of their
elements, one, uneven rows, no dimension at all), dtypes and roles: tied, frozen, of a module that stands in two
places. It is wrapped wholly, in part or nested, under a policy, moved by hand or trained.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from support.broken_steps import raising
from support.ranks import device_type, this_device, this_rank, world_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)

Strategy: TypeAlias = Literal["fsdp2", "fsdp1", "fsdp1-orig"]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BUFFERS = (torch.float32, torch.int64, torch.bool, torch.uint8)


class Node(nn.Module):
    """A module of parameters, buffers and other nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def add_parameter(self, name: str, parameter: nn.Parameter) -> None:
        self.register_parameter(name, parameter)
        self.used.append(name)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        total = scale * 0
        # By name: FSDP1 shows them as attributes that are no parameters.
        for tensor in (getattr(self, name) for name in self.used):
            total = total + (scale * tensor.abs().float()).sum().square() / max(tensor.numel(), 1)
        for child in self.children():
            total = total + child(scale)
        return total


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that is drawn of a seed apart from the tree itself.

    happens: what is done to the sharded model, in this order.
    """

    seed: int
    strategy: Strategy
    offloads: bool
    pins: bool
    hybrid: bool
    wraps: tuple[str, ...]
    happens: tuple[str, ...]


def draw(strategy: Strategy, seed: int) -> Recipe:
    """The recipe of a seed."""
    chooser = random.Random(f"{strategy} {seed}")
    model = tree(strategy, seed)
    twice = getattr(model, "again", None)
    # A module that is used from two places has no unit around it that is unsharded in one of them alone.
    names = [
        name
        for name, module in model.named_modules()
        if name and (module is twice or all(inner is not twice for inner in module.modules()))
    ]
    wraps = tuple(name for name in names if chooser.random() < 0.5)
    has_device = device_type() != "cpu"
    offloads = has_device and chooser.random() < 0.4
    moves = ["to the host and back", "to the host"] if has_device and not offloads else []
    happens = [
        chooser.choice(["step", "step", "forward", "lazy", "nothing", *moves]) for _ in range(chooser.randrange(4))
    ]
    while "to the host" in happens[:-1]:
        happens.remove("to the host")
    return Recipe(
        seed=seed,
        strategy=strategy,
        offloads=offloads,
        pins=chooser.random() < 0.7,
        hybrid=world_size() >= 4 and chooser.random() < 0.3,
        wraps=wraps,
        happens=tuple(happens),
    )


def tree(strategy: Strategy, seed: int) -> Node:
    """The model before it is sharded."""
    chooser = random.Random(f"tree {strategy} {seed}")
    torch.manual_seed(seed)
    # A flat parameter has one dtype, and FSDP2 reduces the gradients of one.
    dtype = chooser.choice(_FLOATS)
    root = _node(chooser, strategy, dtype, depth=0)
    nodes = [node for node in root.modules() if isinstance(node, Node)]
    if chooser.random() < 0.4:
        _tie(chooser, root)
    if len(nodes) > 1 and chooser.random() < 0.3:
        root.again = chooser.choice(nodes[1:])
    return root


def _node(chooser: random.Random, strategy: Strategy, dtype: torch.dtype, depth: int) -> Node:
    node = Node()
    for index in range(chooser.randrange(1, 4)):
        parameter = nn.Parameter(torch.randn(_shape(chooser, may_be_empty=index > 0)).to(dtype))
        # FSDP2 has no gradient of a parameter without elements; a flat parameter is trained as a whole or not at all.
        is_frozen = chooser.random() < 0.2 or (strategy == "fsdp2" and not parameter.numel())
        if strategy != "fsdp1" and is_frozen:
            parameter.requires_grad_(False)
        node.add_parameter(f"p{index}", parameter)
    if strategy == "fsdp2" and chooser.random() < 0.2:
        kind = chooser.choice([torch.int32, torch.complex64])
        node.add_parameter("other", nn.Parameter((torch.randn(5, 2) * 9).to(kind), requires_grad=False))
    if chooser.random() < 0.2:
        # Neither FSDP shards a tensor without dimensions.
        node.add_parameter("scalar", nn.Parameter(torch.randn(()).to(dtype), requires_grad=False))
    if chooser.random() < 0.3:
        buffer = (torch.randn(chooser.choice([(), (3,), (2, 3)])) * 9).to(chooser.choice(_BUFFERS))
        node.register_buffer("kept", buffer)
        node.register_buffer("scratch", torch.ones(2), persistent=False)
    if depth < 3:
        for index in range(chooser.randrange(3 - depth) + (depth == 0)):
            node.add_module(f"c{index}", _node(chooser, strategy, dtype, depth + 1))
    return node


def _shape(chooser: random.Random, *, may_be_empty: bool) -> tuple[int, ...]:
    rows = chooser.choice([1, 2, 3, 4, 7, 8, 33])
    shapes = [(rows,), (rows, 3), (rows, 4), (rows, 2, 3), (rows, 1), (rows, 129)]
    return chooser.choice([*shapes, (0, 4), (rows, 0)] if may_be_empty else shapes)


def _tie(chooser: random.Random, root: Node) -> None:
    """Gives one parameter two names in one node, so that they are in one unit."""
    node = chooser.choice([module for module in root.modules() if isinstance(module, Node)])
    node.add_parameter("tied", node.p0)


def shard(recipe: Recipe) -> nn.Module:
    """The model of a recipe, sharded, before anything happens to it."""
    model: Any = tree(recipe.strategy, recipe.seed)
    if recipe.strategy == "fsdp2":
        return _shard_fsdp2(model, recipe)
    return _shard_fsdp1(model, recipe)


def _shard_fsdp2(model: nn.Module, recipe: Recipe) -> nn.Module:
    shape = (world_size() // 2, 2) if recipe.hybrid else (world_size(),)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    policy = CPUOffloadPolicy(pin_memory=recipe.pins) if recipe.offloads else OffloadPolicy()
    model = model.to(this_device())
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": set(_scalars(model))}
    for name in reversed(recipe.wraps):
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def _scalars(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 0]


def _shard_fsdp1(model: nn.Module, recipe: Recipe) -> nn.Module:
    options: dict[str, Any] = {
        "device_id": this_device(),
        "use_orig_params": recipe.strategy == "fsdp1-orig",
        "cpu_offload": CPUOffload(offload_params=True) if recipe.offloads else None,
        "ignored_states": _scalars(model),
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP if recipe.pins else ShardingStrategy.FULL_SHARD,
    }
    wrapped: dict[int, nn.Module] = {}
    for name in sorted(recipe.wraps, key=lambda name: -name.count(".")):
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        unit = wrapped[id(module)] = FullyShardedDataParallel(module, **options)
        setattr(model.get_submodule(parent), child, unit)
        for owner in list(model.modules()):
            for key, other in list(owner._modules.items()):
                if other is module and owner is not unit:
                    owner._modules[key] = unit
    return FullyShardedDataParallel(model, **options)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Computes the loss of this rank's batch."""
    return model(torch.full((), 1.0 + this_rank(), device=this_device()))


def make_happen(model: Any, recipe: Recipe) -> None:
    """Trains, moves and initializes the model as the recipe says."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    doings: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "step": lambda: _step(model, optimizer),
        "forward": lambda: _forward_alone(model),
        "lazy": lambda: _initialize_lazily(model),
        "to the host and back": lambda: model.cpu().to(this_device()),
        "to the host": lambda: model.cpu(),
    }
    for happening in recipe.happens:
        doings[happening]()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def _forward_alone(model: nn.Module) -> None:
    with torch.no_grad():
        loss_of(model)


def _initialize_lazily(model: Any) -> None:
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            pass
    elif isinstance(model, FSDPModule):
        model.unshard()
        model.reshard()


def break_off_step(model: nn.Module, recipe: Recipe, part: Literal["forward", "backward"]) -> None:
    """Runs a step that raises at one of the model's nodes, which the seed chooses."""
    trained = {
        name for name, parameter in tree(recipe.strategy, recipe.seed).named_parameters() if parameter.requires_grad
    }
    clean = lambda name: name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")  # noqa: E731
    nodes = [
        module
        for name, module in model.named_modules()
        if isinstance(module, Node) and any(other.startswith(clean(name)) for other in trained)
    ]
    node = random.Random(f"raises {recipe.seed}").choice(nodes)
    with raising(node, part):
        loss_of(model).backward()
