"""``fsdp-doctor bundle -- COMMAND``: output, exit codes, and every rank's stack if it hangs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import zipfile

import pytest
from program import Run, Started, doctor

_HUNG = """
import os, threading

def waits_for_rank_1():
    threading.Event().wait()

def waits_for_nobody():
    threading.Event().wait()

print("in place", flush=True)
waits_for_rank_1() if os.environ["RANK"] == "0" else waits_for_nobody()
"""
# As torchrun does: each rank in a session of its own, and all are ended as soon as one has ended.
_LAUNCHER = """
import os, signal, subprocess, sys, threading

ranks = [
    subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "RANK": str(rank)}, start_new_session=True)
    for rank in range(2)
]
os.waitid(os.P_ALL, 0, os.WEXITED)
for rank in ranks:
    rank.terminate()
"""
_WAITING = """
import os, subprocess, sys, threading

def stuck_here():
    os.write(1, b"in place\\n")
    threading.Event().wait()

if len(sys.argv) > 1:
    started = [subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(process.wait() for process in started))
stuck_here()
"""
_FAILING = """
import sys
print("torch.distributed", sys.stdin.read(), flush=True)
raise RuntimeError("Attempted to set the storage of a tensor on device cpu to a storage on different device cuda:0")
"""


@dataclasses.dataclass(frozen=True)
class Made:
    """A run of the program, and the files of the bundle that it made."""

    run: Run
    files: dict[str, str]
    beside: list[str]


def _made(directory: pathlib.Path, done: Run) -> Made:
    with zipfile.ZipFile(directory / "bug.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    return Made(done, files, sorted(file.name for file in directory.iterdir()))


def _bundle(directory: pathlib.Path, script: str, *launcher: str, hang_after: float = 60.0) -> Made:
    (directory / "train.py").write_text(script)
    options = ("--hang-after", str(hang_after), "-o", str(directory / "bug.zip"))
    return _made(directory, doctor("bundle", *options, "--", sys.executable, *launcher, str(directory / "train.py")))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _bundle(tmp_path_factory.mktemp("failed"), _FAILING)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("hung")
    launcher = tmp_path_factory.mktemp("launcher") / "launcher.py"
    launcher.write_text(_LAUNCHER)
    return _bundle(directory, _HUNG, str(launcher), hang_after=5.0)


def test_the_bundle_of_a_failed_command_has_its_output_and_exit_code(failed: Made) -> None:
    assert failed.run.code == 0, failed.run.stderr
    assert "exit code 1" in failed.files["command.txt"]
    assert "Attempted to set the storage" in failed.files["log.txt"]
    assert "Attempted to set the storage" in failed.files["explain.txt"]
    assert set(failed.files) >= {"issue.md", "environment.txt", "replaced.txt"}


def test_what_the_command_writes_is_shown_as_it_comes(failed: Made) -> None:
    assert "Attempted to set the storage" in failed.run.stderr
    assert "Attempted" not in failed.run.stdout


def test_nothing_but_the_bundle_and_no_process_is_left(failed: Made, hung: Made) -> None:
    assert failed.beside == hung.beside == ["bug.zip", "train.py"]
    assert failed.run.left == hung.run.left == []


def test_each_rank_reports_its_stack_before_the_launcher_ends_all_ranks(hung: Made) -> None:
    assert hung.run.code == 0, hung.run.stderr
    stacks = hung.files["stacks.txt"]
    of_rank_0, of_rank_1 = stacks.split("rank 1:")
    assert "in waits_for_rank_1" in of_rank_0
    assert "in waits_for_nobody" in of_rank_1
    assert "waits_for_nobody" not in of_rank_0


def test_the_first_ten_lines_say_that_it_hung_and_where(hung: Made) -> None:
    first = "\n".join(hung.files["issue.md"].splitlines()[:10])
    assert "The command hung: it wrote nothing for 5 s" in first
    assert "in waits_for_rank_1" in first
    assert "in waits_for_nobody" in first


def test_ctrl_c_gives_the_stacks_of_a_command_that_does_not_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(_WAITING)
    bundle = ("bundle", "-o", str(tmp_path / "bug.zip"), "--", sys.executable, str(tmp_path / "train.py"), "start")
    started = Started(sys.executable, "-m", "fsdp_doctor", *bundle)
    assert started.first_message() == "in place\n"
    assert started.first_message() == "in place\n"
    started.interrupt()
    made = _made(tmp_path, started.wait())
    assert made.run.code == 0, made.run.stderr
    assert made.files["stacks.txt"].count("in stuck_here") == 2
    assert "rank 0" in made.files["stacks.txt"]
    assert "stopped" in made.files["command.txt"]


def test_a_command_that_cannot_be_started_is_one_sentence(tmp_path: pathlib.Path) -> None:
    done = doctor("bundle", "-o", str(tmp_path / "bug.zip"), "--", "/nowhere/at-all")
    assert (done.code, done.stderr) == (2, "fsdp-doctor: cannot start /nowhere/at-all: No such file or directory\n")
    assert list(tmp_path.iterdir()) == []
    log = tmp_path / "job.log"
    log.touch()
    done = doctor("bundle", "-o", str(tmp_path / "bug.zip"), "--", str(log))
    assert (done.code, "a log is given with --log" in done.stderr) == (2, True)
