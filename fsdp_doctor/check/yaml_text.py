"""YAML to settings, document after document, within bounds: an alias is counted as what it stands for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import yaml

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.errors import UsageError, first_line

# libyaml where PyYAML has it: ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_NESTED = 32
_LONGEST_KEY = 200
_LARGEST = 4 << 20
_MOST_EVENTS = 60_000


def settings_of_yaml(text: str, name: str) -> Iterator[Setting]:
    """Every leaf of every document that is a mapping. Raises UsageError, with the line where there is one."""
    try:
        _check_size(text, name)
        loader = _LOADER(text)
        mappings = 0
        while loader.check_node():
            document = loader.get_node()
            if isinstance(document, yaml.MappingNode):
                mappings += 1
                yield from _leaves(loader, document, "", name)
        if not mappings:
            raise not_a_mapping(name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{name}{f':{mark.line + 1}' if mark else ''}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: invalid YAML: {first_line(error)}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid YAML: {error}") from None


@functools.lru_cache(maxsize=10_000)
def scalar(text: str) -> Any:
    """The value of an override, by YAML's rules, which Hydra's come near to."""
    if len(text) > _LONGEST_KEY and not text.lstrip().startswith(("[", "{")):
        return text
    try:
        _check_size(text, "")
        value = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, UsageError):
        return text
    return text if isinstance(value, dict) else value


def not_a_mapping(name: str) -> UsageError:
    return UsageError(f"{name} does not contain settings: expected names with values, not a list or a single value")


def _check_size(text: str, name: str) -> None:
    """Raises UsageError for what is nested too deeply, contains itself, or is too large with aliases written out."""
    sizes: dict[str, tuple[int, int]] = {}
    # Of each open collection: its anchor, its size and depth so far. The outermost is the stream.
    open_: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number > _MOST_EVENTS:
            raise UsageError(f"{name} has more than {_MOST_EVENTS:,} names and values")
        match event:
            case yaml.AliasEvent():
                if any(anchor == event.anchor for anchor, _, _ in open_):
                    raise UsageError(f"{name}:{event.start_mark.line + 1}: invalid YAML: a value contains itself")
                size, depth = sizes.get(event.anchor, (1, 0))
            case yaml.ScalarEvent():
                size, depth = 1 + len(event.value), 0
                if event.anchor:
                    sizes[event.anchor] = size, depth
            case yaml.CollectionStartEvent():
                open_.append((event.anchor, 1, 0))
                if len(open_) > _MOST_NESTED:
                    raise UsageError(f"cannot read {name}: it is nested too deeply")
                continue
            case yaml.CollectionEndEvent():
                anchor, size, depth = open_.pop()
                if anchor:
                    sizes[anchor] = size, depth
            case _:
                continue
        above, total, deepest = open_.pop()
        open_.append((above, total + size, max(deepest, depth + 1)))
        if total + size > _LARGEST or max(deepest, depth + 1) > _MOST_NESTED:
            raise UsageError(f"cannot read {name}: with its aliases written out it is too large")


def _leaves(loader: Any, node: Any, prefix: str, name: str) -> Iterator[Setting]:
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = f"{prefix}{_key(key_node, name)}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(loader, value_node, f"{key}.", name)
        else:
            yield Setting(key, loader.construct_object(value_node, deep=True), f"{name}:{key_node.start_mark.line + 1}")


def _key(node: Any, name: str) -> str:
    key = node.value if isinstance(node, yaml.ScalarNode) else "?"
    if len(key) > _LONGEST_KEY:
        raise UsageError(f"{name}:{node.start_mark.line + 1}: a name has more than {_LONGEST_KEY} characters")
    return str(key)
