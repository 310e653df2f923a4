"""fsdp-doctor report diff --common: a case that only one report has is listed and does not count."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from fsdp_doctor.cli import reports
from fsdp_doctor.report.comparison import differences, on_common_cases
from fsdp_doctor.report.journal import read_report

_COMMITTED = pathlib.Path(__file__).resolve().parents[2] / "examples" / "reports" / "emulated.json"


@pytest.fixture
def older(tmp_path: pathlib.Path) -> pathlib.Path:
    """The report as it was before its first path was there."""
    data = json.loads(_COMMITTED.read_text())
    data["results"] = data["results"][1:]
    file = tmp_path / "older.json"
    file.write_text(json.dumps(data))
    return file


def _exit_code(left: pathlib.Path, right: pathlib.Path, *, common: bool) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        reports.diff(left=left, right=right, common=common)
    return end.value.code


def test_a_case_that_only_one_has_is_listed_and_counts_only_without_common(
    older: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = read_report(_COMMITTED).results[0].id
    assert _exit_code(older, _COMMITTED, common=True) == 0
    assert capsys.readouterr().out == f"{first}\tonly in one\tnot there\tok\n"
    assert _exit_code(older, _COMMITTED, common=False) == 1


def test_a_difference_in_a_common_case_counts(older: pathlib.Path) -> None:
    report = read_report(older)
    changed = dataclasses.replace(report.results[0].verdict, kind="wrong")
    other = dataclasses.replace(
        report, results=(dataclasses.replace(report.results[0], verdict=changed), *report.results[1:])
    )
    found = differences(read_report(_COMMITTED), other)
    assert {difference.what for difference in found} == {"only in one", "verdict"}
    assert [difference.what for difference in on_common_cases(found)] == ["verdict"]
