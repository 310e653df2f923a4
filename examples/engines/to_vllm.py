"""vLLM: its trainer reads the weights from a source over the model, and drives the update by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_doctor


def connect(model: nn.Module, url: str) -> Any:
    """Once, on every rank, after the model was sharded. ``vllm serve`` answers under ``url``, on the same GPUs."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    # On the same GPUs no rank may gather while another one sends.
    source = fsdp_doctor.engines.vllm_weight_source(model, dtype=torch.bfloat16, in_step=True)
    init_info = IPCTrainerInitInfo(rank=dist.get_rank(), packed=True)
    return WeightTransferTrainerFactory.trainer_init(init_info, client=HTTPVLLMWeightSyncClient(url), source=source)


def sync(trainer: Any) -> None:
    """After a training step, on every rank. If it raises, the other ranks raise RankLeft, and none of them waits."""
    with trainer.source:
        trainer.send_weights()
