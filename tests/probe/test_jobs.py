"""``--jobs``: groups of ranks that share the cases of a run."""

from __future__ import annotations

import pathlib
import sys

import pytest
from program import forked_doctor, run

from fsdp_doctor.report.journal import read_report

# Of three blocks; each group waits in its first case until the other has begun one.
_SCENARIOS = ("--device", "cpu", "--strategy", "fsdp2", "--offload", "none,policy,param", "--staging", "unstaged")
_MEETS = """
import os, pathlib, time

def weights(model):
    group = os.environ["FSDP_DOCTOR_GROUP"].partition(":")[0]
    {act}
    (pathlib.Path(os.environ["MEETING"]) / group).touch()
    while len(os.listdir(os.environ["MEETING"])) < 2:
        time.sleep(0.01)
    return {{name: tensor.full_tensor() for name, tensor in model.state_dict().items()}}
"""


@pytest.mark.parametrize(
    ("act", "kinds"),
    [
        ("", {"ok"}),
        # The group whose workers die does not cost the other's cases.
        ("if group == '1': (pathlib.Path(os.environ['MEETING']) / group).touch(); os._exit(9)", {"ok", "died"}),
    ],
)
def test_every_group_runs_cases_and_the_report_lists_all_cases_in_order(
    tmp_path: pathlib.Path, act: str, kinds: set[str]
) -> None:
    meeting, file = tmp_path / "meeting", tmp_path / "report.json"
    meeting.mkdir()
    (tmp_path / "mine.py").write_text(_MEETS.format(act=act))
    env = {"PYTHONPATH": str(tmp_path), "MEETING": str(meeting)}
    words = ("--nproc", "2", "--jobs", "2", "--timeout", "300", *_SCENARIOS, "--method", "mine:weights", "-k", "mine")
    done = run(sys.executable, "-m", "fsdp_doctor", "probe", *words, "--json", str(file), env=env)
    report = read_report(file)
    assert [result.id.split("/")[1] for result in report.results] == ["none", "policy", "param"], done.stderr
    assert {result.verdict.kind for result in report.results} == kinds
    assert report.complete
    assert done.left == []


def test_under_torchrun_more_than_one_group_is_refused() -> None:
    done = forked_doctor("probe", *_SCENARIOS, "--jobs", "2")
    assert (done.code, done.stdout) == (2, "")
    assert "--jobs" in done.stderr
