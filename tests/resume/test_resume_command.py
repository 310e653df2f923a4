"""``fsdp-doctor resume`` as users start it: it runs their commands, with their own ``sitecustomize``, and ends them."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest
from program import doctor
from support import inside
from support.places import ROOT, TESTS

_PROGRAMS = TESTS / "resume" / "programs.py"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")


def test_the_job_of_the_tutorial_gets_the_answer_that_it_shows(tmp_path: pathlib.Path) -> None:
    """Adds a ``sitecustomize`` of the user's, which runs in the job as it always does."""
    job, _, answer, *_ = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs" / "resume.md").read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(job)
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').close()")
    files = [f"--json={tmp_path / 'answer.json'}", f"--markdown={tmp_path / 'answer.md'}"]
    command = [sys.executable, str(tmp_path / "train.py"), "--output", "{dir}"]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = doctor("resume", "--resume=--resume", f"--directory={tmp_path / 'runs'}", *files, "--", *command, env=path)
    assert (done.code, done.left) == (1, []), done
    assert done.stdout.startswith(answer.rstrip()), done.stdout
    assert (tmp_path / "ran").exists()
    assert answer.splitlines()[0] in (tmp_path / "answer.md").read_text()
    document = json.loads((tmp_path / "answer.json").read_text())
    assert [(each["kind"], each["step"], each["ranks"]) for each in document["findings"]] == [("schedule", 5, [0])]
    assert [run["steps"] for run in document["runs"]] == [6, 2, 6]
    assert all(pathlib.Path(run["log"]).exists() for run in document["runs"])


def test_a_right_job_under_torchrun_takes_two_runs(tmp_path: pathlib.Path) -> None:
    command = (*_TORCHRUN, str(_PROGRAMS), "Sharded", "--dir", "{dir}")
    done = doctor("resume", "--resume=--resume", f"--directory={tmp_path / 'runs'}", "--", *command)
    assert (done.code, done.left) == (0, []), done
    assert {file.name for file in (tmp_path / "runs").iterdir()} == {"job", "straight", "resumed"}


def test_a_job_on_the_cpu_is_recorded_where_gpus_are_hidden(tmp_path: pathlib.Path) -> None:
    command = (sys.executable, str(TESTS / "support" / "hidden_gpus.py"), str(_PROGRAMS), "Right", "--dir", "{dir}")
    done = doctor("resume", "--resume=--resume", f"--directory={tmp_path / 'runs'}", "--", *command)
    assert (done.code, done.left) == (0, []), done
    assert "CUDA" not in done.stdout


def test_a_job_that_leaves_no_record_has_no_answer(tmp_path: pathlib.Path) -> None:
    """``python -I`` reads no PYTHONPATH."""
    command = (sys.executable, "-I", str(_PROGRAMS), "Right", "--dir", "{dir}")
    done = doctor("resume", "--resume=--resume", f"--directory={tmp_path / 'runs'}", "--", *command)
    assert (done.code, done.stdout, done.left) == (2, "", []), done
    assert "python -I" in done.stderr.splitlines()[-1]


def test_a_job_that_does_not_end_is_killed_with_all_its_processes(tmp_path: pathlib.Path) -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1e6)'])"
    arguments = ("--longest=1", f"--directory={tmp_path / 'runs'}", "--", sys.executable, "-c", sleeper, "{dir}")
    done = doctor("resume", *arguments)
    assert (done.code, done.left) == (2, []), done


@pytest.mark.parametrize(
    "arguments",
    [
        ("--", "python", "train.py"),
        ("--twice", "--steps=4", "--", "python", "train.py", "{dir}"),
        ("--directory", str(ROOT), "--", "python", "train.py", "{dir}"),
        ("--directory=runs", "--", "a-program-that-there-is-not", "{dir}"),
    ],
)
def test_a_command_that_cannot_mean_anything_is_refused(arguments: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    done = inside.doctor("resume", *arguments, cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
