"""What a script is to reproduce: the verdict of a report, or what the catalogue knows of the case."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import catalogue, signatures
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import VerdictKind

_DEVICE = re.compile(r"\b(?:cuda|npu|xpu|hpu|emulated)\b(?::\d+)?")
# What torch lists at the end of a message: other models and ranks, other lists.
_LIST = re.compile(r": \[\(.*$", re.DOTALL)
_NAMED = re.compile(r"^[^:;]+: (?P<names>[\w.]+(?:, [\w.]+)*)(?: and (?P<more>\d+) more)?$")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CHANGED = "the extraction changed"
_HOLDS = re.compile(r"the optimizer holds \d+ of the model's \d+ parameters")
# What a script does not compare after a load.
_NOT_COMPARED = re.compile(
    r"the next training step ends otherwise than that of a run which had this state from the start|requires_grad is"
)
_REFUSED = re.compile(r"^refused on every rank: (?P<exception>.*)$", re.DOTALL)
_ANY_RANK = re.compile(r"rank_\d+")
_CATALOGUE = "its catalogue"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What to see.

    kind: the verdict. message: a regular expression over the exception's ``Type: message``; empty for none.
    title: in words. references: of the catalogue's entry. source: where it is known from. versions: by package.
    """

    kind: VerdictKind
    message: str = ""
    title: str = ""
    references: tuple[str, ...] = ()
    source: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def expected(case: Case) -> Expectation:
    """What the catalogue knows of the case, on the torch that is installed here if there is one.

    Raises UsageError for what a script cannot see.
    """
    versions = _installed()
    entry = next(iter(catalogue.of_case(case, RunContext(torch=versions.get("torch", "")))), None)
    if entry is None:
        return Expectation(kind="ok", title="Nothing is known to break here", source=_CATALOGUE, versions=versions)
    _check_that_a_script_can_see(case, entry.verdict)
    return Expectation(
        kind=entry.verdict,
        # What also shows without an exception is known by its verdict alone.
        message=entry.signatures[0].pattern if entry.signatures and not entry.symptoms else "",
        title=entry.title,
        references=entry.references,
        source=_CATALOGUE,
        versions=versions,
    )


def _check_that_a_script_can_see(case: Case, kind: VerdictKind) -> None:
    """Raises UsageError for extracted values of the optimizer's state: a script has nothing to compare them with."""
    if kind == "wrong" and find_path(case.path, case.scenario.version).contract.form == "optimizer":
        raise UsageError(f"case {case.id!r}: that the optimizer's state has other values, the doctor alone can see")


@functools.cache
def _installed() -> Mapping[str, str]:
    found = {}
    for package in ("torch", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def reported(case: Case, report: Report) -> Expectation:
    """What a report says of the case. Raises UsageError if it has not run it."""
    result = next((result for result in report.results if result.id == case.id), None)
    if result is None:
        raise UsageError(f"the report has no case {case.id!r}")
    if not result.verdict.bad and result.verdict.kind != "ok":
        raise UsageError(f"case {case.id!r} is {result.verdict.kind} in the report: {result.verdict.reason}")
    if _CHANGED in result.verdict.reason:
        raise UsageError(f"case {case.id!r}: that {_CHANGED} the training state, the doctor alone can see")
    if found := _NOT_COMPARED.search(result.verdict.reason):
        raise UsageError(f"case {case.id!r}: that {found[0]}, the doctor alone can see")
    if report.world_size != 2 and case.scenario.sharding != "hsdp":
        raise UsageError(f"the report is of {report.world_size} ranks; a script starts 2, or 4 where it replicates")
    _check_that_a_script_can_see(case, result.verdict.kind)
    known = next((entry for entry in catalogue.known_failures() if entry.id == result.known), None)
    return Expectation(
        kind=result.verdict.kind,
        message=_message(result) or _refusal(result) or _entries(result),
        title=known.title if known is not None else "",
        references=known.references if known is not None else (),
        source=f"a run on {report.world_size} ranks of {report.device}",
        versions=report.environment.get("packages") or {},
    )


def _message(result: CaseResult) -> str:
    """The exception of the first rank that the verdict names, as an expression that any device matches."""
    if result.verdict.kind not in ("crash", "poisoned", "oom"):
        return ""
    for report in sorted(result.ranks, key=lambda report: report.rank not in result.verdict.ranks):
        if report.record is not None and (failure := report.record.failure) is not None:
            if failure.type == "FloatingPointError":
                # The doctor's own, of a loss that is nan.
                return ""
            return _pattern(f"{failure.type}: {failure.message}")
    return ""


def _pattern(text: str) -> str:
    """An expression that matches the text of an exception whatever the device and the addresses."""
    pieces = _DEVICE.split(_LIST.sub("", signatures.one_line(text)))
    escaped = (re.escape(piece).replace(r"\ ", " ") for piece in pieces)
    return _ADDRESS.sub("0x[0-9a-f]+", signatures.DEVICE.join(escaped))


def _refusal(result: CaseResult) -> str:
    """The exception with which every rank refused a checkpoint, if they did: any rank's file in any directory."""
    if result.verdict.bad or (match := _REFUSED.search(result.verdict.reason)) is None:
        return ""
    return _ANY_RANK.sub(r"rank_\\d+", _pattern(match["exception"]).replace("the checkpoint/", ".*/"))


def _entries(result: CaseResult) -> str:
    """How many entries are bad and which come first, where the reason is one sentence over all of them."""
    if result.verdict.kind == "poisoned" and (found := _HOLDS.search(result.verdict.reason)):
        return re.escape(found[0]).replace(r"\ ", " ")
    match = _NAMED.search(result.verdict.reason)
    if result.verdict.kind not in ("wrong", "misplaced", "incomplete") or match is None:
        return ""
    names = match["names"].split(", ")
    count = len(names) + int(match["more"] or 0)
    return re.escape(f"{count} entries: {', '.join(names)}").replace(r"\ ", " ")
