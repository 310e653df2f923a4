"""One rank's whole run under torchrun: supervise, and on rank 0 conduct, report and judge."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_doctor import __version__
from fsdp_doctor.errors import (
    EXIT_BAD_VERDICT,
    EXIT_OK,
    CannotRun,
    DoctorFault,
    FsdpDoctorError,
    UsageError,
)
from fsdp_doctor.machine import devices, launch
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.environment import EnvironmentFacts, home_as_tilde, without_torch
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import is_user_path
from fsdp_doctor.report import formats
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.journal import Journal
from fsdp_doctor.report.layout import summary
from fsdp_doctor.report.progress import Progress

if TYPE_CHECKING:
    import torch.distributed as dist

    from fsdp_doctor.probe.supervisor import Conductor, Interruption

ON_THE_CPU = (
    "The device is the CPU: an offload from the CPU to the CPU moves nothing, so the failures that "
    "offloading causes cannot show here. CPUOffloadPolicy runs unpinned: there is nothing to pin memory for."
)
ON_THE_EMULATED_DEVICE = (
    "The device is emulated in host memory: torch's FSDP code is the real one, the accelerator is not, and seconds "
    "say nothing about a GPU."
)
EAGER = "Late completion is off: non-blocking copies finished at once, so no race of theirs can show."
_GOODBYE_SECONDS = 10.0
_RENDEZVOUS_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What ``fsdp-doctor probe`` was asked for.

    timeout, start_timeout, grace: seconds for a stage of a case, for starting workers and building
    a model, and for the other ranks once one is in trouble.
    host_memory: bytes that a worker may hold, None for no limit.
    outputs: files to write, by format. expect: a report whose verdicts are the expected ones.
    """

    cases: tuple[Case, ...]
    device: RunDevice = dataclasses.field(default_factory=RunDevice)
    model: pathlib.Path | None = None
    timeout: float = 30.0
    start_timeout: float = 300.0
    grace: float = 5.0
    host_memory: int | None = None
    confirm: bool = False
    format: str = "auto"
    outputs: dict[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    expect: Report | None = None
    resume_from: Report | None = None
    host_name: bool = False


def conduct(options: ProbeOptions) -> int:
    """Rank 0's part under torchrun: tells the others what the job is, runs it, judges it."""
    from fsdp_doctor.probe import supervisor
    from fsdp_doctor.probe.worker import Job

    place, store, interruption = _join_the_others()
    device = dataclasses.replace(options.device, type=devices.resolve(options.device.type))
    devices.load(device, asked=options.device.type)
    keeper = _ReportWriter(options, place, device)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="fsdp-doctor-"))
    job = Job(
        rank=0,
        world_size=place.world_size,
        local_rank=place.local_rank,
        num_nodes=place.num_nodes,
        device=device,
        cases=options.cases,
        user_paths=tuple(dict.fromkeys(case.path for case in options.cases if is_user_path(case.path))),
        custom_model=options.model,
        scratch=scratch,
    )
    limits = supervisor.Limits(
        start=options.start_timeout, stage=options.timeout, grace=options.grace, host_bytes=options.host_memory
    )
    supervisor.share_job(store, job, limits)
    member = supervisor.Member(job, store, limits, interruption)
    try:
        return _run(supervisor.Conductor(member), keeper, options, place)
    finally:
        member.close()
        shutil.rmtree(scratch, ignore_errors=True)
        _wait_for_the_others(store, place.world_size)


def follow() -> int:
    """Every other rank's part: it reads no option and no file, and does what rank 0 says."""
    from fsdp_doctor.probe import supervisor

    place, store, interruption = _join_the_others()
    job, limits = supervisor.receive_job(store, place, interruption)
    devices.load(job.device, asked=job.device.type)
    # On another node than rank 0's the directory is one of the same name.
    job.scratch.mkdir(parents=True, exist_ok=True)
    member = supervisor.Member(job, store, limits, interruption)
    try:
        member.follow()
        return EXIT_OK
    finally:
        member.close()
        shutil.rmtree(job.scratch, ignore_errors=True)
        with contextlib.suppress(RuntimeError):
            store.set(f"bye/{place.rank}", "")


def _join_the_others() -> tuple[launch.Place, dist.Store, Interruption]:
    """Imports what the workers will need, connects to torchrun's store. Raises CannotRun if that fails."""
    from fsdp_doctor.probe import supervisor
    from fsdp_doctor.probe.worker import die_with_parent

    place = launch.place()
    # Supervisors must not outlive a torchrun that was killed.
    die_with_parent(signal.SIGTERM)
    supervisor.prepare()
    import torch.distributed as dist

    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().splitlines()[0]
        raise CannotRun(
            f"rank {place.rank} cannot meet the {place.world_size - 1} other ranks at {address}: {reason}"
        ) from None
    return place, dist.PrefixStore("fsdp-doctor", store), supervisor.Interruption()


def _wait_for_the_others(store: dist.Store, world_size: int) -> None:
    """torchrun ends every rank as soon as one fails; rank 0, whose exit code counts, goes last."""
    keys = [f"bye/{rank}" for rank in range(1, world_size)]
    end = time.monotonic() + _GOODBYE_SECONDS
    with contextlib.suppress(RuntimeError):
        while keys and not store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)


def _run(conductor: Conductor, keeper: _ReportWriter, options: ProbeOptions, place: launch.Place) -> int:
    """Runs the cases, keeps and prints the report, judges it."""
    from fsdp_doctor.probe import session

    numbers = keeper.numbers_to_run()
    trouble: FsdpDoctorError | None = None
    try:
        if numbers:
            ready = conductor.start(options.cases[numbers[0]].scenario.backend)[0].ready
            keeper.open(ready.environment if ready else {})
        with Progress(len(numbers)) as progress:
            for result in session.results(
                conductor, options.cases, numbers, world_size=place.world_size, confirm=options.confirm
            ):
                keeper.add(result)
                progress.add(result)
    except FsdpDoctorError as error:
        if isinstance(error, (UsageError, CannotRun)) and not keeper.is_open:
            # Said by the workers as they start: nothing ran, and an older report stays what it was.
            raise
        trouble = error
    except Exception as error:
        traceback.print_exc()
        trouble = DoctorFault(f"its own fault, {type(error).__name__}: {error}; please report the traceback")
    finally:
        with contextlib.suppress(RuntimeError):
            conductor.end()
    report, lost = keeper.finish(ended=str(trouble or ""))
    _print(report, options)
    if trouble or lost:
        raise trouble or lost or AssertionError
    return exit_code(report, options.expect)


class _ReportWriter:
    """Holds the report while it grows, and keeps it on disk where the user wants it."""

    def __init__(self, options: ProbeOptions, place: launch.Place, device: RunDevice) -> None:
        self._options = options
        self._report = _first_report(options, place, device)
        self._results = list(self._report.results)
        self._start = time.monotonic()
        self._lost: DoctorFault | None = None
        self._journal: Journal | None = None
        self.is_open = False

    def numbers_to_run(self) -> list[int]:
        """The cases without a result: places in the job's list."""
        done = {result.case for result in self._results}
        return [number for number, case in enumerate(self._options.cases) if case not in done]

    def open(self, facts: EnvironmentFacts) -> None:
        """The workers have started and told what they found: from here on results are kept on disk."""
        self.is_open = True
        self._report = dataclasses.replace(self._report, environment=self._report.environment | facts)
        with self._noting_a_full_disk():
            if "json" in self._options.outputs:
                self._journal = Journal(self._options.outputs["json"], self._report)

    def add(self, result: CaseResult) -> None:
        self._results.append(result)
        with self._noting_a_full_disk():
            if self._journal is not None and self._lost is None:
                self._journal.add(result)

    def finish(self, ended: str) -> tuple[Report, DoctorFault | None]:
        """Writes every file; returns the report, and what could not be written."""
        report = dataclasses.replace(
            self._report,
            results=tuple(self._results),
            complete=not self.numbers_to_run(),
            ended=ended,
            seconds=round(self._report.seconds + time.monotonic() - self._start, 3),
        )
        with self._noting_a_full_disk():
            if self._journal is not None:
                self._journal.close(report)
            elif "json" in self._options.outputs:
                _write(self._options.outputs["json"], formats.render(report, "json"))
        for name, path in self._options.outputs.items():
            if name != "json":
                with self._noting_a_full_disk():
                    _write(path, formats.render(report, name))
        return report, self._lost

    @contextlib.contextmanager
    def _noting_a_full_disk(self) -> Iterator[None]:
        """A file that cannot be written does not end the run: the results still go to stdout."""
        try:
            yield
        except DoctorFault as fault:
            if self._lost is None:
                print(f"fsdp-doctor: {fault}; the run goes on", file=sys.stderr)
            self._lost = self._lost or fault


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None


def _first_report(options: ProbeOptions, place: launch.Place, device: RunDevice) -> Report:
    """The report before anything ran, or the earlier one that is gone on with."""
    rerun = _rerun_options(options, place)
    report = Report(
        version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=home_as_tilde(shlex.join(["fsdp-doctor", *sys.argv[1:]])),
        device=device.type,
        world_size=place.world_size,
        num_selected=len(options.cases),
        environment=without_torch(options.host_name),
        rerun_options=rerun,
        notes=_notes(device),
    )
    earlier = options.resume_from
    if earlier is None:
        return report
    if (earlier.world_size, earlier.rerun_options) != (report.world_size, rerun):
        raise UsageError(
            f"--resume: the report is of {earlier.world_size} ranks with options {earlier.rerun_options!r}, "
            f"this run is of {report.world_size} with {rerun!r}; their results cannot stand in one report"
        )
    selected = set(options.cases)
    return dataclasses.replace(
        earlier,
        command=report.command,
        num_selected=report.num_selected,
        results=tuple(r for r in earlier.results if r.case in selected and r.verdict.kind != "lost"),
    )


def _notes(device: RunDevice) -> tuple[str, ...]:
    if device.type == "cpu":
        return (ON_THE_CPU,)
    if device.type != "emulated":
        return ()
    return (ON_THE_EMULATED_DEVICE,) if device.late_completion else (ON_THE_EMULATED_DEVICE, EAGER)


def _rerun_options(options: ProbeOptions, place: launch.Place) -> str:
    """What a command that runs one case alone needs besides the case."""
    words = ["--nproc", str(place.world_size)] if place.num_nodes == 1 else []
    if options.device.type != "auto":
        words += ["--device", options.device.type]
    if options.device.memory is not None:
        words += ["--device-memory", str(options.device.memory)]
    if not options.device.late_completion:
        words += ["--no-late-completion"]
    if options.model is not None:
        words += ["--model", home_as_tilde(str(options.model))]
    if options.host_memory is not None:
        words += ["--host-memory", str(options.host_memory)]
    return shlex.join(words)


def _print(report: Report, options: ProbeOptions) -> None:
    """The chosen format to stdout; the summary and hints to stderr."""
    tty = sys.stdout.isatty()
    # A report can quote what this terminal or pipe has no characters for.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    name = options.format if options.format != "auto" else ("table" if tty else "lines")
    width = shutil.get_terminal_size((132, 24)).columns
    color = tty and "NO_COLOR" not in os.environ
    sys.stdout.write(formats.render(report, name, width=width, color=color))
    sys.stdout.flush()
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{summary(report)} in {report.seconds:.1f} s", file=sys.stderr)


def exit_code(report: Report, expected: Report | None) -> int:
    """0, 1, 3 or 4 as errors.py and the README say. Raises CannotRun where nothing could be run."""
    if report.of_kind("lost"):
        raise DoctorFault(f"{report.of_kind('lost')} cases have no result through the doctor's own fault")
    if expected is not None:
        return EXIT_BAD_VERDICT if _unexpected(report, expected) else EXIT_OK
    if report.bad:
        return EXIT_BAD_VERDICT
    if not report.of_kind("ok"):
        raise CannotRun("none of the selected cases could be run here; the reasons stand with the cases")
    return EXIT_OK


def _unexpected(report: Report, expected: Report) -> bool:
    """Tells on stderr which verdicts are not the expected ones, better ones included."""
    expected_kind = {result.id: result.verdict.kind for result in expected.results}
    surprises = 0
    for result in report.results:
        wanted = expected_kind.get(result.id, "ok")
        if result.verdict.kind != wanted:
            surprises += 1
            print(f"expected {wanted}, got {result.verdict.kind}: {result.id}", file=sys.stderr)
    not_run = len(expected_kind.keys() - {result.id for result in report.results})
    if not_run:
        print(f"note: {not_run} cases of the expected report were not selected", file=sys.stderr)
    return surprises > 0
