"""The two streams of an extraction, and how they wait for one another and for the caller's.

Shards are loaded on one stream and gathered on the other, so that one bucket's copies from the host
run while another's gather does. On the CPU there are no streams, and all of it happens at once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Lanes:
    """device: where the extraction computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        self._loading: Any = self._module.Stream(device) if self._module else None
        self._gathering: Any = self._module.Stream(device) if self._module else None

    def loading(self) -> contextlib.AbstractContextManager[Any]:
        """Loading comes after everything that the caller's stream holds now."""
        return self._after_caller(self._loading)

    def gathering(self) -> contextlib.AbstractContextManager[Any]:
        """Gathering comes after everything that was loaded."""
        if not self._module:
            return contextlib.nullcontext()
        self._gathering.wait_stream(self._loading)
        return self._on(self._gathering)

    def gathered(self) -> Any:
        """An event after everything that was gathered; None on the CPU."""
        return self._gathering.record_event() if self._module else None

    def wait(self, event: Any) -> None:
        """The caller's stream waits; the host does not."""
        if self._module:
            self._module.current_stream(self.device).wait_event(event)

    def _after_caller(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        if not self._module:
            return contextlib.nullcontext()
        stream.wait_stream(self._module.current_stream(self.device))
        return self._on(stream)

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context
