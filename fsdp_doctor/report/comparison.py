"""Compares two reports, case by case.

Two runs of the same cases can differ in the environment (another device, another torch) or in the code that ran
(another model of the same shape, a changed framework). The results on which a user acts are compared: the verdict, the
exception and its message, the yielded entries, the next training step. Seconds, bytes and tracebacks depend on the
machine and are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import fold, strip_seconds

IGNORABLE = ("device",)

_ORDER = ("verdict", "only in one", "reason", "ranks", "yielded")
_DEVICE = re.compile(r"\b(?:cuda|xpu|hpu|npu|emulated)\b")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A case that differs between two reports. ``what``: "only in one", "verdict", "reason", "ranks" or "yielded"."""

    case_id: str
    what: str
    left: str
    right: str


def list_differences(left: Report, right: Report, ignore: frozenset[str] = frozenset()) -> list[Difference]:
    """Lists the first difference of each case that differs, sorted by ``what`` in the order of ``_ORDER``.

    If the reports are of two types of device, the type's name alone is no difference between yielded entries.

    ignore: "device" treats all devices as equal, whatever their names and indices, and ignores the place in which a
        rank hangs. The host of a GPU may run ahead to the next synchronization, and hang there.
    """
    differences = []
    types = {report.device.partition(":")[0] for report in (left, right)}
    is_renamed = len(types) > 1
    results = {result.id: result for result in left.results}
    others = {result.id: result for result in right.results}
    for case_id in results | others:
        a, b = results.get(case_id), others.get(case_id)
        if a is None or b is None:
            kinds = [result.verdict.kind if result is not None else "not there" for result in (a, b)]
            differences.append(Difference(case_id=case_id, what="only in one", left=kinds[0], right=kinds[1]))
            continue
        facts, other_facts = (_select_compared_facts(each, ignore, is_renamed=is_renamed) for each in (a, b))
        what = next((name for name in facts if name in other_facts and facts[name] != other_facts[name]), None)
        if what is not None:
            differences.append(Difference(case_id=case_id, what=what, left=facts[what], right=other_facts[what]))
    return sorted(differences, key=lambda difference: _ORDER.index(difference.what))


def select_common_cases(differing: list[Difference]) -> list[Difference]:
    """Returns the differences of cases that both reports have.

    A case of a new method or axis value is in one report only.
    """
    return [difference for difference in differing if difference.what != "only in one"]


def _select_compared_facts(result: CaseResult, ignore: frozenset[str], *, is_renamed: bool) -> dict[str, str]:
    """Selects the facts to compare, the most important first. Older reports do not have "yielded".

    is_renamed: whether the name of the accelerator's type is replaced in the description of yielded entries.
    """
    verdict = result.verdict
    reasons = [strip_seconds(text) for text in (verdict.reason, *verdict.also)]
    if "device" in ignore and verdict.kind == "hang":
        reasons[0] = reasons[0].split(":")[0]
    facts = {
        "verdict": verdict.kind,
        "reason": "; ".join(filter(None, reasons)),
        "ranks": ", ".join(str(rank) for rank in verdict.ranks),
    }
    if result.yielded:
        facts["yielded"] = "; ".join(
            ", ".join(f"{count} {sort}" for sort, count in sorted(of_rank.items())) or "nothing"
            for of_rank in result.yielded
        )
    if is_renamed and "yielded" in facts:
        facts["yielded"] = _DEVICE.sub("device", facts["yielded"])
    if "device" in ignore:
        for name in facts.keys() & {"reason", "yielded"}:
            facts[name] = _DEVICE.sub("device", fold(facts[name]))
    return facts


def summarize(differing: list[Difference], left: Report, right: Report) -> str:
    """Summarizes the differences in one line."""
    num_cases = len({result.id for report in (left, right) for result in report.results})
    kinds = Counter(difference.what for difference in differing)
    by_kind = ", ".join(f"{count} {what}" for what, count in kinds.items())
    same = f"{num_cases - len(differing)} of {num_cases} cases are the same on {left.device} and {right.device}"
    return f"{same}; different: {by_kind}" if differing else same
