"""Tests what GitHub Actions is told: annotations that its runner reads, and a summary within its limit."""

from __future__ import annotations

import pathlib

import pytest
from support.reports import CONTROL, every_kind, report

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.report import formats
from fsdp_doctor.report.github import render_step_summary, render_workflow_commands, write_step_summary

_REPORT = report(*every_kind())


def test_each_unexpected_verdict_is_an_error_and_the_last_line_sums_up() -> None:
    *errors, notice = render_workflow_commands(_REPORT, ["unexpected: a is crash", "stale: b"]).splitlines()
    assert errors == [
        "::error title=fsdp-doctor::unexpected: a is crash",
        "::error title=fsdp-doctor::stale: b",
    ]
    assert notice.startswith("::notice title=fsdp-doctor::16 cases on 2 ranks of cuda: ")


def test_what_the_runner_would_read_as_its_own_is_escaped() -> None:
    first, _ = render_workflow_commands(_REPORT, ["100% \r\n::error::not ours" + CONTROL]).splitlines()
    assert first.startswith("::error title=fsdp-doctor::100%25 %0D%0A::error::not ours")
    assert "\x1b" not in first


def test_of_many_unexpected_as_many_are_told_as_github_shows() -> None:
    *errors, _ = render_workflow_commands(_REPORT, [f"number {n}" for n in range(25)]).splitlines()
    assert len(errors) == 10
    assert errors[-1] == "::error title=fsdp-doctor::and 16 more, which are listed in the log and in the job's summary"


def test_an_incomplete_run_is_an_error_before_all_others() -> None:
    first = render_workflow_commands(report(complete=False, ended="stopped by SIGINT"), ["another"]).splitlines()[0]
    assert first == "::error title=fsdp-doctor::the run is incomplete: stopped by SIGINT"


def test_the_summary_has_the_unexpected_before_the_report() -> None:
    text = render_step_summary(_REPORT, ["unexpected: <b>`x`</b> @someone"])
    assert text.splitlines()[0] == "## fsdp-doctor: 1 unexpected"
    assert text.index("- `` unexpected: <b>`x`</b> @someone ``") < text.index("\n## fsdp-doctor 0")
    assert render_step_summary(_REPORT, []).startswith("## fsdp-doctor: nothing unexpected\n")


@pytest.mark.parametrize("num_bytes", [1024 * 1024, 100_000, 5_000, 100, 0])
def test_it_keeps_to_its_limit_and_tells_the_unexpected_that_fit(num_bytes: int) -> None:
    unexpected = [f"unexpected: number {n}, \u00e4nderung {'x' * 100}" for n in range(20_000)]
    text = render_step_summary(_REPORT, unexpected, num_bytes)
    assert len(text.encode()) <= max(num_bytes, 1)
    if num_bytes > 5_000:
        assert "number 0," in text
        assert " more, which are listed in the log\n" in text


def test_it_is_added_to_what_an_earlier_command_of_the_step_wrote(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    write_step_summary(_REPORT, [])
    assert file.read_text().startswith("before\n## fsdp-doctor: nothing unexpected\n")
    file.write_text("x" * (1024 * 1024 - 50))
    write_step_summary(_REPORT, [])
    assert file.stat().st_size <= 1024 * 1024


def test_without_github_nothing_is_written_and_an_unwritable_file_is_a_fault(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write_step_summary(_REPORT, [])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary"))
    with pytest.raises(DoctorFault, match=r"cannot write the summary of the job, .*none"):
        write_step_summary(_REPORT, [])


def test_it_is_one_of_the_formats() -> None:
    assert formats.render(_REPORT, "github", unexpected=["one"]) == render_workflow_commands(_REPORT, ["one"])


def test_in_junit_a_failure_that_is_expected_is_skipped_and_says_so() -> None:
    bad = [one for one in _REPORT.results if one.verdict.bad]
    (foreseen, *others) = bad
    text = formats.render(_REPORT, "junit", expected={foreseen.id})
    assert f'message="as expected, {foreseen.verdict.kind}: ' in text
    plain = formats.render(_REPORT, "junit")
    assert plain.count("<failure") + plain.count("<error") == len(bad)
    assert text.count("<failure") + text.count("<error") == len(others)
    assert text.count("<skipped") == plain.count("<skipped") + 1
