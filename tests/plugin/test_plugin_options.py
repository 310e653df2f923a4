"""The options of pytest and of other plugins do with tests on ranks what they do with others."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

import pytest
from program import run
from support.places import ROOT
from support.plugin_runs import PytestRun, run_pytest

from fsdp_doctor.matrix.axes import AXIS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NOTHING_KEPT = ("-p", "no:cacheprovider")


def test_k_selects_by_values_of_axes_and_all_stands_for_every_value(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_all.py").write_text(
        "import pytest\n@pytest.mark.fsdp(offload='all', staging='all')\ndef test_all(fsdp_case): ...\n"
    )
    arguments = ("--collect-only", "-q", "-k", "test_all or (test_ours and fsdp1 and not unstaged)", *_NOTHING_KEPT)
    ids = re.findall(r"::(\S+)", run_pytest(tmp_path, *arguments, suites=["scenarios"]).run.stdout)
    every = [f"fsdp2/{offload}/{staging}" for offload in AXIS["offload"].values for staging in AXIS["staging"].values]
    assert ids == [f"test_all[{scenario}]" for scenario in every] + [
        "test_ours[fsdp1/none/staged]",
        "test_ours[fsdp1/policy/staged]",
    ]


@pytest.mark.parametrize(("mark", "meant"), [("rank", "ranks"), ("fspd", "fsdp"), ("fast", "")])
def test_a_misspelt_mark_is_an_error_and_a_foreign_mark_is_not(mark: str, meant: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_own.py").write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_own(): ...\n")
    done = run_pytest(tmp_path, *_NOTHING_KEPT).run
    assert done.code == (pytest.ExitCode.USAGE_ERROR if meant else pytest.ExitCode.OK), done.stderr
    assert (f"{meant!r}" in done.stderr) == bool(meant)


def test_x_ends_the_run_and_lf_begins_with_what_failed(tmp_path: pathlib.Path) -> None:
    first = run_pytest(tmp_path, "-x", suites=["mixed"])
    assert list(first.results) == ["test_first_fails"]
    again = run_pytest(tmp_path, "--lf")
    assert {name: result.outcome for name, result in again.results.items()} == {"test_first_fails": "failed"}


def test_xdist_runs_them_in_workers_of_its_own(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("pytest-xdist is not installed")
    done = run_pytest(tmp_path, "-p", "xdist", "-n", "2", *_NOTHING_KEPT, suites=["mixed"])
    assert {name: result.outcome for name, result in done.results.items()} == {
        "test_first_fails": "failed",
        "test_second_passes": "passed",
        "test_third_fails": "failed",
        "test_plain": "passed",
    }
    assert "assert 2 == 3" in done["test_first_fails"].text
    assert "-- ranks 0, 1 --" in done["test_first_fails"].text


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> PytestRun:
    """A run with -s, and with warnings as errors, whose own process looks at what it has imported in the end."""
    directory = tmp_path_factory.mktemp("shown")
    (directory / "conftest.py").write_text(
        "import os, sys\ndef pytest_unconfigure():\n"
        "    assert 'RANK' in os.environ or 'torch' not in sys.modules, 'torch is here'\n"
    )
    return run_pytest(directory, "-s", "-W", "error", "-k", "second", *_NOTHING_KEPT, suites=["mixed"])


def test_the_plugin_gives_no_warning(shown: PytestRun) -> None:
    assert shown["test_second_passes"].outcome == "passed", shown.run.stdout


def test_s_shows_what_the_ranks_print(shown: PytestRun) -> None:
    assert shown["test_second_passes"].outcome == "passed", shown.run.stdout
    for rank in (0, 1):
        assert f"[Captured stdout call of rank {rank}, with stderr]\nsaid by a rank\n" in shown.run.stdout


def test_pytests_own_process_imports_no_torch(shown: PytestRun) -> None:
    assert (shown.run.code, shown.run.stderr) == (0, "")


def test_a_run_that_does_not_use_it_says_what_it_says_without(tmp_path: pathlib.Path) -> None:
    outputs = [run_pytest(tmp_path, *_NOTHING_KEPT, suites=["plain"], plugin=plugin).run for plugin in (False, True)]
    without, with_it = (re.sub(r"in [\d.]+s", "in S", f"{done.stdout}{done.stderr}") for done in outputs)
    assert with_it == without


def test_to_have_it_and_not_use_it_imports_three_modules() -> None:
    code = "import sys, pytest; before = set(sys.modules); import fsdp_doctor.plugin.hooks; "
    done = run(sys.executable, "-c", f"{code}print(*sorted(set(sys.modules) - before))")
    assert done.stdout.split() == ["fsdp_doctor", "fsdp_doctor.plugin", "fsdp_doctor.plugin.hooks"]


def test_it_is_an_entry_point_of_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"fsdp_doctor": "fsdp_doctor.plugin.hooks"}
