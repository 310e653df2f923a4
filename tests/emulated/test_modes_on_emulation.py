"""The stricter modes beside FSDP2 with CPU offload: what is correct is correct in them, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from support.ranks import Setting, accelerator, on_ranks, this_device, together
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

on_two = on_ranks(Setting("emulated", 2))


def losses() -> list[float]:
    """Of three steps, in which shards and gradients are copied while tensors come and go on several streams."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    policies = {"offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for module in (model[0], model[1], model[3], model):
        fully_shard(module, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found = []
    for _ in range(3):
        loss = model(torch.arange(8, device=this_device())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    accelerator().poison_freed_memory()
    try:
        yield
    finally:
        accelerator().poison_freed_memory(False)


@on_two
def test_offloaded_training_is_the_same_with_freed_memory_poisoned_and_has_no_race() -> None:
    modes: tuple[Callable[[], contextlib.AbstractContextManager[None]], ...] = (
        contextlib.nullcontext,
        poisoned,
        accelerator().race_detection,
    )
    plain, *others = [_trained_in(mode) for mode in modes]
    assert others == [plain, plain]
    together()


def _trained_in(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> list[float]:
    with mode():
        return losses()
