"""accelerate on the ranks of a test: FSDP2, on GPUs as it is, on the emulated device with what it takes to find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def make_accelerator(this_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator with FSDP2; its arguments are those of FullyShardedDataParallelPlugin."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # As `accelerate launch` does for use_fsdp.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    if this_rank.device.type == "emulated":
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(this_rank.device))
        # It looks for the accelerators that it knows; the process group is there already, and has the right backends.
        monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("nccl", DistributedType.MULTI_GPU))

    def make(**plugin: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **plugin))

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
