"""What ``check`` found, as text and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterator

from fsdp_doctor.check import CheckResult, cases
from fsdp_doctor.check.config_findings import ConfigFinding, ConfigFindingKind
from fsdp_doctor.check.use import Use
from fsdp_doctor.known import catalogue

_WIDTH = 120
_HEADINGS: dict[ConfigFindingKind, str] = {
    "conflict": "Conflicts",
    "known": "Known failures",
    "unknown": "Not understood",
    "note": "Notes",
}


def as_text(result: CheckResult) -> str:
    """Role by role what is run and why, then the findings, then the command that tries the cases."""
    lines = [f"{result.framework}: {_summary(result)}"]
    for use in result.uses:
        lines += ["", *_of_use(use)]
    for kind, found in itertools.groupby(result.findings, key=lambda finding: finding.kind):
        lines += ["", _HEADINGS[kind], *(line for finding in found for line in _of_finding(finding))]
    if tried := cases(result):
        lines += ["", "Try them", *_command([case.id for case in tried])]
    return "\n".join(lines) + "\n"


def as_json(result: CheckResult) -> str:
    """An object of ``framework``, ``exit_code``, ``cases`` (ids), ``uses`` and ``findings``.

    A use has ``role``, ``versions``, ``scenario`` (an id or null), ``why_not``, ``reasons`` (``axis``, ``value``,
    ``because``) and ``extractions`` (``purpose``, ``case``); a finding ``kind``, ``sentence``, ``settings``, ``entry``
    (empty but for ``known``), ``cases``, and of an entry ``verdict``, ``cause``, ``remedy``, ``references``.
    """
    data = {
        "framework": result.framework,
        "exit_code": result.exit_code,
        "cases": [case.id for case in cases(result)],
        "uses": [_use_as_data(use) for use in result.uses],
        "findings": [_finding_as_data(finding) for finding in result.findings],
    }
    return json.dumps(data, indent=1) + "\n"


def _summary(result: CheckResult) -> str:
    count = len(cases(result))
    bad = sum(finding.bad for finding in result.findings)
    if not count and not bad:
        return "no case to try"
    named = f"{count} case{'s' * (count != 1)}"
    return f"{named}, {bad} finding{'s' * (bad != 1)}" if bad else f"{named}, nothing known to break, no conflict"


def _of_use(use: Use) -> Iterator[str]:
    if use.scenario is None:
        yield from _wrapped(f"{use.title}: {use.why_not}", 0)
        return
    yield from _wrapped(f"{use.title}: {use.scenario.id}", 0)
    for reason in use.reasons:
        yield from _wrapped(str(reason), 4)
    for extraction in use.extractions:
        yield from _wrapped(f"{extraction.purpose}: {extraction.case.id}", 2)
    if not use.extractions:
        yield "  nothing is extracted from it"


def _of_finding(finding: ConfigFinding) -> Iterator[str]:
    if finding.entry:
        yield from _of_entry(finding)
        return
    yield from _wrapped(f"- {finding.sentence}", 2)
    for setting in finding.settings:
        yield from _wrapped(setting, 4)
    for case in finding.cases:
        yield f"    {case}"


def _of_entry(finding: ConfigFinding) -> Iterator[str]:
    entry = catalogue.known_failure(finding.entry)
    yield from _wrapped(f"- {entry.id}: {finding.sentence}", 2)
    yield from _wrapped(f"cause: {entry.cause}", 4)
    yield from _wrapped(f"remedy: {entry.remedy}", 4)
    if entry.torch:
        yield f"    torch {entry.torch}"
    if entry.references:
        yield from _wrapped(f"see {', '.join(entry.references)}", 4)
    for case in finding.cases:
        yield f"    {case}"


def _command(ids: list[str]) -> list[str]:
    words = ["fsdp-doctor probe", *(f"--case {case}" for case in ids)]
    return [
        f"{'  ' if at == 0 else '    '}{word}{'' if at == len(words) - 1 else ' ' + chr(92)}"
        for at, word in enumerate(words)
    ]


def _wrapped(text: str, indent: int) -> list[str]:
    lead = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=f"{lead}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _use_as_data(use: Use) -> dict[str, object]:
    return {
        "role": use.role,
        "versions": use.versions,
        "scenario": use.scenario.id if use.scenario else None,
        "why_not": use.why_not,
        "reasons": [dataclasses.asdict(reason) for reason in use.reasons],
        "extractions": [{"purpose": one.purpose, "case": one.case.id} for one in use.extractions],
    }


def _finding_as_data(finding: ConfigFinding) -> dict[str, object]:
    data: dict[str, object] = dataclasses.asdict(finding)
    if finding.entry:
        entry = catalogue.known_failure(finding.entry)
        data |= {name: getattr(entry, name) for name in ("verdict", "cause", "remedy", "references")}
    return data
