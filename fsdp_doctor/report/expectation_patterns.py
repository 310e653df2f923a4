"""Patterns of case ids: ``fsdp2/policy*/staged/{state_dict,dcp}``, and the few that stand for a set of cases.

``*`` is any text, ``{a,b}`` one of several; everything else is itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import AnyCase, leading_words

_PIECE = re.compile(r"\*|\{[^{}]*\}|[^*{}]+")
# Boxes are joined along them in this order: a list of offloads reads better than one of strategies.
_DIMENSIONS = ("offload", "staging", "path", "strategy", "rest")
_LONGEST_PATTERN = 100
_Values = tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """Raises UsageError where a brace is not closed."""
    pieces = _PIECE.findall(pattern)
    if not pattern or "".join(pieces) != pattern:
        raise UsageError(f"the pattern {pattern!r} is empty or has a brace without its other half")
    return re.compile("".join(map(_of_piece, pieces)))


def matches_case(pattern: str, case_id: str) -> bool:
    return compiled_pattern(pattern).fullmatch(case_id) is not None


def _of_piece(piece: str) -> str:
    if piece == "*":
        return ".*"
    if piece[0] == "{":
        return "(?:" + "|".join(re.escape(word) for word in piece[1:-1].split(",")) + ")"
    return re.escape(piece)


@dataclass(frozen=True)
class _Box:
    """Every combination of some values of some dimensions."""

    values: Mapping[str, _Values]

    def joined(self, other: _Box, dimension: str) -> _Box | None:
        """Both as one, where they differ in that dimension alone."""
        if any(self.values[name] != other.values[name] for name in _DIMENSIONS if name != dimension):
            return None
        if dimension == "rest" and "" in (*self.values["rest"], *other.values["rest"]):
            return None
        both = tuple(dict.fromkeys([*self.values[dimension], *other.values[dimension]]))
        return _Box({**self.values, dimension: both})

    def pattern(self, shown: Mapping[str, str]) -> str:
        """With some dimensions shown in another way than as a list."""
        words = {name: shown.get(name) or _listed(self.values[name]) for name in _DIMENSIONS}
        parts = [words["strategy"], words["offload"], words["staging"], words["rest"], words["path"]]
        return "/".join(part for part in parts if part)


def patterns_of(cases: Iterable[AnyCase], others: Collection[str]) -> list[str]:
    """Patterns that together match these cases and none of ``others``, ids of cases that they must not match."""
    boxes = [_box(case) for case in dict.fromkeys(cases)]
    for dimension in _DIMENSIONS:
        boxes = _joined_along(boxes, dimension)
    return [pattern for box in boxes for pattern in _patterns_of(box, others)]


def _box(case: AnyCase) -> _Box:
    first = leading_words(case)
    rest = "/".join(case.scenario.id.split("/")[len([word for word in first if word]) :])
    values = dict(zip(("strategy", "offload", "staging"), first, strict=True)) | {"rest": rest, "path": case.path}
    return _Box({name: (value,) for name, value in values.items()})


def _joined_along(boxes: list[_Box], dimension: str) -> list[_Box]:
    found: list[_Box] = []
    for box in boxes:
        for number, earlier in enumerate(found):
            if (both := earlier.joined(box, dimension)) is not None:
                found[number] = both
                break
        else:
            found.append(box)
    return found


def _patterns_of(box: _Box, others: Collection[str]) -> list[str]:
    """One, or several of at most 100 characters where its list of paths makes it longer."""
    whole = _shortened(box, others)
    paths = box.values["path"]
    if len(whole) <= _LONGEST_PATTERN or len(paths) == 1:
        return [whole]
    halves = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    return [text for half in halves for text in _patterns_of(_Box({**box.values, "path": half}), others)]


def _shortened(box: _Box, others: Collection[str]) -> str:
    """Its pattern, with a ``*`` for a list of offloads or stagings where that matches nothing more.

    Strategies and paths are named: of those that will be added nobody has said anything.
    """
    shown: dict[str, str] = {}
    for name in ("offload", "staging"):
        if len(box.values[name]) == 1:
            continue
        for shorter in (*_prefixes(box.values[name]), "*"):
            pattern = compiled_pattern(box.pattern(shown | {name: shorter}))
            if not any(pattern.fullmatch(other) for other in others):
                shown[name] = shorter
                break
    return box.pattern(shown)


def _prefixes(values: _Values) -> list[str]:
    """``policy*`` for values that all begin so."""
    prefix = common_prefix(values)
    return [f"{prefix}*"] if len(prefix) > 2 else []


def common_prefix(texts: Collection[str]) -> str:
    """What all of them begin with."""
    first, last = min(texts), max(texts)
    differing = (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differing, len(first))]


def _listed(values: _Values) -> str:
    return values[0] if len(values) == 1 else "{" + ",".join(values) + "}"
