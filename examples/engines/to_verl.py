"""verl: what a checkpoint engine's ``send_weights`` takes is the generator that we are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_doctor


async def sync(model: nn.Module, checkpoint_engine: Any) -> None:
    """After a training step, on every rank. checkpoint_engine: of ``verl.checkpoint_engine``, prepared."""
    weights, _ = fsdp_doctor.engines.verl_weights(model, dtype=torch.bfloat16)
    await checkpoint_engine.send_weights(weights)
