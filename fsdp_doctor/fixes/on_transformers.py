"""The replacement for transformers' Trainer, read in transformers 5.22.0 to 5.24.0 (``training_args.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_doctor.fixes.applying import fall_back


def offload_as_accelerate_names_it(original: Callable[..., Any], arguments: Any) -> Any:
    """Replaces ``TrainingArguments._process_fsdp_args``, which reads ``cpu_offload`` and not ``offload_params``."""
    plugin = original(arguments)
    config = arguments.fsdp_config
    if plugin is None or not config.get("offload_params") or "cpu_offload" in config:
        return plugin
    clips = plugin["fsdp_version"] == 2 and arguments.max_grad_norm
    if clips and dist.is_initialized() and "cpu:" not in dist.get_backend_config():
        reason = 'the norm of gradients on the CPU needs a backend for it: set ddp_backend="cuda:nccl,cpu:gloo"'
        return fall_back(reason, original, arguments)
    plugin["cpu_offload"] = config["cpu_offload"] = True
    return plugin
