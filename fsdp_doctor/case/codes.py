"""Weights in 4 bits: their quantized codes are parameters, and their scales are in other objects.

bitsandbytes keeps the scales of a weight in the ``quant_state`` of its module. No state dict of FSDP2 contains these
scales, and FSDP neither moves nor shards them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp_doctor.case.findings import compare
from fsdp_doctor.checkpoints.names import strip_wrappers

# By the name of a weight, the tensors of its scales on the host, in the order of the state's attributes.
Scales: TypeAlias = Mapping[str, tuple[torch.Tensor, ...]]


def decode(model: nn.Module, codes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Computes the weights from the model's quantized codes and scales, as bitsandbytes does.

    codes: the unsharded codes of each weight on the host; other tensors are ignored.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, state in _list_states(model):
        import bitsandbytes.functional

        on_host = copy.deepcopy(state)
        on_host.to("cpu")
        weights[name] = bitsandbytes.functional.dequantize_4bit(codes[name], on_host)
    return weights


def copy_scales(model: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """Copies the scales of every weight to the host."""
    return {
        name: tuple(tensor.detach().to("cpu", copy=True) for tensor in _list_tensors(state))
        for name, state in _list_states(model)
    }


def write_scales(model: nn.Module, scales: Scales) -> None:
    """Overwrites the model's scales in place."""
    for name, state in _list_states(model):
        for own, given in zip(_list_tensors(state), scales[name], strict=True):
            own.copy_(given)


def find_other_scales(model: nn.Module, scales: Scales) -> list[str]:
    """Lists the weights whose scales in the model differ from ``scales`` in any bit."""
    own = copy_scales(model)
    return [
        name for name, given in scales.items() if len(own[name]) != len(given) or any(map(compare, own[name], given))
    ]


def _list_states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (name of a weight in 4 bits, the object with its scales)."""
    for module_name, module in model.named_modules():
        state: Any = getattr(module, "quant_state", None)
        if state is not None:
            yield f"{strip_wrappers(f'{module_name}.')}weight", state


def _list_tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a ``quant_state``. If its scales are quantized, too, yields also the tensors of their
    state.
    """
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _list_tensors(value)
