"""An extraction that needs more memory than a training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import fsdp_doctor


def collects_ten_times(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the right values when ten copies of them lie on the device."""
    copies = [{name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(model)} for _ in range(10)]
    yield from copies[0].items()
