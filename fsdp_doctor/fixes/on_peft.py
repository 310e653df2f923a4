"""Replacement for peft's extraction of an adapter, based on peft 0.21.0 to 0.21.2 (``utils/save_and_load.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.fixes.applying import fall_back


def take_adapter_within_fsdp1(
    original: Callable[..., Any],
    model: nn.Module,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces ``get_peft_model_state_dict``; looks up the adapter's modules by their names without FSDP1's wrappers.

    The original looks up names with the wrappers, which a state dict of FSDP1 does not contain, and so finds nothing.
    If a state dict is given, nothing is gathered, because callers give a state dict on a single rank only.
    """
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return fall_back("a model that FSDP1 does not shard", original, model, state_dict, *arguments, **options)
    if state_dict is None:
        state_dict = model.state_dict()
    named_modules = model.named_modules

    def name_unwrapped(*words: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
        return (
            (strip_wrappers(f"{name}.").removesuffix("."), module) for name, module in named_modules(*words, **named)
        )

    # An attribute of only this object, which hides the class's method until the call ends.
    model.named_modules = name_unwrapped  # type: ignore[method-assign]
    try:
        return original(model, state_dict, *arguments, **options)
    finally:
        del model.named_modules
