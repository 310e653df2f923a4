"""full_tensors in one process."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from fsdp_doctor import full_tensors


def test_a_model_that_is_not_initialized_is_refused_before_any_collective() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="weight is on the meta device"):
        next(full_tensors(model))


def test_the_dtype_and_device_asked_for_are_delivered() -> None:
    (name, tensor), _ = full_tensors(nn.Linear(2, 2), device="cpu", dtype=torch.float16)
    assert (name, tensor.dtype, tensor.device.type) == ("weight", torch.float16, "cpu")


def test_the_callers_grad_mode_is_left_alone() -> None:
    entries = full_tensors(nn.Linear(2, 2))
    next(entries)
    assert torch.is_grad_enabled()


def test_one_tensor_is_held_at_a_time() -> None:
    """What was yielded and dropped is gone before the next is made."""
    entries = full_tensors(nn.Linear(2, 2))
    _, tensor = next(entries)
    held = weakref.ref(tensor)
    del tensor
    next(entries)
    assert held() is None
