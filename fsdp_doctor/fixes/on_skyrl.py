"""Replacements for SkyRL, based on the source of SkyRL 0.3.0 (``backends/skyrl_train/distributed/fsdp_utils.py``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_doctor.fixes.applying import fall_back
from fsdp_doctor.weights.extract import full_tensors


def collect_adapter(original: Callable[..., Any], model: nn.Module) -> Any:
    """Replaces ``layered_summon_lora_params``; returns the adapter's full tensors on the CPU.

    The original gives peft the state dicts of single layers.
    """
    try:
        with full_tensors(model, lora="adapter") as tensors:
            return OrderedDict((name, tensor.cpu()) for name, tensor in tensors)
    except NotImplementedError as error:
        return fall_back(str(error), original, model)


def tie_before_sharding(original: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    """Replaces ``apply_fsdp2``; first ties the weights again that the move to the meta device has separated."""
    if not model.config.tie_word_embeddings:
        return fall_back("a model without tied weights", original, model, *arguments)
    model.tie_weights()
    return original(model, *arguments)
