"""From the name of a path to the function behind it, the user's own included."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fsdp_doctor.errors import UsageError
from fsdp_doctor.extract import full_tensors
from fsdp_doctor.fsdp import paths_fsdp1 as v1
from fsdp_doctor.fsdp import paths_fsdp2 as v2
from fsdp_doctor.fsdp.subject import Subject
from fsdp_doctor.paths import FIX, Contract

PathFunction = Callable[[Subject], Any]


def _fix(subject: Subject) -> Any:
    return full_tensors(subject.model)


def _lora(name: str) -> PathFunction:
    """peft is imported only where a model has adapters."""

    def run(subject: Subject) -> Any:
        from fsdp_doctor.fsdp import paths_lora

        return getattr(paths_lora, name)(subject)

    return run


# torch.distributed.checkpoint.state_dict serves both FSDPs with one function.
_BOTH: dict[str, PathFunction] = {
    "get_model_state_dict.sharded": v2.model_state_dict_sharded,
    "get_model_state_dict.sharded+cpu": v2.model_state_dict_sharded_cpu,
    "get_model_state_dict.full": v2.model_state_dict_full,
    "get_model_state_dict.full+cpu": v2.model_state_dict_full_cpu,
    "get_optimizer_state_dict": v2.optimizer_state_dict,
    "weights_info": v2.weights_info,
    FIX: _fix,
    "lora.merged": _lora("merged"),
    "lora.merged.read_late": _lora("merged_read_late"),
    "lora.adapter": _lora("adapter"),
    "lora.layered_summon": _lora("layered_summon"),
}

FUNCTIONS: dict[int, dict[str, PathFunction]] = {
    1: _BOTH
    | {
        "state_dict": v1.state_dict,
        "full_state_dict": v1.full_state_dict,
        "full_state_dict.rank0+cpu": v1.full_state_dict_rank0_cpu,
        "sharded_state_dict": v1.sharded_state_dict,
        "sharded_state_dict.full_tensor": v1.sharded_state_dict_full_tensor,
        "local_state_dict": v1.local_state_dict,
        "summon_full_params": v1.summon_full_params,
    },
    2: _BOTH
    | {
        "state_dict": v2.state_dict,
        "state_dict.to.full_tensor": v2.state_dict_to_full_tensor,
        "state_dict.held": v2.state_dict_held,
        "state_dict.full_tensor.to": v2.state_dict_full_tensor_to,
        "parameters.full_tensor": v2.parameters_full_tensor,
        "parameters.data.full_tensor": v2.parameters_data_full_tensor,
        "unshard": v2.unshard,
        "dcp": v2.dcp_save_and_load,
        "from_local": v2.from_local,
        "summon_full_params": v2.summon_full_params,
    },
}


def load_user_path(name: str) -> tuple[PathFunction, Contract]:
    """Imports ``module:function``. Raises UsageError if it does not import or is no function.

    The function is called with the sharded model alone and returns a mapping, or yields
    (name, tensor). What it promises is what ``fsdp_doctor.promises`` says of it.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--path {name}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has no such name" if function is None else f"is a {type(function).__name__}, not a function"
        raise UsageError(f"--path {name}: {attribute or 'an empty name'} in {module_name} {what}")
    contract = getattr(function, "contract", Contract())
    return (lambda subject: function(subject.model)), contract
