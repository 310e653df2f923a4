"""Runs a command as it stands, and keeps what it wrote, how it ended, and where its ranks were if it did not end.

The command is changed in nothing but environment variables that make Python and torch say more when something is wrong;
those that the user has set stay as they are. Its standard input is this process's.
"""

from __future__ import annotations

import contextlib
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

from fsdp_doctor.bundle import processes, rank_stacks
from fsdp_doctor.bundle.rank_stacks import RankStack
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.versions import at_least, installed_versions

CommandEnd: TypeAlias = Literal["exited", "hung", "stopped"]

# By the torch that has it, and warns of the other: what makes the flight recorder run, and where it puts its dumps.
_RECORDER = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER_FROM_2_9 = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
_MOST_OUTPUT = 512 << 20
_CHUNK = 1 << 16
_SUMMARY_BYTES = 1 << 18
_FAILED = re.compile(r"^\s*rank\s*: (\d{1,6})\b.*\n\s*exitcode\s*: (-?\d{1,6})\b", re.MULTILINE)
# After its end a command may have left something that holds its output open.
_AFTER_END_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class CommandRun:
    """How a command went.

    exit_code: negative for a signal; None where it was ended from here. seconds: that it ran. silent: how long it had
    written nothing at the end. rank_exit_codes: by rank, those that torchrun tells.
    output: the file with all that it wrote. dumps: of torch's flight recorder.
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
            case "stopped":
                silence = f"{self.silent:.0f} s after its last output"
                return f"The command was stopped by its user after {self.seconds:.0f} s, {silence}."

    @property
    def _exit(self) -> str:
        if self.exit_code is not None and self.exit_code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-self.exit_code).name
        return f"exit code {self.exit_code}"


def run(command: Sequence[str], *, output: pathlib.Path, dumps: pathlib.Path, hang_after: float) -> CommandRun:
    """Runs ``command``, shows what it writes, and ends it if it writes nothing for ``hang_after`` seconds.

    output: the file that takes what it writes. dumps: a new folder for torch's flight recorder. Raises UsageError where
    the command cannot be started.
    """
    processes.keep_orphans()
    dumps.mkdir()
    environment = {**_say_more(dumps), **os.environ}
    begun = time.monotonic()
    process = _started(command, environment)
    with open(output, "wb") as kept, _signals_as_interrupts():
        watched = _Output(process, kept)
        end: CommandEnd = "hung"
        stacks: list[RankStack] = []
        try:
            try:
                end = "exited" if watched.until_end(hang_after) else "hung"
            except KeyboardInterrupt:
                end = "stopped"
            silent = watched.silent_seconds
            if end != "exited":
                stacks = rank_stacks.take(os.getpid(), watched.collect)
        finally:
            # What a command that ended by itself has left running is its own business.
            if end != "exited":
                rank_stacks.end(os.getpid())
            process.wait()
    return CommandRun(
        command=tuple(command),
        end=end,
        exit_code=process.returncode if end == "exited" else None,
        seconds=time.monotonic() - begun,
        silent=silent,
        output=output,
        rank_exit_codes=_rank_exit_codes(output),
        dumps=tuple(sorted(file for file in dumps.iterdir() if file.stat().st_size)),
        stacks=tuple(stacks),
    )


def _say_more(dumps: pathlib.Path) -> dict[str, str]:
    torch = installed_versions(["torch"]).get("torch", "")
    size, place = _RECORDER_FROM_2_9 if torch and at_least(torch, "2.9") else _RECORDER
    return {
        "PYTHONFAULTHANDLER": "1",
        size: "2000",
        place: str(dumps / "nccl_trace_rank_"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def _started(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C comes to us alone, and the ranks' stacks can be taken."""
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    except OSError as error:
        raise UsageError(f"cannot start {shlex.join(command)}: {error.strerror or error}") from None


def _rank_exit_codes(output: pathlib.Path) -> dict[int, int]:
    """Of the ranks that failed, as the summary at the end of torchrun's output has them."""
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - _SUMMARY_BYTES))
        text = file.read().decode(errors="replace")
    return {int(rank): int(code) for rank, code in _FAILED.findall(text)}


class _Output:
    """What the command writes: shown on standard error as it comes, and kept up to a size."""

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

    def until_end(self, hang_after: float) -> bool:
        """Whether the command ended; False where it wrote nothing for so many seconds."""
        ended_at: float | None = None
        while self._open:
            self._show(self._read(min(0.5, hang_after)))
            if ended_at is None and self._process.poll() is not None:
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > _AFTER_END_SECONDS:
                return True
            if ended_at is None and self.silent_seconds >= hang_after:
                return False
        return processes.wait_for_end(self._process.pid, hang_after)

    def collect(self, seconds: float) -> bytes:
        """What comes within that time, which is not shown."""
        end = time.monotonic() + seconds
        found = b""
        while self._open and (left := end - time.monotonic()) > 0:
            found += self._read(left)
        return found

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
            # A disk that is full does not end a run of hours; the beginning of the log is there.
            with contextlib.suppress(OSError):
                self._kept.write(data)
                self._kept.flush()


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does: what it wrote is kept, and nothing of it stays behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before: list[Callable[..., object] | int | None] = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
