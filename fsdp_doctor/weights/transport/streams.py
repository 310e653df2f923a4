"""The streams of an extraction, and how they wait for one another and for the caller's, of which there may be several.

Shards are loaded on two, cast and merged on the next, gathered on another: all at once, of different pieces; and what
watches an extraction reads on the last what was gathered. Two,
because the link is idle for some 10 us between two copies of one stream; both have copies of the same bucket, so that
none of the next shares the link with those that a gather waits for. On the CPU there are no streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any, TypeVar

import torch

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.decorators import enter_device

_T = TypeVar("_T")


class HomeStream:
    """The stream that is current when this is made, on which results are allocated and written.

    The caller may have another stream current each time it asks for more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        self._stream: Any = self._module.current_stream(device) if self._module else None
        self._key: Any = private.read_stream_key(device) if self._module else None
        # The caller's stream, where it is another, as of the step that ``run`` has made last.
        self._callers: Any = None

    def run(self, items: Generator[_T]) -> Generator[_T]:
        """Runs each step of ``items`` in this stream, and the first after the current one."""
        if (callers := self._find_callers()) is not None:
            self._stream.wait_stream(callers)
        try:
            while True:
                self._callers = self._find_callers()
                with self._enter(self._callers):
                    item = next(items, None)
                if item is None:
                    return
                yield item
                del item
        finally:
            with self._enter(self._find_callers()):
                items.close()

    def hand_out(self, tensor: torch.Tensor) -> None:
        """The current stream may use the tensor: after what wrote it, and before its memory is used again."""
        self._hand_to(self._find_callers(), tensor)

    def hand_out_last(self, tensor: torch.Tensor) -> None:
        """Hands out the result of the last ``run``, on the streams of that call, which are not determined again."""
        self._hand_to(self._callers, tensor)

    def _hand_to(self, callers: Any, tensor: torch.Tensor) -> None:
        if callers is not None:
            callers.wait_event(self._stream.record_event())
            tensor.record_stream(callers)

    def _find_callers(self) -> Any:
        """Finds the current stream; None if it is this one, and on the CPU."""
        if self._module is None or private.read_stream_key(self._device) == self._key:
            return None
        return self._module.current_stream(self._device)

    def _enter(self, callers: Any) -> contextlib.AbstractContextManager[Any]:
        """Enters the stream, on its device: another thread may take the next tensor."""
        if callers is not None:
            context: contextlib.AbstractContextManager[Any] = self._module.stream(self._stream)
            return context
        return enter_device(self._device)


class Streams:
    """device: where the extraction computes. An event is None on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        self._loading, self._other_loading, self._casting, self._gathering, self._watching = _make_streams(device)
        # Those with something that is yet to be gathered.
        self._used: list[Any] = []

    def begin_loading(self) -> None:
        """Loads and gathers from now on come after all that is in the caller's stream now."""
        if self._module:
            event = self._module.current_stream(self._device).record_event()
            for stream in (self._loading, self._other_loading, self._gathering):
                stream.wait_event(event)

    def use_loading_stream(self, turn: int = 0) -> contextlib.AbstractContextManager[Any]:
        """turn: 0 or 1, which of the two streams."""
        return self._enter(self._use(self._other_loading if turn else self._loading))

    def use_casting_stream(self) -> contextlib.AbstractContextManager[Any]:
        """After all that was loaded."""
        if self._module:
            self._casting.wait_stream(self._loading)
            self._casting.wait_stream(self._other_loading)
        return self._enter(self._use(self._casting))

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies, without waiting. The source may be let go of at once; in host memory it must stay as it is."""
        if self._module and source.device.type != "cpu":
            source.record_stream(self._loading)
        with self.use_loading_stream():
            target.copy_(source, non_blocking=True)

    def wait_until_loaded(self) -> None:
        """The host waits for all that was loaded."""
        if self._module:
            self._loading.synchronize()
            self._other_loading.synchronize()

    def enter_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Lets another thread copy: its copies inside are loads of turn 0, after this one's ``wait_for_threads``."""
        return self._enter(self._loading)

    def wait_for_threads(self) -> None:
        """Gathers from now on come after all that other threads have loaded."""
        if self._module:
            self._use(self._loading)

    def record_loading(self) -> Any:
        """An event after all that was loaded in turn 0."""
        return self._loading.record_event() if self._module else None

    def cast(self) -> Any:
        """An event after all that was cast."""
        return self._casting.record_event() if self._module else None

    def load_after(self, event: Any, turn: int) -> None:
        """Loads of that turn come after the event from now on."""
        if event is not None:
            (self._other_loading if turn else self._loading).wait_event(event)

    def use_gathering_stream(self) -> contextlib.AbstractContextManager[Any]:
        """After all that was loaded and cast."""
        if self._module:
            for stream in self._used:
                self._gathering.wait_stream(stream)
        self._used.clear()
        return self._enter(self._gathering)

    def record_gathering(self) -> Any:
        """An event after all that was gathered."""
        return self._gathering.record_event() if self._module else None

    def use_watching_stream(self) -> contextlib.AbstractContextManager[Any]:
        """After all that was gathered; what is gathered later does not wait for it."""
        if self._module:
            self._watching.wait_stream(self._gathering)
        return self._enter(self._watching)

    def record_watching(self) -> Any:
        """An event after all that watched."""
        return self._watching.record_event() if self._module else None

    def wait(self, event: Any) -> None:
        """The caller's stream waits; the host does not."""
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    def _use(self, stream: Any) -> Any:
        if stream not in self._used:
            self._used.append(stream)
        return stream

    def _enter(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = (
            self._module.stream(stream) if self._module else contextlib.nullcontext()
        )
        return context


def wait_for_device(device: torch.device) -> None:
    """The host waits for all that was launched on the device, on any stream."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


@functools.cache
def _make_streams(device: torch.device) -> tuple[Any, ...]:
    """Returns the same streams every time: what an allocator has kept for a stream is of use to no other."""
    if device.type == "cpu":
        return (None,) * 5
    module = torch.get_device_module(device.type)
    return tuple(module.Stream(device) for _ in range(5))
