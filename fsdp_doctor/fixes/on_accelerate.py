"""Replacements for accelerate's loads, based on the source of accelerate 1.12.0 to 1.15.0 (``utils/fsdp_utils.py``)."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fsdp_doctor.fixes.applying import fall_back, read_global
from fsdp_doctor.weights.extract import lora
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.load import LoadError, load_full_tensors


class LoadedKeys(NamedTuple):
    """The result of a load, with the field names that ``nn.Module.load_state_dict`` uses for its result."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state(
    original: Callable[..., Any],
    model: nn.Module,
    state_dict: Mapping[str, Any],
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    """Replaces ``_set_model_state_dict``; loads a full state dict with ``load_full_tensors``.

    Under FSDP2, only rank 0 has the full state dict. Under FSDP1, every rank has it, and only adapters are loaded in
    this way. Raises LoadError if no tensor of the state dict belongs to the adapter.
    """

    def leave(reason: str) -> Any:
        return fall_back(reason, original, model, state_dict, adapter_only=adapter_only, sd_options=sd_options)

    layers = lora.read(lora.find_adapter_modules(model))
    adapter_only = adapter_only and layers.has_adapters
    if sd_options is not None:
        if adapter_only or not (sd_options.full_state_dict and sd_options.broadcast_from_rank0):
            return leave("a load of only an adapter under FSDP2" if adapter_only else "a sharded state")
        load_full_tensors(model, state_dict or None, dtype="cast")
        return LoadedKeys([], [])
    if not adapter_only or not isinstance(model, FullyShardedDataParallel):
        return leave("the whole model under FSDP1")
    if FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is not StateDictType.FULL_STATE_DICT:
        return leave("a sharded state")
    try:
        find_name = lora.make_adapter_names(layers)
    except (NotImplementedError, ValueError) as error:
        return leave(str(error))
    names = [name for names in reader.read(model).list_all_names() for name in names]
    name_of = {saved: name for name in names if (saved := find_name(name)) is not None}
    own = {name_of[saved]: tensor for saved, tensor in state_dict.items() if saved in name_of}
    if not own:
        raise LoadError(
            f"none of the checkpoint's {len(state_dict)} tensors belongs to the adapter, whose names are like "
            f"{min(name_of)}"
        )
    load_full_tensors(model, own, strict=False, dtype="cast")
    missing, unexpected = name_of.keys() - state_dict.keys(), state_dict.keys() - name_of.keys()
    return LoadedKeys(sorted(missing), sorted(unexpected))


def load_sharded_optimizer(
    original: Callable[..., Any],
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    **options: Any,
) -> Any:
    """Replaces ``load_fsdp_optimizer``, which loads nothing before the optimizer's first step.

    The original loads only into state that the optimizer already has, so the replacement first makes empty state.
    """
    arguments = (fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index, adapter_only)
    is_sharded = fsdp_plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT and options.get("use_dcp", True)
    if fsdp_plugin.fsdp_version != 1 or not is_sharded:
        return fall_back("FSDP2, or FSDP1 without SHARDED_STATE_DICT", original, *arguments, **options)
    bare = getattr(optimizer, "optimizer", optimizer)
    if not bare.state:
        name = f"{read_global(original, 'OPTIMIZER_NAME')}_{optimizer_index}"
        directory = pathlib.Path(input_dir)
        metadata = FileSystemReader(directory if directory.name == name else directory / name).read_metadata()
        kinds = dict(_list_kinds(metadata.state_dict_metadata))
        parameters = [parameter for group in bare.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.requires_grad and parameter.numel():
                bare.state[parameter] = {
                    key: torch.zeros_like(parameter, dtype=dtype) if is_divided else torch.zeros((), dtype=dtype)
                    for key, (dtype, is_divided) in kinds.items()
                }
    return original(*arguments, **options)


def _list_kinds(saved: Mapping[str, Any]) -> Iterator[tuple[str, tuple[torch.dtype, bool]]]:
    """Yields each key of the parameters' state in a checkpoint with its dtype, and whether it is a tensor with
    dimensions.
    """
    for name, metadata in saved.items():
        # An object, and not a tensor, has no properties.
        if name.startswith("optimizer.state.") and hasattr(metadata, "properties"):
            yield name.rpartition(".")[2], (metadata.properties.dtype, len(metadata.size) > 0)
