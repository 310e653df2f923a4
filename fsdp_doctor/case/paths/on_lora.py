"""The paths of models with LoRA adapters, each as frameworks write it. The names are in paths.py.

peft is imported by whoever built the model; without adapters none of these paths is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_doctor.case.paths.inputs import Subject, to_device_then_gather
from fsdp_doctor.fsdp.names import unwrapped, without_adapters


def merged(subject: Subject) -> Iterator[tuple[str, Any]]:
    """verl since PR 7014: each tensor is materialised while the adapters are merged."""
    with _merged(subject.model):
        for name, tensor in _base_weights(subject.model):
            full = to_device_then_gather(tensor, subject.device)
            yield name, full if isinstance(tensor, DTensor) else full.detach().clone()


def merged_read_late(subject: Subject) -> Iterator[tuple[str, Any]]:
    """verl before PR 7014: the state dict, which aliases the weights, is read after they were restored."""
    with _merged(subject.model):
        weights = list(_base_weights(subject.model))
    for name, tensor in weights:
        yield name, to_device_then_gather(tensor, subject.device)


def adapter(subject: Subject) -> Iterator[tuple[str, Any]]:
    """verl's collect_lora_params."""
    with _summoned(subject.model):
        for name, tensor in get_peft_model_state_dict(_peft_model(subject.model)).items():
            yield unwrapped(name), to_device_then_gather(tensor, subject.device).detach().clone()


def layered_summon(subject: Subject) -> Iterator[tuple[str, Any]]:
    """verl's layered_summon_lora_params: module by module, each adapter to the host."""
    seen: set[str] = set()
    for prefix, module in _layers(subject.model):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            state = get_peft_model_state_dict(_peft_model(subject.model), state_dict=module.state_dict())
            for name, tensor in state.items():
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if (whole_name := unwrapped(prefix + name)) not in seen:
                    seen.add(whole_name)
                    yield whole_name, full.detach().cpu()


@contextlib.contextmanager
def _merged(model: nn.Module) -> Iterator[None]:
    """The adapters added to the weights in place, and the weights put back as they were."""
    with _summoned(model), torch.no_grad():
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        bases: list[Any] = [layer.get_base_layer() for layer in layers]
        weights = [base.weight.to_local() if isinstance(base.weight, DTensor) else base.weight for base in bases]
        kept = [weight.detach().to("cpu", copy=True) for weight in weights]
        for layer in layers:
            layer.merge()
        try:
            yield
        finally:
            for layer, weight, before in zip(layers, weights, kept, strict=True):
                weight.copy_(before)
                layer.merged_adapters.clear()


def _summoned(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """FSDP1's parameters unsharded; FSDP2's are left as they are, each with its DTensor."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return contextlib.nullcontext()


def _base_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    tensors = model.named_parameters() if isinstance(model, FullyShardedDataParallel) else model.state_dict().items()
    for name, tensor in tensors:
        if ".lora_" not in name:
            yield without_adapters(unwrapped(name)), tensor


def _peft_model(model: nn.Module) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix, FSDP module) of every one but the root."""
    for name, module in model.named_modules():
        if name and isinstance(module, (FullyShardedDataParallel, FSDPModule)):
            yield unwrapped(f"{name}."), module
