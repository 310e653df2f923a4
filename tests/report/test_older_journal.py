"""A journal belongs to one run: what an older run left beside the file is never taken for this run's results."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report import journal
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import Journal, journal_of, read_report
from fsdp_doctor.report.writer import ReportWriter
from fsdp_doctor.verdict.classification import Verdict

_CASES = tuple(select(Selection(paths=("dcp",))))
_OLDER = tuple(CaseResult(case=case, verdict=Verdict(kind="crash", reason="of the older run")) for case in _CASES[:3])
_EMPTY = Report(
    version="0",
    created="2026-01-01T00:00:00+00:00",
    command="fsdp-doctor probe",
    device="cpu",
    world_size=2,
    num_selected=len(_CASES),
    environment={},
)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A partial report whose run was killed: its results stand in its journal."""
    path = tmp_path / "report.json"
    older = Journal(path, _EMPTY)
    for result in _OLDER:
        older.add(result)
    left = {name: name.read_bytes() for name in (path, journal_of(path))}
    older.close(_EMPTY)
    for name, content in left.items():
        name.write_bytes(content)
    assert read_report(path).results == _OLDER
    return path


def _writer(file: pathlib.Path, cases: tuple[Case, ...] = _CASES) -> ReportWriter:
    return ReportWriter(_EMPTY, cases, {"json": file})


def test_a_run_that_stops_in_its_start_up_has_no_results(file: pathlib.Path) -> None:
    report, lost = _writer(file).finish(ended="stopped by SIGINT")
    assert lost is None
    assert read_report(file) == report
    assert report.results == ()
    assert not journal_of(file).exists()


def test_a_run_that_is_killed_as_it_opens_its_report_has_no_results(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = journal.replace_file

    def replace_and_die(path: pathlib.Path, text: str) -> None:
        replace(path, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal, "replace_file", replace_and_die)
    with pytest.raises(KeyboardInterrupt):
        _writer(file).open({})
    assert read_report(file).results == ()


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_run_that_goes_on_loses_nothing_when_it_is_killed_as_it_opens_its_report(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    replace = journal.replace_file

    def replace_or_die(path: pathlib.Path, text: str) -> None:
        if dies == "after":
            replace(path, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal, "replace_file", replace_or_die)
    with pytest.raises(KeyboardInterrupt):
        ReportWriter(read_report(file), _CASES, {"json": file}).open({})
    assert read_report(file).results == _OLDER


def test_a_run_that_goes_on_and_stops_in_its_start_up_keeps_what_there_was(file: pathlib.Path) -> None:
    ReportWriter(read_report(file), _CASES, {"json": file}).finish(ended="stopped by SIGINT")
    assert read_report(file).results == _OLDER
    assert not journal_of(file).exists()


def test_a_new_run_has_its_own_results_alone(file: pathlib.Path) -> None:
    writer = _writer(file, _CASES[3:5])
    writer.open({"torch": "2.13.0"})
    assert read_report(file).results == ()
    new = CaseResult(case=_CASES[3], verdict=Verdict(kind="ok"))
    writer.add(new)
    assert read_report(file).results == (new,)
    report, _ = writer.finish(ended="stopped by SIGTERM")
    assert dataclasses.replace(report, seconds=0.0) == dataclasses.replace(read_report(file), seconds=0.0)
    assert (report.results, report.complete, report.ended) == ((new,), False, "stopped by SIGTERM")
