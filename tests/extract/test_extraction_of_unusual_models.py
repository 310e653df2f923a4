"""full_tensors against the model before it was sharded, where no probe can build it: on one, two and three CPU ranks.

FSDP1 (which takes a CPU when it is told to), parameters that FSDP ignores, a model without any FSDP, a wrapped model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from support.ranks import Setting, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard

from fsdp_doctor import full_tensors

CPU = torch.device("cpu")
# torch 2.6's FSDP2 cannot train on a CPU, nor ignore parameters.
TORCH_2_6 = not hasattr(torch.cpu.Stream, "record_event")


class Tied(nn.Module):
    """Odd sizes, a tied pair, a buffer that is saved and one that is not, a frozen integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def fsdp1(model: Tied, *, use_orig_params: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    options = {"device_id": CPU, "use_orig_params": use_orig_params, "sharding_strategy": strategy}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: Tied, *, ignored: bool = False, checkpointed: bool = False) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for index, layer in enumerate(model.layers):
        if checkpointed:
            model.layers[index] = checkpoint_wrapper(layer)
        fully_shard(model.layers[index], mesh=mesh)
    fully_shard(model, mesh=mesh, **({"ignored_params": {model.embed.weight}} if ignored and not TORCH_2_6 else {}))
    return model


CASES: dict[str, Callable[[Tied], nn.Module]] = {
    "fsdp1": lambda model: fsdp1(model, use_orig_params=False),
    "fsdp1 with use_orig_params": lambda model: fsdp1(model, use_orig_params=True),
    "fsdp1 without sharding": lambda model: fsdp1(model, use_orig_params=False, strategy=ShardingStrategy.NO_SHARD),
    "fsdp2": fsdp2,
    "fsdp2 with an ignored parameter": lambda model: fsdp2(model, ignored=True),
    "fsdp2 with activation checkpointing": lambda model: fsdp2(model, checkpointed=True),
    "no fsdp": lambda model: model,
}


def check(build: Callable[[Tied], nn.Module]) -> Iterator[str]:
    torch.manual_seed(0)
    plain = Tied()
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = build(copy.deepcopy(plain))
    for phase in ("fresh", "trained"):
        yielded = list(full_tensors(model))
        names = [name for name, _ in yielded]
        if sorted(names) != sorted(expected):
            yield f"{phase}: names {sorted(set(names) ^ set(expected))}, {len(names)} of {len(expected)}"
        for name, tensor in yielded:
            if phase == "fresh" and not torch.equal(tensor, expected[name]):
                yield f"{phase}: {name} differs"
        before = {name: tensor.clone() for name, tensor in yielded}
        for _, tensor in yielded:
            tensor.fill_(-1)
        again = dict(full_tensors(model))
        yield from (
            f"{phase}: {name} aliases the model" for name in names if not torch.equal(before[name], again[name])
        )
        if again["embed.weight"].data_ptr() != again["head.weight"].data_ptr():
            yield f"{phase}: tied weights were gathered twice"
        if TORCH_2_6 and isinstance(model, FSDPModule):
            return
        loss = model(torch.arange(7) % 7).sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        after = dict(full_tensors(model))
        if torch.equal(after["layers.0.0.weight"], again["layers.0.0.weight"]):
            yield f"{phase}: training after the extraction changed nothing"


@on_ranks(Setting("cpu", 1), Setting("cpu", 2), Setting("cpu", 3))
def test_it_agrees_with_the_model_before_sharding() -> None:
    failures = [f"{name}, {failure}" for name, build in CASES.items() for failure in check(build)]
    assert failures == [], failures
