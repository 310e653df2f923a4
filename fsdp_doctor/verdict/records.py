"""The records that a worker sends to its supervisor, and the reports that the supervisor makes from them.

All records and reports are plain values that JSON can hold.

A worker sends the whole record of the case each time it reaches another stage. The last record that arrived tells how
far the rank came. The supervisor wraps it in a :class:`RankReport`, and adds its own observations: a signal, a
deadline, a stack.
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
    """One problem that verification found on one rank: the kind of bad verdict, and a sentence."""

    kind: ProblemKind
    detail: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as plain values.

    time: seconds since the epoch, on the rank that raised the exception.
    """

    type: str
    message: str
    traceback: str
    time: float

    @property
    def summary(self) -> str:
        """The type and the first line of the message; also the second line, if the first one ends with a colon.

        If the message contains the traceback of another exception, the last line of this traceback replaces the
        message.
        """
        # torch's CheckpointException has a traceback in its message.
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

    call: the number of the current call of the method. A user's function is called a second time after the next step.
    done: the rank has finished the case, successfully or not, and waits for the next case.
    seconds: time spent inside the method, synchronized with the device at both ends.
    peak_extra_bytes: the peak of device memory during the method, minus the memory that was allocated before it; None
        if the device does not count memory.
    num_tensors: for an extraction, the entries that the method has yielded on this rank so far; for a load, the tensors
        that were checked after it.
    yielded: the number of yielded entries for each combination of form, dtype and kind of device, once the method has
        finished.
    healthy: whether the ranks ended in the same way and the process group still works for a collective.
    refusal: ``failure`` in short, if every rank refused a checkpoint that does not fit; empty otherwise.
    retire: why no other case may run in this process, because the method changed it irreversibly; empty if it did not.
    ledgers: the memory of each stage of the scenario that was watched and has ended.
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
    """Says that a worker has its device and its process groups, and waits for cases.

    unavailable: why no case of the worker's framework can run; empty if cases can run.
    """

    environment: EnvironmentFacts
    unavailable: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Says that a worker cannot start, for a reason that is not a fault of fsdp-doctor.

    exit_code: one of the exit codes in errors.py.
    """

    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """The outcome of one phase of a test on one rank.

    report: pytest's report in pytest's serialized form.
    xfailed: the reason of a ``pytest.xfail()`` call in the phase; None if there was none.
    """

    report: dict[str, Any]
    xfailed: str | None = None


Stop = Literal["", "deadline", "memory", "others"]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's part in one case: the worker's last record, and the observations of its supervisor.

    exit: how the worker ended by itself ("SIGKILL", "exit code 3"); empty if it did not end by itself.
    exit_time: when the supervisor noticed the end, in seconds since the epoch.
    oom_killed: whether the kernel's out-of-memory killer was at work when the worker got SIGKILL.
    stopped: why the supervisor ended the worker; empty if it did not.
    stopped_detail: the same reason in words, with numbers.
    process_state: the kernel's state of the worker when it was stopped ("stopped by a signal").
    stack: the Python stacks of the worker when it was stopped, innermost frame first.
    garbled: output of the worker that is not a valid record.
    output: the last part of the worker's printed output.
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
    """Converts the exception to plain values, with the innermost frames of its traceback.

    Never raises, although any method of a user's exception class may raise.
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
    """Returns the text that ``read`` returns, or a sentence that says that it raised. Escapes characters that cannot be
    encoded.
    """
    try:
        return read().encode(errors="backslashreplace").decode()
    except BaseException as error:
        return f"({what} cannot be read: {type(error).__name__} was raised)"


def shorten_paths(text: str) -> str:
    """Shortens each file name in ``text`` to a path relative to ``sys.path``, such as ``torch/nn/functional.py``."""
    for entry in sorted({path.rstrip("/") for path in sys.path if path}, key=len, reverse=True):
        text = text.replace(f'File "{entry}/', 'File "')
    return write_home_as_tilde(text)
