"""The remedy as code: names, shapes and dtypes from what is known without an unshard; weights with the units loaded.

fsdp-doctor probe --case fsdp1/param/unstaged/remedy:weights
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_doctor


def weights_info(model: nn.Module) -> list[fsdp_doctor.WeightInfo]:
    """What get_actor_weights_info is for: no communication, no traffic to the device, on any one rank."""
    return fsdp_doctor.weights_info(model)


def weights(model: FullyShardedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Loads the flat parameters as verl's load_fsdp_model_to_gpu does, and takes them back. Every rank must call it."""
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    _move(model, device)
    try:
        yield from model.state_dict().items()
    finally:
        _move(model, torch.device("cpu"))


@torch.no_grad()
def _move(model: FullyShardedDataParallel, device: torch.device) -> None:
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit._handle is not None:
            unit._handle.flat_param_to(device, non_blocking=False)
            unit._handle.flat_param._local_shard = unit._handle.flat_param.data
