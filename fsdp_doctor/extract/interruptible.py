"""A call into C++ that waits, as one that Ctrl-C ends: Python's handlers of signals run in the main thread alone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_SECONDS = 0.5

_T = TypeVar("_T")


def interruptible(wait: Callable[[], _T]) -> _T:
    """What ``wait`` returns or raises. From the main thread another one calls it, and goes on if this is interrupted.

    Where no thread is to be had, it is called here.
    """
    if threading.current_thread() is not threading.main_thread():
        return wait()
    result: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            result.put((wait(), None))
        except BaseException as error:
            result.put((None, error))

    waiting = threading.Thread(target=call, daemon=True)
    try:
        waiting.start()
    except RuntimeError:
        return wait()
    while True:
        # A signal that comes just before the waiting begins does not end it.
        with contextlib.suppress(queue.Empty):
            found, error = result.get(timeout=_SECONDS)
            break
    waiting.join()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]
