"""What a device must be able to say, and what is said of one that cannot."""

from __future__ import annotations

import types

import pytest
import torch

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.ledgers.ledger import power_of_two
from fsdp_doctor.memory.snapshot import DeviceCounters, check_counted

_COUNTING = dict.fromkeys(
    ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda device: 0
)


def test_a_device_that_cannot_say_its_memory_is_refused_by_the_name_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(**_COUNTING))
    with pytest.raises(CannotRun, match=r"torch\.meta has no mem_get_info"):
        check_counted("meta")


def test_a_driver_that_does_not_answer_is_refused_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: the GPU is lost\nand more")

    module = types.SimpleNamespace(**_COUNTING, mem_get_info=fails)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with pytest.raises(CannotRun, match=r"meta.*: CUDA error: the GPU is lost$"):
        DeviceCounters(torch.device("meta")).read()


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    sizes = [0, 1, 2, 3, 1 << 20, (1 << 20) + 1]
    assert list(map(power_of_two, sizes)) == [0, 1, 2, 4, 1 << 20, 1 << 21]
