"""Whose memory a storage is, by the function that made it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_doctor.memory.snapshot import device_bytes
from fsdp_doctor.memory.stage_watch import StorageTracker

_FSDP = pathlib.Path(torch.__file__).parent / "distributed" / "fsdp"
_NBYTES = 4096


def _function_in(file: str, source: str) -> Callable[..., torch.Tensor]:
    """``made`` of the source, as if it stood in that file of torch's FSDP."""
    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(compile(f"import torch\n{source}", str(_FSDP / file), "exec"), names)
    return names["made"]


_MAKES = f"def made(module=None): return torch.empty({_NBYTES}, dtype=torch.uint8)"
_CALLS = "def made(module): return module()"


class _Computes(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.empty(_NBYTES, dtype=torch.uint8)


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
def test_what_fsdp_makes_in_a_file_that_is_not_known_is_unexplained_and_what_a_module_computes_is_not(
    file: str, source: str, expected: str
) -> None:
    tracker = StorageTracker(torch.device("cpu"))
    made = _function_in(file, source)
    with tracker.tracking("activations"):
        tensor = made(_Computes())
    assert tracker.held() == tracker.at_peak() == {expected: device_bytes(tensor.untyped_storage())}
