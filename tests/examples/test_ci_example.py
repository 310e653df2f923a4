"""The workflow of examples/ci: what it runs is run here, on one case."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import yaml
from support.emulation import needs_emulation
from support.places import ROOT

pytestmark = pytest.mark.processes

_WORKFLOW = yaml.safe_load((ROOT / "examples" / "ci" / "fsdp-matrix.yml").read_text())
_ONE_CASE = "--case fsdp2/policy/staged/state_dict"


def _script(name: str) -> str:
    (step,) = [step for step in _WORKFLOW["jobs"]["probe"]["steps"] if step.get("name") == name]
    script: str = step["run"]
    return script


def _bash(script: str, cwd: pathlib.Path, summary: pathlib.Path) -> subprocess.CompletedProcess[str]:
    program = pathlib.Path(sys.executable).parent
    env = os.environ | {"PATH": f"{program}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(summary)}
    return subprocess.run(["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
    """The directory after the step, with one case instead of the matrix."""
    needs_emulation()
    directory = tmp_path_factory.mktemp("job")
    script = _script("Probe").replace("probe ", f"probe {_ONE_CASE} ", 1)
    return directory, _bash(script, directory, directory / "unused")


def test_the_step_ends_with_the_verdict_and_leaves_the_files_that_the_job_keeps(
    job: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    directory, done = job
    assert done.returncode == 1, done.stderr
    assert "storage of a tensor on device" in done.stdout
    assert {file.name for file in directory.iterdir()} == {"report.json", "junit.xml", "summary.md"}


def test_the_summary_is_the_table_in_markdown(
    job: tuple[pathlib.Path, subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    directory, _ = job
    assert _bash(_script("Summary"), directory, tmp_path / "summary").returncode == 0
    assert "fsdp2" in (tmp_path / "summary").read_text()


def test_a_verdict_that_is_expected_does_not_fail_the_job(
    job: tuple[pathlib.Path, subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "fsdp-expected.json").write_bytes((job[0] / "report.json").read_bytes())
    script = _script("Probe").replace("probe ", f"probe {_ONE_CASE} ", 1)
    assert _bash(script, tmp_path, tmp_path / "unused").returncode == 0
