"""What ``check`` found, as text and as JSON: the findings first, then what they rest on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fsdp_doctor.check import CheckResult, cases
from fsdp_doctor.check.findings import ConfigFinding, FindingKind
from fsdp_doctor.check.use import VERSIONS_BETWEEN, Use
from fsdp_doctor.known import catalogue

_WIDTH = 120
_HEADINGS: dict[FindingKind, str] = {
    "conflict": "Conflicts",
    "known": "Known failures",
    "unknown": "Not understood",
    "note": "Notes",
}


def as_text(result: CheckResult) -> str:
    """The summary and the findings, then role by role what is run and why, then the command that tries the cases."""
    lines = [f"{result.framework}: {_summary(result)}"]
    if result.under_fsdp:
        lines += _wrapped(f"read for {_read_for(result)}", 2)
    for kind, found in itertools.groupby(result.findings, key=lambda finding: finding.kind):
        lines += ["", _HEADINGS[kind], *(line for finding in found for line in _of_finding(finding, result))]
    for role, uses in itertools.groupby(result.uses, key=lambda use: use.role):
        lines += ["", *_of_role(role, list(uses))]
    if tried := cases(result):
        lines += ["", "Try them", *_command([case.id for case in tried])]
    return "\n".join(lines) + "\n"


def as_json(result: CheckResult) -> str:
    """An object of ``framework``, ``version`` and ``torch`` (null for every one), ``world_size``, ``read_in``,
    ``exit_code``, ``cases`` (ids), ``uses`` and ``findings``.

    A use has ``role``, ``versions``, ``scenario`` (an id or null), ``why_not``, ``reasons`` (``axis``, ``value``,
    ``because``) and ``extractions`` (``purpose``, ``case``); a finding ``kind``, ``sentence``, ``settings``, ``entry``
    (empty but for ``known``), ``cases``, ``holds_for``, and of an entry ``verdict``, ``cause``, ``remedy``,
    ``references``.
    """
    data = {
        "framework": result.framework,
        "version": str(result.version.version) if result.version.version else None,
        "torch": str(result.torch.version) if result.torch.version else None,
        "world_size": result.world_size,
        "read_in": result.read_in,
        "exit_code": result.exit_code,
        "cases": [case.id for case in cases(result)],
        "uses": [_use_as_data(use) for use in result.uses],
        "findings": [_finding_as_data(finding) for finding in result.findings],
    }
    return json.dumps(data, indent=1) + "\n"


def _summary(result: CheckResult) -> str:
    bad = sum(finding.bad for finding in result.findings)
    found = f"{bad} finding{'s' * (bad != 1)}" if bad else ""
    if not result.determined:
        return f"not all of it could be read{f'; {found}' if found else ''}"
    if not result.under_fsdp:
        return f"not FSDP{f'; {found}' if found else ', nothing to check'}"
    count = len(cases(result))
    if not count and not bad:
        return "no case to try"
    named = f"{count} case{'s' * (count != 1)}"
    return f"{named}, {found}" if bad else f"{named}, nothing known to break, no conflict"


def _read_for(result: CheckResult) -> str:
    ranks = "2 ranks, for none are configured" if result.world_size is None else f"{result.world_size} ranks"
    return f"{result.version} (its sources were read at {result.read_in}); {result.torch}; {ranks}"


def _of_role(role: str, uses: Sequence[Use]) -> Iterator[str]:
    """What one model amounts to: as a table of numbered rows where it depends on the version."""
    if len(uses) == 1:
        yield from _wrapped(f"{uses[0].title}: {_amounts_to(uses[0])}", 0)
    else:
        yield from (role, *_table(uses))
    for line, rows in _having(uses, [[str(reason) for reason in use.reasons] for use in uses]):
        yield from _wrapped(f"{line}{rows}", 4)
    points = [[f"{one.purpose}: {one.case.id}" for one in use.extractions] for use in uses]
    for line, rows in _having(uses, points):
        yield from _wrapped(f"{line}{rows}", 2)
    if any(use.scenario for use in uses) and not any(points):
        yield "  nothing is extracted from it"


def _table(uses: Sequence[Use]) -> Iterator[str]:
    rows = [(label, _amounts_to(use)) for use in uses for label in _labels(use)]
    widest = max(len("versions"), *(len(label) for label, _ in rows))
    yield f"      {'versions':{widest}}  amounts to"
    yield from (f"  ({number}) {label:{widest}}  {what}" for number, (label, what) in enumerate(rows, 1))


def _labels(use: Use) -> list[str]:
    return use.versions.split(VERSIONS_BETWEEN)


def _amounts_to(use: Use) -> str:
    return use.scenario.id if use.scenario else use.why_not


def _having(uses: Sequence[Use], lines: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Each line once, and where not all have it, the numbers of the rows that do."""
    ends = list(itertools.accumulate(len(_labels(use)) for use in uses))
    for line in dict.fromkeys(line for of_use in lines for line in of_use):
        having = [at for at, of_use in enumerate(lines) if line in of_use]
        numbers = [number for at in having for number in range(ends[at] - len(_labels(uses[at])) + 1, ends[at] + 1)]
        yield line, "" if len(having) == len(uses) else f" ({', '.join(map(str, numbers))})"


def _of_finding(finding: ConfigFinding, result: CheckResult) -> Iterator[str]:
    if finding.entry:
        yield from _of_entry(finding, result)
        return
    yield from _wrapped(f"- {finding.sentence}", 2)
    yield from _holds_for(finding, result)
    for line in (*finding.settings, *finding.cases):
        yield from _wrapped(line, 4)


def _of_entry(finding: ConfigFinding, result: CheckResult) -> Iterator[str]:
    entry = catalogue.known_failure(finding.entry)
    yield from _wrapped(f"- {entry.id}: {finding.sentence}", 2)
    yield from _holds_for(finding, result)
    yield from _wrapped(f"torch: {entry.torch or 'every version'}", 4)
    yield from _wrapped(f"cause: {entry.cause}", 4)
    yield from _wrapped(f"remedy: {entry.remedy}", 4)
    if entry.references:
        yield from _wrapped(f"see {', '.join(entry.references)}", 4)
    for case in finding.cases:
        yield f"    {case}"


def _holds_for(finding: ConfigFinding, result: CheckResult) -> list[str]:
    if not finding.bad:
        return []
    every = f"every version of {result.framework} that reads these settings"
    titles = finding.holds_for or (every,)
    return _wrapped(
        f"holds for: {' | '.join(title if ',' in title else _with_every(title, every) for title in titles)}", 4
    )


def _with_every(title: str, every: str) -> str:
    return title if title == every else f"{title}, {every}"


def _command(ids: Iterable[str]) -> list[str]:
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
