"""Names of torch's dtypes, and the dtypes that other words, such as ``bf16``, stand for."""

from __future__ import annotations

import torch

from fsdp_doctor.checkpoints.dtypes import NAME_OF_CODE


def name_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without ``torch.``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def check_dtype(dtype: object) -> None:
    """Raises TypeError unless ``dtype`` is None or a torch.dtype. For a string such as ``bf16``, the error suggests a
    dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return
    meant = find_meant_dtype(dtype) if isinstance(dtype, str) else None
    suggestion = f" (did you mean {meant}?)" if meant is not None else ""
    raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}{suggestion}")


def find_meant_dtype(word: str) -> torch.dtype | None:
    """Finds the dtype that a word such as ``bf16``, ``fp16`` or ``torch.half`` means; None for any other word."""
    name = word.removeprefix("torch.").lower()
    # As in safetensors: bf16, and fp16 for f16.
    meant = getattr(torch, NAME_OF_CODE.get(name.replace("fp", "f").upper(), name), None)
    return meant if isinstance(meant, torch.dtype) else None
