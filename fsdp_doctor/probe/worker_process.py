"""One worker as its supervisor sees it: a forked process, what it says, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from fsdp_doctor.machine.launch import Place
from fsdp_doctor.probe import left_processes, worker
from fsdp_doctor.probe.activity import Activity
from fsdp_doctor.probe.instructions import StartWorker
from fsdp_doctor.probe.job import Job
from fsdp_doctor.verdict.classification import waiting_in
from fsdp_doctor.verdict.records import (
    RankReport,
    Ready,
    Record,
    Refused,
    Stop,
    message_from_dict,
)
from fsdp_doctor.verdict.tracebacks import short

_OUTPUT_KEPT = 8 * 1024
_STACKS_KEPT = 64 * 1024
_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 20.0
_STACK_SECONDS = 2.0
_STACK_AFTER_SECONDS = 3.0
_CHUNK = 1 << 16


# Of this process, those that are still to be reaped.
_workers: set[int] = set()


class WorkerProcess:
    """Starts a worker at once. Single-threaded; :meth:`pump` must be called again and again."""

    def __init__(self, place: Place, job: Job, start: StartWorker) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        stacks_read, stacks_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Importing torch can leave a helper thread behind; it holds no lock that a worker takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        _workers.add(self.pid)
        if self.pid == 0:
            ours.close()
            os.close(output_read)
            os.close(stacks_read)
            ends = worker.WorkerEnds(channel=theirs, output=output_write, stacks=stacks_write)
            _be_the_worker(parent, lambda: worker.run(place, job, start, ends), output_write)
        theirs.close()
        os.close(output_write)
        os.close(stacks_write)
        self._rank = place.rank
        self._channel = ours
        self._channel.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._readers = {
            ours.fileno(): self._read_channel,
            output_read: self._read_output,
            stacks_read: self._read_stacks,
        }
        for descriptor in self._readers:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._partial = b""
        self._output = b""
        self._stacks = b""
        self._ended = False
        self._closed = False
        self._state = _State()
        self._activity: Activity | None = None

    def begin(self, case_number: int) -> None:
        """Sends the worker its next case. One that died since the last case reports that of this one."""
        before, self._state = self._state, _State()
        if self._ended:
            self._state.exit, self._state.exit_time = before.exit, before.exit_time
        self._output = b""
        self._activity = None
        with contextlib.suppress(OSError):
            self._channel.sendall(f"{case_number}\n".encode())

    def pump(self, seconds: float) -> None:
        """Waits up to ``seconds`` for the worker, takes in what it wrote, notices its end."""
        if self._closed:
            time.sleep(seconds)
            return
        self._drain(seconds)
        if not self._ended:
            self._reap()

    def report(self) -> RankReport:
        """What is known of this rank's part in the case or the start that is under way."""
        state = self._state
        return RankReport(
            rank=self._rank,
            record=state.record,
            exit=state.exit,
            exit_time=state.exit_time,
            oom_killed=state.oom_killed,
            stopped=state.stopped,
            stopped_detail=state.stopped_detail,
            process_state=state.process_state,
            stack=state.stack,
            garbled=state.garbled,
            output=short(self._output.decode(errors="replace")),
            refused=state.refused,
            ready=state.ready,
        )

    @property
    def record(self) -> Record | None:
        """What the worker said last of its case."""
        return self._state.record

    @property
    def settled(self) -> bool:
        """Whether nothing more will come of the case or the start: the report is final."""
        state = self._state
        done = state.record is not None and state.record.done
        return bool(done or state.ready or state.refused or state.exit or state.garbled or state.stopped)

    @property
    def in_trouble(self) -> bool:
        """Whether this rank can keep the others from finishing."""
        state = self._state
        failed = state.record is not None and state.record.failure is not None
        return bool(failed or state.refused or state.exit or state.garbled or state.stopped)

    @property
    def suspended(self) -> bool:
        """Whether a signal stopped the worker, so that it must be woken to tell its stack."""
        return "stopped" in _process_state(self.pid)

    def keep_within(self, host_bytes: int | None) -> None:
        """Stops a worker whose resident memory is more than that."""
        if host_bytes is None:
            return
        resident = self._resident_bytes()
        if resident > host_bytes:
            self.stop("memory", f"held {resident >> 20} MiB of host memory, the limit is {host_bytes >> 20} MiB")

    def _resident_bytes(self) -> int:
        """0 once the worker is gone."""
        try:
            with open(f"/proc/{self.pid}/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def idle_seconds(self) -> float:
        """For how long the worker has only waited for other ranks or its device, since this was first asked here.

        Who waits for anything else, a service or a timer of a path's own, may go on by itself: its stack tells. A
        suspended worker is not asked, since that would wake it.
        """
        if self._activity is None:
            self._activity = Activity(session=self.pid)
        idle = self._activity.idle_seconds()
        if idle < _STACK_AFTER_SECONDS or self.suspended:
            return idle
        self._take_stacks()
        return idle if waiting_in(self._stacks.decode(errors="replace")) else 0.0

    def stop(self, why: Stop, detail: str) -> None:
        """Ends the worker for a reason that goes into the report, after its stacks are taken."""
        if self.settled:
            return
        state = self._state
        # What the worker says from here on may come of being woken for its stack.
        state.stopped, state.stopped_detail, state.exit_time = why, detail, time.time()
        state.process_state = _process_state(self.pid)
        self._take_stacks()
        state.stack = short(self._stacks.decode(errors="replace"))
        self.kill()

    def kill(self) -> None:
        """Terminates the worker and all it started, then kills what is left. Returns when it is gone."""
        if self._closed:
            return
        for number, patience in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)
            end = time.monotonic() + patience
            while not self._ended and time.monotonic() < end:
                self._drain(0.01)
                self._reap(by_us=True)
            if self._ended:
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._ended:
            _workers.discard(self.pid)
        left_processes.end_adopted(_workers)
        self._closed = True
        self._selector.close()
        self._channel.close()
        for descriptor, read in self._readers.items():
            if read != self._read_channel:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._readers = {}

    def _drain(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            self._readers[key.fd]()

    def _take_stacks(self) -> None:
        """Asks for every thread's stack and waits until the last one was written.

        SIGUSR1 first: a stopped process takes it as soon as SIGCONT wakes it.
        """
        self._stacks = b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
        end = time.monotonic() + _STACK_SECONDS
        quiet_since = time.monotonic()
        while time.monotonic() < end:
            before = len(self._stacks)
            self._drain(0.02)
            if len(self._stacks) != before:
                quiet_since = time.monotonic()
            elif self._stacks and time.monotonic() - quiet_since > 0.1:
                return

    def _reap(self, by_us: bool = False) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self._drain(0)
        self._ended = True
        if by_us:
            return
        code = os.waitstatus_to_exitcode(status)
        self._state.exit = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._state.exit_time = time.time()
        self._state.oom_killed = code == -signal.SIGKILL and _kernel_oom_kills() > self._state.oom_kills_before

    def _read_channel(self) -> None:
        data = self._read(self._channel.fileno())
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._state.stopped:
            return
        for line in lines:
            self._take(line)
        if not data and self._partial:
            self._state.garbled = _excerpt(self._partial)
            self._partial = b""

    def _take(self, line: bytes) -> None:
        try:
            message = message_from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._state.garbled = _excerpt(line)
            return
        match message:
            case Record():
                self._state.record = message
            case Ready():
                self._state.ready = message
            case Refused():
                self._state.refused = message

    def _read_output(self) -> None:
        self._output = (self._output + self._read(self._descriptor_of(self._read_output)))[-_OUTPUT_KEPT:]

    def _read_stacks(self) -> None:
        self._stacks = (self._stacks + self._read(self._descriptor_of(self._read_stacks)))[:_STACKS_KEPT]

    def _descriptor_of(self, reader: object) -> int:
        return next(descriptor for descriptor, read in self._readers.items() if read == reader)

    def _read(self, descriptor: int) -> bytes:
        """What there is to read; on EOF the descriptor is not watched any more."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        return data


class _State:
    """What was learned of the case or start under way."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.ready: Ready | None = None
        self.refused: Refused | None = None
        self.exit = ""
        self.exit_time = 0.0
        self.oom_killed = False
        self.oom_kills_before = _kernel_oom_kills()
        self.stopped: Stop = ""
        self.stopped_detail = ""
        self.process_state = ""
        self.stack = ""
        self.garbled = ""


def _be_the_worker(parent: int, run: Callable[[], None], output: int) -> NoReturn:
    """For the fork."""
    code = 1
    try:
        worker.become_worker(parent, output)
        run()
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _process_state(pid: int) -> str:
    """A word for a process that cannot move by itself; empty for one that can."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {
        "T": "was stopped by a signal",
        "t": "was stopped by a debugger",
        "D": "was in an uninterruptible wait",
    }.get(letter, "")


def _kernel_oom_kills() -> int:
    try:
        with open("/proc/vmstat") as vmstat:
            return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0


def _excerpt(data: bytes) -> str:
    return data[:80].decode(errors="replace")
