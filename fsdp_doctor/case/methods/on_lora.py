"""Methods for models with LoRA adapters, each written as frameworks write it; matrix/methods.toml has their names.

peft is imported by the code that builds the model; these methods are not tried with a model without adapters. This
module imports nothing of this package, since ``fsdp-doctor repro`` copies its functions into scripts unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def read_merged(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Reads like verl since PR 7014: each tensor is materialised while the adapters are merged."""
    with _merge_in_place(model):
        for name, tensor in _list_base_weights(model):
            full = _gather(tensor, device)
            yield name, full if isinstance(tensor, DTensor) else full.detach().clone()


def read_merged_late(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Reads like verl before PR 7014: the state dict aliases the weights, and is read after they were restored."""
    with _merge_in_place(model):
        weights = list(_list_base_weights(model))
    for name, tensor in weights:
        yield name, _gather(tensor, device)


def collect_adapter(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Collects the adapter like verl's collect_lora_params."""
    with _summon(model):
        for name, tensor in get_peft_model_state_dict(_find_peft_model(model)).items():
            yield _unwrap(name), _gather(tensor, device).detach().clone()


def summon_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Collects the adapter like verl's layered_summon_lora_params: module by module, each adapter to the host."""
    seen: set[str] = set()
    for prefix, module in _list_layers(model):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            state = get_peft_model_state_dict(_find_peft_model(model), state_dict=module.state_dict())
            for name, tensor in state.items():
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if (whole_name := _unwrap(prefix + name)) not in seen:
                    seen.add(whole_name)
                    yield whole_name, full.detach().cpu()


def set_peft_model_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    """Loads an adapter like peft."""
    return peft.set_peft_model_state_dict(model, state)


@contextlib.contextmanager
def _merge_in_place(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the adapters are added to the weights in place; at its end the weights are restored."""
    with _summon(model), torch.no_grad():
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        weights: list[Any] = [layer.get_base_layer().weight for layer in layers]
        shards = [weight.to_local() if isinstance(weight, DTensor) else weight.detach() for weight in weights]
        kept = [shard.to("cpu", copy=True) for shard in shards]
        for layer in layers:
            layer.merge()
        try:
            yield
        finally:
            for layer, shard, before in zip(layers, shards, kept, strict=True):
                shard.copy_(before)
                layer.merged_adapters.clear()


def _summon(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which FSDP1's parameters are unsharded; FSDP2's stay DTensors."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return contextlib.nullcontext()


def _list_base_weights(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the weights that belong to no adapter, under their names in the model that peft was given."""
    tensors = model.named_parameters() if isinstance(model, FullyShardedDataParallel) else model.state_dict().items()
    for name, tensor in tensors:
        if ".lora_" not in name:
            yield _unwrap(name).removeprefix("base_model.model.").replace(".base_layer.", "."), tensor


def _gather(tensor: Any, device: torch.device) -> Any:
    return tensor.to(device, non_blocking=True).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _unwrap(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _find_peft_model(model: torch.nn.Module) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _list_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (prefix, FSDP module) for every FSDP module except the root."""
    for name, module in model.named_modules():
        if name and isinstance(module, (FullyShardedDataParallel, FSDPModule)):
            yield _unwrap(f"{name}."), module
