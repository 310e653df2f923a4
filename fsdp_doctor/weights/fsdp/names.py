"""The names of the unwrapped Hugging Face model."""

from __future__ import annotations

import re

from fsdp_doctor.checkpoints.names import WRAPPER_NAMES

_PEFT_ROOT = "base_model.model."
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")


def unwrap_name(name: str) -> str:
    """``name`` without what FSDP1, activation checkpointing and torch.compile put into it."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def strip_adapters(name: str) -> str:
    """``name`` as in the model that peft was given, for a weight that is no adapter's."""
    # Adapters of several parameters of one module are around one another.
    return _BASE_LAYERS.sub(".", name.removeprefix(_PEFT_ROOT))
