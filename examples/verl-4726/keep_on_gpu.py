"""What verl PR 4726 adds to ``get_actor_weights_info``, and the half of it that its review asks for.

Names, shapes and dtypes are all that is wanted. FSDP1's ``state_dict()`` gathers for them, on the device alone, so an
offloaded model is loaded first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_doctor.case.offloading import load, offload


def kept(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    load(model, device, non_blocking=False)
    yield from model.state_dict().items()


def given_back(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    yield from kept(model, device)
    offload(model, non_blocking=False)
