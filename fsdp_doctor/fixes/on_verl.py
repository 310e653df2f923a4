"""Replacements for verl's engine, based on verl 0.7.1 to 0.9.1.

Sources: ``workers/engine/fsdp/transformer_impl.py`` and ``utils/fsdp_utils.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_doctor.fixes.applying import fall_back, read_global
from fsdp_doctor.fixes.moving import is_offloaded, move_unsharded
from fsdp_doctor.fixes.sending import check_sent, choose_bucket_bytes, list_buffers
from fsdp_doctor.weights.extract import full_tensors, weights_info
from fsdp_doctor.weights.fingerprints import fingerprint


def send_in_bfloat16(original: Callable[..., Any], engine: Any, *arguments: Any, **options: Any) -> Any:
    """Replaces ``FSDPEngine.get_per_tensor_param`` before verl 0.9.

    Like the original, it casts only the parameters to bfloat16, and leaves buffers in their own dtype.
    """
    return _send(original, torch.bfloat16, engine, *arguments, **options)


def send_in_own_dtype(original: Callable[..., Any], engine: Any, *arguments: Any, **options: Any) -> Any:
    """Replaces ``FSDPEngine.get_per_tensor_param`` since verl 0.9. Like the original, it casts only merged weights."""
    merges = engine.model_config.lora.get("merge", False)
    has_adapters = hasattr(engine.module, "peft_config")
    return _send(original, torch.bfloat16 if merges and has_adapters else None, engine, *arguments, **options)


def _send(
    original: Callable[..., Any],
    dtype: torch.dtype | None,
    engine: Any,
    layered_summon: bool = False,
    base_sync_done: bool = False,
    **more: Any,
) -> tuple[Iterable[tuple[str, torch.Tensor]], dict[str, Any] | None]:
    options = {"layered_summon": layered_summon, "base_sync_done": base_sync_done, **more}
    model = engine.module
    # FSDP1 passes on what the wrapped module has.
    adapter = getattr(model, "peft_config", {}).get("default")
    if engine.model_config.lora.get("merge", False):
        adapter = None
    if engine._qat_enabled:
        return fall_back("quantization-aware training", original, engine, **options)  # type: ignore[no-any-return]
    if adapter is not None and not base_sync_done:
        return fall_back("the base under an adapter", original, engine, **options)  # type: ignore[no-any-return]
    try:
        infos = weights_info(model, lora="adapter" if adapter is not None else "merged")
    except NotImplementedError as error:
        return fall_back(str(error), original, engine, **options)  # type: ignore[no-any-return]
    # verl leaves what it offloads by hand on the CPU, since the rollout needs the memory.
    if engine._is_offload_param:
        read_global(original, "offload_fsdp_model_to_cpu")(model)
    # verl's engine is not told the bucket of the rollout.
    bucket_bytes = choose_bucket_bytes(infos, dtype)
    if adapter is not None:
        summed = functools.partial(fingerprint, model, lora="adapter")
        with full_tensors(model, lora="adapter", bucket_bytes=bucket_bytes) as tensors:
            sent = check_sent(original, tensors, summed)
            return {name: tensor.cpu() for name, tensor in sent}.items(), adapter.to_dict()
    kept = list_buffers(model, infos) if dtype is not None else []
    tensors = full_tensors(model, dtype=dtype, keep_dtype=kept, names="auto", bucket_bytes=bucket_bytes)
    summed = functools.partial(fingerprint, model, dtype=dtype, keep_dtype=kept, names="auto")
    return check_sent(original, tensors, summed), None


def leave_shards_to_policy(original: Callable[..., Any], model: nn.Module) -> Any:
    """Replaces ``load_fsdp2_model_to_gpu``; moves only the tensors that FSDP2 does not shard.

    The original also moves the shards that CPUOffloadPolicy keeps on the CPU.
    """
    if not is_offloaded(model):
        return fall_back("a model of which some units are not offloaded", original, model)
    move_unsharded(model, read_global(original, "get_device_id")())
    return None
