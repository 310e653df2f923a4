"""A process that does not outlive what started it, whenever a signal comes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def child_process(
    command: Sequence[str], end: Callable[[subprocess.Popen[Any]], None], **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """The command in a session of its own: a signal of the terminal comes to us alone. Raises OSError as Popen does.

    end: called where the block raises, then the process is waited for. While the process is being made, signals wait:
    nobody else would know of it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
    as_before = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=as_before, **options)
        try:
            as_before()
            yield process
        except BaseException:
            end(process)
            process.wait()
            raise
    finally:
        as_before()


def kill_with_all_it_started(process: subprocess.Popen[Any]) -> None:
    """For one that has nothing to lose, and whose own processes would go on without it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
