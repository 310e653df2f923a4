"""The action, the workflows and the script of examples/ci: their shell steps are run as they stand, on one case."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from support.places import ROOT
from support.wheels import index_with_torch

import fsdp_doctor
from fsdp_doctor.report.journal import read_report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.processes

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_EXAMPLES = ROOT / "examples" / "ci"
_ACTION = yaml.safe_load((ROOT / "ci" / "action.yml").read_text())
_GITHUB = yaml.safe_load((_EXAMPLES / "fsdp-matrix.yml").read_text())
_GITLAB = yaml.safe_load((_EXAMPLES / "gitlab-ci.yml").read_text())
_CASE = "fsdp2/none/unstaged/summon_full_params"
_ONE_CASE = f"--device cpu --case '{_CASE}'"


def _bash(script: str, cwd: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a step as GitHub's ``shell: bash`` and GitLab do; this interpreter is the python that it finds."""
    program = pathlib.Path(sys.executable).parent
    env = os.environ | {"PATH": f"{program}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)} | variables
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def _step(name: str) -> dict[str, Any]:
    (step,) = [step for step in _ACTION["runs"]["steps"] if step.get("name") == name]
    return dict(step)


def _probe_step(cwd: pathlib.Path, inputs: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """The step with the inputs that are not given at their defaults."""
    values = {name: inputs.get(name, declared["default"]) for name, declared in _ACTION["inputs"].items()}
    step = _step("Probe")
    inputs_of = {name: text.removeprefix("${{ inputs.").removesuffix(" }}") for name, text in step["env"].items()}
    named = {variable: values[name] for variable, name in inputs_of.items()}
    summary = {"GITHUB_ACTION_PATH": str(ROOT / "ci"), "GITHUB_STEP_SUMMARY": str(cwd / "summary.md")}
    return _bash(step["run"], cwd, **(named | summary | variables))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
    """Runs the step with the torch that there is, without a failure in its expectations."""
    directory = tmp_path_factory.mktemp("action")
    (directory / "expected.toml").write_text("# nothing fails\n")
    return directory, _probe_step(directory, {"selection": _ONE_CASE, "expect": "expected.toml"})


def test_the_step_fails_on_an_unexpected_verdict_and_annotates_it(
    installed: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    directory, done = installed
    assert done.returncode == 1, done.stderr
    assert f"::error title=fsdp-doctor::expected ok, got wrong: {_CASE}: " in done.stdout
    summary = (directory / "summary.md").read_text()
    assert summary.startswith("## fsdp-doctor: 1 unexpected\n")


def test_the_step_leaves_the_files_that_the_job_keeps(
    installed: tuple[pathlib.Path, subprocess.CompletedProcess[str]],
) -> None:
    directory, _ = installed
    names = {file.name for file in (directory / _ACTION["inputs"]["directory"]["default"]).iterdir()}
    assert names == {"installed.json", "installed.xml", "merged.json.gz"}


def test_each_torch_version_has_its_environment_and_known_failures_are_expected(
    tmp_path: pathlib.Path,
) -> None:
    index = index_with_torch(tmp_path / "wheels", "2.98.0")
    done = _probe_step(tmp_path, {"torch": "2.98", "selection": _ONE_CASE}, **index)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "::error" not in done.stdout
    assert (tmp_path / "summary.md").read_text().startswith("## fsdp-doctor: nothing unexpected\n")
    report = read_report(tmp_path / "fsdp-doctor-reports" / "torch2.98.json")
    assert report.environment["packages"]["torch"] == "2.98.0"


def _cache_key(directory: pathlib.Path, torch: str) -> str:
    """Makes the key with the digest that the step computes; what GitHub says of the machine stays as it is."""
    output = directory / "output"
    output.touch()
    named = {"TORCH": torch, "GITHUB_ACTION_PATH": str(ROOT / "ci"), "GITHUB_OUTPUT": str(output)}
    done = _bash(_step("Name the cache")["run"], directory, **named)
    assert done.returncode == 0, done.stderr
    digest = output.read_text().splitlines()[-1].removeprefix("digest=")
    key = str(_step("Keep the emulated device between runs")["with"]["key"])
    return key.replace("${{ steps.cache.outputs.digest }}", digest)


def test_the_cache_has_a_valid_key_for_each_selection_of_versions(
    tmp_path: pathlib.Path,
) -> None:
    selections = ["", "2.13", "2.10,2.11,2.13,2.15"]
    keys = [_cache_key(tmp_path, torch) for torch in [*selections, *selections]]
    assert keys[:3] == keys[3:]
    assert len(set(keys)) == 3
    assert [key for key in keys if "," in key or "inputs." in key or not re.search("-[0-9a-f]{16}$", key)] == []


def test_the_examples_name_this_version() -> None:
    repository = _PROJECT["urls"]["Source"].removeprefix("https://github.com/")
    steps = [step for job in _GITHUB["jobs"].values() for step in job["steps"] if step.get("name") == "Probe"]
    assert {step["uses"] for step in steps} == {f"{repository}/ci@v{fsdp_doctor.__version__}"}
    assert _GITLAB["fsdp-matrix"]["variables"]["FSDP_DOCTOR"] == f"fsdp-doctor=={fsdp_doctor.__version__}"


def test_the_action_installs_what_the_command_line_needs_without_torch() -> None:
    words = _step("Install")["run"].split()
    assert words[:5] == ["python", "-m", "pip", "install", "--quiet"]
    installed = {(one.name, str(one.specifier)) for one in map(Requirement, shlex.split(" ".join(words[5:])))}
    needed = {(one.name, str(one.specifier)) for one in map(Requirement, _PROJECT["dependencies"])}
    assert {one for one in needed if one[0] not in ("torch", "transformers")} <= installed


@pytest.mark.parametrize("name", _GITHUB["jobs"])
def test_the_workflow_uses_the_action_with_inputs_that_it_has(name: str, tmp_path: pathlib.Path) -> None:
    (step,) = [step for step in _GITHUB["jobs"][name]["steps"] if step.get("name") == "Probe"]
    assert step["uses"].split("@")[0].endswith("fsdp-doctor/ci")
    assert set(step["with"]) <= set(_ACTION["inputs"])
    assert _bash(f"python {ROOT}/fsdp-doctor list {step['with']['selection']}", tmp_path).returncode == 0


def test_the_job_of_gitlab_ends_with_the_verdict_and_leaves_its_artifacts(tmp_path: pathlib.Path) -> None:
    job = _GITLAB["fsdp-matrix"]
    (tmp_path / "fsdp-expected.toml").write_text("# nothing fails\n")
    done = _bash("\n".join(job["script"]), tmp_path, SELECTION=_ONE_CASE.replace("'", ""))
    assert done.returncode == 1, done.stderr
    assert f"expected ok, got wrong: {_CASE}: " in done.stderr
    kept = [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    assert all((tmp_path / name).exists() for name in kept)


def test_the_slurm_script_runs_the_probe_on_the_ranks_that_slurm_gives(tmp_path: pathlib.Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    script = (_EXAMPLES / "fsdp-doctor.sbatch").read_text()
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node",
        "SLURM_GPUS_ON_NODE": "2",
        "PORT": "0",
    }
    path = f"{programs}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = _bash(f"set -- {_ONE_CASE}\n{script}", tmp_path, PATH=path, **slurm)
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "fsdp-doctor-7.json")
    assert (report.world_size, [result.id for result in report.results]) == (2, [_CASE])
