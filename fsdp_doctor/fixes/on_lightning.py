"""Replacements for Lightning's ModelParallelStrategy, based on the source of Lightning 2.6.5 and 2.6.6."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from fsdp_doctor.fixes.applying import fall_back
from fsdp_doctor.fixes.moving import is_offloaded, move_unsharded


def keep_offloaded_shards(original: Callable[..., Any], strategy: Any) -> Any:
    """Replaces ``ModelParallelStrategy.model_to_device``; moves only the tensors that FSDP2 does not shard.

    The original also moves the shards that CPUOffloadPolicy keeps on the CPU.
    """
    model = strategy.model
    if not is_offloaded(model):
        return fall_back("a model with units that are not offloaded", original, strategy)
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(tensor, DTensor) and tensor.device.type != "cpu" for tensor in tensors):
        return fall_back("shards that were given memory on the device", original, strategy)
    move_unsharded(model, strategy.root_device)
    return None


def name_weights_as_expected(original: Callable[..., Any], checkpoint_folder: Any) -> Any:
    """Replaces ``_load_distributed_checkpoint``; gives the weights the key ``model``, which the caller expects."""
    # The only caller in that module is the program that ``python -m`` runs.
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is None or program.name != "lightning.pytorch.utilities.consolidate_checkpoint":
        return fall_back("another program than consolidate_checkpoint", original, checkpoint_folder)
    checkpoint = original(checkpoint_folder)
    if "model" in checkpoint or "state_dict" not in checkpoint:
        return checkpoint
    return {"model": checkpoint.pop("state_dict"), **checkpoint}
