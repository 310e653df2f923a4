"""Optimizer state on each rank, and which rank writes each tensor.

The ranks compare their state before it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fsdp_doctor.weights.fingerprints.summing import FingerprintSums
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.load.optimizer_matching import (
    SINGLE_TYPES,
    OptimizerParameter,
    ParameterPart,
    StateForm,
    name_entry,
    read_option,
)
from fsdp_doctor.weights.save.directory import SaveError

REMEDY = "save the optimizer's own state_dict() on each rank instead, for as many ranks"


@dataclass(frozen=True)
class RankEntry:
    """Entry of a parameter's state on one rank.

    dtype: the dtype of a tensor; None for another value.
    value: a single value, on the host.
    digest: a digest of the values, for a tensor that may be whole.
    """

    form: StateForm
    dtype: torch.dtype | None
    value: Any = None
    digest: tuple[int, int] | None = None


@dataclass
class RankOutline:
    """Optimizer state of one rank, by parameter and key.

    lacking: parameters of which the rank holds elements, but no state.
    """

    entries: dict[str, dict[str, RankEntry]] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)


class SavedEntry(NamedTuple):
    """Entry of the full optimizer state.

    form: the form of the tensor: SINGLE, SHARD or WHOLE.
    writer: the rank that writes an entry that is not divided.
    """

    form: StateForm
    dtype: torch.dtype | None
    value: Any
    writer: int


# By parameter and key.
SavedEntries = dict[str, dict[str, SavedEntry]]


def list_values(
    optimizer: torch.optim.Optimizer, parameters: list[OptimizerParameter]
) -> Iterator[tuple[ParameterPart, str, Any]]:
    """Yields (part of a model's parameter, key, value) for all state on this rank."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter.parameter, {}).items():
            for part in parameter.parts:
                yield part, key, value


def read_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Reads the options of each param group in the form in which they are saved.

    Raises SaveError for a tensor of several values.
    """
    groups = [
        {key: read_option(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    for index, group in enumerate(groups):
        for key, option in group.items():
            values = option if isinstance(option, tuple | list) else (option,)
            if any(isinstance(value, torch.Tensor) for value in values):
                raise SaveError(f"the option {key} of param group {index} is a tensor of several values; {REMEDY}")
    return groups


def make_outline(
    optimizer: torch.optim.Optimizer, parameters: list[OptimizerParameter], *, is_alone: bool
) -> RankOutline:
    """Makes the outline of this rank's state. Raises SaveError or LoadError for state that a full state cannot have.

    is_alone: whether there is no other rank to compare with.
    """
    known = {id(parameter.parameter) for parameter in parameters}
    if any(not isinstance(key, torch.Tensor) or id(key) not in known for key in optimizer.state):
        raise SaveError(f"{type(optimizer).__name__} has state that does not belong to any of its parameters; {REMEDY}")
    outline, sums = RankOutline(), FingerprintSums()
    for parameter in parameters:
        values = optimizer.state.get(parameter.parameter, {})
        entries = {key: _read_entry(parameter, key, value) for key, value in values.items()}
        if entries:
            outline.entries |= {name: dict(entries) for name in parameter.names}
        elif parameter.own_shape.numel():
            outline.lacking.update(parameter.names)
        for key, entry in entries.items() if not is_alone else ():
            if entry.form in (StateForm.WHOLE, StateForm.EITHER):
                sums.add(name_entry(key, parameter.names[0]), private.read_local_tensor(values[key]))
    digests = sums.fingerprints().tensors
    for name, entries in outline.entries.items():
        for key, entry in entries.items():
            if (digest := digests.get(name_entry(key, name))) is not None:
                entries[key] = replace(entry, digest=digest.lanes)
    return outline


def _read_entry(parameter: OptimizerParameter, key: str, value: Any) -> RankEntry:
    if isinstance(value, torch.Tensor):
        form = parameter.find_form(key, value)
        single = private.read_local_tensor(value).cpu().clone() if form is StateForm.SINGLE else None
        return RankEntry(form, value.dtype, single)
    if not isinstance(value, SINGLE_TYPES):
        raise SaveError(
            f"{name_entry(key, parameter.names[0])} is a {type(value).__name__}: a full state has tensors and single "
            f"values; {REMEDY}"
        )
    return RankEntry(StateForm.SINGLE, None, value)


def merge_outlines(outlines: Mapping[int, RankOutline]) -> SavedEntries:
    """Determines the form and the writer of each tensor. Raises SaveError if the ranks' parts do not make a full state.

    outlines: the outline of each rank.
    """
    merged: SavedEntries = {}
    turns = itertools.count()
    for name in dict.fromkeys(name for outline in outlines.values() for name in outline.entries):
        # FSDP1's optimizer has no state of a parameter of which the rank has nothing.
        holders = {rank: outline.entries[name] for rank, outline in outlines.items() if name in outline.entries}
        lacking = [rank for rank, outline in outlines.items() if name in outline.lacking]
        for key in dict.fromkeys(key for entries in holders.values() for key in entries):
            entries = {rank: of_rank[key] for rank, of_rank in holders.items() if key in of_rank}
            entry = _merge_entry(name_entry(key, name), entries, next(turns))
            without = [rank for rank in holders if rank not in entries]
            if entry.form is not StateForm.WHOLE:
                without += lacking
            if without:
                raise SaveError(
                    f"rank {without[0]} has elements of {name}, but no {key} for it, unlike rank "
                    f"{next(iter(entries))}: the ranks' optimizers have made different steps"
                )
            merged.setdefault(name, {})[key] = entry
    return merged


def _merge_entry(entry: str, entries: Mapping[int, RankEntry], turn: int) -> SavedEntry:
    """Merges the ranks' entries of one name.

    turn: the number of the entry, by which ranks with equal entries take turns at writing.
    """
    (first, expected), *others = entries.items()
    for rank, other in others:
        if _describe(other) != _describe(expected):
            raise SaveError(
                f"{entry} is {_describe(expected)} on rank {first}, but {_describe(other)} on rank {rank}: "
                f"undivided state must be equal on all ranks; {REMEDY}"
            )
    writer = list(entries)[turn % len(entries)]
    forms = {each.form for each in entries.values()}
    if forms <= {StateForm.SINGLE} or (StateForm.SHARD in forms and forms <= {StateForm.SHARD, StateForm.EITHER}):
        return SavedEntry(expected.form if len(forms) == 1 else StateForm.SHARD, expected.dtype, expected.value, writer)
    if not forms <= {StateForm.WHOLE, StateForm.EITHER}:
        stated = " and ".join(
            f"{form.value} on rank {next(r for r in entries if entries[r].form is form)}" for form in forms
        )
        raise SaveError(f"{entry} is, by its shapes, {stated}, so it is unknown which rank has which part; {REMEDY}")
    by_digest: dict[tuple[int, int] | None, int] = {}
    for rank, each in entries.items():
        by_digest.setdefault(each.digest, rank)
    if len(by_digest) > 1:
        raise SaveError(
            f"{entry} is a whole tensor on each rank, but its values differ between ranks "
            f"{sorted(by_digest.values())}, and a full state has room for one of these tensors; {REMEDY}"
        )
    return SavedEntry(StateForm.WHOLE, expected.dtype, None, writer)


def _describe(entry: RankEntry) -> str:
    """Describes the facts of an entry that must be the same on all ranks.

    These are the dtype and, for a tensor of one element, its value; two NaNs count as equal.
    """
    if entry.form is not StateForm.SINGLE:
        return f"a tensor of {entry.dtype}"
    return f"{entry.value.item()!r} of {entry.dtype}" if isinstance(entry.value, torch.Tensor) else repr(entry.value)
