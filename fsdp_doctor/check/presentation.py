"""Renders the result of ``check`` as text or JSON: the findings first, then the details behind them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence

from fsdp_doctor.check import CheckResult, list_cases
from fsdp_doctor.check.findings import ConfigFinding, FindingKind
from fsdp_doctor.check.use import VERSIONS_BETWEEN, Use
from fsdp_doctor.fixes.entry import find_fix_command
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.machine.terminal import wrap_all

_HEADINGS: dict[FindingKind, str] = {
    "conflict": "Conflicts",
    "known": "Known failures",
    "unknown": "Not understood",
    "note": "Notes",
}


def render_text(result: CheckResult, width: int = 120) -> str:
    """Renders the summary, the findings, each role's scenario with its reasons, and the command that runs the cases."""
    lines = [f"{result.framework}: {_render_summary(result)}"]
    if result.under_fsdp:
        ranks = (
            ("2 ranks, because no number is configured") if result.world_size is None else f"{result.world_size} ranks"
        )
        sources = f"{result.version} (its sources were read at {result.read_in}); {result.torch}; {ranks}"
        lines += [f"  read for {sources}"]
    for kind, findings in itertools.groupby(result.findings, key=lambda finding: finding.kind):
        lines += ["", _HEADINGS[kind], *(line for finding in findings for line in _render_finding(finding, result))]
    for role, uses in itertools.groupby(result.uses, key=lambda use: use.role):
        lines += ["", *_render_role(role, list(uses))]
    if tried := list_cases(result):
        words = ["fsdp-doctor probe", *(f"--case {case.id}" for case in tried)]
        lines += ["", "Try them", "  " + " \\\n    ".join(words)]
    return wrap_all(lines, width)


def render_json(result: CheckResult) -> str:
    """Renders a JSON object with ``framework``, ``version`` and ``torch`` (null for all versions), ``world_size``,
    ``read_in``, ``exit_code``, ``cases`` (ids), ``uses`` and ``findings``.

    A use has ``role``, ``versions``, ``scenario`` (an id or null), ``why_not``, ``reasons`` (``axis``, ``value``,
    ``because``) and ``extractions`` (``purpose``, ``case``). A finding has ``kind``, ``sentence``, ``settings``,
    ``entry`` (empty except for ``known``), ``cases``, ``holds_for`` and ``decides``. A finding with an entry also has
    ``verdict``, ``cause``, ``remedy``, ``remedy_run``, ``references``, ``conditions``, ``remedy_here`` (advice for this
    framework) and ``fix`` (a command, or empty).
    """
    data = {
        "framework": result.framework,
        "version": str(result.version.version) if result.version.version else None,
        "torch": str(result.torch.version) if result.torch.version else None,
        "world_size": result.world_size,
        "read_in": result.read_in,
        "exit_code": result.exit_code,
        "cases": [case.id for case in list_cases(result)],
        "uses": [
            {
                "role": use.role,
                "versions": use.versions,
                "scenario": use.scenario.id if use.scenario else None,
                "why_not": use.why_not,
                "reasons": [dataclasses.asdict(reason) for reason in use.reasons],
                "extractions": [{"purpose": point.purpose, "case": point.case.id} for point in use.extractions],
            }
            for use in result.uses
        ],
        "findings": [_convert_finding_to_dict(finding, result) for finding in result.findings],
    }
    return json.dumps(data, indent=1) + "\n"


def _render_summary(result: CheckResult) -> str:
    bad = sum(finding.bad for finding in result.findings)
    findings = f"{bad} finding{'s' * (bad != 1)}" if bad else ""
    if not result.determined:
        return f"some settings could not be read{f'; {findings}' if findings else ''}"
    if not result.under_fsdp:
        return f"not FSDP{f'; {findings}' if findings else ', nothing to check'}"
    count = len(list_cases(result))
    if not count and not bad:
        return "no case to try"
    return f"{count} case{'s' * (count != 1)}, {findings or 'nothing known to break, no conflict'}"


def _render_role(role: str, uses: Sequence[Use]) -> Iterator[str]:
    """Renders the scenario of one model; if the scenario depends on the version, as a numbered table."""
    if len(uses) == 1:
        yield f"{uses[0].title}: {_render_scenario(uses[0])}"
    else:
        scenarios = [(label, _render_scenario(use)) for use in uses for label in _list_labels(use)]
        widest = max(len("versions"), *(len(label) for label, _ in scenarios))
        yield role
        yield f"      {'versions':{widest}}  means"
        for number, (label, scenario) in enumerate(scenarios, 1):
            yield f"  ({number}) {label:{widest}}  {scenario}"
    for line, rows in _number_lines(uses, [[str(reason) for reason in use.reasons] for use in uses]):
        yield f"    {line}{rows}"
    points = [[f"{point.purpose}: {point.case.id}" for point in use.extractions] for use in uses]
    for line, rows in _number_lines(uses, points):
        yield f"  {line}{rows}"
    if any(use.scenario for use in uses) and not any(points):
        yield "  nothing is extracted from this model"


def _list_labels(use: Use) -> list[str]:
    return use.versions.split(VERSIONS_BETWEEN)


def _render_scenario(use: Use) -> str:
    return use.scenario.id if use.scenario else use.why_not


def _number_lines(uses: Sequence[Use], lines: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yields each distinct line once, with the numbers of its table rows; without numbers if all rows have the line."""
    counts = [len(_list_labels(use)) for use in uses]
    ends = list(itertools.accumulate(counts))
    for line in dict.fromkeys(line for of_use in lines for line in of_use):
        having = [at for at, of_use in enumerate(lines) if line in of_use]
        numbers = [number for at in having for number in range(ends[at] - counts[at] + 1, ends[at] + 1)]
        yield line, "" if len(having) == len(uses) else f" ({', '.join(map(str, numbers))})"


def _render_finding(finding: ConfigFinding, result: CheckResult) -> Iterator[str]:
    entry = catalogue.find_entry(finding.entry) if finding.entry else None
    yield f"  - {f'{entry.id}: ' if entry else ''}{finding.sentence}"
    if entry is not None and (fix := _find_fix(entry, result)):
        yield f"    fix: {fix}"
    if finding.bad:
        every = f"every version of {result.framework} that reads these settings"
        if result.version.version:
            every = f"{result.version.of} {result.version.version}"
        titles = [title if "," in title else f"{title}, {every}" for title in finding.holds_for] or [every]
        yield f"    holds for: {' | '.join(titles)}"
    if entry is None:
        for line in (*finding.settings, *finding.cases):
            yield f"    {line}"
        return
    for condition in _list_conditions(entry, result):
        yield f"    {condition}"
    yield f"    cause: {entry.cause}"
    if special := entry.advise(result.version.of):
        yield f"    in {result.framework}: {special}"
    yield f"    remedy: {entry.advice}"
    if entry.references:
        yield f"    see {', '.join(entry.references)}"
    for case in finding.cases:
        yield f"    {case}"


def _find_fix(entry: KnownFailure, result: CheckResult) -> str:
    own = {result.version.of: str(result.version.version)} if result.version.version else {}
    return find_fix_command(entry.short_code, framework=result.version.of, versions={**result.packages, **own})


def list_remedies(result: CheckResult) -> dict[str, str]:
    """Maps the short codes of failures in bad findings to the remedies for this framework, where there are any."""
    entries = [catalogue.find_entry(finding.entry) for finding in result.findings if finding.bad and finding.entry]
    advice = {entry.short_code: entry.advise(result.version.of) for entry in entries}
    return {code: text for code, text in advice.items() if text}


def _list_conditions(entry: KnownFailure, result: CheckResult) -> Iterator[str]:
    """Lists the versions and ranks that a failure needs, the installed versions, and the versions with which it was
    measured.
    """
    yield f"torch: {entry.torch or 'every tried version'}"
    for name, versions in entry.versions.items():
        yield f"only with {name} {versions} ({result.packages.get(name, 'version not known here')})"
    groups = [trigger.shard_group for trigger in entry.triggers]
    if groups and (most := max(group.max or 0 for group in groups)) and all(group.max for group in groups):
        yield f"only if a parameter is sharded over at most {most} rank{'s' * (most > 1)}"
    elif groups and (least := min(group.min for group in groups)) > 1:
        yield f"only if a parameter is sharded over {least} ranks or more"
    if entry.measured:
        yield f"measured with torch, by device: {'; '.join(entry.measured)}"


def _convert_finding_to_dict(finding: ConfigFinding, result: CheckResult) -> dict[str, object]:
    data: dict[str, object] = dataclasses.asdict(finding)
    if finding.entry:
        entry = catalogue.find_entry(finding.entry)
        data |= {name: getattr(entry, name) for name in ("verdict", "cause", "remedy", "remedy_run", "references")}
        data |= {
            "conditions": list(_list_conditions(entry, result)),
            "remedy_here": entry.advise(result.version.of),
            "fix": _find_fix(entry, result),
        }
    return data
