"""What the source has against what the model has, by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fsdp_doctor.errors import some
from fsdp_doctor.extract.rank_groups import Conflict, refusal
from fsdp_doctor.load.given import Value
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.targets import Target

DtypeRule = Literal["keep", "cast"]


@dataclass(frozen=True)
class Rules:
    strict: bool
    dtype: DtypeRule


class Matching:
    """Which names of the source are which targets. A target may come under several names.

    found: by the target's place in the order of the model, the names that the source has for it. superfluous: the
    names that are of none. Where rules are strict there are none when ``complete`` has returned. refused: what the
    source is not to have, by the first name of each target.
    """

    def __init__(self, targets: Sequence[Target], rules: Rules, refused: Mapping[str, Conflict]) -> None:
        self._targets = targets
        self._rules = rules
        self._refused = refused
        self._places = {name: place for place, target in enumerate(targets) for name in target.names}
        self.found: dict[int, list[str]] = {}
        self.superfluous: list[str] = []

    def add(self, name: str, value: Value) -> int | None:
        """The place of the target, None for what is to be skipped. Raises LoadError for what does not fit."""
        place = self._places.get(name)
        if place is None:
            self.superfluous.append(name)
            if self._rules.strict:
                raise LoadError(_superfluous([name]))
            return None
        self._refuse([place])
        if problem := _misfit(name, value, self._targets[place], self._rules.dtype):
            raise LoadError(problem)
        if name in self.found.setdefault(place, []):
            raise LoadError(f"the source has {name} twice")
        self.found[place].append(name)
        return place

    def add_all(self, tensors: Mapping[str, Value]) -> None:
        """Everything at once; the LoadError names all that does not fit."""
        self._refuse(sorted({self._places[name] for name in tensors if name in self._places}))
        problems = _Problems()
        for name, value in tensors.items():
            place = self._places.get(name)
            if place is None:
                self.superfluous.append(name)
            elif problem := _misfit(name, value, self._targets[place], self._rules.dtype):
                problems.misfits.append(problem)
            if place is not None:
                self.found.setdefault(place, []).append(name)
        if self._rules.strict:
            problems.missing, problems.superfluous = self.missing(), self.superfluous
        problems.check()

    def _refuse(self, places: Sequence[int]) -> None:
        names = [name for place in places if (name := self._targets[place].names[0]) in self._refused]
        if names:
            raise LoadError(refusal({name: self._refused[name] for name in names}))

    def complete(self) -> None:
        """After the last one. Raises LoadError for what is missing, if nothing may be."""
        if self._rules.strict and (missing := self.missing()):
            raise LoadError(_missing(missing))

    def missing(self) -> list[str]:
        return [target.names[0] for place, target in enumerate(self._targets) if place not in self.found]


@dataclass
class _Problems:
    missing: list[str] = field(default_factory=list)
    superfluous: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def check(self) -> None:
        sentences = [
            *([_missing(self.missing)] if self.missing else []),
            *([_superfluous(self.superfluous)] if self.superfluous else []),
            *([some(self.misfits)] if self.misfits else []),
        ]
        if sentences:
            raise LoadError("; ".join(sentences))


def _missing(names: Sequence[str]) -> str:
    return f"the source lacks {len(names)} of the model's tensors: {some(names)}"


def _superfluous(names: Sequence[str]) -> str:
    return f"the source has {len(names)} that the model does not have: {some(names)}"


def _misfit(name: str, value: Value, target: Target, rule: DtypeRule) -> str:
    if value.shape != target.shape:
        return f"{name} has the shape {list(value.shape)} in the source and {list(target.shape)} in the model"
    if value.dtype == target.dtype:
        return ""
    differ = f"{name} is {value.dtype} in the source and {target.dtype} in the model"
    if rule == "keep":
        return f'{differ} (dtype="cast" casts it)'
    return "" if _may_cast(value.dtype, target.dtype) else f"{differ}, which no cast keeps"


def _may_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    return dtype.is_floating_point and to.is_floating_point
