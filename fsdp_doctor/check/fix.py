"""Finds one setting to change in a configuration file so that no known problem remains.

Each setting that a finding names is changed in turn, and the changed file is checked. If no single change removes every
problem, the result is a change that the remedy of a known failure names. Everything else in the file stays unchanged.
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fsdp_doctor.check import CheckResult
from fsdp_doctor.check.findings import ConfigFinding
from fsdp_doctor.check.settings import Setting
from fsdp_doctor.errors import EXIT_OK, UsageError
from fsdp_doctor.known.catalogue import find_entry

_TRUE = re.compile(r"\b(?:true|yes|on)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Fix:
    """Change of one setting in a file. ``after`` is the new value, or empty if the setting is removed.

    ``text`` is the whole changed file. ``left`` are the bad findings in the changed file.
    """

    file: pathlib.Path
    before: Setting
    after: str
    text: str
    left: tuple[ConfigFinding, ...] = ()

    def __str__(self) -> str:
        return f"{self.before}: {f'set it to {self.after}' if self.after else 'remove it'}"


def find_fix(arguments: Sequence[str], check: Callable[[Sequence[str]], CheckResult]) -> Fix | None:
    """Finds the first change of one setting after which ``check`` succeeds, or else a change that removes one failure.

    A change sets a true setting to false, or removes a setting. Settings that bad findings name are tried first, then
    other settings that determine how the models are trained, except the type of model. If ``check`` succeeds after none
    of these changes, returns the first change that the remedy of a failure names and that removes the failure. Returns
    None if there is no such change either.

    ``arguments`` are files and overrides, as for ``check``. Raises UsageError like ``check``.
    """
    result = check(arguments)
    remedies = _list_switches(result)
    partial: Fix | None = None
    for row, after in _list_candidates(result):
        file = pathlib.Path(row.file)
        if str(file) not in arguments or (text := _edit_line(file, row, after)) is None:
            continue
        with tempfile.TemporaryDirectory() as directory:
            changed = pathlib.Path(directory) / file.name
            changed.write_text(text, encoding="utf-8")
            changed_arguments = [str(changed) if argument == str(file) else argument for argument in arguments]
            try:
                changed_result = check(changed_arguments)
            except UsageError:
                continue
        if changed_result.exit_code == EXIT_OK:
            return Fix(file, row, after, text)
        left = tuple(finding for finding in changed_result.findings if finding.bad)
        cured = {*remedies} - {finding.entry for finding in left}
        if partial is None and after and left and any((row.name, after) in remedies[entry] for entry in cured):
            partial = Fix(file, row, after, text, left)
    return partial


def _list_switches(result: CheckResult) -> dict[str, set[tuple[str, str]]]:
    """Maps the entries of bad findings to the settings (names and values) of their remedies for this framework."""
    entries = {finding.entry for finding in result.findings if finding.bad and finding.entry}
    switches = {entry: find_entry(entry).remedy_settings.get(result.version.of, {}) for entry in entries}
    return {entry: {(name, str(on).lower()) for name, on in named.items()} for entry, named in switches.items()}


def _list_candidates(result: CheckResult) -> Iterator[tuple[Setting, str]]:
    bad = "\n".join(row for finding in result.findings if finding.bad for row in finding.settings)
    reasons = "\n".join(str(reason) for use in result.uses for reason in use.reasons if reason.axis != "model")
    for text in (bad, reasons):
        named = [row for row in result.settings if str(row) in text]
        yield from ((row, "false") for row in named if row.value is True)
        yield from ((row, "") for row in named)


def _edit_line(file: pathlib.Path, row: Setting, after: str) -> str | None:
    """Returns the file's text with the setting's line changed or removed; None if the line cannot be edited.

    A line that cannot be edited contains a variable instead of the value, or also other settings.
    """
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    number = row.where.removeprefix(row.file).removeprefix(":")
    if not number.isdecimal() or not 0 < int(number) <= len(lines) or row.name not in lines[int(number) - 1]:
        return None
    at = int(number) - 1
    if not after:
        is_alone = lines[at].lstrip(" \t'\"+").startswith((row.key, row.name)) and not set(lines[at]) & set("{},")
        return "".join([*lines[:at], *lines[at + 1 :]]) if is_alone else None
    before, name, value = lines[at].partition(row.name)
    changed, count = _TRUE.subn(lambda match: after.capitalize() if match[0][0].isupper() else after, value, count=1)
    return "".join([*lines[:at], before + name + changed, *lines[at + 1 :]]) if count else None
