"""Starts workers, receives their messages and ends them: a single worker, or one for each rank of a node."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil
from typing_extensions import assert_never

from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, UsageError
from fsdp_doctor.machine.signals import die_with_parent
from fsdp_doctor.probe.deadlines import Deadlines, Limits, Watch
from fsdp_doctor.probe.messages import MESSAGES, Message, decode, encode
from fsdp_doctor.probe.processes import Activity, end_orphans
from fsdp_doctor.verdict.classification import find_wait
from fsdp_doctor.verdict.records import PhaseReport, RankReport, Ready, Record, Refused, Stop, shorten_paths

# Polling intervals are short at first, so that supervision adds little to a case of some milliseconds. They are longer
# later, to leave the processor to the workers.
SHORT_POLL, LONG_POLL, SHORT_PHASE = 0.002, 0.02, 0.3
IDLE_POLL = 0.5
_OUTPUT_KEPT = 8 * 1024
_STACKS_KEPT = 64 * 1024
_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 20.0
_STACK_SECONDS = 2.0
_STACK_AFTER_SECONDS = 3.0
_CHUNK = 1 << 16
_STATE_IN_WORDS: dict[str, str] = {
    psutil.STATUS_STOPPED: "was stopped by a signal",
    psutil.STATUS_TRACING_STOP: "was stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "was in an uninterruptible wait",
}
_ERROR_OF_EXIT_CODE: dict[int, Callable[[str], FsdpDoctorError]] = {2: UsageError, 3: CannotRun}
# The process ids of this process's workers that are not yet reaped.
_workers: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class WorkerEnds:
    """A worker's ends of the connections to its supervisor.

    channel: the worker sends messages as lines of JSON, and receives commands as lines. A probe's command is the number
        of a case.
    output: the file descriptor that stdout and stderr are redirected to.
    stacks: the file descriptor to which SIGUSR1 writes the Python stack of every thread.
    """

    channel: socket.socket
    output: int
    stacks: int

    def write_stacks(self) -> None:
        """Makes SIGUSR1 write the stacks of all threads to ``stacks``, and a fatal signal write them to stderr."""
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)

    def send(self, message: Message) -> None:
        self.channel.sendall(encode(message).encode() + b"\n")


class WorkerProcess:
    """A worker, which the constructor starts. Single-threaded: :meth:`pump` must be called repeatedly.

    run: the function that the fork calls; the worker ends when it returns.
    ended: whether the process has ended.
    phase_report: the report of the worker's pytest on its phase of a test.
    """

    def __init__(self, rank: int, run: Callable[[WorkerEnds], None]) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        stacks_read, stacks_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Importing torch can leave a helper thread running. The thread holds no lock that a worker takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        _workers.add(self.pid)
        if self.pid == 0:
            ours.close()
            os.close(output_read)
            os.close(stacks_read)
            ends = WorkerEnds(channel=theirs, output=output_write, stacks=stacks_write)
            _be_the_worker(parent, lambda: run(ends), output_write)
        theirs.close()
        os.close(output_write)
        os.close(stacks_write)
        self._channel = ours
        self._pipes = (output_read, stacks_read)
        self._selector = selectors.DefaultSelector()
        for descriptor, take in (
            (ours.fileno(), self._take_messages),
            (output_read, self._take_output),
            (stacks_read, self._take_stack),
        ):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, take)
        self._partial = b""
        self._output = b""
        self._stacks = b""
        self.ended = False
        self._closed = False
        self._activity: Activity | None = None
        self._report = RankReport(rank=rank)
        self._oom_kills_before = _count_oom_kills()
        self.phase_report: PhaseReport | None = None

    def begin(self, command: str) -> None:
        """Sends the worker its next command, a line.

        If the worker died since the last command, its death is reported for this command.
        """
        before = self._report
        self._report = RankReport(rank=before.rank)
        if self.ended:
            self._note(exit=before.exit, exit_time=before.exit_time)
        self._oom_kills_before = _count_oom_kills()
        self.phase_report = None
        self._output = b""
        self._activity = None
        with contextlib.suppress(OSError):
            self._channel.sendall(f"{command}\n".encode())

    def let_go(self) -> None:
        """Tells the worker that no command follows, so that it ends by itself."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def pump(self, seconds: float) -> None:
        """Waits up to ``seconds`` for the worker, reads its output, and notices if it has ended."""
        if self._closed:
            time.sleep(seconds)
            return
        self._drain(seconds)
        if not self.ended:
            self._reap()

    def make_report(self) -> RankReport:
        """Returns this rank's report on the current case or start, as far as it is known."""
        return dataclasses.replace(self._report, output=shorten_paths(self._output.decode(errors="replace")))

    @property
    def record(self) -> Record | None:
        """The worker's last record of its case; None if there is none."""
        return self._report.record

    @property
    def settled(self) -> bool:
        """Returns whether the report of the case or the start is final."""
        report = self._report
        done = report.record is not None and report.record.done
        return bool(done or report.ready or self._has_ended)

    @property
    def in_trouble(self) -> bool:
        """Returns whether this rank can keep the others from finishing."""
        report = self._report
        failed = report.record is not None and report.record.failure is not None
        return failed or self._has_ended

    @property
    def _has_ended(self) -> bool:
        report = self._report
        return bool(report.refused or report.exit or report.garbled or report.stopped)

    @property
    def suspended(self) -> bool:
        """Returns whether a signal or a debugger stopped the worker, so that it must be woken to write its stack."""
        return self._process_status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def keep_within(self, host_bytes: int | None) -> None:
        """Stops the worker if its resident memory exceeds the limit."""
        if host_bytes is None:
            return
        resident = 0
        with contextlib.suppress(psutil.Error):
            resident = psutil.Process(self.pid).memory_info().rss
        if resident > host_bytes:
            self.stop("memory", f"held {resident >> 20} MiB of host memory, but the limit is {host_bytes >> 20} MiB")

    def measure_idle_seconds(self) -> float:
        """Returns for how long the worker has only waited for other ranks or its device.

        The time begins with the first call for the current case. A worker that waits for anything else, such as a
        service or a timer, may continue by itself, and does not count as idle; its stack shows the difference. A
        suspended worker is not asked for its stack, because the request would wake it.
        """
        if self._activity is None:
            self._activity = Activity(session=self.pid)
        idle = self._activity.measure_idle_seconds()
        if idle < _STACK_AFTER_SECONDS or self.suspended:
            return idle
        self._ask_for_stacks()
        return idle if find_wait(self._stacks.decode(errors="replace")) else 0.0

    def stop(self, why: Stop, detail: str) -> None:
        """Ends the worker after its stacks are taken. ``why`` and ``detail`` go into the report."""
        if not self.settled:
            self.report_stop(why, detail)
            self.kill()

    def report_stop(self, why: Stop, detail: str) -> None:
        """Takes the worker's stacks, and reports that the worker is stopped. The caller must kill the worker."""
        # Later messages of the worker may only result from being woken for its stack.
        state = _STATE_IN_WORDS.get(self._process_status(), "")
        self._note(stopped=why, stopped_detail=detail, exit_time=time.time(), process_state=state)
        self._ask_for_stacks()
        self._note(stack=shorten_paths(self._stacks.decode(errors="replace")))

    def kill(self) -> None:
        """Terminates the worker and its processes, then kills those that remain. Returns when the worker has ended."""
        if self._closed:
            return
        for number, patience in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)
            end = time.monotonic() + patience
            while not self.ended and time.monotonic() < end:
                self._drain(0.01)
                self._reap(by_us=True)
            if self.ended:
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.ended:
            _workers.discard(self.pid)
        end_orphans(_workers)
        self._closed = True
        self._selector.close()
        self._channel.close()
        for descriptor in self._pipes:
            os.close(descriptor)

    def _process_status(self) -> str:
        """Returns the kernel's status of the process; empty if the process has ended."""
        with contextlib.suppress(psutil.Error):
            return str(psutil.Process(self.pid).status())
        return ""

    def _ask_for_stacks(self) -> None:
        """Asks for the stack of every thread, and waits until the last stack is written.

        SIGUSR1 is sent first, so that a stopped process handles it as soon as SIGCONT wakes it.
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
        self.ended = True
        if by_us:
            return
        code = os.waitstatus_to_exitcode(status)
        self._note(
            exit=signal.Signals(-code).name if code < 0 else f"exit code {code}",
            exit_time=time.time(),
            oom_killed=code == -signal.SIGKILL and _count_oom_kills() > self._oom_kills_before,
        )

    def _note(self, **fields: Any) -> None:
        self._report = dataclasses.replace(self._report, **fields)

    def _drain(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, _CHUNK)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(key.fd)
            key.data(data)

    def _take_messages(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._report.stopped:
            return
        for line in lines:
            self._take_message(line)
        if not data and self._partial:
            self._note(garbled=_cut_excerpt(self._partial))
            self._partial = b""

    def _take_message(self, line: bytes) -> None:
        try:
            message = decode(line, MESSAGES)
        except ValueError:
            self._note(garbled=_cut_excerpt(line))
            return
        match message:
            case Record():
                self._note(record=message)
            case Ready():
                self._note(ready=message)
            case Refused():
                self._note(refused=message)
            case PhaseReport():
                self.phase_report = message
            case _:
                assert_never(message)

    def _take_output(self, data: bytes) -> None:
        self._output = (self._output + data)[-_OUTPUT_KEPT:]

    def _take_stack(self, data: bytes) -> None:
        self._stacks = (self._stacks + data)[:_STACKS_KEPT]


def _become_worker(parent: int, output: int) -> None:
    """Prepares a forked worker before it does anything else.

    The worker leads a new session, so that Ctrl-C reaches only the supervisor, and all processes that the worker starts
    can be ended together with the worker. The worker dies with its supervisor, in whatever way the supervisor ends.

    output: the file descriptor for stdout and stderr.
    """
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _be_the_worker(parent: int, run: Callable[[], None], output: int) -> NoReturn:
    """Runs the forked process until its end."""
    code = 1
    try:
        _become_worker(parent, output)
        run()
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _count_oom_kills() -> int:
    try:
        with open("/proc/vmstat") as vmstat:
            return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0


def _cut_excerpt(data: bytes) -> str:
    return data[:80].decode(errors="replace")


class WorkerGroup:
    """Forks a worker for each rank of one node at once, and supervises the workers without a store.

    :meth:`close` ends the workers.

    runs: the function that each rank's fork calls; the worker ends when it returns.
    check: a function that is called repeatedly while the group is waited for; an exception that it raises ends the
        wait.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[WorkerEnds], None]],
        limits: Limits,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._deadlines = Deadlines(limits)
        self._check = check
        self._workers: list[WorkerProcess] = []
        self._idle_seconds = 0.0
        try:
            for rank, run in enumerate(runs):
                self._workers.append(WorkerProcess(rank, run))
        except BaseException:
            self.close()
            raise

    def wait_until_started(self) -> list[RankReport]:
        """Waits until every rank is ready, has refused, has ended, or was stopped. Returns the report of every rank."""
        return self._collect_reports(self._deadlines)

    def perform(self, command: str, timeout: float | None = None) -> list[RankReport]:
        """Sends the command to every worker.

        Returns the report of every rank once all have finished it or were stopped.

        timeout: seconds without progress that the command's test may take; None for the group's limits.
        """
        for member in self._workers:
            member.begin(command)
        if timeout is None:
            return self._collect_reports(self._deadlines)
        return self._collect_reports(Deadlines(self._limits, test_timeout=timeout))

    def read_phase_reports(self) -> list[PhaseReport | None]:
        """Returns pytest's report on the last command for each rank; None for a rank without a report."""
        return [member.phase_report for member in self._workers]

    def end(self, seconds: float) -> None:
        """Lets all workers end by themselves, and after ``seconds`` ends the remaining ones."""
        for member in self._workers:
            member.let_go()
        end = time.monotonic() + seconds
        while not all(member.ended for member in self._workers) and time.monotonic() < end:
            for member in self._workers:
                member.pump(LONG_POLL / len(self._workers))
        self.close()

    def close(self) -> None:
        """Ends all workers and all processes that they have started."""
        for member in self._workers:
            member.kill()

    def _collect_reports(self, deadlines: Deadlines) -> list[RankReport]:
        began = asked_at = time.monotonic()
        watch = Watch(deadlines, self._limits.grace, [member.record for member in self._workers])
        self._idle_seconds = 0.0
        while working := [member for member in self._workers if not member.settled]:
            self._check()
            now = time.monotonic()
            poll = SHORT_POLL if now - began < SHORT_PHASE else LONG_POLL
            for member in self._workers:
                member.pump(poll / len(self._workers))
                member.keep_within(self._limits.host_bytes)
            if now - asked_at > IDLE_POLL:
                asked_at = now
                self._idle_seconds = min(member.measure_idle_seconds() for member in working)
            records = [member.record for member in self._workers]
            if stop := watch.look(
                records, lambda: any(member.in_trouble for member in self._workers), lambda: self._idle_seconds
            ):
                # Suspended workers come last: once woken for its stack, a worker would let the others' collectives
                # finish. No worker is killed before all stacks are taken, because its end would wake those that wait.
                stopped = [member for member in working if not member.settled]
                stopped.sort(key=lambda member: member.suspended)
                for member in stopped:
                    member.report_stop(stop.why, stop.detail)
                for member in stopped:
                    member.kill()
        return [member.make_report() for member in self._workers]


def check_ready(reports: Sequence[RankReport]) -> None:
    """Raises the workers' error if they cannot run here, and DoctorFault if they ended while they started."""
    for report in reports:
        if report.refused is not None:
            raise _ERROR_OF_EXIT_CODE.get(report.refused.exit_code, DoctorFault)(report.refused.reason)
    missing = sorted((report for report in reports if report.ready is None), key=lambda report: report.exit_time)
    if missing:
        first = missing[0]
        output = first.output.strip().splitlines()[-1:]
        ending = first.exit or first.stopped_detail or "the worker printed nothing readable"
        ending += f" ({output[0]})" if output else ""
        raise DoctorFault(f"the worker of rank {first.rank} did not start: {ending}")
