"""Fingerprints as data: the sums of each tensor of a model, or of one rank's part of it; combined, written and read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from fsdp_doctor.weights.fingerprints.keyed_sum import VERSION

Lanes: TypeAlias = tuple[int, int]


class FingerprintError(ValueError):
    """Error for fingerprints that cannot be read, added or compared; its message gives the reason in one sentence."""


@dataclass(frozen=True, slots=True)
class TensorFingerprint:
    """Fingerprint of one tensor, or of a part of it.

    dtype: torch's name of the dtype without ``torch.``.
    shape: the shape of the whole tensor.
    first: the index of the first element that was summed.
    num_summed: the number of elements that were summed.
    lanes: the two sums modulo 2**64, not negative.
    """

    dtype: str
    shape: tuple[int, ...]
    first: int
    num_summed: int
    lanes: Lanes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.num_summed == self.numel

    @property
    def hex(self) -> str:
        """Both lanes as 32 hexadecimal digits."""
        return f"{self.lanes[0]:016x}{self.lanes[1]:016x}"


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of a model's tensors by name.

    tied: groups of names that are known to share one tensor.
    """

    tensors: Mapping[str, TensorFingerprint]
    tied: tuple[tuple[str, ...], ...] = ()
    version: int = VERSION

    def require_whole(self, whose: str) -> None:
        """Raises FingerprintError if the sums have another version, or if only a part of a tensor was summed."""
        require_version(self.version, whose)
        for name, tensor in self.tensors.items():
            if not tensor.is_whole:
                raise FingerprintError(
                    f"{whose}: only {tensor.num_summed} of {tensor.numel} elements of {name} were summed; combine "
                    "the fingerprints of all ranks that share the tensor with combine_fingerprints"
                )

    def to_json(self) -> str:
        tensors = {
            name: _TensorEntry(tensor.dtype, tensor.shape, (tensor.first, tensor.num_summed), tensor.hex)
            for name, tensor in self.tensors.items()
        }
        file = _File("fsdp-doctor fingerprints", self.version, self.tied, tensors)
        return msgspec.json.format(msgspec.json.encode(file), indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> Fingerprints:
        """Reads fingerprints from JSON. Raises FingerprintError for other text, and for another version of the sum."""
        try:
            file = msgspec.json.decode(text, type=_File)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise FingerprintError(f"this is not a file of fingerprints: {error}") from None
        require_version(file.version, "these fingerprints")
        tensors = {
            name: TensorFingerprint(
                entry.dtype, entry.shape, *entry.summed, (int(entry.sum[:16], 16), int(entry.sum[16:], 16))
            )
            for name, entry in file.tensors.items()
        }
        return cls(tensors, file.tied)


@dataclass(frozen=True)
class _TensorEntry:
    """Entry of a tensor in a file.

    summed: the index of the first summed element, and the number of summed elements.
    sum: both lanes in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    summed: tuple[int, int]
    sum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class _File:
    format: Literal["fsdp-doctor fingerprints"]
    version: int
    tied: tuple[tuple[str, ...], ...]
    tensors: dict[str, _TensorEntry]


def require_fingerprints(value: object, whose: str) -> None:
    """Raises TypeError unless ``value`` is a Fingerprints; another rank may have sent None."""
    if not isinstance(value, Fingerprints):
        raise TypeError(f"{whose} are not Fingerprints: {type(value).__name__}")


def require_version(version: Any, whose: str) -> None:
    if version != VERSION:
        raise FingerprintError(
            f"{whose} are of version {version} of the sum, but this fsdp-doctor uses version {VERSION}: make both "
            "with the same fsdp-doctor"
        )


def combine_fingerprints(parts: Iterable[Fingerprints]) -> Fingerprints:
    """Adds the sums of several ranks for the same tensors, counting each replicated part once.

    Raises FingerprintError if ``parts`` is empty, if a part was made with another version of the sum, if a tensor's
    shape or dtype differs between parts, if replicas of a part differ, or if parts overlap.
    """
    if isinstance(parts, Fingerprints):
        raise TypeError("combine_fingerprints needs the fingerprints of several ranks, not of one")
    sums: dict[str, TensorFingerprint] = {}
    replicas: dict[tuple[str, int, int], TensorFingerprint] = {}
    tied: dict[tuple[str, ...], None] = {}
    is_empty = True
    for part in parts:
        is_empty = False
        require_fingerprints(part, "fingerprints to be combined")
        require_version(part.version, "fingerprints to be combined")
        tied |= dict.fromkeys(part.tied)
        for name, tensor in part.tensors.items():
            replica = replicas.setdefault((name, tensor.first, tensor.num_summed), tensor)
            if replica is tensor or not tensor.num_summed:
                add_fingerprint(sums, name, tensor)
            elif replica != tensor:
                raise FingerprintError(
                    f"{name}: several ranks hold the elements that begin at {tensor.first}, but their values differ"
                )
    if is_empty:
        raise FingerprintError("there are no fingerprints to combine")
    return Fingerprints(sums, tuple(tied))


def add_fingerprint(sums: dict[str, TensorFingerprint], name: str, part: TensorFingerprint) -> None:
    """Adds the sums of a part of a tensor to ``sums``.

    Raises FingerprintError for parts that overlap or differ in shape or dtype.
    """
    if (known := sums.get(name)) is None:
        sums[name] = part
        return
    if (known.dtype, known.shape) != (part.dtype, part.shape):
        raise FingerprintError(
            f"{name} is {known.dtype} {list(known.shape)} in one part and {part.dtype} {list(part.shape)} in another"
        )
    num_summed = known.num_summed + part.num_summed
    if num_summed > known.numel:
        raise FingerprintError(
            f"{name} has {known.numel} elements, but {num_summed} were summed: parts of the tensor overlap"
        )
    first = min((fingerprint.first for fingerprint in (known, part) if fingerprint.num_summed), default=0)
    lanes = reduce_to_lanes(fingerprint + other for fingerprint, other in zip(known.lanes, part.lanes, strict=True))
    sums[name] = replace(known, first=first, num_summed=num_summed, lanes=lanes)


def reduce_to_lanes(sums: Iterable[int]) -> Lanes:
    """Reduces two signed sums modulo 2**64; the results are not negative."""
    first, second = sums
    return first % (1 << 64), second % (1 << 64)
