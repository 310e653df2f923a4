"""SGLang: flattened buckets, whose memory the engine maps instead of copying it over a wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_doctor


def sync(model: nn.Module, engine: Any, tp_size: int, bucket_bytes: int = 512 << 20) -> None:
    """After a training step, on every rank. engine: an ``sglang.Engine`` on the same node; None on the other ranks.

    On its GPUs no rank may gather while another one sends. If it raises, the other ranks raise RankLeft.
    """
    if engine is not None:
        engine.begin_weight_update()
    with fsdp_doctor.full_tensors(model, dtype=torch.bfloat16, names="auto", in_step=True) as tensors:
        for bucket in fsdp_doctor.engines.sglang_buckets(tensors, bucket_bytes):
            if engine is not None:
                engine.update_weights_from_tensor(
                    named_tensors=bucket.serialized(tp_size), load_format="flattened_bucket", flush_cache=False
                )
    if engine is not None:
        engine.end_weight_update()
