"""Memory for tensors on the meta device, without making other tensors of them.

An optimizer that was made before the load holds the same parameters after it, and what is tied stays tied.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp_doctor.load.outcome import LoadError


def materialize(tensor: torch.Tensor, device: torch.device) -> None:
    """Gives a tensor on the meta device uninitialized memory, in place; a DTensor, its shard.

    Raises LoadError where torch does not allow it: something else, such as a graph, holds on to the tensor.
    """
    become(tensor, torch.empty_like(tensor, device=device))


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """The tensor takes over the memory of the other, and stays the object, with the attributes, that it was."""
    new = nn.Parameter(other, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    new.__class__ = type(tensor)
    new.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:
        raise LoadError(f"a tensor on the meta device cannot be given memory: {error}") from error
