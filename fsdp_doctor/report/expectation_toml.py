"""Writes what a report shows as expectations: a table for each failure, with its cause and a link if there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet

from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.expectation_patterns import common_prefix, patterns_of
from fsdp_doctor.report.expected_failures import comparable
from fsdp_doctor.report.failure_groups import FailureGroup, distinct_failures
from fsdp_doctor.report.layout import printable

_LONGEST_REASON = 120
_SHORTEST_REASON = 12
_ISSUE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")
_RANKS = re.compile(r"^ranks? [\d, ]+: ")
_EVERY_WIDTH = 110


def expectation_toml(report: Report) -> str:
    """``report`` as a file for ``--expect``: a run with the same results meets every expectation, and none else."""
    head = (
        f"# What torch {report.environment.get('packages', {}).get('torch', '')} fails in on {report.device}, "
        f"{report.world_size} ranks.\n"
        "# A case that no pattern covers is expected to be ok. In a pattern * is any text, {a,b} one of several.\n"
        "# `until` is the first torch that is expected not to fail; an expectation that no case meets is stale.\n"
    )
    ids = [result.id for result in report.results]
    return head + "".join(map("".join, (_table(failure, ids) for failure in distinct_failures(report))))


def _table(failure: FailureGroup, ids: Sequence[str]) -> Iterator[str]:
    own = {result.id for result in failure.results}
    known = failure.known
    yield f"\n# {known.title} ({known.id})\n" if known is not None else "\n# not in the catalogue\n"
    yield "[[expect]]\n"
    patterns = patterns_of((result.case for result in failure.results), [name for name in ids if name not in own])
    yield from _array("cases", patterns)
    yield f"verdict = {_string(failure.kind)}\n"
    if reason := _shared_reason(failure.results):
        yield f"reason = {_string(reason)}\n"
    if known is not None and (link := _link(known)):
        yield f"link = {_string(link)}\n"
    if known is not None and (until := _until(known)):
        yield f"until = {_string(until)}\n"


def _array(name: str, texts: Sequence[str]) -> Iterator[str]:
    line = f"{name} = [{', '.join(map(_string, texts))}]\n"
    if len(line) <= _EVERY_WIDTH:
        yield line
        return
    yield f"{name} = [\n"
    yield from (f"    {_string(text)},\n" for text in texts)
    yield "]\n"


def _string(text: str) -> str:
    return json.dumps(printable(text), ensure_ascii=False)


def _shared_reason(results: Sequence[CaseResult]) -> str:
    """What the reasons of all these cases begin with, without the ranks and to the end of a word; perhaps nothing."""
    reasons = [_RANKS.sub("", " ".join(result.verdict.reason.split())) for result in results]
    shared = common_prefix([comparable(reason) for reason in reasons])
    first = reasons[0]
    # The first case's own words, as far as they are the same in all.
    length = max((n for n in range(len(first) + 1) if shared.startswith(comparable(first[:n]))), default=0)
    words = first[:length]
    if len(words) > _LONGEST_REASON or length < len(first):
        words = words[: _LONGEST_REASON + 1].rpartition(" ")[0]
    words = words.strip(" :;,")
    return words if len(words) >= _SHORTEST_REASON else ""


def _link(known: KnownFailure) -> str:
    found = next((match for text in known.references if (match := _ISSUE.fullmatch(text))), None)
    return f"https://github.com/{found['repository']}/issues/{found['number']}" if found is not None else ""


def _until(known: KnownFailure) -> str:
    """The first version that does not show it, where the catalogue knows it."""
    return next((one.version for one in SpecifierSet(known.torch) if one.operator == "<"), "")
