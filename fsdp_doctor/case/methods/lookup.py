"""Finds the function of a method under test, built-in or a user's, and calls it with the arguments that it requests."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_never

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Context
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.matrix.methods import MatrixMethod
from fsdp_doctor.weights.extract import full_tensors, local_shards
from fsdp_doctor.weights.fingerprints.keyed_sum import compute_column_keys
from fsdp_doctor.weights.load import load_full_tensors, load_optimizer_state
from fsdp_doctor.weights.save import save_full_tensors, save_optimizer_state

_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class MethodArguments:
    """Sharded model in the state of the scenario, and further arguments that a method can request by name.

    device: this rank's compute device. The arguments below exist only in a probe.
    scratch: a directory for this call, the same on every rank, which does not exist yet.
    control: a gloo group that the model does not use.
    state: the checkpoint to load, for a method that loads.
    buffers: the non-persistent buffers, by name, on the host, with the values of a model that was never on the meta
        device.
    experts: the dim of the mesh along which experts are hidden from FSDP; None if they are not hidden.
    train: a function that trains the next step, for a method that runs while the job continues. Every rank must call it
        once. The method must still yield the state from the time of its call. The model is then restored to that state.
    """

    model: nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    scratch: pathlib.Path | None = None
    control: dist.ProcessGroup | None = None
    state: Any = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    experts: DeviceMesh | None = None
    train: Callable[[], None] | None = None


MethodFunction = Callable[[MethodArguments], Any]
_ARGUMENTS = tuple(argument.name for argument in dataclasses.fields(MethodArguments))


def call_by_name(function: Callable[..., Any]) -> MethodFunction:
    """Wraps ``function`` so that it gets the model and the arguments that it requests by name."""
    names = list_requested_arguments(function)
    return lambda given: function(given.model, **{name: getattr(given, name) for name in names})


def list_requested_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Lists the names of the parameters after the model, except those with a default."""
    try:
        further = list(inspect.signature(function).parameters.values())[1:]
    except (NameError, TypeError, ValueError):
        # A function of C has no signature; from Python 3.14 on an annotation may name an object that is imported only
        # for types.
        return ()
    return tuple(p.name for p in further if p.kind in _BY_NAME and p.default is inspect.Parameter.empty)


def run_in_context(context: Context, function: MethodFunction) -> MethodFunction:
    """Wraps ``function`` so that it is called, and its result is iterated over, in the given autograd context.

    The caller's own work on an entry is outside of the context.
    """
    match context:
        case Context.ORDINARY:
            return function
        case Context.NO_GRAD:
            enter: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
        case Context.INFERENCE:
            enter = torch.inference_mode
        case _:
            assert_never(context)

    def call(given: MethodArguments) -> Any:
        with enter():
            result = function(given)
        return iterate(result) if isinstance(result, Iterator) else result

    def iterate(entries: Iterator[Any]) -> Iterator[Any]:
        while True:
            with enter():
                try:
                    entry = next(entries)
                except StopIteration:
                    return
            yield entry
            del entry

    return call


def find_function(method: MatrixMethod) -> Callable[..., Any]:
    """Returns the function of a built-in method. Imports only that function's module, since the module for adapters
    needs peft.
    """
    module, _, name = method.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"fsdp_doctor.case.methods.{module}"), name)
    return function


def fix(model: nn.Module, experts: DeviceMesh | None) -> Any:
    return full_tensors(model, experts=experts)


def extract_adapter_by_fix(model: nn.Module, experts: DeviceMesh | None) -> Any:
    return full_tensors(model, lora="adapter", experts=experts)


def extract_local_by_fix(model: nn.Module, experts: DeviceMesh | None) -> Any:
    for shard in local_shards(model, experts=experts):
        yield shard.name, shard


def save_by_fix(model: nn.Module, experts: DeviceMesh | None, scratch: pathlib.Path) -> dict[str, torch.Tensor]:
    """Saves the model with fsdp-doctor. Returns on rank 0 the tensors that the safetensors library reads from the
    files.
    """
    save_full_tensors(model, scratch, names="model", experts=experts)
    full: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        for file in scratch.glob("*.safetensors"):
            full |= load_file(file)
        shutil.rmtree(scratch)
    return full


def save_optimizer_by_fix(
    model: nn.Module, optimizer: torch.optim.Optimizer, experts: DeviceMesh | None, scratch: pathlib.Path
) -> dict[str, torch.Tensor]:
    """Saves the optimizer's state with fsdp-doctor. Returns on rank 0 the state that torch.load reads from the file."""
    save_optimizer_state(model, optimizer, scratch, experts=experts)
    # Keys on the device that stay for the process: not memory that the call keeps.
    compute_column_keys.cache_clear()
    if dist.get_rank() != 0:
        return {}
    saved = torch.load(scratch / "optimizer.pt", weights_only=True)
    shutil.rmtree(scratch)
    return {f"{name}.{key}": value for name, values in saved["state"].items() for key, value in values.items()}


def load_by_fix(model: nn.Module, state: Any, buffers: Any, experts: DeviceMesh | None) -> Any:
    return load_full_tensors(model, state, buffers=buffers, experts=experts)


def load_optimizer_by_fix(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, experts: DeviceMesh | None
) -> Any:
    return load_optimizer_state(model, optimizer, state, experts=experts)


def load_user_method(name: str, given: Collection[str] = _ARGUMENTS) -> tuple[Callable[..., Any], Contract]:
    """Imports a user's ``module:function``. Returns it with the contract declared with ``fsdp_doctor.promises``.

    Raises UsageError if the import fails, if there is no such function, or if the function requests an unknown
    argument.

    given: the names of the arguments that the function can request.
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
    if unknown := [parameter for parameter in list_requested_arguments(function) if parameter not in given]:
        known = ", ".join(argument for argument in given if argument != "model")
        raise UsageError(
            f"--method {name}: a method has no argument {unknown[0]!r}; after the model its parameters can be {known}, "
            "and any other parameter needs a default"
        )
    return function, getattr(function, "contract", Contract())
