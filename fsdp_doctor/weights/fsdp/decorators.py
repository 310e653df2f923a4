"""Decorators that make functions independent of autograd mode, thread and compiled region, or defer garbage
collection.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.private import fsdp2

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run_for_model(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function of a model run with the model's device as the current device, and outside of compiled code.

    The model is the first argument or the argument ``model``. A new thread begins with device 0 as its current device,
    which is another rank's device on all ranks but one.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with enter_device(_find_device(args[0] if args else kwargs.get("model"))):
            return function(*args, **kwargs)

    return private.leave_uncompiled(run)


def enter_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which ``device`` is the current device of its type; changes nothing for the CPU or None."""
    if device is None or device.type == "cpu":
        return contextlib.nullcontext()
    if device.index in (None, private.read_device_index(device.type)):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.get_device_module(device.type).device(device)
    return context


def _find_device(model: object) -> torch.device | None:
    """Returns the device on which the model computes; None if it cannot be found, for example if ``model`` is not a
    module.
    """
    if not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return module.compute_device
        if isinstance(module, FSDPModule) and (device := fsdp2.find_compute_device(module)) is not None:
            return device
    locals_ = (private.read_local_tensor(parameter).device for parameter in model.parameters())
    return next((device for device in locals_ if device.type not in ("cpu", "meta")), None)


def disable_autograd(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes ``function`` run without recording a graph and outside inference mode, so that it makes ordinary tensors.

    Tensors made in inference mode can be written to only in inference mode.
    """
    # To leave inference mode also enables gradients, so that comes first.
    return torch.inference_mode(False)(torch.no_grad()(function))


def keep_present_modes(items: Iterator[_T]) -> Iterator[_T]:
    """Returns an iterator that makes each item in the grad mode and inference mode that are set at this call."""
    in_inference_mode, with_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run_steps() -> Iterator[_T]:
        while True:
            with torch.inference_mode(in_inference_mode), torch.set_grad_enabled(with_gradients):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
            del item

    return run_steps()


def defer_garbage_collection(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes ``function`` run without automatic garbage collection, and restore the collector's setting afterwards.

    Work on ten thousand tensors creates some hundred thousand objects, which makes Python collect several times
    although none of them is garbage.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
