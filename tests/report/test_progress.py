"""The progress of a probe whose output is no terminal."""

from __future__ import annotations

import itertools
import re

import pytest

from fsdp_doctor.matrix.cases import Case, make_scenario
from fsdp_doctor.report.document import CaseResult, make_result
from fsdp_doctor.report.writer import print_progress
from fsdp_doctor.verdict.classification import Verdict


def _results(number: int) -> list[CaseResult]:
    scenario = make_scenario({"strategy": "fsdp2", "offload": "none", "staging": "unstaged"})
    verdicts = itertools.cycle([Verdict(kind="ok"), Verdict(kind="crash", reason="raised")])
    return [make_result(Case(scenario, "state_dict"), next(verdicts)) for _ in range(number)]


def test_a_pipe_gets_a_line_every_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [0.0]
    with print_progress(100, now=lambda: seconds[0]) as show:
        for result in _results(100):
            seconds[0] += 10.0
            show(result)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 33
    assert re.findall(r"\d+", lines[0]) == ["3", "100", "1", "16"]
    assert re.findall(r"\d+", lines[-1]) == ["99", "100", "49"]


def test_a_short_run_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with print_progress(37, now=lambda: 0.0) as show:
        for result in _results(37):
            show(result)
    assert capsys.readouterr().err == ""
