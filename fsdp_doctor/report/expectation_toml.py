"""Writes the failures of a report as expectations in TOML, one table for each, with its cause and perhaps a link."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.matrix.cases import AnyCase, read_leading_words
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.expected_failures import compile_pattern, make_comparable
from fsdp_doctor.report.failure_groups import FailureGroup, group_failures
from fsdp_doctor.text import make_printable

_LONGEST_REASON = 120
_SHORTEST_REASON = 12
_LONGEST_LINE = 110
_LONGEST_PATTERN = 100
_ISSUE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")
_RANKS = re.compile(r"^ranks? [\d, ]+: ")
# Boxes are joined along the dimensions in this order: a list of offloads is easier to read than a list of strategies.
_DIMENSIONS = ("offload", "staging", "method", "strategy", "rest")


def render_expectation_toml(report: Report) -> str:
    """Renders the report's failures as a file for ``--expect``.

    A run with the same results meets every expectation in this file.
    """
    head = (
        f"# What torch {report.packages.get('torch', '')} fails in on {report.device}, {report.world_size} ranks.\n"
        "# A case that no pattern covers is expected to be ok. In a pattern * is any text, {a,b} one of several.\n"
        "# `until` is the first torch that is expected not to fail; an expectation that no case meets is stale.\n"
    )
    ids = [result.id for result in report.results]
    return head + "".join("".join(_render_table(failure, ids)) for failure in group_failures(report))


def _render_table(failure: FailureGroup, ids: Sequence[str]) -> Iterator[str]:
    covered = {result.id for result in failure.results}
    known = failure.known
    yield f"\n# {known.title} ({known.id})\n" if known is not None else "\n# not in the catalogue\n"
    yield "[[expect]]\n"
    patterns = make_patterns((result.case for result in failure.results), [name for name in ids if name not in covered])
    texts = [_render_string(pattern) for pattern in patterns]
    line = f"cases = [{', '.join(texts)}]\n"
    yield line if len(line) <= _LONGEST_LINE else "cases = [\n" + "".join(f"    {text},\n" for text in texts) + "]\n"
    issues = filter(None, map(_ISSUE.fullmatch, known.references if known is not None else ()))
    link = next((f"https://github.com/{issue['repository']}/issues/{issue['number']}" for issue in issues), "")
    # `until` is the first version of torch without the failure, if the catalogue knows it.
    limits = SpecifierSet(known.torch) if known is not None else ()
    until = next((limit.version for limit in limits if limit.operator == "<"), "")
    optional = {"reason": _find_shared_reason(failure.results), "link": link, "until": until}
    for name, text in {"verdict": failure.kind, **optional}.items():
        yield f"{name} = {_render_string(text)}\n" if text else ""


def _render_string(text: str) -> str:
    return json.dumps(make_printable(text), ensure_ascii=False)


def _find_shared_reason(results: Sequence[CaseResult]) -> str:
    """Returns the common beginning of the reasons of all cases, without ranks and cut at the end of a word.

    Returns an empty string if the common beginning is too short.
    """
    reasons = [_RANKS.sub("", " ".join(result.verdict.reason.split())) for result in results]
    shared = find_common_prefix([make_comparable(reason) for reason in reasons])
    first = reasons[0]
    # The length of the first reason's beginning that all reasons share.
    length = max((n for n in range(len(first) + 1) if shared.startswith(make_comparable(first[:n]))), default=0)
    words = first[:length]
    if len(words) > _LONGEST_REASON or length < len(first):
        words = words[: _LONGEST_REASON + 1].rpartition(" ")[0]
    words = words.strip(" :;,")
    return words if len(words) >= _SHORTEST_REASON else ""


@dataclass(frozen=True)
class _Box:
    """A set of cases: all combinations of some values in each dimension."""

    values: Mapping[str, tuple[str, ...]]

    def join(self, other: _Box, dimension: str) -> _Box | None:
        """Joins two boxes into one if they differ in no other dimension than ``dimension``; else returns None."""
        if any(self.values[name] != other.values[name] for name in _DIMENSIONS if name != dimension):
            return None
        if dimension == "rest" and "" in (*self.values["rest"], *other.values["rest"]):
            return None
        both = tuple(dict.fromkeys([*self.values[dimension], *other.values[dimension]]))
        return _Box({**self.values, dimension: both})

    def make_pattern(self, shortened: Mapping[str, str]) -> str:
        """Makes the pattern that matches the box.

        ``shortened`` gives the texts of some dimensions; any other dimension lists its values.
        """
        words = {name: shortened.get(name) or _list_in_braces(self.values[name]) for name in _DIMENSIONS}
        order = ("strategy", "offload", "staging", "rest", "method")
        return "/".join(words[name] for name in order if words[name])


def make_patterns(cases: Iterable[AnyCase], others: Collection[str]) -> list[str]:
    """Makes patterns that together match these cases and none of the ids in ``others``."""
    boxes = [_make_box(case) for case in dict.fromkeys(cases)]
    for dimension in _DIMENSIONS:
        boxes = _join_along(boxes, dimension)
    return [pattern for box in boxes for pattern in _make_patterns_of_box(box, others)]


def _make_box(case: AnyCase) -> _Box:
    first = read_leading_words(case)
    rest = "/".join(case.scenario.id.split("/")[len([word for word in first if word]) :])
    values = dict(zip(("strategy", "offload", "staging"), first, strict=True)) | {"rest": rest, "method": case.method}
    return _Box({name: (value,) for name, value in values.items()})


def _join_along(boxes: list[_Box], dimension: str) -> list[_Box]:
    joined: list[_Box] = []
    for box in boxes:
        for number, earlier in enumerate(joined):
            if (both := earlier.join(box, dimension)) is not None:
                joined[number] = both
                break
        else:
            joined.append(box)
    return joined


def _make_patterns_of_box(box: _Box, others: Collection[str]) -> list[str]:
    """Makes one pattern, or several of at most 100 characters each if the list of methods is long."""
    pattern = _find_shortest_pattern(box, others)
    methods = box.values["method"]
    if len(pattern) <= _LONGEST_PATTERN or len(methods) == 1:
        return [pattern]
    halves = methods[: len(methods) // 2], methods[len(methods) // 2 :]
    return [text for half in halves for text in _make_patterns_of_box(_Box({**box.values, "method": half}), others)]


def _find_shortest_pattern(box: _Box, others: Collection[str]) -> str:
    """Finds the shortest pattern of a box: ``*`` replaces a list of offloads or stagings if it matches no further case.

    Strategies and methods are always listed by name, because ``*`` would also match new names of later versions.
    """
    shortened: dict[str, str] = {}
    for name in ("offload", "staging"):
        values = box.values[name]
        prefix = find_common_prefix(values)
        for shorter in ([f"{prefix}*"] if len(prefix) > 2 else []) + ["*"] if len(values) > 1 else []:
            pattern = compile_pattern(box.make_pattern(shortened | {name: shorter}))
            if not any(pattern.fullmatch(other) for other in others):
                shortened[name] = shorter
                break
    return box.make_pattern(shortened)


def find_common_prefix(texts: Collection[str]) -> str:
    """Finds the common beginning of all texts."""
    first, last = min(texts), max(texts)
    differing = (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(differing, len(first))]


def _list_in_braces(values: tuple[str, ...]) -> str:
    return values[0] if len(values) == 1 else "{" + ",".join(values) + "}"
