"""From the name of a path to the function behind it, the user's own included."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case.paths.arguments import PathArguments, asked_for
from fsdp_doctor.errors import UsageError
from fsdp_doctor.extract import full_tensors, local_shards
from fsdp_doctor.load import load_full_tensors, load_optimizer_state
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.paths import Path

_ARGUMENTS = tuple(field.name for field in dataclasses.fields(PathArguments))


def function_of(path: Path) -> Callable[..., Any]:
    """The function behind a row of the table. peft is imported only for the paths of models with adapters."""
    module, _, name = path.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"fsdp_doctor.case.paths.{module}"), name)
    return function


def fix(model: nn.Module) -> Any:
    return full_tensors(model)


def local_fix(model: nn.Module) -> Any:
    for shard in local_shards(model):
        yield shard.name, shard


def loading_fix(model: nn.Module, state: Any, buffers: Any) -> Any:
    return load_full_tensors(model, state, buffers=buffers)


def optimizer_fix(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> Any:
    return load_optimizer_state(model, optimizer, state)


def load_user_path(name: str, given: Collection[str] = _ARGUMENTS) -> tuple[Callable[..., Any], Contract]:
    """Imports ``module:function``.

    given: the names of the arguments that there are. The function is called with the sharded model and with those that
    its further parameters name, and returns a mapping, or yields (name, tensor). What it promises is what
    ``fsdp_doctor.promises`` says of it.

    Raises UsageError if it does not import, is no function, or asks for an argument that there is not.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--method {name}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "does not exist" if function is None else f"is a {type(function).__name__}, not a function"
        raise UsageError(f"--method {name}: {attribute or 'an empty name'} in {module_name} {what}")
    if unknown := [parameter for parameter in asked_for(function) if parameter not in given]:
        known = ", ".join(argument for argument in given if argument != "model")
        raise UsageError(
            f"--method {name}: a path has no argument {unknown[0]!r}; after the model its parameters can be {known}, "
            "and any other parameter needs a default"
        )
    return function, getattr(function, "contract", Contract())
