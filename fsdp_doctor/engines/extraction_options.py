"""The arguments of an extraction that an engine's interface hands through."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypedDict

import torch

from fsdp_doctor.extract.lora import Lora


class ExtractionOptions(TypedDict, total=False):
    """As :func:`fsdp_doctor.full_tensors` has them."""

    dtype: torch.dtype | None
    keep_dtype: Collection[str]
    bucket_bytes: int
    lora: Lora
