"""Makes the optimizers of the axis ``optimizer``, and reads this rank's part of their state."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_never

from fsdp_doctor.matrix.axes import Optimizer
from fsdp_doctor.weights.fsdp import private


def explain_unsupported(kind: Optimizer, *, has_accelerator: bool) -> str:
    """Explains why the optimizer cannot be made with the installed packages and devices; empty if it can."""
    match kind:
        case Optimizer.MUON:
            is_there = hasattr(torch.optim, "Muon")
            return "" if is_there else f"torch {torch.__version__} has no Muon, which needs torch 2.9 or newer"
        case Optimizer.ADAMW_8BIT:
            is_there = importlib.util.find_spec("torchao") is not None
            return "" if is_there else "AdamW8bit needs torchao, which is not installed"
        case Optimizer.ADAMW_CAPTURABLE:
            return "" if has_accelerator else "a capturable AdamW needs an accelerator"
        case Optimizer.ADAMW | Optimizer.SGD | Optimizer.ADAFACTOR | Optimizer.ADAMW_FUSED | Optimizer.TENSOR_LR:
            return ""
        case _:
            assert_never(kind)


def make_optimizers(
    kind: Optimizer, model: nn.Module, *, foreach: bool | None, options: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, ...]:
    """Makes the scenario's optimizer for the model's parameters, and a second optimizer for parameters that the first
    does not take.

    foreach: the option of the same name, for AdamW and SGD.
    options: the options of the first optimizer; every kind of optimizer accepts them. The options of the second
        optimizer are fixed.
    """
    parameters = list(model.parameters())
    match kind:
        case Optimizer.ADAMW:
            return (torch.optim.AdamW(parameters, foreach=foreach, **options),)
        case Optimizer.SGD:
            return (torch.optim.SGD(parameters, momentum=0.9, foreach=foreach, **options),)
        case Optimizer.MUON:
            muon: Any = vars(torch.optim)["Muon"]
            matrices, others = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
            return muon(matrices, **options), torch.optim.SGD(others, lr=1e-3)
        case Optimizer.ADAFACTOR:
            return (torch.optim.Adafactor(parameters, **options),)
        case Optimizer.ADAMW_FUSED:
            return (torch.optim.AdamW(parameters, fused=True, **options),)
        case Optimizer.ADAMW_CAPTURABLE:
            return (torch.optim.AdamW(parameters, capturable=True, foreach=foreach, **options),)
        case Optimizer.ADAMW_8BIT:
            return (_make_8bit(parameters, options),)
        case Optimizer.TENSOR_LR:
            lr = torch.tensor(options["lr"], device="cpu")
            return (torch.optim.AdamW(parameters, foreach=False, **{**options, "lr": lr}),)
        case _:
            assert_never(kind)


def _make_8bit(parameters: list[nn.Parameter], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    import torchao.optim

    class AdamW8bit(torchao.optim.AdamW8bit):  # type: ignore[misc]
        """AdamW8bit whose step does not use torch.compile, which cannot compile for the emulated device.

        torch's setters of optimizer state dicts also call this step.
        """

        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **options)
    return optimizer


def read_values(state: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a state tensor; for 8-bit codes, the values that they stand for."""
    local = private.read_local_tensor(state).detach()
    return local.dequantize() if hasattr(local, "__tensor_flatten__") else local


def list_memories(key: str, state: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for the tensors in which this rank holds a state entry: codes and scales for 8-bit state,
    otherwise the entry itself.
    """
    local = private.read_local_tensor(state) if isinstance(state, torch.Tensor) else state
    if not hasattr(local, "__tensor_flatten__"):
        yield key, state
        return
    names, _ = local.__tensor_flatten__()
    for name in names:
        yield f"{key}.{name}", getattr(local, name)
