"""Runs ``fsdp-doctor probe`` on one rank, which supervises its worker process. Rank 0 also makes the report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fsdp_doctor.errors import EXIT_OK, CannotRun, DoctorFault, FsdpDoctorError, UsageError
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.machine import devices, imports, launch
from fsdp_doctor.machine.signals import Interruption, die_with_parent
from fsdp_doctor.matrix.methods import is_user_method
from fsdp_doctor.probe.baseline import Judgement
from fsdp_doctor.probe.first_report import make_first_report
from fsdp_doctor.probe.probe_options import ProbeOptions
from fsdp_doctor.report import formats
from fsdp_doctor.report.document import CaseResult, Report, make_context, recognize_failure
from fsdp_doctor.report.github import write_step_summary
from fsdp_doctor.report.layout import summarize
from fsdp_doctor.report.page import write_page
from fsdp_doctor.report.versions.merging import merge
from fsdp_doctor.report.writer import ReportWriter, print_progress
from fsdp_doctor.text import format_count, read_first_line

if TYPE_CHECKING:
    import torch.distributed as dist

    from fsdp_doctor.probe.conductor import Conductor
    from fsdp_doctor.probe.groups import SharedCases

_GOODBYE_SECONDS = 10.0
_RENDEZVOUS_SECONDS = 60.0


def conduct(options: ProbeOptions) -> int:
    """Runs rank 0's part: shares the job, runs its cases and writes the report. Returns the exit code."""
    with imports.freeze_imports():
        from fsdp_doctor.examination.live_memory import check_counted
        from fsdp_doctor.probe.checkpoint_writers import CheckpointWriters, choose_num_writers
        from fsdp_doctor.probe.conductor import Conductor, add_cases_that_must_work, run_cases
        from fsdp_doctor.probe.deadlines import Limits
        from fsdp_doctor.probe.groups import SharedCases
        from fsdp_doctor.probe.job import Job, share_job
        from fsdp_doctor.probe.supervisor import Supervisor

    place, store, interruption = _join_the_others()
    group = launch.RankGroup.read()
    shared = SharedCases(_connect_to_groups(group), interruption.check) if group is not None else None
    device = dataclasses.replace(options.device, type=devices.resolve(options.device.type))
    devices.load(device, asked=options.device.type)
    if options.with_ledgers:
        check_counted(device.type)
    saved_by = choose_num_writers(options.saved_by, place.world_size, device.type)
    report = make_first_report(options, place, device, saved_by)
    writer = ReportWriter(report, options.cases, options.outputs)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="fsdp-doctor-"))
    job = Job(
        device=device,
        cases=add_cases_that_must_work(options.cases),
        user_methods=tuple(dict.fromkeys(case.method for case in options.cases if is_user_method(case.method))),
        custom_model=options.model,
        scratch=scratch,
        training=options.training,
        with_ledgers=options.with_ledgers,
    )
    limits = Limits(
        start=options.start_timeout, stage=options.timeout, grace=options.grace, host_bytes=options.host_memory
    )
    share_job(store, job, limits)
    writers = CheckpointWriters(place, job, limits, interruption, saved_by=saved_by)
    supervisor = Supervisor(place, job, limits, store, interruption)
    conductor = Conductor(supervisor)
    run = functools.partial(
        run_cases,
        conductor,
        job.cases,
        writers=writers,
        world_size=place.world_size,
        confirm=options.confirm,
        scenarios_apart=options.with_ledgers,
    )
    try:
        if shared is not None and group is not None and group.number:
            return _run_beside(conductor, shared, run)
        return _run(conductor, run, writer, options, make_context(report), shared)
    finally:
        supervisor.close()
        shutil.rmtree(scratch, ignore_errors=True)
        _wait_for_the_others(store, place.world_size)


def follow() -> int:
    """Runs the part of a rank other than 0, which only follows rank 0's instructions. Returns the exit code."""
    with imports.freeze_imports():
        from fsdp_doctor.probe.job import receive_job
        from fsdp_doctor.probe.supervisor import Supervisor

    place, store, interruption = _join_the_others()
    job, limits = receive_job(store, check=interruption.check)
    devices.load(job.device, asked=job.device.type)
    # On another node than rank 0's, this creates a separate directory with the same name.
    job.scratch.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(place, job, limits, store, interruption)
    try:
        supervisor.follow()
        return EXIT_OK
    finally:
        supervisor.close()
        shutil.rmtree(job.scratch, ignore_errors=True)
        with contextlib.suppress(RuntimeError):
            store.set(f"bye/{place.rank}", "")


def _join_the_others() -> tuple[launch.Place, dist.Store, Interruption]:
    """Imports the modules that the workers will need, and connects to the ranks' store.

    Returns this rank's place, the store, and the handler of signals. Raises CannotRun if the connection fails.
    """
    from fsdp_doctor.probe import processes, worker

    place = launch.read_place()
    # Supervisors must not outlive a torchrun or a launcher that was killed.
    die_with_parent(signal.SIGTERM)
    processes.adopt_orphans()
    worker.import_what_cases_need()
    import torch.distributed as dist

    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CannotRun(
            f"rank {place.rank} cannot connect to the other ranks at {address}: {read_first_line(error)}"
        ) from None
    return place, dist.PrefixStore("fsdp-doctor", store), Interruption()


def _wait_for_the_others(store: dist.Store, world_size: int) -> None:
    """Lets the other ranks end before rank 0, whose exit code counts.

    torchrun ends all ranks as soon as one rank fails.
    """
    keys = [f"bye/{rank}" for rank in range(1, world_size)]
    end = time.monotonic() + _GOODBYE_SECONDS
    with contextlib.suppress(RuntimeError):
        while keys and not store.check(keys) and time.monotonic() < end:
            time.sleep(0.01)


def _connect_to_groups(group: launch.RankGroup) -> dist.Store:
    import torch.distributed as dist

    return dist.PrefixStore("fsdp-doctor-groups", dist.TCPStore("127.0.0.1", group.store_port))


def _run_beside(conductor: Conductor, shared: SharedCases, run: Callable[[Iterable[int]], Iterator[CaseResult]]) -> int:
    """Runs the cases of a group other than the first, and sends their results to the first group.

    Reports an error to the first group, and always returns EXIT_OK.
    """
    try:
        for result in run(shared.take()):
            shared.post(result)
    except FsdpDoctorError as error:
        shared.report_trouble(str(error))
    finally:
        with contextlib.suppress(RuntimeError):
            conductor.end()
    return EXIT_OK


def _run(
    conductor: Conductor,
    run: Callable[[Iterable[int]], Iterator[CaseResult]],
    writer: ReportWriter,
    options: ProbeOptions,
    context: RunContext,
    shared: SharedCases | None,
) -> int:
    """Runs the cases, and writes and prints the report. Returns the exit code."""
    numbers = writer.list_numbers_to_run()
    trouble: FsdpDoctorError | None = None
    try:
        if numbers:
            ready = conductor.start(options.cases[numbers[0]])[0].ready
            writer.open(ready.environment if ready else {})
        if shared is None:
            results = run(numbers)
        else:
            shared.offer(options.cases, numbers)
            results = shared.gather(run(shared.take()))
        with print_progress(len(numbers)) as show_progress:
            for result in results:
                writer.add(recognize_failure(result, context))
                show_progress(result)
    except FsdpDoctorError as error:
        if isinstance(error, (UsageError, CannotRun)) and not writer.is_open:
            # The workers could not start: no case ran, and an older report file is left unchanged.
            raise
        trouble = error
    except Exception as error:
        traceback.print_exc()
        trouble = DoctorFault(f"an internal error, {type(error).__name__}: {error}; please report the traceback")
    finally:
        with contextlib.suppress(RuntimeError):
            conductor.end()
    report, lost = writer.finish(
        ended=str(trouble or ""), expected=lambda report: Judgement(report, options.expect).expected_failures
    )
    no_page = _write_page(options.page, report) if options.page is not None else None
    judgement = Judgement(report, options.expect)
    _print(judgement, options)
    if options.format == "github":
        write_step_summary(report, judgement.unexpected)
    print(judgement.conclusion, file=sys.stderr)
    if problem := trouble or lost or no_page or (_explain_unmeasured(report) if options.with_ledgers else None):
        raise problem
    return judgement.choose_exit_code()


def _explain_unmeasured(report: Report) -> CannotRun | None:
    """Returns the error for a run that measured the memory of no stage; None if at least one stage was measured."""
    if any(result.ledgers for result in report.results):
        return None
    verdicts = [result.verdict for result in report.results]
    reason = next((verdict.reason for verdict in verdicts if verdict.bad), verdicts[0].reason if verdicts else "")
    return CannotRun(f"no stage could be measured: {reason or 'the cases have no stages'}")


def _write_page(page: pathlib.Path, report: Report) -> DoctorFault | None:
    """Returns the fault if the page cannot be written.

    For a run without a result, only prints a note and writes no page.
    """
    try:
        write_page(page, merge({page.name: report}), formats.render_memory_picture(report))
    except DoctorFault as fault:
        return fault
    except UsageError as nothing:
        print(f"note: {nothing}", file=sys.stderr)
    return None


def _print(judgement: Judgement, options: ProbeOptions) -> None:
    """Prints the report to stdout in the chosen format.

    Prints unexpected cases to stderr before the report, and notes and the summary after it.
    """
    report = judgement.report
    if options.expect != "nothing bad":  # otherwise the report itself lists them
        for sentence in judgement.unexpected:
            print(sentence, file=sys.stderr)
    tty = sys.stdout.isatty()
    # A report can contain characters that this terminal or pipe cannot encode.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    name = options.format if options.format != "auto" else ("table" if tty else "lines")
    width = shutil.get_terminal_size((132, 24)).columns
    color = tty and "NO_COLOR" not in os.environ
    text = formats.render(
        report,
        name,
        width=width,
        color=color,
        unexpected=judgement.unexpected,
        expected=judgement.expected_failures,
        is_verbose=options.is_verbose,
    )
    if name == "table":
        print(f"{'FAIL' if judgement.unexpected else 'PASS'}: {judgement.conclusion}\n")
    sys.stdout.write(text)
    sys.stdout.flush()
    notes = list(report.notes)
    if isinstance(options.expect, Report):
        count = len({result.id for result in options.expect.results} - {result.id for result in report.results})
        notes += [f"not selected: {format_count(count, 'case')} of the expected report"] if count else []
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{summarize(report)} in {report.seconds:.1f} s", file=sys.stderr)
