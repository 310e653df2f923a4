"""FSDP2's shards at rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


@torch.no_grad()
def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as it lies: no copy, no collective, half-moved ones too.

    Without autograd ``DTensor.to_local`` returns the local tensor itself (torch/distributed/
    tensor/_api.py); a plain tensor is its own local part.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def entries(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(unwrapped name, parameter or persistent buffer), tied parameters under each name."""
    parameters, buffers = private.parameters_and_buffers(model)
    for name, tensor in (*parameters, *buffers):
        yield unwrapped(name), tensor
