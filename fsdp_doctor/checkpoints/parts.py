"""Finds which tensors of a state belong to the model, by the keys that lead to them and by config.json."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from fsdp_doctor.checkpoints.names import strip_prefixes
from fsdp_doctor.checkpoints.record import State

_Path: TypeAlias = tuple[str, ...]
# Keys under which programs store a model's state.
_MODEL_KEYS = frozenset({"model", "module", "state_dict", "app", "model_state", "model_state_dict", "model_weights"})
# Keys of other copies of the model, and optimizer slots that hold such copies: float32 master weights, and averages.
MASTER = re.compile(r"^(?!.*(?:ema|averag)).*(?:^|[._])(?:master|fp32|float32|main_param)|^param$")
AVERAGE = re.compile(r"(?:^|[._])(?:model_|state_dict_)?ema(?:[._]|$)|averag|(?:^|[._])swa(?:[._]|$)")


def assign_roles(state: State, config: Mapping[str, Any], part: str | None) -> None:
    """Sets the role of each tensor in a state, and the names of the model's tensors.

    The model is the part under a key that programs use for models, such as ``model``, at any depth. Without such a key,
    the model is the only part that can be a model. Parts that share no tensor name count as one part. If several parts
    can be the model, the model is the part that config.json describes. If config.json does not decide, no part counts
    as the model, and ``state.candidates`` lists the parts.

    ``config`` is the content of config.json. ``part`` is the part that was chosen explicitly, such as ``ema`` or
    ``state.ema``.
    """
    roles = {path: state.judge_keys(path) for path in (*state.tensors, *state.unread)}
    of_model = [path for path, role in roles.items() if role == "model"]
    heads = _find_heads(of_model)
    if part is not None:
        asked = {path[:at] for path in roles for at in range(1, len(path)) if _is_called(path[:at], part)}
        heads = [min(asked, key=len)] if asked else []
        roles |= dict.fromkeys([path for path in roles if asked and path[: len(heads[0])] == heads[0]], "model")
    elif len(heads) > 1:
        fitting = [head for head in heads if _fits(state, head, config)]
        heads = fitting if len(fitting) == 1 else heads
    state.candidates = [".".join(head) for head in heads] if len(heads) > 1 else []
    state.head = heads[0] if len(heads) == 1 else None
    left_out: dict[str, int] = defaultdict(int)
    for path, role in roles.items():
        if role == "model" and not (state.head is not None and path[: len(state.head)] == state.head):
            roles[path] = "other"
            left_out[".".join(path[:-1])] += 1
    state.left_out = dict(left_out)
    state.roles = roles
    model = [tensor for path, tensor in state.tensors.items() if roles[path] == "model"]
    names = strip_prefixes([state.get_saved_name(tensor) for tensor in model])
    for tensor in model:
        tensor.parameter = names[state.get_saved_name(tensor)]


def _is_called(head: _Path, part: str) -> bool:
    return ".".join(head) == part or head[-1] == part


def _find_heads(paths: Iterable[_Path]) -> list[_Path]:
    """Finds the key prefix of each part that may be the model. Parts that share no tensor name form one model."""
    by_key: dict[_Path, None] = {}
    groups: dict[_Path, set[str]] = defaultdict(set)
    for path in paths:
        begin = next((at for at, key in enumerate(path[:-1]) if key in _MODEL_KEYS), None)
        if begin is not None:
            end = next((at for at in range(begin, len(path) - 1) if path[at] not in _MODEL_KEYS), len(path) - 1)
            by_key[path[:end]] = None
        groups[path[:1] if len(path) > 1 else ()].add(".".join(path[1:] if len(path) > 1 else path))
    if by_key:
        # A part below another one belongs to it.
        return [head for head in by_key if not any(head != other and head[: len(other)] == other for other in by_key)]
    if len(groups) == 1 and () not in groups:
        return [_find_common([path[:-1] for path in paths])]
    names: set[str] = set()
    for of_group in groups.values():
        if of_group & names:
            return list(groups)
        names |= of_group
    return [()]


def _find_common(paths: list[_Path]) -> _Path:
    first, last = min(paths), max(paths)
    count = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:count]


def _fits(state: State, head: _Path, config: Mapping[str, Any]) -> bool:
    """Returns whether the part has the vocabulary size and the number of layers that config.json gives."""
    tensors = [tensor for path, tensor in state.tensors.items() if path[: len(head)] == head]
    numbers = {int(found[1]) for each in tensors if (found := re.search(r"\b(?:layers|h|blocks?)\.(\d+)\.", each.name))}
    layers, vocabulary = config.get("num_hidden_layers", config.get("n_layer")), config.get("vocab_size")
    has_vocabulary = any(len(tensor.shape) == 2 and tensor.shape[0] == vocabulary for tensor in tensors)
    return bool(config) and (layers is None or len(numbers) == layers) and (vocabulary is None or has_vocabulary)
