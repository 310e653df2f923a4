"""Starts the process that supervises the ranks when the first marked test runs, and ends it with pytest's session.

Also defines the messages that pytest, the supervising process and the ranks exchange.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

import pytest

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.plugin.marks import RanksNeeded
from fsdp_doctor.verdict.records import PhaseReport, RankReport

# The program gets this process's sys.path, and does not import the main module that started pytest.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from fsdp_doctor.machine import imports
with imports.freeze_imports():
    from fsdp_doctor.plugin.supervision import main
main(int(sys.argv[2]))
"""
_END_SECONDS = 30.0
# Options that concern only this process, which selects the tests, judges them, reports on them, and may end early.
_FOR_THIS_PROCESS_ALONE: dict[str, Any] = {
    "capture": "no",
    "collectonly": False,
    "deselect": None,
    "dist": "no",
    "durations": None,
    "failedfirst": False,
    "htmlpath": None,
    "keyword": "",
    "lf": False,
    "looponfail": False,
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "no_cov": True,
    "numprocesses": None,
    "pastebin": None,
    "report_log": None,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "stepwise": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
}
# The plugins' names in pytest's plugin manager.
_PLUGINS_OF_THIS_PROCESS = ("terminal", "lfplugin", "nfplugin", "stepwiseplugin")


TestPhase: TypeAlias = Literal["setup", "call", "teardown"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The settings of the ranks' own pytest sessions.

    options: the parsed options of the command line.
    args: files and directories.
    scratch: a directory for all files that ranks write.
    """

    options: dict[str, Any]
    args: list[str]
    scratch: pathlib.Path


@dataclass(frozen=True, kw_only=True)
class PhaseCommand:
    """Tells a rank to run one phase of one test.

    number: the number of the test in this run.
    next_nodes: the node ids of the next test and of its parents; empty after the last test.
    still_whole: whether every rank has done the same so far and has left nothing behind, so that collectives must work.
    """

    phase: TestPhase
    file: str
    test: str
    number: int
    next_nodes: tuple[str, ...] = ()
    still_whole: bool = True

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class PhaseRequest:
    """Requests one phase of one test on every rank.

    builds_model: whether the test has a scenario.
    """

    needs: RanksNeeded
    command: PhaseCommand
    timeout: float | None
    builds_model: bool


@dataclass(frozen=True, kw_only=True)
class PhaseAnswer:
    """The reports of all ranks at the end of a phase.

    goes_on: whether the test's next phase can run in the same workers.
    """

    reports: list[RankReport]
    phases: list[PhaseReport | None]
    goes_on: bool


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Says that the requested ranks cannot be started.

    exit_code: one of the exit codes in errors.py.
    """

    reason: str
    exit_code: int


Answer: TypeAlias = PhaseAnswer | Refusal


class RankHost:
    """The supervising process. The process must first import torch, so the first answer may take seconds."""

    def __init__(self, config: pytest.Config) -> None:
        self._scratch = pathlib.Path(tempfile.mkdtemp(prefix="fsdp-doctor-"))
        self._printed = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            # A new session, so that Ctrl-C reaches only pytest.
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send(
            Preparation(options=_collect_options(config), args=list(config.args), scratch=self._scratch)
        )

    def ask(self, request: PhaseRequest) -> Answer:
        """Sends the request, and waits until the phase has ended on every rank.

        Raises DoctorFault if the process ends instead.
        """
        try:
            self._connection.send(request)
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.wait(_END_SECONDS)
            self._printed.seek(0)
            last = self._printed.read().decode(errors="replace").strip().splitlines()[-1:]
            how = f"exit code {self._process.returncode}" + (f": {last[0]}" if last else "")
            raise DoctorFault(f"the process that supervises the ranks ended with {how}") from None
        return answer

    def close(self) -> None:
        """Ends the process and its ranks, even in the middle of a test."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._printed.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _collect_options(config: pytest.Config) -> dict[str, Any]:
    """Collects the options of this run that a rank's own session needs."""
    options: dict[str, Any] = {}
    for name, value in vars(config.option).items():
        # An option that cannot be pickled is left out.
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            options[name] = value
    options |= {name: value for name, value in _FOR_THIS_PROCESS_ALONE.items() if name in options}
    options["plugins"] = [*options.get("plugins", ()), *(f"no:{name}" for name in _PLUGINS_OF_THIS_PROCESS)]
    options["rootdir"] = str(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    return options
