"""Two reports, case by case: what is not the same in both.

Two runs of one matrix can differ in where they ran (another device, another torch) or in what they
ran (another model of the same shape, a changed framework). What must be the same is what a user
would act on: the verdict, the exception and its message, what was yielded, what training did next.
Seconds, bytes and tracebacks are left out: they are of the machine.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import fold, without_seconds

IGNORABLE = ("device",)

_DEVICE = re.compile(r"\b(?:cuda|xpu|hpu|npu|emulated)\b")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One case that is not the same in both. ``what``: "only in one", "verdict", "reason", "ranks" or "yielded"."""

    case_id: str
    what: str
    left: str
    right: str


def differences(left: Report, right: Report, ignore: frozenset[str] = frozenset()) -> list[Difference]:
    """Every difference, at most one for a case: the first of the fields in which it differs.

    ignore: "device" takes one device for another, by name and number, and leaves out where a hanging
    rank stood: a GPU's host runs on to the next synchronization, another device's may not.
    """
    results = {result.id: result for result in left.results}
    others = {result.id: result for result in right.results}
    found = []
    for case_id in results | others:
        a, b = results.get(case_id), others.get(case_id)
        if a is None or b is None:
            kinds = [result.verdict.kind if result is not None else "not there" for result in (a, b)]
            found.append(Difference(case_id=case_id, what="only in one", left=kinds[0], right=kinds[1]))
            continue
        mine, theirs = _facts(a, ignore), _facts(b, ignore)
        found += [
            Difference(case_id=case_id, what=what, left=mine[what], right=theirs[what])
            for what in mine
            if what in theirs and mine[what] != theirs[what]
        ][:1]
    return found


def on_common_cases(found: list[Difference]) -> list[Difference]:
    """The differences of cases that both reports have: what a new path or axis value adds is not among them."""
    return [difference for difference in found if difference.what != "only in one"]


def _facts(result: CaseResult, ignore: frozenset[str]) -> dict[str, str]:
    """What is compared, the most telling first. Older reports do not say what was yielded."""
    verdict = result.verdict
    reasons = [without_seconds(text) for text in (verdict.reason, *verdict.also)]
    if "device" in ignore and verdict.kind == "hang":
        reasons[0] = reasons[0].split(":")[0]
    facts = {
        "verdict": verdict.kind,
        "reason": _text("; ".join(filter(None, reasons)), ignore),
        "ranks": ", ".join(str(rank) for rank in verdict.ranks),
    }
    if result.yielded:
        facts["yielded"] = _text("; ".join(_sorts(of_rank) for of_rank in result.yielded), ignore)
    return facts


def _sorts(of_rank: dict[str, int]) -> str:
    return ", ".join(f"{count} {sort}" for sort, count in sorted(of_rank.items())) or "nothing"


def _text(text: str, ignore: frozenset[str]) -> str:
    return _DEVICE.sub("device", fold(text)) if "device" in ignore else text


def sentence(found: list[Difference], left: Report, right: Report) -> str:
    """One line that sums up."""
    num_cases = len({result.id for report in (left, right) for result in report.results})
    kinds = Counter(difference.what for difference in found)
    by_kind = ", ".join(f"{count} {what}" for what, count in kinds.items())
    same = f"{num_cases - len(found)} of {num_cases} cases are the same on {left.device} and {right.device}"
    return f"{same}; different: {by_kind}" if found else same
