"""``python -m benchmarks.silent``: a handful of errors and clean programs of each kind, from end to end."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest
from program import run
from support.emulation import needs_emulation
from support.places import ROOT

_ON_RANKS = (
    *("MergeIsUndoneBeforeTheSend", "PartArrivesTwice", "ExpertsOfOneGroupAreSaved", "MergeAndUnmergeRound"),
    *("AdapterOfRankZero", "MergedSync-plain", "FusedSync-tied", "CheckedLoad-uneven", "Save-bfloat16"),
    "Fp8MergeWithoutScale",
)


def test_published_errors_are_found_and_clean_programs_pass(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("peft")
    table = tmp_path / "table.md"
    done = run(sys.executable, "-m", "benchmarks.silent", *_ON_RANKS, "--markdown", str(table), cwd=ROOT)
    assert done.code == 0, done.stdout + done.stderr
    assert "6 of 6 errors found; 0 false alarms on 7 clean programs." in table.read_text()


def test_methods_are_judged_by_the_probe() -> None:
    needs_emulation()
    pytest.importorskip("peft")
    names = ("summon_under_fsdp2", "gather_each-fsdp2/none/unstaged")
    done = run(sys.executable, "-m", "benchmarks.silent", *names, cwd=ROOT)
    assert done.code == 0, done.stdout + done.stderr
    assert re.search(r"1 of 1 errors found; 0 false alarms on \d clean programs", done.stdout)


def test_a_resume_is_judged() -> None:
    pytest.importorskip("peft")
    done = run(sys.executable, "-m", "benchmarks.silent", "OptionsNotLoaded", cwd=ROOT)
    assert done.code == 0, done.stdout + done.stderr
    assert "`weight_decay`" in done.stdout
