"""From what a report says of a case to the regular expression that its script's own words must match."""

from __future__ import annotations

import re

from fsdp_doctor.known import signatures
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.report.document import CaseResult

_DEVICE = re.compile(r"\b(?:cuda|npu|xpu|hpu|emulated)\b(?::\d+)?")
# What torch lists at the end of a message: other models and ranks, other lists.
_LIST = re.compile(r": \[\(.*$", re.DOTALL)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# A CheckpointException's message has the traceback of another exception, and its summary has that exception alone.
_CARRIES, _CARRIER = "Traceback (most recent call last):", "CheckpointException: "
_DIRECTORY, _ANY_RANK = re.compile(r"the checkpoint/(?:\w+/)*"), re.compile(r"rank_\d+")
_HOLDS = re.compile(r"the optimizer holds \d+ of the model's \d+ parameters")
_NAMED = re.compile(r"^[^:;]+: (?P<names>[\w.]+(?:, [\w.]+)*)(?: and (?P<more>\d+) more)?$")


def pattern_of(result: CaseResult) -> str:
    """Empty where only the kind of the verdict says what to see."""
    if result.verdict.kind == "refused":
        return _refusal(result)
    if result.verdict.kind in ("crash", "poisoned", "oom"):
        return _message(result) or _held(result)
    return _entries(result)


def _message(result: CaseResult) -> str:
    """The exception of the first rank that the verdict names."""
    for report in sorted(result.ranks, key=lambda report: report.rank not in result.verdict.ranks):
        if report.record is not None and (failure := report.record.failure) is not None:
            if failure.type == "FloatingPointError":
                # The doctor's own, of a loss that is nan.
                return ""
            return _pattern(failure.summary if _CARRIES in failure.message else f"{failure.type}: {failure.message}")
    return ""


def _refusal(result: CaseResult) -> str:
    """The exception with which every rank refused a checkpoint: any rank's file in any directory."""
    assert isinstance(result.case, Case)
    if find_path(result.case.path, result.case.scenario.version).contract.ranks == "rank0":
        # What is given to rank 0 alone, the others refuse in other words.
        return _escaped(result.verdict.reason.partition(" ")[0])
    return _ANY_RANK.sub(r"rank_\\d+", _DIRECTORY.sub(".*/", _pattern(result.verdict.reason)))


def _pattern(text: str) -> str:
    """The text of an exception, whatever the device and the addresses."""
    pieces = (_escaped(piece) for piece in _DEVICE.split(_LIST.sub("", signatures.one_line(text))))
    pattern = _ADDRESS.sub("0x[0-9a-f]+", signatures.DEVICE.join(pieces))
    return pattern.replace(_CARRIER, f"{_CARRIER}.*", 1) if pattern.startswith(_CARRIER) else pattern


def _held(result: CaseResult) -> str:
    match = _HOLDS.search(result.verdict.reason)
    return _escaped(match[0]) if match else ""


def _entries(result: CaseResult) -> str:
    """How many entries are bad and which come first, where the reason is one sentence over all of them."""
    assert isinstance(result.case, Case)
    scenario, match = result.case.scenario, _NAMED.search(result.verdict.reason)
    contract = find_path(result.case.path, scenario.version).contract
    if result.verdict.kind not in ("wrong", "misplaced", "incomplete") or match is None:
        return ""
    if contract.direction == "in" and scenario.version == 1:
        # A script compares flat parameters, the report what is in them.
        return ""
    names = match["names"].split(", ")
    # A report speaks of weights and of moments apart.
    count = f"{len(names) + int(match['more'] or 0)} " if contract.loads != "both" else ""
    return _escaped(f"{count}entries: {', '.join(names)}")


def _escaped(text: str) -> str:
    return re.escape(text).replace(r"\ ", " ")
