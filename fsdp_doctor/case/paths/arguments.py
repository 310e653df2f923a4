"""What a path under test is called with: the sharded model first, then what its further parameters name."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.matrix.axes import Context

_BY_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class PathArguments:
    """The sharded model in the state that the scenario left it in, and what else a path can ask for by name.

    device: this rank's compute device. What follows it a probe alone has: the optimizer; scratch, a directory of
    this path's own, the same on every rank, not yet made; control, a gloo group apart from the model's.
    A path that loads is given its checkpoint as state; and as buffers those that no state dict has, by name, on the
    host, as a model has them that was never on the meta device.
    """

    model: torch.nn.Module
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    scratch: pathlib.Path | None = None
    control: dist.ProcessGroup | None = None
    state: Any = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


PathFunction = Callable[[PathArguments], Any]


def called_by_name(function: Callable[..., Any]) -> PathFunction:
    """``function`` called with the model and the arguments that it asks for."""
    names = asked_for(function)
    return lambda given: function(given.model, **{name: getattr(given, name) for name in names})


def in_context(context: Context, function: PathFunction) -> PathFunction:
    """``function`` called in one of torch's contexts, in which what it returns is iterated over, too, if it is lazy.

    What is done with an entry, between it and the next one, is outside.
    """
    match context:
        case Context.ORDINARY:
            return function
        case Context.NO_GRAD:
            entered: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad
        case Context.INFERENCE:
            entered = torch.inference_mode
        case _:
            assert_never(context)

    def call(given: PathArguments) -> Any:
        with entered():
            result = function(given)
        return _iterated_in(entered, result) if isinstance(result, Iterator) else result

    return call


def _iterated_in(
    entered: Callable[[], contextlib.AbstractContextManager[Any]], entries: Iterator[Any]
) -> Iterator[Any]:
    while True:
        with entered():
            try:
                entry = next(entries)
            except StopIteration:
                return
        yield entry
        del entry


def asked_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters after the first, which is the model; one with a default keeps it."""
    try:
        further = list(inspect.signature(function).parameters.values())[1:]
    except (NameError, TypeError, ValueError):
        # A function of C has no signature; from Python 3.14 on an annotation may name what is imported for types alone.
        return ()
    return tuple(p.name for p in further if p.kind in _BY_NAME and p.default is inspect.Parameter.empty)
