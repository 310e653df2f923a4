"""Functions that keep something from one call to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor import full_tensors, promises

Entries = Iterator[tuple[str, torch.Tensor]]

_kept: dict[str, torch.Tensor] = {}
_buffers: dict[str, torch.Tensor] = {}


def keeps_in_a_global(model: nn.Module) -> Entries:
    """A cache on the host, of some of the weights, that nothing invalidates."""
    for name, tensor in full_tensors(model):
        if name.endswith("down_proj.weight"):
            yield name, _kept.setdefault(name, tensor.cpu()).to(tensor.device, copy=True)
        else:
            yield name, tensor


@promises(device="cpu", ranks="rank0")
def keeps_on_the_module(model: Any) -> dict[str, torch.Tensor]:
    if not hasattr(model, "weights_to_send"):
        model.weights_to_send = {name: tensor.cpu() for name, tensor in full_tensors(model)}
    weights = {name: tensor.clone() for name, tensor in model.weights_to_send.items()}
    return weights if dist.get_rank() == 0 else {}


def keeps_on_rank_1(model: Any) -> Entries:
    for name, tensor in full_tensors(model):
        if dist.get_rank() == 1 and name == "lm_head.weight":
            if not hasattr(model, "head_to_send"):
                model.head_to_send = tensor.cpu()
            yield name, model.head_to_send.to(tensor.device, copy=True)
        else:
            yield name, tensor


def keeps_what_it_yields(model: Any) -> dict[str, torch.Tensor]:
    if not hasattr(model, "yielded"):
        model.yielded = dict(full_tensors(model))
    yielded: dict[str, torch.Tensor] = model.yielded
    return yielded


def reads_anew_into_what_it_keeps(model: nn.Module) -> Entries:
    for name, tensor in full_tensors(model):
        kept = _buffers.setdefault(name, torch.empty_like(tensor, device="cpu"))
        yield name, kept.copy_(tensor).to(tensor.device, copy=True)


def works_once(model: Any) -> Entries:
    if hasattr(model, "was_sent"):
        raise RuntimeError("planted: it was sent before")
    model.was_sent = True
    yield from full_tensors(model)
