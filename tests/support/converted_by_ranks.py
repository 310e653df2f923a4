"""A job that changes its FSDP strategy between two steps. It is run on two ranks, with a command and a directory.

``save`` trains under FSDP1, saves, and trains further. ``load`` loads conversions of the saved checkpoint under FSDP1
and FSDP2, trains further, and compares each result with the weights that ``save`` reached.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,  # noqa: N817
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)

import fsdp_doctor.emulated  # noqa: F401

RANK = int(os.environ["RANK"])
DEVICE = torch.device("emulated", RANK)
OF_RANK = f"world_size_{os.environ['WORLD_SIZE']}_rank_{RANK}.pt"


class Net(torch.nn.Module):
    """A model with a matrix whose rows do not divide evenly, a matrix of one row, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1)
        self.register_buffer("scale", torch.rand(5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(values))) * self.scale)


def build(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
    mesh = init_device_mesh("emulated", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    match strategy:
        case "fsdp1":
            model: Any = FSDP(Net(), device_id=DEVICE, use_orig_params=True)
        case "fsdp1 with a mesh":
            model = FSDP(Net(), device_id=DEVICE, use_orig_params=True, device_mesh=mesh)
        case _:
            model = fully_shard(Net().to(DEVICE), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def forget(model: torch.nn.Module) -> None:
    """Overwrites all values, so that no value is right by chance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # The values are the same on all ranks, and multiples of a power of two, so that the mean is exact.
    values = torch.arange(28, device=DEVICE).view(4, 7).float() / 32
    model(values).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def read_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the full tensors of the model and of the optimizer by name, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    tensors = weights | {name: value for name, value in state.items() if name.startswith("state.")}
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def are_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def use_shards(model: Any) -> Any:
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    return FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)


def use_whole(model: Any) -> Any:
    configs = FullStateDictConfig(), FullOptimStateDictConfig()
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs)


def save(directory: pathlib.Path) -> None:
    model, optimizer = build("fsdp1")
    train(model, optimizer)
    (directory / "fsdp1").mkdir(exist_ok=True)
    with use_shards(model):
        torch.save(model.state_dict(), directory / "fsdp1" / f"model_{OF_RANK}")
        torch.save(FSDP.optim_state_dict(model, optimizer), directory / "fsdp1" / f"optim_{OF_RANK}")
    saved = read_states(model, optimizer)
    train(model, optimizer)
    reached = read_states(model, optimizer)
    if RANK == 0:
        torch.save((saved, reached), directory / "states.pt")


def load_fsdp1(directory: pathlib.Path, model: Any, optimizer: Any) -> None:
    with use_shards(model):
        model.load_state_dict(torch.load(directory / f"model_{OF_RANK}", weights_only=False))
        state = torch.load(directory / f"optim_{OF_RANK}", weights_only=False)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


def load_fsdp2(directory: pathlib.Path, model: Any, optimizer: Any) -> None:
    """Loads the files as verl does, and with weights_only."""
    model.load_state_dict(torch.load(directory / f"model_{OF_RANK}", weights_only=True))
    optimizer.load_state_dict(torch.load(directory / f"optim_{OF_RANK}", weights_only=True))


def load_dcp(directory: pathlib.Path, model: Any, optimizer: Any) -> None:
    train(model, optimizer)
    forget(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def load_whole(directory: pathlib.Path, model: Any, optimizer: Any) -> None:
    """Loads the full tensors, under FSDP1 as accelerate does, and under FSDP2 as set_optimizer_state_dict does."""
    weights = torch.load(directory / "pytorch_model_fsdp.bin", weights_only=True)
    state = torch.load(directory / "optimizer.bin", weights_only=True)
    if isinstance(model, FSDP):
        with use_whole(model):
            model.load_state_dict(weights)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        return
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


LOADS = {
    "fsdp1": [("fsdp1", load_fsdp1)],
    "fsdp2": [("fsdp2", load_fsdp2)],
    "again": [("fsdp1", load_fsdp1)],
    "dcp": [("fsdp1 with a mesh", load_dcp), ("fsdp2", load_dcp)],
    "torch": [("fsdp1", load_whole), ("fsdp2", load_whole)],
}


def main(what: str, directory: pathlib.Path, names: list[str]) -> None:
    dist.init_process_group("emulated")
    if what == "save":
        save(directory)
    for name in names:
        for strategy, function in LOADS[name]:
            model, optimizer = build(strategy)
            forget(model)
            function(directory / name, model, optimizer)
            loaded = read_states(model, optimizer)
            train(model, optimizer)
            continued = read_states(model, optimizer)
            if RANK == 0:
                saved, reached = torch.load(directory / "states.pt")
                # With another number of ranks, the mean is rounded differently.
                is_same = are_equal(continued, reached) or dist.get_world_size() != 2
                print(f"{name} under {strategy}:", are_equal(loaded, saved) and is_same)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
