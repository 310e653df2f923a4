"""Streams of an extraction, and how they wait for each other and for the caller's stream, which may change.

Shards are loaded on two streams, cast and merged on a third, and gathered on a fourth, all at the same time for
different pieces. A watcher of the extraction reads the gathered tensors on a fifth. There are two loading streams
because the link is idle for about 10 us between two copies of one stream. Both have copies of the same bucket, so that
copies for the next bucket do not share the link with copies for which a gather waits. On the CPU there are no streams.
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
    """Stream that is current when this object is made, on which results are allocated and written.

    The caller may have another current stream at each request.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        self._stream: Any = self._module.current_stream(device) if self._module else None
        # The index of the current device, and a key of the current stream. Their values are those of this stream.
        self._read_place = private.find_place_reader(device) if self._module else None
        self._place: tuple[int, Any] | None = None
        if self._read_place is not None:
            index, key = self._read_place()
            self._place = index if device.index is None else device.index, key
        # The caller's stream at the last step of ``run``; None if it was this stream.
        self.callers: Any = None

    def run(self, items: Generator[_T]) -> Generator[_T]:
        """Runs each step of ``items`` in this stream; the first step waits for the current stream.

        A step enters no context if this stream and its device are already current, because a context costs the host
        more than the rest of the step.
        """
        read_place, place = self._read_place, self._place
        if (callers := self._find_callers()) is not None:
            self._stream.wait_stream(callers)
        try:
            while True:
                if read_place is None or read_place() == place:
                    self.callers = None
                    item = next(items, None)
                else:
                    self.callers = self._find_callers()
                    with self._enter(self.callers):
                        item = next(items, None)
                if item is None:
                    return
                yield item
                del item
        finally:
            with self._enter(self._find_callers()):
                items.close()

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Makes the current stream wait for the tensor, and keeps its memory until the current stream has used it."""
        self._hand_to(self._find_callers(), tensor)

    def hand_out_last(self, tensor: torch.Tensor) -> None:
        """Makes the result of the last step of ``run`` available on the stream that was current at that step."""
        self._hand_to(self.callers, tensor)

    def _hand_to(self, callers: Any, tensor: torch.Tensor) -> None:
        if callers is not None:
            callers.wait_event(self._stream.record_event())
            tensor.record_stream(callers)

    def _find_callers(self) -> Any:
        """Returns the caller's current stream; None if the caller's stream is this stream, or on the CPU."""
        if self._read_place is None or self._place is None or self._read_place()[1] == self._place[1]:
            return None
        return self._module.current_stream(self._device)

    def _enter(self, callers: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context of this stream, or only of its device if ``callers`` is None.

        The device must be set because another thread, with another current device, may take the next tensor.
        """
        if callers is not None:
            context: contextlib.AbstractContextManager[Any] = self._module.stream(self._stream)
            return context
        return enter_device(self._device)


class Streams:
    """Streams of one extraction. On the CPU there are no streams, and events are None.

    device: the device on which the extraction computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        self._loading, self._other_loading, self._casting, self._gathering, self._watching = _make_streams(device)
        # Those with something that is yet to be gathered.
        self._used: list[Any] = []

    def begin_loading(self) -> None:
        """Makes later loads and gathers wait for all present work in the caller's stream."""
        if self._module:
            event = self._module.current_stream(self._device).record_event()
            for stream in (self._loading, self._other_loading, self._gathering):
                stream.wait_event(event)

    def use_loading_stream(self, turn: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Enters one of the two loading streams.

        turn: the number of the stream, 0 or 1.
        """
        return self._enter(self._use(self._other_loading if turn else self._loading))

    def use_casting_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the casting stream, and makes it wait for all loads so far."""
        if self._module:
            self._casting.wait_stream(self._loading)
            self._casting.wait_stream(self._other_loading)
        return self._enter(self._use(self._casting))

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launches a copy of ``source`` into ``target``, without waiting.

        The caller may drop the source at once, but a source in host memory must not change until the copy has finished.
        """
        if self._module and source.device.type != "cpu":
            source.record_stream(self._loading)
        with self.use_loading_stream():
            target.copy_(source, non_blocking=True)

    def wait_until_loaded(self) -> None:
        """Makes the host wait for all loads."""
        if self._module:
            self._loading.synchronize()
            self._other_loading.synchronize()

    def enter_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the loading stream of turn 0 in another thread.

        ``wait_for_threads`` makes later gathers wait for the copies of this thread.
        """
        return self._enter(self._loading)

    def wait_for_threads(self) -> None:
        """Makes later gathers wait for all loads by other threads."""
        if self._module:
            self._use(self._loading)

    def record_loading(self) -> Any:
        """Returns an event after all loads on the loading stream of turn 0."""
        return self._loading.record_event() if self._module else None

    def cast(self) -> Any:
        """Returns an event after all casts."""
        return self._casting.record_event() if self._module else None

    def load_after(self, event: Any, turn: int) -> None:
        """Makes later loads on the loading stream of this turn wait for the event."""
        if event is not None:
            (self._other_loading if turn else self._loading).wait_event(event)

    def use_gathering_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the gathering stream, and makes it wait for all loads and casts so far."""
        if self._module:
            for stream in self._used:
                self._gathering.wait_stream(stream)
        self._used.clear()
        return self._enter(self._gathering)

    def record_gathering(self) -> Any:
        """Returns an event after all gathers."""
        return self._gathering.record_event() if self._module else None

    def use_watching_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Enters the watching stream, and makes it wait for all gathers so far. Later gathers do not wait for this
        stream.
        """
        if self._module:
            self._watching.wait_stream(self._gathering)
        return self._enter(self._watching)

    def record_watching(self) -> Any:
        """Returns an event after all work in the watching stream."""
        return self._watching.record_event() if self._module else None

    def wait(self, event: Any) -> None:
        """Makes the caller's stream wait for the event; the host does not wait."""
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
    """Makes the host wait for all work that was launched on the device, on any stream."""
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


@functools.cache
def _make_streams(device: torch.device) -> tuple[Any, ...]:
    """Returns the same streams every time, because the allocator keeps memory for one stream, and no other stream can
    use it.
    """
    if device.type == "cpu":
        return (None,) * 5
    module = torch.get_device_module(device.type)
    return tuple(module.Stream(device) for _ in range(5))
