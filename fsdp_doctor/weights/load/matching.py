"""Matches the tensors of the source with the model's: which tensor fills which, and whether shapes and dtypes fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.text import format_count, join_some
from fsdp_doctor.weights.fsdp.forms import refuse
from fsdp_doctor.weights.load.agreement import Holders
from fsdp_doctor.weights.load.layouts import Whole
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.portions import compute_checksum, make_portion
from fsdp_doctor.weights.load.source import Value
from fsdp_doctor.weights.load.targets import Target
from fsdp_doctor.weights.transport.rank_groups import Conflict, describe_conflicts

DtypeRule = Literal["keep", "cast"]
_WHOLE = Whole((0,))
# Limit for the names in an error, for each of three kinds of problems.
_MOST_NAMES = 3


class Matching:
    """Pairs of tensors of the source and the targets that they fill.

    The source may have a tied target under several of its names if the values are the same.

    names: by the target's index, the names under which the source has the target.
    superfluous: names in the source that belong to no target.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        strict: bool,
        dtype: DtypeRule,
        holders: Holders,
        conflicts: Mapping[str, Conflict],
        unreadable: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares the matching.

        conflicts, unreadable: by the first name of a target, the reason why it cannot be loaded.
        """
        self._targets, self._strict, self._dtype = targets, strict, dtype
        self._holders, self._conflicts = holders, conflicts
        self._unreadable = unreadable or {}
        self._indices = {name: index for index, target in enumerate(targets) for name in target.names}
        self._checksums: dict[int, int] = {}
        self.names: dict[int, list[str]] = {}
        self.superfluous: list[str] = []

    def add(self, name: str, value: Value) -> int | None:
        """Matches one item of an iterator, whose other items are unknown.

        Returns the index of the target to fill; None if the model has no such tensor, or if the tied target has already
        been filled. Raises LoadError if the tensor does not fit, or if the load is strict and the model has no such
        tensor.
        """
        index = self._indices.get(name)
        if index is None:
            self.superfluous.append(name)
            if self._strict:
                raise LoadError(_describe_superfluous([name]))
            return None
        self._refuse_conflicts([index])
        if problem := self._describe_misfit(name, value):
            raise LoadError(problem)
        names = self.names.setdefault(index, [])
        if name in names:
            raise LoadError(f"the source has {name} twice")
        names.append(name)
        self._check_tie(index, name, value)
        return index if len(names) == 1 else None

    def add_all(self, tensors: Mapping[str, Value]) -> None:
        """Matches all tensors of the source at once. Raises a LoadError that names all tensors that do not fit."""
        self._refuse_conflicts(sorted({self._indices[name] for name in tensors if name in self._indices}))
        misfits = []
        for name, value in tensors.items():
            if name not in self._indices:
                self.superfluous.append(name)
                continue
            self.names.setdefault(self._indices[name], []).append(name)
            if problem := self._describe_misfit(name, value):
                misfits.append(problem)
        missing = self.list_missing() if self._strict else []
        problems = [_describe_missing(missing)] if missing else []
        problems += [_describe_superfluous(self.superfluous)] if self._strict and self.superfluous else []
        problems += [join_some(misfits, _MOST_NAMES)] if misfits else []
        if problems:
            raise LoadError("; ".join(problems))
        for index, (first, *others) in self.names.items():
            if not all(_is_same_memory(tensors[first], tensors[name]) for name in others):
                for name in (first, *others):
                    self._check_tie(index, name, tensors[name])

    def check_complete(self) -> None:
        """Raises LoadError if the load is strict and a target is missing after the last ``add``."""
        if self._strict and (missing := self.list_missing()):
            raise LoadError(_describe_missing(missing))

    def list_missing(self) -> list[str]:
        return [target.names[0] for index, target in enumerate(self._targets) if index not in self.names]

    def _refuse_conflicts(self, indices: Iterable[int]) -> None:
        names = [self._targets[index].names[0] for index in indices]
        refuse({name: self._unreadable[name] for name in names if name in self._unreadable})
        if conflicting := [name for name in names if name in self._conflicts]:
            raise LoadError(describe_conflicts({name: self._conflicts[name] for name in conflicting}))

    def _describe_misfit(self, name: str, value: Value) -> str:
        target = self._targets[self._indices[name]]
        if value.shape != target.shape:
            return f"{name} has the shape {list(value.shape)} in the source and {list(target.shape)} in the model"
        if value.dtype == target.dtype:
            return ""
        difference = f"{name} is {value.dtype} in the source and {target.dtype} in the model"
        match self._dtype:
            case "keep":
                return f'{difference} (dtype="cast" casts it)'
            case "cast":
                may_cast = value.dtype.is_floating_point and target.dtype.is_floating_point
                return "" if may_cast else f"{difference}, but only floating-point tensors are cast"
            case _:
                assert_never(self._dtype)

    def _check_tie(self, index: int, name: str, value: Value) -> None:
        """Raises LoadError if an earlier tensor for the same tied target had different values.

        If only rank 0 has the source, it compares whole tensors; otherwise each rank compares its own part.
        """
        target = self._targets[index]
        if len(target.names) == 1:
            return
        layout, rank = (_WHOLE, 0) if self._holders == "first" else (target.layout, dist.get_rank())
        number = compute_checksum(make_portion(value, layout, layout.compute_part(target.shape, rank), target.dtype))
        if number != self._checksums.setdefault(index, number):
            first = self.names[index][0]
            raise LoadError(f"{first} and {name} are tied in the model, but have different values in the source")


def _describe_missing(names: Sequence[str]) -> str:
    return f"the source lacks {len(names)} of the model's tensors: {join_some(names, _MOST_NAMES)}"


def _describe_superfluous(names: Sequence[str]) -> str:
    count = format_count(len(names), "tensor")
    return f"the source has {count} that the model does not have: {join_some(names, _MOST_NAMES)}"


def _is_same_memory(one: Value, other: Value) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one == other
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
