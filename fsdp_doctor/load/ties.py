"""A tied tensor that the source has under several names must be the same under all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from fsdp_doctor.load.given import Value
from fsdp_doctor.load.layouts import Whole
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.portions import fingerprint, portion
from fsdp_doctor.load.targets import Target
from fsdp_doctor.load.together import Holders

_WHOLE = Whole((0,))


class Ties:
    """holders: where rank 0 alone has the source it compares whole tensors, else each rank its own part."""

    def __init__(self, targets: Sequence[Target], holders: Holders) -> None:
        self._targets = targets
        self._holders = holders
        self._seen: dict[int, tuple[str, int]] = {}

    def check(self, found: Mapping[int, Iterable[str]], tensors: Mapping[str, Value]) -> None:
        """Of all that the source has. Raises LoadError."""
        for place, names in found.items():
            first, *others = names
            for name in others:
                if not _is_same(tensors[first], tensors[name]):
                    self.is_first(place, first, tensors[first])
                    self.is_first(place, name, tensors[name])

    def is_first(self, place: int, name: str, value: Value) -> bool:
        """Whether the target has not come before. Raises LoadError where it has, with other values."""
        target = self._targets[place]
        if len(target.names) == 1:
            return True
        number = self._fingerprint(target, value)
        first, expected = self._seen.setdefault(place, (name, number))
        if number != expected:
            raise LoadError(f"{first} and {name} are tied in the model and have different values in the source")
        return first == name

    def _fingerprint(self, target: Target, value: Value) -> int:
        layout, rank = (_WHOLE, 0) if self._holders == "first" else (target.layout, dist.get_rank())
        return fingerprint(portion(value, layout, layout.part(target.shape, rank), target.dtype))


def _is_same(one: Value, other: Value) -> bool:
    """Whether they are the same memory."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one == other
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
