"""Makes torch behave as if built for CUDA on a machine with hidden GPUs: ``hidden_gpus.py PROGRAM ARGUMENT...``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch


def hide_gpus(patch: pytest.MonkeyPatch) -> None:
    """Makes torch name CUDA as its accelerator, and makes each call that needs a GPU raise torch's own error."""

    def make_refusal() -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("No CUDA GPUs are available")

        return refuse

    patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    patch.setattr(torch.accelerator, "is_available", lambda: False)
    patch.setattr(torch.accelerator, "device_count", lambda: 0)
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setattr(torch.accelerator, "synchronize", make_refusal())
    # Current optimizers of torch ask the accelerator for its stream, which only a torch built for CUDA can answer.
    patch.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None, raising=False)
    for name in ("get_rng_state", "current_device", "current_stream", "synchronize", "get_device_name", "_lazy_init"):
        patch.setattr(torch.cuda, name, make_refusal())


if __name__ == "__main__":
    hide_gpus(pytest.MonkeyPatch())
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
