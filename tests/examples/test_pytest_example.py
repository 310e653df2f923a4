"""The tests of accelerate that are rewritten with the pytest plugin pass without a GPU."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from support.emulation import needs_emulation
from support.places import ROOT
from support.plugin_runs import run_pytest


def test_the_rewritten_tests_of_accelerate_pass(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate")
    needs_emulation()
    for file in (ROOT / "examples" / "pytest").glob("*.py"):
        shutil.copy(file, tmp_path)
    done = run_pytest(tmp_path, "-p", "no:cacheprovider")
    issue = done.results.pop("test_every_rank_gets_rank_0s_buffers")
    assert issue.outcome in ("skipped", "passed"), "it is expected to fail until accelerate has solved its issue"
    assert {result.outcome for result in done.results.values()} == {"passed"}, done.run.stdout
    assert len(done.results) == 4
