"""How strict the emulated devices are: what a program may get away with on a GPU, and not here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fsdp_doctor.emulated.library import _C


def set_late_completion(late: bool) -> None:
    """Whether a non-blocking copy finishes as late as its contract allows (the default) or at once."""
    _C.set_late(late)


def late_completion() -> bool:
    """Whether non-blocking copies are late."""
    return bool(_C.is_late())


def copies_in_flight() -> int:
    """How many non-blocking copies were issued in this process and have not happened yet."""
    return int(_C.copies_in_flight())


def use_caching_allocator(use: bool = True) -> None:
    """Whether memory is reserved in segments that are split and cached by stream, as CUDA's caching allocator does.

    Then ``memory_reserved`` and ``inactive_split_bytes`` are counted, and a limit is one of reserved memory. Off by
    default. Raises RuntimeError while there are tensors on a device.
    """
    _C.set_caching(use)


def poison_freed_memory(poison: bool = True) -> None:
    """Whether memory holds not-a-number from when it is freed; off by default.

    A copy to the host that is in flight then brings it too, unless it is on the stream that the memory was allocated
    on, that stream waits for it, or ``record_stream`` was called: on a GPU the memory would be in other use.
    """
    _C.set_poisoning(poison)


@contextlib.contextmanager
def race_detection() -> Iterator[None]:
    """Inside, two kernels that touch the same bytes, one of them writing, on streams that nothing orders are a race.

    So is memory that its stream may be given again while another stream still uses it, without ``record_stream``. It
    sees all threads of the process. Raises RuntimeError at the end, with a line for each race that was found.
    """
    _C.set_race_detection(True)
    try:
        yield
        found = data_races()
    finally:
        _C.set_race_detection(False)
    if found:
        raise RuntimeError("\n".join([f"{len(found)} data race(s):", *found]))


def data_races() -> list[str]:
    """What ``race_detection`` has found since the last call, a sentence for each race."""
    races: list[str] = _C.take_races()
    return races
