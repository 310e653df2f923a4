"""Fingerprints as data: of each tensor of a model, whole or this rank's part of it; combined, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fsdp_doctor.fingerprints.keyed_sum import VERSION

Lanes: TypeAlias = tuple[int, int]

_MODULUS = 1 << 64
_FORMAT = "fsdp-doctor fingerprints"


class FingerprintError(ValueError):
    """Fingerprints that cannot be read, added or compared; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class TensorFingerprint:
    """Of one tensor.

    dtype: as torch names it, without ``torch.``. shape: of the whole tensor. first, num_summed: the first of its
    elements that were summed, and how many. lanes: the two sums modulo 2**64, not negative.
    """

    dtype: str
    shape: tuple[int, ...]
    first: int
    num_summed: int
    lanes: Lanes

    @property
    def numel(self) -> int:
        numel = 1
        for length in self.shape:
            numel *= length
        return numel

    @property
    def is_whole(self) -> bool:
        return self.num_summed == self.numel

    @property
    def hex(self) -> str:
        """32 digits."""
        return f"{self.lanes[0]:016x}{self.lanes[1]:016x}"


@dataclass(frozen=True)
class Fingerprints:
    """Of a model's tensors by name. tied: the names that share one tensor, as far as it is known."""

    tensors: Mapping[str, TensorFingerprint]
    tied: tuple[tuple[str, ...], ...] = ()
    version: int = VERSION

    def require_whole(self, whose: str) -> None:
        """Raises FingerprintError for a version that sums otherwise, and for what is a part of a tensor only."""
        require_version(self.version, whose)
        for name, one in self.tensors.items():
            if not one.is_whole:
                raise FingerprintError(
                    f"{whose}: of {name} {one.num_summed} of {one.numel} elements were summed; "
                    f"add the fingerprints of all ranks that share the tensor with combine_fingerprints"
                )

    def to_json(self) -> str:
        tensors = {
            name: {"dtype": one.dtype, "shape": list(one.shape), "summed": [one.first, one.num_summed], "sum": one.hex}
            for name, one in self.tensors.items()
        }
        return json.dumps(
            {"format": _FORMAT, "version": self.version, "tied": [list(n) for n in self.tied], "tensors": tensors},
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Fingerprints:
        """Raises FingerprintError for a text that is none, or of a version that sums otherwise."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FingerprintError(f"no fingerprints: this is no JSON ({error})") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise FingerprintError(f"no fingerprints: the JSON does not say that its format is {_FORMAT!r}")
        require_version(found.get("version"), "these fingerprints")
        try:
            tensors = {str(name): _tensor(about) for name, about in found["tensors"].items()}
            tied = tuple(tuple(map(str, names)) for names in found["tied"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FingerprintError(f"no fingerprints: {type(error).__name__}: {error}") from None
        return cls(tensors, tied)


def require_fingerprints(found: object, whose: str) -> None:
    """Raises TypeError for anything else, such as what another rank has not sent."""
    if not isinstance(found, Fingerprints):
        raise TypeError(f"{whose} are no Fingerprints: {type(found).__name__}")


def require_version(version: Any, whose: str) -> None:
    if version != VERSION:
        raise FingerprintError(
            f"{whose} are of version {version} of the sum, and this fsdp-doctor sums as in version {VERSION}: "
            f"take both with the same fsdp-doctor"
        )


def _tensor(about: Any) -> TensorFingerprint:
    digits = about["sum"]
    if len(digits) != 32:
        raise ValueError(f"a sum has 32 hexadecimal digits, not {len(digits)}")
    lanes = int(digits[:16], 16), int(digits[16:], 16)
    first, num_summed = map(int, about["summed"])
    return TensorFingerprint(str(about["dtype"]), tuple(map(int, about["shape"])), first, num_summed, lanes)


def combine_fingerprints(parts: Iterable[Fingerprints]) -> Fingerprints:
    """Adds what several ranks have summed of the same tensors, each replica once.

    Raises FingerprintError where there are none, where the parts are of versions that sum otherwise, of tensors that
    differ in shape or dtype, where a part that several ranks hold is not the same on them, or where parts overlap.
    """
    if isinstance(parts, Fingerprints):
        raise TypeError("fingerprints to be combined are those of several ranks, not of one")
    sums = PartialSums()
    seen: dict[tuple[str, int, int], TensorFingerprint] = {}
    tied: dict[tuple[str, ...], None] = {}
    is_empty = True
    for part in parts:
        is_empty = False
        require_fingerprints(part, "fingerprints to be combined")
        require_version(part.version, "fingerprints to be combined")
        tied |= dict.fromkeys(part.tied)
        for name, one in part.tensors.items():
            replica = seen.setdefault((name, one.first, one.num_summed), one)
            if replica is one or not one.num_summed:
                sums.add(name, one)
            elif replica != one:
                raise FingerprintError(
                    f"{name}: elements {one.first} and on are held by several ranks, and not the same"
                )
    if is_empty:
        raise FingerprintError("there are no fingerprints to combine")
    return Fingerprints(sums.tensors, tuple(tied))


@dataclass
class PartialSums:
    """What is being summed, by name."""

    tensors: dict[str, TensorFingerprint] = field(default_factory=dict)

    def add(self, name: str, one: TensorFingerprint) -> None:
        """Raises FingerprintError for parts of tensors that differ, and for more elements than there are."""
        self.tensors[name] = _added(name, self.tensors[name], one) if name in self.tensors else one


def _added(name: str, one: TensorFingerprint, other: TensorFingerprint) -> TensorFingerprint:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise FingerprintError(
            f"{name} is {one.dtype} {list(one.shape)} in one part and {other.dtype} {list(other.shape)} in another"
        )
    summed = one.num_summed + other.num_summed
    if summed > one.numel:
        raise FingerprintError(f"{name} has {one.numel} elements, and {summed} were summed: parts of it overlap")
    first = min((part.first for part in (one, other) if part.num_summed), default=0)
    return replace(one, first=first, num_summed=summed, lanes=added_lanes(one.lanes, other.lanes))


def added_lanes(one: Lanes, other: Lanes) -> Lanes:
    return (one[0] + other[0]) % _MODULUS, (one[1] + other[1]) % _MODULUS


def lanes_of(signed: Iterable[int]) -> Lanes:
    """Two sums as int64 has them."""
    one, two = signed
    return one % _MODULUS, two % _MODULUS
