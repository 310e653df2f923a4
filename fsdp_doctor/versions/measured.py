"""Writes the versions of torch that showed each entry of the catalogue into the entries' files.

``python -m fsdp_doctor.versions.measured MERGED`` writes them as ``measured``, after each entry's ``evidence``.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from packaging.version import Version

from fsdp_doctor.known.catalogue import DIRECTORY
from fsdp_doctor.versions.merged import MergedReport, read_merged
from fsdp_doctor.versions.merging import in_order, public, short_names

_ID = re.compile(r'^id = "(?P<id>[^"]+)"$')
_WRITTEN = re.compile(r"^measured = ")
_BEFORE = re.compile(r"^evidence = ")


def measured(merged: MergedReport) -> dict[str, tuple[str, ...]]:
    """By entry, the versions that showed it on each device: ``emulated: 2.10 to 2.13, 2.15``.

    A range is of releases that follow one another, all of which showed it.
    """
    names = short_names(in_order(public(each.torch) for each in merged.environments))
    shown: dict[str, dict[str, set[str]]] = {}
    for case in merged.cases:
        for number, environment in enumerate(merged.environments):
            outcome = merged.outcome(case, number)
            if outcome is not None and outcome.known:
                by_device = shown.setdefault(outcome.known, {})
                by_device.setdefault(environment.device, set()).add(names[public(environment.torch)])
    return {
        entry: tuple(f"{device}: {_ranges(versions)}" for device, versions in by_device.items())
        for entry, by_device in shown.items()
    }


def with_measured(text: str, versions: dict[str, tuple[str, ...]]) -> str:
    """The text of a file of entries with these versions in place of earlier ones."""
    return "".join(_entry_lines(text, versions))


def _entry_lines(text: str, versions: dict[str, tuple[str, ...]]) -> Iterator[str]:
    entry = ""
    for line in text.splitlines(keepends=True):
        if match := _ID.match(line):
            entry = match["id"]
        if _WRITTEN.match(line):
            continue
        yield line
        if _BEFORE.match(line) and versions.get(entry):
            yield f"measured = {json.dumps(versions[entry])}\n"


def _ranges(versions: Iterable[str]) -> str:
    runs: list[list[str]] = []
    for version in in_order(versions):
        if runs and _follows(runs[-1][-1], version):
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _follows(earlier: str, later: str) -> bool:
    """torch counts its releases by the second number."""
    one, other = Version(earlier), Version(later)
    return one.major == other.major and other.minor - one.minor <= 1


def main(merged: pathlib.Path) -> None:
    versions = measured(read_merged(merged))
    for file in sorted(DIRECTORY.glob("*.toml")):
        file.write_text(with_measured(file.read_text(encoding="utf-8"), versions), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
