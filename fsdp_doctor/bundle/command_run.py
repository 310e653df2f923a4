"""Runs a command, and keeps its output, its exit code, and the stacks of its ranks if it hangs.

The command runs unchanged, with this process's standard input. Environment variables are added that make Python and
torch report more about a failure; variables that the user has set are kept.

The ranks write their stacks themselves: ``PYTHONFAULTHANDLER`` switches on Python's faulthandler, which writes the
stacks of all threads at SIGABRT, after which the process ends. Therefore stacks are taken only when the command has to
end anyway. All processes are suspended before the signal is sent; otherwise, the end of the first process would make
torchrun end the others, or would wake processes that wait for the first.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, TypeAlias

import psutil

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.versions import is_at_least, read_installed_versions
from fsdp_doctor.probe.processes import adopt_orphans
from fsdp_doctor.text import find_main_thread

# Matches the frames of torch, of other packages and of Python itself.
_OTHERS = re.compile(r"/torch/|-packages/|/lib/python|<frozen ")
_STACK_BEGINS = ("Fatal Python error", "Current thread", "Thread 0x")
_STACK_SECONDS = 5.0
NO_STACK = "no stack: the process is not a Python process, or handles SIGABRT itself"


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The Python stack of one rank.

    stack: faulthandler's text, or the reason why it is missing.
    """

    name: str
    stack: str

    @property
    def place(self) -> str:
        """The innermost frame outside torch, other packages and Python; if there is none, the innermost frame."""
        frames = [line.strip() for line in find_main_thread(self.stack) if line.lstrip().startswith("File ")]
        outside = [frame for frame in frames if not _OTHERS.search(frame)]
        return (outside or frames or [NO_STACK])[0]


def take_stacks(output: Callable[[float], bytes]) -> list[RankStack]:
    """Returns the stacks of the ranks among this process's descendants, and ends these ranks.

    output: a function that waits up to the given number of seconds, and returns the output that the command wrote
        during this time.
    """
    processes = _find_descendants()
    ranks = _find_ranks(processes)
    _send(processes, signal.SIGSTOP)
    output(0.2)
    return [RankStack(name=name, stack=_take_stack(process, output)) for name, process in ranks.items()]


def end_descendants() -> None:
    """Ends all descendants of this process."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes = _find_descendants()
        _send(processes, number)
        _send(processes, signal.SIGCONT)
        psutil.wait_procs(processes, timeout=3)


def _find_descendants() -> list[psutil.Process]:
    """Returns all descendants of this process that have not ended, parents before their children."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _find_ranks(processes: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """Maps names such as ``rank 0`` to processes.

    The process of a rank is the first process whose environment variable RANK is this rank. If no process has this
    variable, every Python process is returned.
    """
    ranks: dict[int, psutil.Process] = {}
    pythons = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number = process.environ().get("RANK", "")
            if number.isdecimal():
                ranks.setdefault(int(number), process)
            if "python" in pathlib.Path(process.exe()).name:
                pythons[f"process {process.pid}"] = process
    return {f"rank {rank}": process for rank, process in sorted(ranks.items())} or pythons


def _take_stack(process: psutil.Process, output: Callable[[float], bytes]) -> str:
    # The file to which standard error is redirected, as by torchrun's --redirects; None if it is not redirected.
    file: pathlib.Path | None = None
    with contextlib.suppress(psutil.Error):
        file = next((pathlib.Path(each.path) for each in process.open_files() if each.fd == 2), None)
    begin = file.stat().st_size if file is not None else 0
    # No core dump is written, which could have gigabytes.
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        process.rlimit(psutil.RLIMIT_CORE, (0, process.rlimit(psutil.RLIMIT_CORE)[1]))
    _send([process], signal.SIGABRT)
    _send([process], signal.SIGCONT)
    written = b""
    left = _STACK_SECONDS
    while left > 0 and psutil.wait_procs([process], timeout=0.05)[1]:
        written += output(0.05)
        left -= 0.1
    written += output(0.05)
    if file is not None:
        with contextlib.suppress(OSError), open(file, "rb") as stream:
            stream.seek(begin)
            written += stream.read(1 << 20)
    text = written.decode(errors="replace")
    begins = [at for word in _STACK_BEGINS if (at := text.find(word)) >= 0]
    return text[min(begins) :].split("\nExtension modules:")[0].strip() if begins else NO_STACK


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


CommandEnd: TypeAlias = Literal["exited", "hung", "overdue", "stopped"]

# The variables that switch on the flight recorder and set the path of its dumps: those of torch before 2.9, and those
# of torch 2.9 and later. Each torch warns about the names of the other.
_RECORDER = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER_FROM_2_9 = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
_MOST_OUTPUT = 512 << 20
_CHUNK = 1 << 16
_SUMMARY_BYTES = 1 << 18
_FAILED = re.compile(r"^\s*rank\s*: (\d{1,6})\b.*\n\s*exitcode\s*: (-?\d{1,6})\b", re.MULTILINE)
# Seconds to read output after the command has ended, because a process that it left behind may keep the output open.
_AFTER_END_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class CommandRun:
    """The outcome of a command.

    exit_code: negative for a signal; None if this process ended the command.
    seconds: the duration of the run.
    silent: the seconds from the last output to the end.
    rank_exit_codes: the exit codes of the failed ranks by rank, as torchrun prints them.
    output: the file with the output.
    dumps: files of torch's flight recorder.
    """

    command: tuple[str, ...]
    end: CommandEnd
    exit_code: int | None
    seconds: float
    silent: float
    output: pathlib.Path
    rank_exit_codes: Mapping[int, int] = field(default_factory=dict)
    dumps: tuple[pathlib.Path, ...] = ()
    stacks: tuple[RankStack, ...] = ()

    @property
    def sentence(self) -> str:
        match self.end:
            case "exited":
                return f"The command ended after {self.seconds:.0f} s with {self._exit}."
            case "hung":
                silence = f"it wrote nothing for {self.silent:.0f} s"
                return f"The command hung: {silence}, and was ended after {self.seconds:.0f} s."
            case "overdue":
                return f"The command was ended after {self.seconds:.0f} s, its time limit."
            case "stopped":
                silence = f"{self.silent:.0f} s after its last output"
                return f"The command was stopped by its user after {self.seconds:.0f} s, {silence}."

    @property
    def _exit(self) -> str:
        if self.exit_code is not None and self.exit_code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-self.exit_code).name
        return f"exit code {self.exit_code}"


def run(
    command: Sequence[str],
    *,
    output: pathlib.Path,
    dumps: pathlib.Path,
    hang_after: float,
    longest: float = math.inf,
    variables: Mapping[str, str] | None = None,
) -> CommandRun:
    """Runs ``command``, shows its output, and ends it if it writes nothing for ``hang_after`` seconds.

    Returns the outcome. Raises UsageError if the command cannot be started.

    output: the file for the command's output.
    dumps: a new folder for torch's flight recorder.
    longest: the most seconds that the command may run.
    variables: additional environment variables.
    """
    # Makes processes that the command leaves behind children of this process, so that they can be ended.
    adopt_orphans()
    dumps.mkdir()
    environment = {**_choose_diagnostic_variables(dumps), **os.environ, **(variables or {})}
    begun = time.monotonic()
    process = _start(command, environment)
    with open(output, "wb") as kept, _turn_signals_into_interrupts():
        watched = _Output(process, kept)
        end: CommandEnd = "hung"
        stacks: list[RankStack] = []
        try:
            try:
                end = watched.wait_for_end(hang_after, begun + longest)
            except KeyboardInterrupt:
                end = "stopped"
            silent = watched.silent_seconds
            if end != "exited":
                stacks = take_stacks(watched.collect)
        finally:
            # If the command ended by itself, the processes that it left behind are meant to continue.
            if end != "exited":
                end_descendants()
            process.wait()
    return CommandRun(
        command=tuple(command),
        end=end,
        exit_code=process.returncode if end == "exited" else None,
        seconds=time.monotonic() - begun,
        silent=silent,
        output=output,
        rank_exit_codes=_read_rank_exit_codes(output),
        dumps=tuple(sorted(file for file in dumps.iterdir() if file.stat().st_size)),
        stacks=tuple(stacks),
    )


def _choose_diagnostic_variables(dumps: pathlib.Path) -> dict[str, str]:
    torch = read_installed_versions(["torch"]).get("torch", "")
    size, place = _RECORDER_FROM_2_9 if torch and is_at_least(torch, "2.9") else _RECORDER
    return {
        "PYTHONFAULTHANDLER": "1",
        size: "2000",
        place: str(dumps / "nccl_trace_rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the command in a new session, so that Ctrl-C reaches only this process.

    Raises UsageError if the command cannot be started.
    """
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    except OSError as error:
        hint = "; a log is given with --log, a configuration with --config" if os.path.exists(command[0]) else ""
        raise UsageError(f"cannot start {shlex.join(command)}: {error.strerror or error}{hint}") from None


def _read_rank_exit_codes(output: pathlib.Path) -> dict[int, int]:
    """Reads the exit codes of the ranks that failed from the summary at the end of torchrun's output."""
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - _SUMMARY_BYTES))
        text = file.read().decode(errors="replace")
    return {int(rank): int(code) for rank, code in _FAILED.findall(text)}


class _Output:
    """The output of the command. It is shown on standard error as it arrives, and kept in a file up to a limit."""

    def __init__(self, process: subprocess.Popen[bytes], kept: BinaryIO) -> None:
        assert process.stdout is not None
        self._process = process
        self._descriptor = process.stdout.fileno()
        self._kept = kept
        self._size = 0
        self._last = time.monotonic()
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._descriptor, selectors.EVENT_READ)

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._last

    def wait_for_end(self, hang_after: float, deadline: float) -> Literal["exited", "hung", "overdue"]:
        """Shows the output until the command ends, is silent for ``hang_after`` seconds, or passes the deadline.

        Returns which of the three happened.
        """
        ended_at: float | None = None
        while self._open:
            self._show(self._read(min(0.5, hang_after)))
            if ended_at is None and self._process.poll() is not None:
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > _AFTER_END_SECONDS:
                return "exited"
            if ended_at is None and self.silent_seconds >= hang_after:
                return "hung"
            if ended_at is None and time.monotonic() >= deadline:
                return "overdue"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(hang_after)
        return "exited" if self._process.returncode is not None else "hung"

    def collect(self, seconds: float) -> bytes:
        """Returns the output of the next ``seconds`` without showing it."""
        end = time.monotonic() + seconds
        output = b""
        while self._open and (left := end - time.monotonic()) > 0:
            output += self._read(left)
        return output

    def _read(self, seconds: float) -> bytes:
        if not self._selector.select(seconds):
            return b""
        data = os.read(self._descriptor, _CHUNK)
        if not data:
            self._selector.unregister(self._descriptor)
            self._open = False
        return data

    def _show(self, data: bytes) -> None:
        if not data:
            return
        self._last = time.monotonic()
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()
        if self._size < _MOST_OUTPUT:
            self._size += len(data)
            # A full disk must not end a run of hours. The beginning of the log is already written.
            with contextlib.suppress(OSError):
                self._kept.write(data)
                self._kept.flush()


@contextlib.contextmanager
def _turn_signals_into_interrupts() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the command as Ctrl-C does.

    The command's output is kept, and none of its processes is left running.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before: list[Callable[..., object] | int | None] = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
