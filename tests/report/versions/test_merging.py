"""Reports of several versions as one: a missing case is no pass, and each change is told with its version."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib

import jsonschema
import pytest
from support.places import ROOT
from support.reports import CASES, report, result

from fsdp_doctor.cli.reports import merge as merge_command
from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.methods import METHOD_NAMES
from fsdp_doctor.report.document import Report, convert_report_to_dict
from fsdp_doctor.report.journal import read_report, write_report
from fsdp_doctor.report.versions.merged import (
    MergedReport,
    Statement,
    convert_merged_to_dict,
    make_merged_schema,
    read_merged,
    render_changes,
    render_incomplete,
    summarize_merged,
    write_merged,
)
from fsdp_doctor.report.versions.merging import choose_names, merge

_ONE, _OTHER = CASES[:2]


def _of(torch: str, *kinds: str, device: str = "emulated", **packages: str) -> Report:
    """A report whose first cases have these verdicts."""
    results = [result(case, kind, f"{kind}!") for case, kind in zip(CASES, kinds, strict=False)]
    environment = {"python": "3.12", "torch": torch, "packages": {"torch": torch, **packages}}
    return report(*results, environment=environment, device=device, created=f"2026-01-01T00:00:00+{torch}")


def _merged(*reports: Report) -> MergedReport:
    return merge({f"{number}.json": one for number, one in enumerate(reports)})


def _statement(*reports: Report, case: int = 0) -> Statement:
    (statement,) = _merged(*reports).cases[case].statements
    return statement


def test_a_change_names_its_version_and_those_that_did_not_run() -> None:
    said = _statement(_of("2.14.1", "ok"), _of("2.6.0+cpu", "crash"), _of("2.10.0", "crash"))
    assert said.text == "crash since torch 2.6, ok from 2.14; 2.7, 2.8, 2.9, 2.11, 2.12, 2.13 not run"
    assert [(period.kind, period.since, period.until) for period in said.periods] == [
        ("crash", "2.6", "2.10"),
        ("ok", "2.14", "2.14"),
    ]
    assert said.changes


def test_what_never_changed_is_one_period() -> None:
    said = _statement(_of("2.10.0", "ok"), _of("2.11.0", "ok"))
    assert (said.text, said.changes, said.where) == ("ok since torch 2.10", False, "2 ranks of emulated")


def test_two_releases_of_one_minor_are_told_by_their_whole_version() -> None:
    said = _statement(_of("2.14.0", "crash"), _of("2.14.1", "ok"))
    assert said.text == "crash since torch 2.14.0, ok from 2.14.1"


def _half_moved(torch: str, message: str, known: str = "") -> Report:
    case = parse_case_id("fsdp2/policy/staged/state_dict", METHOD_NAMES)
    one = dataclasses.replace(result(case, "crash", message, traceback="Traceback"), known=known)
    return dataclasses.replace(_of(torch), results=(one,))


def test_a_failure_that_becomes_another_is_a_change_and_names_the_entry() -> None:
    known = 'Attempted to set the storage of a tensor on device "cpu" to a storage on different device "cuda:0".'
    said = _statement(_half_moved("2.10.0", "it broke"), _half_moved("2.11.0", known))
    assert said.text == "crash since torch 2.10, crash (fsdp2-pinned-policy-half-moved) from 2.11"


def test_a_failure_has_the_entry_of_todays_catalogue_whatever_the_report_says() -> None:
    (outcome,) = _merged(_half_moved("2.10.0", "it broke", known="an-entry-of-another-version")).outcomes
    assert outcome.known == ""


def test_a_case_missing_from_one_report_is_not_run_and_cannot_pass() -> None:
    merged = _merged(_of("2.10.0", "ok", "ok"), _of("2.11.0", "ok"), _of("2.12.0", "ok", "ok"))
    there, lacking = merged.cases
    assert merged.passes(there)
    assert not merged.passes(lacking)
    assert merged.show(lacking, 1) == "not run"
    assert lacking.statements[0].text == "ok since torch 2.10; 2.11 not run"
    assert (
        "1 ok in all, 1 only where they ran, 0 bad in one or more, 1 without a result in one or more"
        in summarize_merged(merged)
    )


def test_environments_that_differ_in_more_than_a_version_are_not_counted() -> None:
    said = summarize_merged(_merged(_of("2.11.0", "ok"), _of("2.13.0", "crash", device="cuda")))
    assert "no change is counted" in said
    assert "changed between two versions" not in said
    assert "1 changed between two versions" in summarize_merged(_merged(_of("2.11.0", "ok"), _of("2.13.0", "crash")))


def test_a_case_that_could_not_run_somewhere_is_no_pass() -> None:
    merged = _merged(_of("2.10.0", "ok"), _of("2.11.0", "unsupported"))
    assert not merged.passes(merged.cases[0])
    assert not merged.fails(merged.cases[0])


def test_devices_and_frameworks_are_told_apart() -> None:
    merged = _merged(
        _of("2.9.0", "ok", device="cpu"),
        _of("2.10.0", "crash", transformers="5.0"),
        _of("2.11.0", "crash", transformers="5.0"),
        _of("2.11.0", "ok", transformers="5.1"),
    )
    said = {(environment.package, environment.where): environment.text for environment in merged.cases[0].statements}
    assert said == {
        ("torch", "2 ranks of emulated, transformers 5.0"): "crash since torch 2.10",
        ("transformers", "2 ranks of emulated, torch 2.11.0"): "crash since transformers 5.0, ok from 5.1",
    }
    assert [environment.name for environment in merged.environments] == [
        "torch 2.9.0, cpu",
        "torch 2.10.0, emulated",
        "torch 2.11.0, emulated, 2 ranks of emulated, transformers 5.0",
        "torch 2.11.0, emulated, 2 ranks of emulated, transformers 5.1",
    ]


def test_a_package_that_an_environment_lacks_is_not_named() -> None:
    merged = _merged(
        *(_of(torch, "ok", **packages) for torch in ("2.10.0", "2.11.0") for packages in ({}, {"verl": "0.9.1"}))
    )
    where = [statement.where for statement in merged.cases[0].statements]
    assert where == ["2 ranks of emulated", "2 ranks of emulated, verl 0.9.1"]


def test_cases_that_changed_alike_are_one_line_of_the_summary() -> None:
    merged = _merged(_of("2.10.0", "crash", "crash"), _of("2.11.0", "ok", "ok"))
    assert list(render_changes(merged)) == [f"crash since torch 2.10, ok from 2.11\t{_ONE.id}\tand 1 more"]


def test_a_column_shows_why_its_environment_could_not_be_made() -> None:
    failed = dataclasses.replace(_of("2.99.0"), complete=False, ended="torch 2.99.0 does not install: no such version")
    merged = _merged(_of("2.13.0", "ok"), failed)
    assert merged.environments[1].ended == "torch 2.99.0 does not install: no such version"
    assert not merged.passes(merged.cases[0])
    assert next(render_incomplete(merged)).split("\t") == [
        "torch 2.99.0, emulated",
        "incomplete",
        "torch 2.99.0 does not install: no such version",
    ]


def test_parts_of_one_run_are_one_column() -> None:
    whole = _of("2.13.0", "ok", "crash")
    parts = [dataclasses.replace(whole, results=(one,)) for one in whole.results]
    merged = _merged(*parts)
    (environment,) = merged.environments
    assert environment.reports == ("0.json", "1.json")
    assert [merged.show(case, 0) for case in merged.cases] == ["ok", "crash"]


def test_the_same_report_twice_is_refused_with_the_case_that_both_have() -> None:
    with pytest.raises(UsageError, match=rf"0\.json and 1\.json .* {_ONE.id}"):
        _merged(_of("2.13.0", "ok"), _of("2.13.0", "crash"))


def test_reports_without_a_result_merge_to_columns_without_rows() -> None:
    merged = _merged(_of("2.10.0"), _of("2.11.0"))
    assert (len(merged.environments), merged.cases) == (2, ())


def test_the_message_is_the_whole_exception_cut_to_its_length() -> None:
    long = _of("2.13.0")
    long = dataclasses.replace(long, results=(result(_ONE, "crash", "word " * 1000, traceback="Traceback"),))
    merged = _merged(long)
    (outcome,) = merged.outcomes
    assert outcome.message.startswith("RuntimeError: word word")
    assert len(outcome.message) == 1000


@pytest.mark.parametrize("name", ["merged.json", "merged.json.gz"])
def test_it_is_written_and_read_back(name: str, tmp_path: pathlib.Path) -> None:
    merged = _merged(_of("2.10.0", "crash", "ok"), _of("2.11.0", "ok"))
    write_merged(tmp_path / name, merged)
    assert read_merged(tmp_path / name) == merged
    assert (tmp_path / name).read_bytes()[:1] == (b"\x1f" if name.endswith("gz") else b"{")


def test_it_keeps_to_its_schema() -> None:
    schema = jsonschema.Draft202012Validator(make_merged_schema())
    committed = read_report(ROOT / "examples" / "reports" / "4xh200-hsdp.json.gz")
    committed = dataclasses.replace(committed, results=committed.results[::20])
    data = json.loads(
        json.dumps(convert_merged_to_dict(_merged(committed, _of("2.10.0", "crash"), _of("2.11.0", "ok"))))
    )
    schema.validate(data)
    data["cases"][0]["outcomes"].append("ok")
    assert not schema.is_valid(data)


def test_a_link_to_a_report_reveals_nothing_outside_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    merged = pathlib.Path("docs/merged.json")
    files = [pathlib.Path("docs/runs/a.json"), pathlib.Path("reports/b.json"), tmp_path / "elsewhere" / "c.json"]
    assert choose_names(files, merged) == ["runs/a.json", "../reports/b.json", "c.json"]
    assert choose_names(files, tmp_path / "elsewhere" / "merged.json") == ["a.json", "b.json", "c.json"]
    assert choose_names(files, None) == ["a.json", "b.json", "c.json"]


_GOOD = json.dumps(convert_merged_to_dict(_merged(_of("2.10.0", "ok")))).encode()


def test_a_run_that_was_interrupted_is_merged_as_far_as_it_came(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.json"
    partial = dataclasses.replace(_of("2.10.0", "ok"), num_selected=5, complete=False, ended="stopped by SIGINT")
    write_report(file, partial)
    (environment,) = _merged(read_report(file)).environments
    assert (environment.complete, environment.ended) == (False, "stopped by SIGINT")


def test_a_device_is_not_replaced_by_a_merged_report(tmp_path: pathlib.Path) -> None:
    device = tmp_path / "fifo"
    os.mkfifo(device)
    with pytest.raises(DoctorFault, match="fifo: it exists, but is not a regular file"):
        write_merged(device, _merged(_of("2.10.0", "ok")))
    assert device.is_fifo()


_REPORT_TEXT = json.dumps(convert_report_to_dict(_of("2.11.0", "ok")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "newer.json",
            _REPORT_TEXT.replace('"schema_version": 1', '"schema_version": 2').encode(),
            "upgrade fsdp-doctor",
        ),
        ("cut.json", _REPORT_TEXT[:-50].encode(), "it is not JSON"),
        ("cut.json.gz", gzip.compress(_REPORT_TEXT.encode())[:-20], "cannot read the report"),
        ("plain.json.gz", _REPORT_TEXT.encode(), "cannot read the report .*Not a gzipped file"),
        ("merged.json", _GOOD.replace(b'"schema_version": 1', b'"schema_version": 2'), "reads 1: upgrade fsdp-doctor"),
        ("outcomes.json", _GOOD.replace(b'"outcomes": [0]', b'"outcomes": [7]'), "is a damaged merged report"),
        (
            "method.json",
            _GOOD.replace(b'"method"', b'"meth"'),
            "damaged merged report: .*required field `method`",
        ),
        ("log.json", b'{"schema": 1}', "its 'schema' is not 'fsdp-doctor/report'"),
        ("empty.json", b"", "it is not JSON"),
    ],
)
def test_a_bad_report_is_refused_in_one_sentence_without_overwriting_any_file(
    name: str, content: bytes, said: str, tmp_path: pathlib.Path
) -> None:
    good, bad, merged = tmp_path / "good.json", tmp_path / name, tmp_path / "all.json"
    write_report(good, _of("2.10.0", "ok"))
    bad.write_bytes(content)
    merged.write_text("what was there")
    with pytest.raises(UsageError, match=said) as refused:
        merge_command(reports=[good, bad], json_file=merged)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)
    assert merged.read_text() == "what was there"


def test_a_report_is_merged_whether_it_is_compressed_or_not(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, compressed = tmp_path / "one.json", tmp_path / "two.json.gz"
    write_report(plain, _of("2.10.0", "crash"))
    compressed.write_bytes(gzip.compress(_REPORT_TEXT.encode()))
    merge_command(reports=[plain, compressed], json_file=tmp_path / "all.json.gz", every_case=True)
    printed = capsys.readouterr()
    assert f"{_ONE.id}\t2 ranks of emulated: crash since torch 2.10, ok from 2.11\n" in printed.out
    assert "1 case in 2 environments" in printed.err
    assert len(read_merged(tmp_path / "all.json.gz").environments) == 2


def test_a_folder_tells_reports_of_one_name_apart(tmp_path: pathlib.Path) -> None:
    files = [tmp_path / folder / "installed.json" for folder in ("torch-2.10", "torch-2.13")]
    assert choose_names(files, None) == ["torch-2.10/installed.json", "torch-2.13/installed.json"]
    with pytest.raises(UsageError, match=r"two of the reports would have the name a/one.json; rename one of them"):
        choose_names([tmp_path / "a" / "one.json", tmp_path / "b" / "a" / "one.json"], None)


def test_a_file_that_is_given_twice_is_refused(tmp_path: pathlib.Path) -> None:
    write_report(tmp_path / "one.json", _of("2.10.0", "ok"))
    with pytest.raises(UsageError, match=r"one.json is given twice$"):
        merge_command(reports=[tmp_path / "one.json", tmp_path / "one.json"])


def test_merging_further_reports_equals_merging_all_reports_at_once(tmp_path: pathlib.Path) -> None:
    reports = [_of("2.10.0", "crash", "ok"), _of("2.11.0", "ok"), _of("2.12.0", "ok", "crash")]
    at_once = _merged(*reports)
    write_merged(tmp_path / "merged.json.gz", merge({"0.json": reports[0], "2.json": reports[2]}))
    write_report(tmp_path / "1.json", reports[1])
    # Into the file that it is read from.
    merge_command(reports=[tmp_path / "merged.json.gz", tmp_path / "1.json"], json_file=tmp_path / "merged.json.gz")
    assert read_merged(tmp_path / "merged.json.gz") == at_once


def test_another_selection_of_an_environment_joins_its_column_with_both_commands() -> None:
    whole = _of("2.13.0", "ok", "crash", accelerate="1.15.0")
    one, other = [dataclasses.replace(whole, results=(each,), command=f"run {each.id}") for each in whole.results]
    merged = merge({"merged.json": _merged(one), "more.json": other})
    (environment,) = merged.environments
    assert environment.command == f"run {_ONE.id}; run {_OTHER.id}"
    assert environment.packages["accelerate"] == "1.15.0"


def test_the_committed_report_merged_again_is_itself() -> None:
    merged = read_merged(ROOT / "docs" / "compat" / "merged.json.gz")
    again = merge({"merged.json.gz": merged})
    assert dataclasses.replace(again, version=merged.version) == merged


def test_writing_a_file_prints_one_line_per_environment_and_change(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a.json": _of("2.10.0", "crash", "ok", "unsupported"), "b.json": _of("2.11.0", "ok", "ok")}
    for name, one in files.items():
        write_report(tmp_path / name, one)
    reports = [tmp_path / name for name in files]
    changed = f"{_ONE.id}\t2 ranks of emulated: crash since torch 2.10, ok from 2.11"
    merge_command(reports=reports, json_file=tmp_path / "all.json")
    assert capsys.readouterr().out.splitlines() == [
        "torch 2.10.0, emulated\t1 ok, 1 bad, 1 not run",
        "torch 2.11.0, emulated\t2 ok, 0 bad, 1 not run",
        f"crash since torch 2.10, ok from 2.11\t{_ONE.id}",
    ]
    merge_command(reports=reports, json_file=tmp_path / "all.json", changes=True)
    assert capsys.readouterr().out.splitlines() == [changed]
    merge_command(reports=reports, json_file=tmp_path / "all.json", every_case=True)
    every = capsys.readouterr().out
    merge_command(reports=reports)
    assert capsys.readouterr().out == every
    assert len(every.splitlines()) == 3
