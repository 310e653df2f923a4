"""An optimizer's full state as a checkpoint has it, and what of it all ranks have to know."""

from __future__ import annotations

import base64
import collections
import numbers
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch

from fsdp_doctor.errors import some
from fsdp_doctor.load.given import check_value
from fsdp_doctor.load.outcome import LoadError

# What a bare value of a parameter's state may be; a text or None is for optimizers of others.
_SINGLE = (numbers.Number, str, NoneType)
_FORMAT = "the source must be what get_optimizer_state_dict(..., full_state_dict=True) returns"


@dataclass(frozen=True)
class TensorEntry:
    """Of a parameter's state, a tensor with a value for each of its elements."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ScalarEntry:
    """Of a parameter's state, one value, such as a step. dtype: of the tensor that holds it, None for a bare value."""

    value: Any
    dtype: torch.dtype | None


@dataclass
class StateOutline:
    """All of it but the tensors' values.

    entries: by parameter and by key. groups: the options of each, and its parameters under ``params``.
    """

    entries: dict[str, dict[str, TensorEntry | ScalarEntry]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Of two outlines that are alike, the same."""
        lines = [f"{entry_name(key, name)}: {e}" for name, of_one in self.entries.items() for key, e in of_one.items()]
        for index, group in enumerate(self.groups):
            lines += [f"{name} in param group {index}" for name in group["params"]]
            lines += [f"param group {index} with {key} = {group[key]!r}" for key in group if key != "params"]
        return sorted(lines)

    def as_word(self) -> str:
        return base64.b85encode(pickle.dumps(self)).decode()

    @staticmethod
    def of_word(word: str) -> StateOutline:
        """What rank 0 of this process group said."""
        outline: StateOutline = pickle.loads(base64.b85decode(word))
        return outline


def outline_of(source: Any) -> tuple[StateOutline, dict[str, torch.Tensor]]:
    """The outline, and the tensors by the names that ``entry_name`` gives them. Raises LoadError, TypeError."""
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= set(source):
        raise TypeError(f"{_FORMAT}, with state and param_groups")
    if not isinstance(source["state"], Mapping) or not _are_groups(source["param_groups"]):
        raise TypeError(f"{_FORMAT}: its state must be a mapping, and its param_groups a list of mappings with params")
    outline, tensors = StateOutline(), {}
    for name, entries in source["state"].items():
        if not isinstance(name, str) or not isinstance(entries, Mapping):
            raise LoadError(f"{_FORMAT}: its state has {name!r} where a parameter's name is expected")
        outline.entries[name] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                check_value(entry_name(key, name), value)
                tensors[entry_name(key, name)] = value
                outline.entries[name][key] = TensorEntry(value.shape, value.dtype)
            elif isinstance(value, torch.Tensor):
                check_value(entry_name(key, name), value)
                outline.entries[name][key] = ScalarEntry(value.item(), value.dtype)
            elif isinstance(value, _SINGLE):
                outline.entries[name][key] = ScalarEntry(value, None)
            else:
                raise LoadError(
                    f"{entry_name(key, name)} is a {type(value).__name__} in the source: state is tensors and numbers"
                )
    for group in source["param_groups"]:
        if not all(isinstance(name, str) for name in group["params"]):
            raise LoadError(f"{_FORMAT}: its param_groups have indices where parameters' names are expected")
        outline.groups.append({key: _on_host(value) for key, value in group.items()})
    listed = collections.Counter(name for group in outline.groups for name in group["params"])
    if twice := [name for name, count in listed.items() if count > 1]:
        raise LoadError(f"the source has {some(twice)} in two param groups")
    return outline, tensors


def entry_name(key: str, name: str) -> str:
    return f"{key} of {name}"


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    )


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
