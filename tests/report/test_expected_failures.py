"""Expectations in TOML: written from a report they say the same as it, they age with torch, and stale ones are told."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest
from support.places import ROOT
from support.reports import report, result

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.methods import METHOD_NAMES
from fsdp_doctor.probe.baseline import Judgement
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.expectation_toml import make_patterns, render_expectation_toml
from fsdp_doctor.report.expected_failures import ExpectedFailures, compile_pattern, read_expected_failures
from fsdp_doctor.report.journal import read_report

_HALF_MOVED = "fsdp2/policy/staged/state_dict"
_FINE = "fsdp2/none/unstaged/state_dict"
_TABLE = """
[[expect]]
cases = ["fsdp2/policy*/staged/{state_dict,dcp}"]
verdict = "crash"
reason = "storage of a tensor on device"
link = "https://github.com/verl-project/verl/issues/5995"
until = "2.16"
"""
_REASON = 'RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on "cuda:1"'


def _result(name: str, kind: str, reason: str = "") -> CaseResult:
    return result(parse_case_id(name, METHOD_NAMES), kind, reason)


def _read(tmp_path: pathlib.Path, text: str) -> ExpectedFailures:
    file = tmp_path / "expected.toml"
    file.write_text(text)
    return read_expected_failures(file)


def _told(tmp_path: pathlib.Path, *results: CaseResult, text: str = _TABLE, torch: str = "2.13.0") -> list[str]:
    return _judge(report(*results), _read(tmp_path, text), torch)


def _judge(judged: Report, expected: ExpectedFailures, torch: str = "2.13.0") -> list[str]:
    of_torch = dataclasses.replace(judged, environment={"packages": {"torch": torch}})
    return Judgement(of_torch, expected).unexpected


def test_what_is_expected_is_not_reported_on_any_device(tmp_path: pathlib.Path) -> None:
    assert _told(tmp_path, _result(_HALF_MOVED, "crash", _REASON), _result(_FINE, "ok")) == []


def test_differences_from_the_expectation_are_told_bad_ones_first(
    tmp_path: pathlib.Path,
) -> None:
    told = _told(
        tmp_path,
        _result("fsdp2/policy+param/staged/dcp", "ok"),
        _result(_HALF_MOVED, "crash", "another"),
        _result("fsdp2/policy/staged/dcp", "wrong", "zeros"),
        _result(_FINE, "hang", "no end"),
        _result("fsdp2/policy+param/staged/state_dict", "crash", _REASON),
    )
    assert told == [
        f"expected crash with 'storage of a tensor on device', got crash: {_HALF_MOVED} with another reason: another",
        "expected crash, got wrong: fsdp2/policy/staged/dcp",
        f"expected ok, got hang: {_FINE}: no end",
        "expected crash, got ok: fsdp2/policy+param/staged/dcp",
    ]


def test_an_expectation_that_no_case_meets_any_more_is_stale(tmp_path: pathlib.Path) -> None:
    *_, stale = _told(tmp_path, _result(_HALF_MOVED, "ok"))
    assert stale.startswith("stale: no case shows the crash of fsdp2/policy*/staged/{state_dict,dcp} any more")


def test_a_pattern_without_a_case_is_stale_unless_it_was_not_selected(tmp_path: pathlib.Path) -> None:
    assert _told(tmp_path, _result(_FINE, "ok")) == []
    (stale,) = _told(tmp_path, _result(_FINE, "ok"), text=_TABLE.replace("staged", "stagd"))
    assert stale.startswith("stale: there is no case fsdp2/policy*/stagd/{state_dict,dcp}")


def test_a_case_that_could_not_run_here_makes_no_expectation_stale(tmp_path: pathlib.Path) -> None:
    assert _told(tmp_path, _result(_HALF_MOVED, "unsupported", "no device")) == []


def test_an_expected_failure_becomes_unexpected_and_not_stale_from_its_until_version(
    tmp_path: pathlib.Path,
) -> None:
    crash = _result(_HALF_MOVED, "crash", _REASON)
    assert _told(tmp_path, crash, torch="2.15.1+cpu") == []
    assert _told(tmp_path, crash, torch="2.16.0.dev1") == [f"expected ok, got crash: {_HALF_MOVED}: {_REASON}"]
    assert _told(tmp_path, _result(_HALF_MOVED, "ok"), torch="2.16.0") == []


def test_the_first_table_that_covers_a_case_counts(tmp_path: pathlib.Path) -> None:
    exception = '[[expect]]\ncases = ["*/policy+param/*"]\nverdict = "ok"\n'
    told = _told(tmp_path, _result("fsdp2/policy+param/staged/dcp", "ok"), text=exception + _TABLE)
    assert told == []


@pytest.mark.parametrize(
    "name",
    ["emulated.json.gz", "1xh200.json.gz", "full/2xh200-fsdp1-orig.json.gz"],
    ids=lambda name: name.split(".")[0],
)
def test_an_expectation_written_from_a_report_holds_exactly_its_failures(name: str, tmp_path: pathlib.Path) -> None:
    whole = read_report(ROOT / "examples" / "reports" / name)
    text = render_expectation_toml(whole)
    expected = _read(tmp_path, text)
    own = whole.packages["torch"]
    assert _judge(whole, expected, own) == []
    mended = [dataclasses.replace(one, verdict=dataclasses.replace(one.verdict, kind="ok")) for one in whole.results]
    told = _judge(dataclasses.replace(whole, results=tuple(mended)), expected, own)
    assert sum(sentence.startswith("expected") for sentence in told) == len(whole.bad)
    assert sum(sentence.startswith("stale") for sentence in told) == text.count("[[expect]]")
    assert len(text.splitlines()) < len(whole.bad), "it is short"


def test_it_names_cause_link_and_the_version_that_ends_it() -> None:
    text = render_expectation_toml(read_report(ROOT / "examples" / "reports" / "emulated.json.gz"))
    assert "(fsdp2-pinned-policy-half-moved)\n[[expect]]\n" in text
    assert 'link = "https://github.com/verl-project/verl/issues/5995"' in text


def test_a_report_without_a_failure_expects_none(tmp_path: pathlib.Path) -> None:
    nothing: Report = report(_result(_FINE, "ok"))
    assert _read(tmp_path, render_expectation_toml(nothing)) == ExpectedFailures(())


def test_reasons_that_hold_quotes_and_control_characters_are_written_and_read(tmp_path: pathlib.Path) -> None:
    reason = 'ValueError: "a\\b" \x1b[31m \ud800 and more'
    one = report(_result(_FINE, "crash", reason))
    assert _judge(one, _read(tmp_path, render_expectation_toml(one))) == []


def test_patterns_match_the_cases_and_none_of_the_others() -> None:
    names = [f"fsdp2/{offload}/staged/dcp" for offload in ("policy", "policy+param", "policy+optimizer")]
    cases = [parse_case_id(name, METHOD_NAMES) for name in names]
    assert make_patterns(cases, ["fsdp2/none/staged/dcp"]) == ["fsdp2/policy*/staged/dcp"]
    assert make_patterns(cases, []) == ["fsdp2/policy*/staged/dcp"]
    (listed,) = make_patterns(cases, ["fsdp2/policy+param+optimizer/staged/dcp"])
    assert listed == "fsdp2/{policy,policy+param,policy+optimizer}/staged/dcp"
    assert all(compile_pattern(listed).fullmatch(name) for name in names)
    assert not compile_pattern(listed).fullmatch("fsdp2/policy+param+optimizer/staged/dcp")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[expect", "is not TOML"),
        ("expected = 1", "unknown field `expected`"),
        ("expect = 1", "got `int` - at `$.expect`"),
        ("expect = [1]", "got `int` - at `$.expect[0]`"),
        ('[[expect]]\ncases = "a"\nverdict = "crash"', "at `$.expect[0].cases`"),
        ('[[expect]]\ncases = []\nverdict = "crash"', "at `$.expect[0].cases`"),
        ('[[expect]]\ncases = ["a"]\nverdict = "crashed"', "'crashed' - at `$.expect[0].verdict`"),
        ('[[expect]]\ncases = ["a"]', "missing required field `verdict`"),
        ('[[expect]]\ncases = ["a"]\nverdict = "crash"\nreason = 1', "at `$.expect[0].reason`"),
        ('[[expect]]\ncases = ["a"]\nverdict = "crash"\nuntill = "2.16"', "unknown field `untill`"),
        ('[[expect]]\ncases = ["a"]\nverdict = "crash"\nuntil = "soon"', "Invalid version: 'soon' - at `$.expect[0]`"),
        ('[[expect]]\ncases = ["{a"]\nverdict = "crash"', "unmatched brace - at `$.expect[0]`"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused_in_a_sentence(text: str, words: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        _read(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the expectations .*: No such file"):
        read_expected_failures(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        read_expected_failures(tmp_path / "binary.toml")
