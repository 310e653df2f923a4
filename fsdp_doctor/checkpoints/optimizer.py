"""Reads the optimizer in a checkpoint, whatever its form, and keys its state by the names of the model's parameters."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.record import SavedCheckpoint, SavedModel, SavedTensor
from fsdp_doctor.text import join_some

_FLAT = re.compile(r"(?:.+\.)?(?P<kind>state|param_groups)\.(?P<parameter>.+)\.(?P<slot>\w+)")
_Leaf: TypeAlias = Any


class SavedOptimizer(NamedTuple):
    """Optimizer state by parameter and slot, such as ``exp_avg``, and the parameter groups with names in ``params``."""

    state: dict[str, dict[str, SavedTensor | Any]]
    groups: list[dict[str, Any]]


class ParameterOrder(NamedTuple):
    """Order of a model's parameters, as in ``named_parameters``.

    ``decayed`` are the parameters that get weight decay in Trainer, which puts them in its first group and all others
    in the second group. It is None if transformers' Trainer is not installed.
    """

    names: tuple[str, ...]
    decayed: frozenset[str] | None


def choose_optimizer(
    checkpoint: SavedCheckpoint,
    model: SavedModel,
    parameters: Iterable[str],
    find_order: Callable[[], ParameterOrder | None] | None = None,
) -> SavedOptimizer | None:
    """Returns the optimizer of a checkpoint, with its state by parameter name; None if there is none.

    ``parameters`` are the names of the model's parameters, in the order of the file. ``find_order`` is called if the
    optimizer numbers its parameters and the files do not keep their order, as safetensors files do not. Without it such
    an optimizer is refused.

    Raises BadFile if the names of its parameters cannot be determined, or if there are several optimizers.
    """
    heads: set[tuple[str, ...]] = set()
    state: dict[str, dict[str, _Leaf]] = {}
    nested: dict[str, Any] = {}
    flat: dict[str, dict[str, Any]] = {}
    for place, path, leaf in _walk_leaves(checkpoint):
        kind = next((at for at, key in enumerate(path) if key in ("state", "param_groups")), None)
        heads.add((place, *(path[:kind] if kind is not None else ())))
        if kind is not None and path[kind] == "state" and len(path) > kind + 2:
            _put(state.setdefault(path[kind + 1], {}), path[kind + 2 :], leaf)
        elif kind is not None and path[kind] == "param_groups":
            _put(nested, path[kind + 1 :], leaf)
        else:
            # DCP's flattened form, in which each parameter has its own group settings.
            for at in range(1, len(path) + 1):
                if (found := _FLAT.fullmatch(".".join(path[:at]))) is not None:
                    parts = state if found["kind"] == "state" else flat
                    _put(parts.setdefault(found["parameter"], {}), (found["slot"], *path[at:]), leaf)
                    break
    if not state:
        return None
    if len(heads) > 1:
        raise BadFile(f"has several optimizers: {join_some(sorted('.'.join(head) for head in heads))}")
    groups = [_restore_sequences(nested[key]) for key in sorted(nested, key=int)] or _join_groups(flat)
    names = _name_parameters(checkpoint, groups, state, model, parameters, find_order)
    return SavedOptimizer(
        {names[key]: _restore_sequences(slots) for key, slots in state.items()},
        [_rename(group, names) for group in groups],
    )


def _walk_leaves(checkpoint: SavedCheckpoint) -> Iterator[tuple[str, tuple[str, ...], _Leaf]]:
    """Yields all optimizer state as (name of the saved state that contains it, path, tensor or value)."""
    for state in checkpoint.states:
        leaves: dict[tuple[str, ...], _Leaf] = {tensor.path: tensor for tensor in state.select("optimizer")}
        for (path, _), value in state.values.items():
            if path and state.judge_keys(path) == "optimizer":
                leaves.setdefault(path, value)
        yield from ((f"{state.directory}/{state.label}", path, leaf) for path, leaf in leaves.items())


def _put(into: dict[str, Any], path: tuple[str, ...], leaf: _Leaf) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = leaf


def _restore_sequences(value: Any) -> Any:
    """Converts dicts with the keys 0, 1, ... to tuples. These dicts were lists or tuples before the save."""
    if not isinstance(value, dict):
        return value
    items = {key: _restore_sequences(each) for key, each in value.items()}
    return tuple(items.values()) if items and list(items) == [str(at) for at in range(len(items))] else items


def _join_groups(flat: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups the parameters by their settings: parameters with the same settings are in one group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, settings in flat.items():
        restored = {key: _restore_sequences(value) for key, value in settings.items() if key != "params"}
        groups.setdefault(repr(restored), restored | {"params": ()})["params"] += (name,)
    return list(groups.values())


def _name_parameters(
    checkpoint: SavedCheckpoint,
    groups: list[dict[str, Any]],
    state: dict[str, Any],
    model: SavedModel,
    parameters: Iterable[str],
    find_order: Callable[[], ParameterOrder | None] | None,
) -> dict[str, str]:
    """Maps each key of the state to a parameter's name. A numeric key is the parameter's number in the model.

    Raises BadFile if the files do not show which parameters the numbers stand for, or if a shape does not fit.
    """
    keys = [key for group in groups for key in group.get("params", ())]
    if not any(isinstance(key, int) for key in keys):
        return {key: strip_wrappers(key) for key in [*keys, *state]}
    names = [strip_wrappers(name) for group in groups for name in group.get("param_names", ())]
    if not names:
        # Parameters that share memory count once.
        places: dict[tuple[Any, ...], str] = {}
        for name in parameters:
            places.setdefault((name,) if not model.tensors[name].numel else tuple(model.tensors[name].pieces), name)
        saved = _find_saved_order(checkpoint, model, set(places.values())) if len(groups) == 1 else None
        names = saved or _order_by_class(checkpoint, groups, model, find_order() if find_order is not None else None)
        if len(names) != len(keys):
            raise BadFile(
                f"has an optimizer that numbers its {len(keys)} parameters in {len(groups)} groups, but not which "
                f"of the model's {len(places)} parameters they are; use --no-optimizer"
            )
    numbered = {str(key): name for key, name in zip(keys, names, strict=True)}
    for key, slots in state.items():
        tensor = model.tensors.get(numbered.get(key, ""))
        for slot in slots.values():
            if tensor is None or (isinstance(slot, SavedTensor) and slot.shape not in ((), (1,), tensor.shape)):
                raise BadFile(
                    "has another shape than the parameter with its number, or this parameter does not exist",
                    f"state {key}",
                )
    return numbered


def _find_saved_order(checkpoint: SavedCheckpoint, model: SavedModel, names: set[str]) -> list[str] | None:
    """Returns the names in the order of ``state_dict()``; None if no saved form of the model keeps this order."""
    for states in (model.states, *([state] for state in checkpoint.states)):
        saved = [strip_wrappers(state.get_saved_name(each)) for state in states for each in state.select("model")]
        if all(state.keeps_order for state in states) and names <= set(saved):
            return [name for name in saved if name in names]
    return None


def _order_by_class(
    checkpoint: SavedCheckpoint, groups: list[dict[str, Any]], model: SavedModel, order: ParameterOrder | None
) -> list[str]:
    """Returns the names in the order in which the groups number them.

    A single group has all parameters. If there are two groups and Trainer made them, the first group has the parameters
    with weight decay. Returns an empty list for other groups, and if the model class has a parameter that the
    checkpoint lacks.
    """
    if order is None or not model.tensors.keys() >= set(order.names):
        return []
    if len(groups) == 1:
        return list(order.names)
    is_of_trainer = any(path.name == "trainer_state.json" for path in map(pathlib.PurePath, checkpoint.settings))
    if order.decayed is None or not is_of_trainer or len(groups) != 2:
        return []
    of_groups = [[name for name in order.names if (name in order.decayed) is first] for first in (True, False)]
    are_alike = all(len(names) == len(group["params"]) for names, group in zip(of_groups, groups, strict=True))
    return list(itertools.chain(*of_groups)) if are_alike else []


def _rename(group: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    params = [names[str(key)] for key in group.get("params", ())]
    return {key: value for key, value in group.items() if key not in ("params", "param_names")} | {"params": params}
