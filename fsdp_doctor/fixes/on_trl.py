"""Replacement for TRL's sender, based on the source of TRL 1.11.0 to 1.16.0 (``generation/vllm_generation.py``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fsdp_doctor.fixes.applying import fall_back
from fsdp_doctor.fixes.sending import check_sent, choose_bucket_bytes, list_buffers
from fsdp_doctor.weights.extract import full_tensors, weights_info
from fsdp_doctor.weights.fingerprints import fingerprint


def iterate_full_tensors(original: Callable[..., Any], generation: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Replaces ``VLLMGeneration._iter_named_params``, and yields each parameter once, in its own dtype."""
    if not generation._dist.is_fsdp:
        return fall_back("a model that is not under FSDP", original, generation)  # type: ignore[no-any-return]
    model = generation.model
    try:
        infos = weights_info(model)
    except NotImplementedError as error:
        return fall_back(str(error), original, generation)  # type: ignore[no-any-return]
    tensors = full_tensors(model, bucket_bytes=choose_bucket_bytes(infos))
    checked = check_sent(original, tensors, functools.partial(fingerprint, model))
    return _rename_parameters(checked, generation, frozenset(list_buffers(model, infos)))


def _rename_parameters(
    tensors: Iterable[tuple[str, torch.Tensor]], generation: Any, buffers: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    last: torch.Tensor | None = None
    for name, tensor in tensors:
        # The names of a tied parameter follow one another, with one tensor.
        if name not in buffers and tensor is not last:
            yield generation._fix_param_name_to_vllm(name), tensor
        last = tensor
