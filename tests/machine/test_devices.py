"""Tests that what a device cannot be told is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice, load


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"late_completion": False}, "--no-late-completion is for the emulated device"),
        ({"memory": 1 << 30}, "--device-memory is for an accelerator"),
    ],
)
def test_a_device_that_cannot_be_told_so_refuses(told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load(RunDevice(type="cpu", **told), "cpu")


@pytest.mark.parametrize(("number", "words"), [(0, "torch sees no xpu"), (2, "more ranks than devices")])
def test_a_device_that_is_not_there_is_not_called_too_many_ranks(
    monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    monkeypatch.setattr(devices, "count", lambda _: number)
    with pytest.raises(CannotRun, match=words):
        devices.check_there_is_one("xpu", rank=2, local_rank=2)
