"""Tests what is counted of a device: its counters, the classes of storages, and a device that cannot be counted."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.examination.live_memory import Counters, DeviceCounters, check_counted, count_device_bytes
from fsdp_doctor.examination.memory_records import Bytes, sum_classes
from fsdp_doctor.examination.stage_watch import StorageTracker

_COUNTED = Counters(allocated=80, peak=100, reserved=120, peak_reserved=140, capacity=1000, elsewhere=7)
_COUNTING = dict.fromkeys(
    ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda device: 0
)
_FSDP = pathlib.Path(torch.__file__).parent / "distributed" / "fsdp"
_NBYTES = 4096
_MAKES = f"def made(module=None): return torch.empty({_NBYTES}, dtype=torch.uint8)"
_CALLS = "def made(module): return module()"


@pytest.mark.parametrize("by_class", [{}, {"parameters": 50}, {"parameters": 50, "gradients": 30}], ids=len)
def test_bytes_without_a_known_class_are_unexplained_now_and_at_the_peak(by_class: Bytes) -> None:
    memory = _COUNTED.make_device_memory(by_class, at_peak=by_class)
    assert (sum_classes(memory.held), sum_classes(memory.at_peak)) == (80, 100)
    assert memory.held.get("unexplained", 0) == 80 - sum_classes(by_class)
    assert memory.at_peak["unexplained"] == 100 - sum_classes(by_class)
    assert (memory.allocated, memory.peak, memory.reserved) == (80, 100, 120)
    assert (memory.peak_reserved, memory.capacity, memory.elsewhere) == (140, 1000, 7)


def test_a_device_without_a_counter_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(**_COUNTING))
    with pytest.raises(CannotRun, match=r"torch\.meta has no mem_get_info"):
        check_counted("meta")


def test_a_driver_that_does_not_answer_is_refused_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: the GPU is lost\nand more")

    module = types.SimpleNamespace(**_COUNTING, mem_get_info=fails)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with pytest.raises(CannotRun, match=r"meta.*: CUDA error: the GPU is lost$"):
        DeviceCounters(torch.device("meta")).read()


class _Computes(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.empty(_NBYTES, dtype=torch.uint8)


def _function_in(file: str, source: str) -> Callable[..., torch.Tensor]:
    """``made`` of the source, as if it stood in that file of torch's FSDP."""
    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(compile(f"import torch\n{source}", str(_FSDP / file), "exec"), names)
    return names["made"]


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("_fully_shard/_fsdp_collectives.py", _MAKES, "communication buffers"),
        ("_fully_shard/_fsdp_param.py", _MAKES, "unsharded parameters"),
        ("_fully_shard/_fsdp_common.py", _MAKES, "activations"),
        ("_fully_shard/_of_a_later_torch.py", _MAKES, "unexplained"),
        ("_of_a_later_torch.py", _CALLS, "activations"),
    ],
)
def test_the_file_of_fsdp_that_makes_a_storage_decides_its_class(file: str, source: str, expected: str) -> None:
    tracker = StorageTracker(torch.device("cpu"))
    made = _function_in(file, source)
    with tracker.track("activations"):
        tensor = made(_Computes())
    assert tracker.held() == tracker.at_peak() == {expected: count_device_bytes(tensor.untyped_storage())}
