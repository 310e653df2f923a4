"""How many bytes CUDA's allocators take for a tensor, on the device and of pinned memory."""

from __future__ import annotations

from collections.abc import Iterable

# The caching allocator gives tensors multiples of it; so does the emulated device's.
_BLOCK = 512


def rounded(nbytes: int) -> int:
    """On the device."""
    return -(-nbytes // _BLOCK) * _BLOCK


def rounded_sum(sizes: Iterable[int]) -> int:
    """On the device, for tensors of these sizes."""
    return sum(map(rounded, sizes))


def power_of_two(nbytes: int) -> int:
    """Of pinned memory."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
