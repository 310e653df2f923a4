"""Computes the CRC-32 of a tensor whose pieces several ranks write in any order.

Without its initial and final inversion, a CRC is linear: the CRC of the whole is the XOR of the CRCs of its pieces,
each padded with zeros in the place of the other pieces. Zeros before a piece change nothing, and zeros after it amount
to a multiplication.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

try:
    from isal.isal_zlib import crc32 as crc32  # the same checksum, five times as fast as zlib's
except ImportError:  # no wheel fits this machine
    from zlib import crc32 as crc32

_ALL_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320
_ONE, _X_TO_THE_8 = 1 << 31, 1 << 23  # the highest bit is the lowest power
_ZEROS = memoryview(bytes(1 << 14))
LinearCrc: TypeAlias = int


def continue_linear_crc(data: bytes | memoryview, before: LinearCrc = 0) -> LinearCrc:
    """Continues a linear CRC: returns the CRC of the previous bytes followed by ``data``."""
    return crc32(data, before ^ _ALL_ONES) ^ _ALL_ONES


def shift_crc(crc: LinearCrc, nbytes: int) -> LinearCrc:
    """Returns the linear CRC of the same bytes followed by ``nbytes`` zeros.

    To get the CRC-32 of two parts together, shift the CRC-32 of the first part by the length of the second, and XOR it
    with the CRC-32 of the second.
    """
    if nbytes <= len(_ZEROS):  # reading so few zeros is faster than multiplying
        return continue_linear_crc(_ZEROS[:nbytes], crc)
    return _multiply(crc, _compute_power(nbytes))


def finish_crc(crc: LinearCrc, nbytes: int) -> int:
    """Converts a linear CRC of ``nbytes`` bytes into the ordinary CRC-32 that zip and zlib use."""
    return crc ^ shift_crc(_ALL_ONES, nbytes) ^ _ALL_ONES


@functools.lru_cache(maxsize=4096)
def _compute_power(nbytes: int) -> int:
    """Computes x to the power of ``8 * nbytes``, modulo the CRC's polynomial."""
    power, square = _ONE, _X_TO_THE_8
    while nbytes:
        if nbytes & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        nbytes >>= 1
    return power


def _multiply(left: int, right: int) -> int:
    """Returns the product of two polynomials modulo the CRC's polynomial."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & _ALL_ONES
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
