"""Writes the versions of torch on which each entry of the catalogue was measured into the catalogue's files.

``python -m fsdp_doctor.report.versions.measured MERGED`` writes the versions as ``measured``, after an entry's
``evidence``.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterable

from packaging.version import Version

from fsdp_doctor.known.catalogue import DIRECTORY
from fsdp_doctor.report.versions.merged import MergedReport, read_merged
from fsdp_doctor.report.versions.merging import shorten_names, sort_versions, strip_build

_ID = re.compile(r'^id = "(?P<id>[^"]+)"$')
_MEASURED = re.compile(r"^measured = ")
_EVIDENCE = re.compile(r"^evidence = ")


def list_measured(merged: MergedReport) -> dict[str, tuple[str, ...]]:
    """Maps each entry to the versions with the failure on each device, for example ``emulated: 2.10 to 2.13, 2.15``.

    A range stands for successive releases that all have the failure.
    """
    names = shorten_names(sort_versions(strip_build(each.torch) for each in merged.environments))
    measured_on: dict[str, dict[str, set[str]]] = {}
    for case in merged.cases:
        for number, environment in enumerate(merged.environments):
            outcome = merged.find_outcome(case, number)
            if outcome is not None and outcome.known:
                by_device = measured_on.setdefault(outcome.known, {})
                by_device.setdefault(environment.device, set()).add(names[strip_build(environment.torch)])
    return {
        entry: tuple(f"{device}: {_format_ranges(versions)}" for device, versions in by_device.items())
        for entry, by_device in measured_on.items()
    }


def insert_measured(text: str, versions: dict[str, tuple[str, ...]]) -> str:
    """Returns the text of a catalogue file with its measured versions replaced by ``versions``."""
    lines, entry = [], ""
    for line in text.splitlines(keepends=True):
        if match := _ID.match(line):
            entry = match["id"]
        if _MEASURED.match(line):
            continue
        lines.append(line)
        if _EVIDENCE.match(line) and versions.get(entry):
            lines.append(f"measured = {json.dumps(versions[entry])}\n")
    return "".join(lines)


def _format_ranges(versions: Iterable[str]) -> str:
    runs: list[list[Version]] = []
    for version in map(Version, sort_versions(versions)):
        # Successive releases of torch differ by one in the second number.
        if runs and runs[-1][-1].major == version.major and version.minor - runs[-1][-1].minor <= 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def main(merged: pathlib.Path) -> None:
    versions = list_measured(read_merged(merged))
    for file in sorted(DIRECTORY.glob("*.toml")):
        file.write_text(insert_measured(file.read_text(encoding="utf-8"), versions), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
