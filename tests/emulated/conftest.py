from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def device_as_it_was() -> Iterator[None]:
    """The device with all that it has, late copies and default streams, before the test and after it."""
    import torch
    from support.emulated_device import emulated

    emulated.set_late_completion(True)
    yield
    emulated.set_memory_limit(None)
    emulated.set_device(0)
    for index in range(emulated.device_count()):
        torch.accelerator.set_stream(emulated.default_stream(index))
        emulated.synchronize(index)
    emulated.set_device(0)
    emulated.set_late_completion(True)
