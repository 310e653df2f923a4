"""Runs the real program with real processes, and ends those that outlive its run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from support.emulation import needs_emulation
from support.forked import run_doctor
from support.places import ROOT, SHARED_DIRECTORY, TESTS

from fsdp_doctor.machine.launch import choose_num_ranks
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.verdict.records import RankReport

# For what never ends: the default matrix takes minutes, and longer beside other work.
LIMIT_SECONDS = 1800
_TAG = "FSDP_DOCTOR_TEST_RUN"


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run of a command. ``left``: processes of it that were still alive afterwards."""

    code: int
    stdout: str
    stderr: str
    left: list[str]
    report: Report | None = None

    def __str__(self) -> str:
        """Makes the message of a test, which pytest shortens unless it is a string."""
        return f"exit code {self.code}, left {self.left}\n{self.stdout}\n{self.stderr}"

    def result(self, ending: str) -> CaseResult:
        """The one case whose id ends so."""
        assert self.report is not None, self.stderr
        (result,) = [result for result in self.report.results if result.id.endswith(ending)]
        return result

    def kind(self, ending: str) -> str:
        return self.result(ending).verdict.kind

    def rank(self, ending: str, rank: int) -> RankReport:
        return self.result(ending).ranks[rank]


class Started:
    """A command under way, in a session of its own and tagged, so that all it started can be found."""

    def __init__(self, *command: str, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> None:
        self._tag = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if not _of_torchrun(name)}
        environment |= {_TAG: self._tag, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", **(env or {})}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd or ROOT,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def first_message(self) -> str:
        """The first line on stderr, once it is there; what follows is the run's."""
        assert self._process.stderr is not None
        return self._process.stderr.readline()

    def told(self, fifo: pathlib.Path) -> str:
        """The text that it, or a process that it started, writes into the FIFO before it ends."""
        with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as pipe, open(os.pidfd_open(self.pid), "rb") as process:
            ready, _, _ = select.select([pipe, process], [], [], LIMIT_SECONDS)
            assert pipe in ready, f"it wrote nothing: {self.wait() if ready else 'it goes on'}"
            os.set_blocking(pipe.fileno(), True)
            return pipe.read()

    def _tagged(self) -> list[psutil.Process]:
        """Lists the processes of this run that have not ended."""
        return [
            process
            for process in psutil.process_iter(["environ", "cmdline", "status"])
            if (process.info["environ"] or {}).get(_TAG) == self._tag and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def wait(self, json_file: pathlib.Path | None = None) -> Run:
        try:
            stdout, stderr = self._process.communicate(timeout=LIMIT_SECONDS)
        finally:
            left = self._end_what_is_left()
        report = read_report(json_file) if json_file is not None and json_file.exists() else None
        return Run(self._process.returncode, stdout, stderr, left, report)

    def _end_what_is_left(self) -> list[str]:
        """Ends what is left: what the kernel kills with its supervisor may need a moment to be gone."""
        end = time.monotonic() + 5
        while (alive := self._tagged()) and time.monotonic() < end:
            psutil.wait_procs(alive, timeout=0.1)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return [_command_line(process) for process in alive]


def run(*command: str, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> Run:
    return Started(*command, env=env, cwd=cwd).wait()


def python_prints(code: str, env: dict[str, str] | None = None) -> str:
    """Returns what the code prints in a new interpreter; its failure is one of the test."""
    done = run(sys.executable, "-W", "ignore", "-c", code, env=env)
    assert done.code == 0, done.stderr
    return done.stdout


def doctor(*arguments: str, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> Run:
    """``fsdp-doctor ARGUMENTS``."""
    return run(sys.executable, "-m", "fsdp_doctor", *arguments, env=env, cwd=cwd)


def start_probe(
    json_file: pathlib.Path, *arguments: str, device: str = "cpu", env: dict[str, str] | None = None
) -> Started:
    command = [sys.executable, "-m", "fsdp_doctor", "probe", "--device", device, "--json", str(json_file), *arguments]
    return Started(*command, env=env)


def forked_doctor(*arguments: str, ranks: int = 2, env: dict[str, str] | None = None) -> Run:
    """``fsdp-doctor ARGUMENTS`` on every rank, as torchrun starts it, but that no interpreter starts.

    A rank is forked from a process that has imported torch.
    """
    done = run_doctor(arguments, ranks, env or {})
    return Run(done.code, done.stdout, done.stderr, done.left)


def forked_script(script: pathlib.Path, *arguments: str, ranks: int = 2, env: dict[str, str] | None = None) -> Run:
    """``python SCRIPT ARGUMENTS`` on every rank, as torchrun starts it; forked, as :func:`forked_doctor`'s."""
    done = run_doctor(arguments, ranks, env or {}, script)
    return Run(done.code, done.stdout, done.stderr, done.left)


def probe(directory: pathlib.Path, *arguments: str, device: str = "cpu", env: dict[str, str] | None = None) -> Run:
    """``fsdp-doctor probe`` on forked ranks, with its report read back.

    Skips the test where there can be no emulated device.
    """
    if device == "emulated":
        needs_emulation()
    json_file = directory / "report.json"
    ranks = int(arguments[arguments.index("--nproc") + 1]) if "--nproc" in arguments else choose_num_ranks(device)
    done = forked_doctor("probe", "--device", device, "--json", str(json_file), *arguments, ranks=ranks, env=env)
    return dataclasses.replace(done, report=read_report(json_file) if json_file.exists() else None)


@functools.cache
def default_matrix_file() -> pathlib.Path:
    """The report of the default matrix with the fix on the emulated device, run once for all tests that read it.

    pytest's workers share it: the first that asks runs it, and the others wait. If it fails, it fails for all of them.
    """
    directory = pathlib.Path(os.environ[SHARED_DIRECTORY])
    problem = directory / "problem"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not problem.exists():
            problem.write_text("the run of the default matrix raised in another test")
            whole = probe(directory, "--fix", device="emulated")
            problem.write_text("" if whole.report is not None and whole.report.complete else whole.stderr or str(whole))
    if why := problem.read_text():
        pytest.fail(why, pytrace=False)
    return directory / "report.json"


@functools.cache
def default_matrix() -> Report:
    return read_report(default_matrix_file())


def torchrun(*arguments: str, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> Run:
    return run(sys.executable, "-m", "torch.distributed.run", *arguments, env=env, cwd=cwd)


def torchrun_script(script: pathlib.Path, directory: pathlib.Path, ranks: int = 2) -> Run:
    """A script on its ranks, with nothing of ours in their processes; what they print, rank after rank.

    Of one pipe that both print into, the lines of one rank may lie within those of the other.
    """
    arguments = (f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={directory / 'printed'}", str(script))
    done = torchrun(*arguments, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}, cwd=directory)
    stdout, stderr = (
        "".join(file.read_text() for file in sorted(directory.glob(f"printed/*/attempt_0/*/{stream}.log")))
        for stream in ("stdout", "stderr")
    )
    return dataclasses.replace(done, stdout=stdout, stderr=stderr)


def user_methods(*names: str) -> list[str]:
    return [word for name in names for word in ("--method", f"faults.{name}")]


def _command_line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


def _of_torchrun(name: str) -> bool:
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or name.startswith("TORCHELASTIC")
