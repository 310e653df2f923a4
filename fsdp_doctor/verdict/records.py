"""The records that a worker sends to its supervisor, and the reports that the supervisor makes of them: plain values,
as JSON.

A worker sends the record of the case whole, again and again, each time it reaches another
stage; the last one that arrived says how far the rank came. The supervisor wraps it in a
:class:`RankReport` with what it saw from outside: a signal, a deadline, a stack.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_doctor.examination.memory_records import StageMemory
from fsdp_doctor.machine.environment import EnvironmentFacts, write_home_as_tilde

_FRAMES = 30
_MESSAGE_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 16_000

Stage = Literal[
    "checkpoint",  # what a load is given is made: the doctor's own work
    "build",  # the model is built, sharded and (phase trained) trained for two steps
    "reference",  # the shards are joined by hand
    "offload",  # the framework's manual offload
    "staging",  # verl's load_fsdp_model_to_gpu
    "fingerprint",  # the training state is read, before the method and after it: the doctor's own work
    "extract",  # the method runs, and its tensors are read to the host
    "save",  # the framework saves
    "load",  # the method loads
    "verify",  # what was read, or loaded, is compared with what it should be: the doctor's own work
    "agree",  # the ranks tell one another how the method ended
    "next step",  # one more training step
    "test",  # a test of the user's own runs, with its fixtures
]

ProblemKind = Literal["wrong", "race", "incomplete", "misplaced", "poisoned", "leak", "order"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that verification found on one rank: a kind of bad verdict, and a sentence."""

    kind: ProblemKind
    detail: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception, as values.

    time: seconds since the epoch, on the rank that raised.
    """

    type: str
    message: str
    traceback: str
    time: float

    @property
    def summary(self) -> str:
        """The type and the first line of the message; also the next line, if the first one only announces it.

        If the message carries another exception's traceback, this is that exception's line.
        """
        # As torch's CheckpointException carries one.
        _, _, carried = self.message.partition("Traceback (most recent call last):")
        if error := next((line for line in carried.splitlines()[1:] if line and not line[0].isspace()), ""):
            return f"{self.type}: {error}"
        lines = [line.strip() for line in self.message.strip().splitlines()[:2]]
        if not lines:
            return self.type
        return f"{self.type}: {' '.join(lines) if lines[0].endswith(':') else lines[0]}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one rank in one case so far.

    call: which call of the method the rank is at. A user's function is called once more after the next step.
    done: the rank has finished the case, with success or not, and waits for the next case.
    seconds: time spent inside the method, synchronized with the device at both ends.
    peak_extra_bytes: device memory that the method had allocated at its peak, above what was
        allocated when it started; None where the device does not count memory.
    num_tensors: how many entries the method yielded on this rank so far; of a load, how many were checked after it.
    yielded: once the method has finished, how many entries of each form, dtype and kind of device.
    healthy: whether the ranks ended alike and the process group still carries a collective.
    refusal: ``failure`` in short, where every rank refused a checkpoint that does not fit; empty where one did not.
    retire: what the method left behind in the process that could not be undone, so that no other case
        may run in it; empty if there is nothing.
    ledgers: of the stages of the scenario's life that were watched and are over.
    """

    case_id: str
    stage: Stage
    call: int = 1
    failure: Failure | None = None
    unsupported: str = ""
    problems: tuple[Problem, ...] = ()
    seconds: float | None = None
    peak_extra_bytes: int | None = None
    num_tensors: int | None = None
    yielded: dict[str, int] = dataclasses.field(default_factory=dict)
    healthy: bool = True
    refusal: str = ""
    retire: str = ""
    ledgers: tuple[StageMemory, ...] = ()
    done: bool = False

    @property
    def call_in_words(self) -> str:
        """A prefix for sentences about the second call; empty for the first call."""
        return "the second call: " if self.call > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has its device and its process groups, and waits for cases.

    unavailable: why no case of the worker's framework can run; empty if they can.
    """

    environment: EnvironmentFacts
    unavailable: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A worker cannot start, for a reason that is not the doctor's fault.

    exit_code: as in errors.py.
    """

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """The outcome of one phase of a test on one rank.

    report: as pytest serializes its reports. xfailed: the reason of a ``pytest.xfail()`` in it; None without one.
    """

    report: dict[str, Any]
    xfailed: str | None = None


Stop = Literal["", "deadline", "memory", "others"]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's part in one case: the worker's last record, and what its supervisor saw.

    exit: how the worker ended by itself ("SIGKILL", "exit code 3"); empty if it did not.
    exit_time: when the supervisor noticed, in seconds since the epoch.
    oom_killed: the kernel's out-of-memory killer was at work when the worker got SIGKILL.
    stopped: why the supervisor ended the worker, if it did.
    stopped_detail: the same in words, with numbers.
    process_state: what the kernel said of the worker at that moment ("stopped by a signal").
    stack: the Python stacks of the worker when it was stopped, innermost frame first.
    garbled: the worker wrote something that is no record.
    output: the end of what the worker printed.
    """

    rank: int
    record: Record | None = None
    exit: str = ""
    exit_time: float = 0.0
    oom_killed: bool = False
    stopped: Stop = ""
    stopped_detail: str = ""
    process_state: str = ""
    stack: str = ""
    garbled: str = ""
    output: str = ""
    refused: Refused | None = None
    ready: Ready | None = None


def make_failure(error: BaseException) -> Failure:
    """The exception as values, with the innermost frames of its traceback. Never raises, though any method of a user's
    exception class may.
    """
    return Failure(
        type=type(error).__name__,
        message=_make_readable(lambda: write_home_as_tilde(str(error)[:_MESSAGE_CHARACTERS]), "its message"),
        traceback=_make_readable(lambda: _format_traceback(error), "its traceback"),
        time=time.time(),
    )


def _format_traceback(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES)
    except Exception:
        lines = [*traceback.format_tb(error.__traceback__, limit=-_FRAMES), f"{type(error).__name__}\n"]
    return shorten_paths("".join(line[:_MESSAGE_CHARACTERS] for line in lines))[-_TRACEBACK_CHARACTERS:]


def _make_readable(read: Callable[[], str], what: str) -> str:
    """Returns the text, or if reading it raises, a sentence that says so. Escapes characters that no file can hold."""
    try:
        return read().encode(errors="backslashreplace").decode()
    except BaseException as error:
        return f"({what} cannot be read: {type(error).__name__} was raised)"


def shorten_paths(text: str) -> str:
    """``text`` with each file named as an import would find it: ``torch/distributed/...``, ``fsdp_doctor/...``."""
    for entry in sorted({path.rstrip("/") for path in sys.path if path}, key=len, reverse=True):
        text = text.replace(f'File "{entry}/', 'File "')
    return write_home_as_tilde(text)
