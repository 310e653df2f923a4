"""The parameters that an optimizer has against those that a checkpoint has, and their param groups."""

from __future__ import annotations

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from typing_extensions import assert_never

from fsdp_doctor.errors import some
from fsdp_doctor.load.optimizer_checkpoint import ScalarEntry, StateOutline, TensorEntry, entry_name
from fsdp_doctor.load.optimizer_parameters import Optimized, Stretch
from fsdp_doctor.load.outcome import LoadError

StateDtypeRule = Literal["keep", "cast", "source"]

# How an optimizer computes, which is the run's own affair, and no part of what it has learned.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")


# Of a scheduler, or of most optimizers: they tell none from another.
_OF_ANY = ("lr", "weight_decay", "maximize")
# What no optimizer makes other state for.
_SCHEDULED = ("initial_lr", *_OF_ANY)


def check_kind(outline: StateOutline, defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises LoadError for the state of another optimizer, of which the options of the param groups tell.

    defaults, groups: of the optimizer. Versions of one differ in an option or two; another one lacks most of the
    options, and has some that this one does not have.
    """
    own = set(defaults) - {*_IMPLEMENTATION, *_OF_ANY}
    known = own | {key for group in groups for key in group}
    for group in outline.groups:
        lacking, strange = own - set(group), set(group) - known - set(_OF_ANY)
        if strange and 2 * len(lacking) > len(own):
            raise LoadError(
                f"the source is the state of another optimizer: its param groups have {some(sorted(strange))}, and not "
                f"{some(sorted(lacking))}"
            )


class StateMatching:
    """found: of each parameter with state, its entries. stateless: those that never had a gradient.

    options: of the param groups, by their index. missing, superfluous, without_state: as in a LoadReport; raises
    LoadError where they are not allowed, and for what does not fit.
    """

    def __init__(
        self, parameters: Sequence[Optimized], outline: StateOutline, *, strict: bool, dtype: StateDtypeRule
    ) -> None:
        self._outline = outline
        self._dtype = dtype
        self._group_of = {name: index for index, group in enumerate(outline.groups) for name in group["params"]}
        self.found: list[tuple[Optimized, dict[str, TensorEntry | ScalarEntry]]] = []
        self.stateless: list[Optimized] = []
        self.missing: list[str] = []
        self.without_state: list[str] = []
        for one in parameters:
            self._match(one)
        known = {name for one in parameters for stretch in one.stretches for name in stretch.names}
        self.superfluous = [name for name in self._outline.entries if name not in known]
        if strict and self.missing:
            raise LoadError(f"the source lacks {len(self.missing)} of the optimizer's parameters: {some(self.missing)}")
        if strict and self.superfluous:
            raise LoadError(
                f"the source has {len(self.superfluous)} parameters that the optimizer does not have: "
                f"{some(self.superfluous)}"
            )
        ungrouped = [name for name in outline.entries if name in known and name not in self._group_of]
        if strict and ungrouped:
            raise LoadError(
                f"the source has {len(ungrouped)} parameters with state in none of its param groups: {some(ungrouped)}"
            )
        self.options = self._options(parameters)
        self._check_alike()

    def check_against(
        self, state: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raises LoadError for what has other keys, or values of another kind, than the optimizer has for it.

        state, groups: of the optimizer. With other options it may need other keys.
        """
        for one, entries in self.found:
            own = {key: _kind_of_value(value, one) for key, value in state.get(one.parameter, {}).items()}
            options = self.options.get(one.group, {})
            if own and all(groups[one.group].get(key, v) == v for key, v in options.items() if key not in _SCHEDULED):
                _check_kinds(one, entries, own, "and the optimizer has")

    def _check_alike(self) -> None:
        """An optimizer makes the same state for all parameters of a group."""
        kinds: dict[int, collections.Counter[tuple[tuple[str, str], ...]]] = collections.defaultdict(
            collections.Counter
        )
        for one, entries in self.found:
            kinds[one.group][tuple((key, _kind(entry, one)) for key, entry in sorted(entries.items()))] += 1
        for one, entries in self.found:
            ((most, _),) = kinds[one.group].most_common(1)
            _check_kinds(one, entries, dict(most), "and most parameters of its group have")
        for one in self.stateless:
            # Of one that never had a gradient there is no entry.
            if kinds[one.group] and self._outline.entries.keys() & set(map(self._name, one.stretches)):
                raise LoadError(f"{one.names[0]} has an empty state in the source, and others of its group have not")

    def _match(self, one: Optimized) -> None:
        named = [self._name(stretch) for stretch in one.stretches]
        if not any(named):
            if one.parameter.requires_grad:
                self.missing += one.names
            return
        entries = [self._outline.entries.get(name, {}) if name else {} for name in named]
        if not any(entries):
            self.stateless.append(one)
            self.without_state += one.names
            return
        for stretch, name, own in zip(one.stretches, named, entries, strict=True):
            _check_shapes(stretch, name, own)
            if difference := _difference(entries[0], own):
                raise LoadError(
                    f"{one.names[0]} and {stretch.names[0]} lie in one flat parameter, and the source has {difference} "
                    "of them that differ"
                )
        self.found.append((one, {key: self._in_dtype(one, key, entry) for key, entry in entries[0].items()}))

    def _in_dtype(self, one: Optimized, key: str, entry: TensorEntry | ScalarEntry) -> TensorEntry | ScalarEntry:
        """As the optimizer is to have it."""
        own = one.parameter.dtype
        if not isinstance(entry, TensorEntry) or entry.dtype == own or not entry.dtype.is_floating_point:
            return entry
        match self._dtype:
            case "keep":
                raise LoadError(
                    f"{entry_name(key, one.names[0])} is {entry.dtype} in the source, and the parameter is {own}: "
                    "torch's optimizers compute with one dtype; dtype='cast' casts it, dtype='source' takes it as it is"
                )
            case "cast":
                return TensorEntry(entry.shape, own)
            case "source":
                return entry
            case _:
                assert_never(self._dtype)

    def _name(self, stretch: Stretch) -> str:
        """The one that the source has; empty for none."""
        have = [name for name in stretch.names if name in self._outline.entries]
        listed = [name for name in stretch.names if name in self._group_of]
        return next(iter([*have, *listed]), "")

    def _options(self, parameters: Sequence[Optimized]) -> dict[int, dict[str, Any]]:
        """Each group of the optimizer has parameters of one group of the checkpoint, and of no other."""
        theirs: dict[int, tuple[int, str]] = {}
        ours: dict[int, tuple[int, str]] = {}
        for one in parameters:
            for stretch in one.stretches:
                other = next((self._group_of[name] for name in stretch.names if name in self._group_of), None)
                if other is None:
                    continue
                name = stretch.names[0]
                for group, match, known in ((one.group, other, theirs), (other, one.group, ours)):
                    expected, first = known.setdefault(group, (match, name))
                    if expected != match:
                        raise LoadError(
                            f"the param groups differ: {first} and {name} are in one group of either the optimizer or "
                            "the source, and in two of the other"
                        )
        return {
            group: {key: v for key, v in self._outline.groups[other].items() if key not in _IMPLEMENTATION}
            for group, (other, _) in theirs.items()
        }


def _check_shapes(stretch: Stretch, name: str, entries: dict[str, TensorEntry | ScalarEntry]) -> None:
    for key, entry in entries.items():
        if isinstance(entry, TensorEntry) and entry.shape != stretch.shape:
            raise LoadError(
                f"{entry_name(key, name)} has the shape {list(entry.shape)} in the source, and the parameter has "
                f"{list(stretch.shape)}"
            )


def _kind(entry: TensorEntry | ScalarEntry, one: Optimized) -> str:
    """What ``_kind_of_value`` says of the value."""
    if isinstance(entry, TensorEntry) or (entry.dtype is not None and not one.parameter.ndim):
        return "a tensor"
    return "a number" if isinstance(entry.value, numbers.Number) else type(entry.value).__name__


def _kind_of_value(value: Any, one: Optimized) -> str:
    """Of a parameter's state. A number may be a tensor with one value."""
    if isinstance(value, torch.Tensor) and (value.ndim or not one.parameter.ndim):
        return "a tensor"
    return "a number" if isinstance(value, numbers.Number | torch.Tensor) else type(value).__name__


def _check_kinds(
    one: Optimized, entries: Mapping[str, TensorEntry | ScalarEntry], expected: Mapping[str, str], who: str
) -> None:
    kinds = {key: _kind(entry, one) for key, entry in entries.items()}
    for key in {**expected, **kinds}:
        if kinds.get(key) != expected.get(key):
            raise LoadError(
                f"{entry_name(key, one.names[0])} is {kinds.get(key, 'missing')} in the source, {who} "
                f"{expected.get(key, 'none')}: a step would fail, or begin anew"
            )


def _difference(one: dict[str, TensorEntry | ScalarEntry], other: dict[str, TensorEntry | ScalarEntry]) -> str:
    """A key that is not alike: tensors in their dtype, single values in all."""
    for key in {**one, **other}:
        left, right = (
            (entry.dtype,) if isinstance(entry, TensorEntry) else entry for entry in (one.get(key), other.get(key))
        )
        if left != right:
            return key
    return ""
