"""Functions that take weights out, rightly and with a published error: ``fsdp-doctor probe --method``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import fsdp_doctor

from .entries import publish


def gather_each(model: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers each tensor of the state dict on the device."""
    for name, tensor in model.state_dict().items():
        tensor = tensor.to(device)
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@fsdp_doctor.promises(device="cpu")
def gather_to_host(model: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers each tensor, and copies it to the host."""
    for name, tensor in gather_each(model, device):
        yield name, tensor.cpu()


@fsdp_doctor.promises(device="cpu", ranks="rank0")
def gather_with_options(model: Any) -> dict[str, Any]:
    """Asks torch for a full state dict in host memory."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


@publish("verl-project/verl#7347", "verl-project/verl#7347", names=("weight",))
@fsdp_doctor.promises(device="cpu")
def read_host_copies_early(model: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies to the host without waiting, and reads the copies at once."""
    for name, tensor in gather_each(model, device):
        yield name, tensor.to("cpu", non_blocking=True).clone()


@publish("huggingface/trl#3670", "huggingface/trl#3687", names=("weight",))
@fsdp_doctor.promises(keys="parameters")
def summon_under_fsdp2(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Summons full parameters as of FSDP1; under FSDP2 the parameters stay shards."""
    with FullyShardedDataParallel.summon_full_params(model):
        for name, parameter in model.named_parameters():
            data = parameter.data
            yield name, data.to_local() if isinstance(data, DTensor) else data


CLEAN_METHODS = ("gather_each", "gather_to_host", "gather_with_options")
# The scenario in which an error has to be found, and those of the clean functions.
ERROR_SCENARIO = "fsdp2/none/unstaged"
CLEAN_SCENARIOS = tuple(
    f"fsdp2/{offload}/unstaged{model}"
    for offload in ("none", "policy", "param")
    for model in ("", "/uneven", "/qwen3-tied")
)
SCENARIOS_OF_ERRORS = ("--strategy=fsdp2", "--offload=none", "--staging=unstaged")
SCENARIOS = (
    *("--strategy=fsdp2", "--offload=none,policy,param", "--staging=unstaged"),
    *("--dims=even,uneven", "--model=qwen3,qwen3-tied"),
)
