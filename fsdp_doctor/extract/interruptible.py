"""A call into C++ that waits, as one that Ctrl-C ends: Python's handlers of signals run in the main thread alone."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_SECONDS = 0.5

# Of the thread that waits: it stays for the process's next call, and holds nothing.
THREAD = "fsdp_doctor waits"

_T = TypeVar("_T")


def interruptible(wait: Callable[[], _T]) -> _T:
    """What ``wait`` returns or raises. From the main thread another one calls it, and goes on if this is interrupted.

    Where no thread is to be had, it is called here.
    """
    calls = _calls(os.getpid()) if threading.current_thread() is threading.main_thread() else None
    if calls is None:
        return wait()
    result: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            result.put((wait(), None))
        except BaseException as error:
            result.put((None, error))

    calls.put(call)
    while True:
        # A signal that comes just before the waiting begins does not end it.
        with contextlib.suppress(queue.Empty):
            found, error = result.get(timeout=_SECONDS)
            break
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1)
def _calls(process: int) -> queue.SimpleQueue[Callable[[], None]] | None:
    """What the thread makes that does nothing else; None without one. A fork has to begin its own."""
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run() -> None:
        while True:
            calls.get()()

    try:
        threading.Thread(target=run, name=THREAD, daemon=True).start()
    except RuntimeError:
        return None
    return calls
