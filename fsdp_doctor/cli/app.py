"""The commands. The one module that prints errors and exits; torch is imported only by what runs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor import __version__
from fsdp_doctor.bench.request import DTYPES, OFFLOADS, SHAPES, STRATEGIES
from fsdp_doctor.cli import options
from fsdp_doctor.errors import (
    EXIT_BAD_VERDICT,
    EXIT_OK,
    CannotRun,
    DoctorFault,
    FsdpDoctorError,
    Interrupted,
    UsageError,
)
from fsdp_doctor.machine import devices, launch
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.paths import PATHS
from fsdp_doctor.matrix.selection import Selection, select

if TYPE_CHECKING:
    from fsdp_doctor.probe.command import ProbeOptions
    from fsdp_doctor.report.formats import Format

app = typer.Typer(
    name="fsdp-doctor",
    help="Which FSDP offload and weight-extraction combinations work here, which crash, hang or lie.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_EXIT_CODES = (
    "Exit codes: 0 nothing bad; 1 a bad verdict, with --expect an unexpected one; 2 usage; "
    "3 cannot run here; 4 the doctor's own fault; 130 interrupted."
)
_NEEDS = {"torch": (2, 6), "transformers": (4, 56)}

Choose = Callable[[], options.Chosen]
File = pathlib.Path | None


@app.command(epilog=_EXIT_CODES)
@options.selecting
def probe(
    *,
    choose: Choose,
    device: Annotated[
        str, typer.Option(help=f"{', '.join(devices.NAMES)}; auto is the accelerator, else the emulated one.")
    ] = "auto",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that each device has, as 2GiB.")
    ] = None,
    no_late_completion: Annotated[
        bool,
        typer.Option("--no-late-completion", help="The emulated device's non-blocking copies finish at once."),
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start where torchrun did not; by default one per accelerator, 2 without."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each stage of a case.")] = 30.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds for starting workers and building a model.")] = 300.0,
    grace: Annotated[float, typer.Option(help="Seconds for the other ranks once one is in trouble.")] = 5.0,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that one worker may hold, as 8GiB.")
    ] = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Run each bad case again in fresh workers.")] = False,
    format: Annotated[
        str,
        typer.Option(help="On stdout: table, lines, json, markdown, junit; auto is table on a terminal, else lines."),
    ] = "auto",
    json_file: Annotated[File, typer.Option("--json", metavar="FILE", help="Write the whole report.")] = None,
    markdown: Annotated[File, typer.Option(metavar="FILE", help="Write it for a GitHub issue.")] = None,
    junit: Annotated[File, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    svg: Annotated[File, typer.Option(metavar="FILE", help="Write a picture of the matrix.")] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="known|REPORT",
            help="Exit code 0 where the verdicts are what the catalogue foretells for this torch, device and "
            "number of ranks, or those of a report; 1 with the others listed first.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the partial report of --json.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="Put this machine's name into the report.")] = False,
) -> None:
    """Run the matrix under torchrun, or start torchrun on this node.

    An option that selects can be repeated, or take several values with commas between.
    """
    from fsdp_doctor.probe.command import ProbeOptions
    from fsdp_doctor.report.journal import read_report

    files: dict[Format, File] = {"json": json_file, "markdown": markdown, "junit": junit, "svg": svg}
    outputs = {name: file for name, file in files.items() if file is not None}
    if resume and json_file is None:
        raise UsageError("--resume goes on with the report that --json names; give --json FILE")
    chosen = choose()
    run = ProbeOptions(
        cases=chosen.cases,
        device=options.device(device, device_memory, late_completion=not no_late_completion),
        model=chosen.model,
        timeout=options.positive("--timeout", timeout),
        start_timeout=options.positive("--start-timeout", start_timeout),
        grace=options.positive("--grace", grace),
        host_memory=options.size("--host-memory", host_memory) if host_memory is not None else None,
        confirm=confirm,
        format=options.output_format(format),
        outputs=outputs,
        expect=options.baseline(expect) if expect is not None else None,
        resume_from=read_report(json_file) if resume and json_file and json_file.exists() else None,
        host_name=host_name,
    )
    options.check_outputs(outputs)
    _check_versions()
    if launch.under_torchrun():
        raise SystemExit(_conduct(run))
    nproc = launch.num_ranks(run.device.type) if nproc is None else int(options.positive("--nproc", nproc))
    raise SystemExit(launch.start_torchrun(sys.argv[1:], nproc))


@app.command(epilog="Exit codes: 0 measured; 2 usage; 3 cannot run here; 4 the doctor's own fault; 130 interrupted.")
def bench(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(SHAPES)}; or a Hugging Face configuration's directory.")
    ] = "small",
    layers: Annotated[int | None, typer.Option(help="Decoder layers, instead of the model's own number.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}.  [default: fsdp2]")] = None,
    offload: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OFFLOADS)}.  [default: none]")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"Of the shards, and after a colon of what is yielded: {', '.join(DTYPES)}."),
    ] = None,
    bucket_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory of one bucket of full_tensors, as 384MiB.")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Only this one; module:function measures a function of your own.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs of each path; the median counts.")] = 5,
    device: Annotated[
        str, typer.Option(help=f"{', '.join(devices.NAMES)}; auto is the accelerator, else the emulated one.")
    ] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start where torchrun did not; by default one per accelerator, 2 without."),
    ] = None,
    json_file: Annotated[
        File, typer.Option("--json", metavar="FILE", help="Write everything that was measured.")
    ] = None,
) -> None:
    """Measure how fast weights leave a sharded model, against what the links can carry.

    An option that takes a list can be repeated, or take several values with commas between.
    """
    run = options.benchmark(
        model=model,
        layers=layers,
        strategy=strategy,
        offload=offload,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        path=path,
        repeat=repeat,
        device=device,
        json_file=json_file,
    )
    _check_versions()
    if not launch.under_torchrun():
        ranks = launch.num_ranks(device) if nproc is None else int(options.positive("--nproc", nproc))
        raise SystemExit(launch.start_torchrun(sys.argv[1:], ranks))
    from fsdp_doctor.bench import tables
    from fsdp_doctor.bench.benchmark import run as measure

    result = measure(run)
    if launch.is_rank_zero():
        sys.stdout.write(tables.as_text(result, shutil.get_terminal_size((132, 24)).columns))
        if json_file is not None:
            json_file.write_text(tables.as_json(result))


@app.command("list")
@options.selecting
def list_(
    *,
    choose: Choose,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    paths: Annotated[bool, typer.Option("--paths", help="The paths and what they promise, not the cases.")] = False,
    axes: Annotated[bool, typer.Option("--axes", help="The axes and their values, not the cases.")] = False,
) -> None:
    """Print the selected cases, without running or importing anything."""
    if paths:
        print(json.dumps([dataclasses.asdict(path) for path in PATHS], indent=1) if as_json else _paths_as_text())
    elif axes:
        print(json.dumps({axis.name: axis.values for axis in AXES}, indent=1) if as_json else _axes_as_text())
    else:
        cases = choose().cases
        print(json.dumps(options.rows_of(cases), indent=1) if as_json else "\n".join(case.id for case in cases))
        print(f"{len(cases)} cases in {len({case.scenario for case in cases})} scenarios", file=sys.stderr)


@app.command()
def report(
    file: Annotated[pathlib.Path, typer.Argument(help="A JSON report, complete or partial.")],
    format: Annotated[str, typer.Option(help="table, lines, json, markdown, junit or svg.")] = "table",
    output: Annotated[File, typer.Option("--output", "-o", metavar="FILE", help="Instead of stdout.")] = None,
) -> None:
    """Make any format again from a JSON report."""
    from fsdp_doctor.report import formats
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.report.layout import summary

    name = options.output_format(format)
    found = read_report(file)
    tty = output is None and sys.stdout.isatty()
    text = formats.render(
        found,
        "table" if name == "auto" else name,
        width=shutil.get_terminal_size((132, 24)).columns,
        color=tty and "NO_COLOR" not in os.environ,
    )
    _write(output, text)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(summary(found), file=sys.stderr)


@app.command(epilog="Exit codes: 0 the catalogue knows the cause; 1 it does not; 2 usage.")
def explain(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE|-]...", help="Logs or tracebacks; - is stdin.", show_default=False),
    ] = None,
    entry: Annotated[str | None, typer.Option(metavar="ID", help="Print this entry of the catalogue instead.")] = None,
    all_: Annotated[bool, typer.Option("--list", help="List the catalogue instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Find the root cause in a job's log, and say what is known of it: cause, remedy, references, reproduction."""
    from fsdp_doctor.explain import explain, text
    from fsdp_doctor.known import catalogue

    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    if (all_ or entry is not None) and files:
        raise UsageError("--entry and --list print the catalogue and read no file; leave one of them out")
    if files and files.count("-") > 1:
        raise UsageError("standard input can be read once; give one -")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if all_ or entry is not None:
        chosen = (catalogue.known_failure(entry),) if entry is not None else catalogue.known_failures()
        if as_json:
            print(json.dumps([text.entry_as_dict(one) for one in chosen], indent=1))
        elif entry is not None:
            print("\n".join(text.entry_lines(chosen[0], width)))
        else:
            print("\n".join(f"{one.id}\t{one.verdict}\t{one.evidence}\t{one.title}" for one in chosen))
        return
    found = explain([None if file == "-" else pathlib.Path(file) for file in files or ["-"]])
    sys.stdout.write(text.as_json(found) + "\n" if as_json else text.as_text(found, width))
    raise SystemExit(EXIT_OK if found.entry is not None else EXIT_BAD_VERDICT)


@app.command("diff")
def diff_(
    left: Annotated[pathlib.Path, typer.Argument(help="A JSON report, also as .json.gz.")],
    right: Annotated[pathlib.Path, typer.Argument(help="Another.")],
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="device: take one device for the other.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compare two reports case by case: verdicts, messages, what was yielded, the next training step.

    Exit code 0 where they are the same, 1 where they are not.
    """
    from fsdp_doctor.report import comparison
    from fsdp_doctor.report.journal import read_report

    ignored = frozenset(ignore or ())
    for name in ignored - set(comparison.IGNORABLE):
        raise UsageError(f"--ignore {name}: use {', '.join(comparison.IGNORABLE)}")
    reports = read_report(left), read_report(right)
    found = comparison.differences(*reports, ignored)
    if as_json:
        print(json.dumps([dataclasses.asdict(difference) for difference in found], indent=1))
    else:
        for difference in found:
            print(*dataclasses.astuple(difference), sep="\t")
    print(comparison.sentence(found, *reports), file=sys.stderr)
    raise SystemExit(EXIT_BAD_VERDICT if found else EXIT_OK)


@app.command(epilog="Exit codes: 0 nothing known to break; 1 a known failure or a conflict; 2 usage.")
def check(
    config: Annotated[
        list[str], typer.Argument(help="YAML, JSON, TOML, a pasted command, - for stdin, or an override a.b=value.")
    ],
    framework_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of the framework, as 0.7.1, or main; without it, all.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks, where the configuration does not say.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Then run exactly those cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say which cases a training configuration amounts to, and what is known of them, without a GPU.

    With --probe the exit code is that of the probe.
    """
    from fsdp_doctor.check import cases, presentation
    from fsdp_doctor.check import check as read

    if world_size is not None:
        options.positive("--world-size", world_size)
    if probe and as_json:
        raise UsageError("--probe prints what the probe prints; leave --json out, and take the cases from it")
    result = read(config, framework_version=framework_version, world_size=world_size)
    sys.stdout.write(presentation.as_json(result) if as_json else presentation.as_text(result))
    if not probe:
        raise SystemExit(result.exit_code)
    sys.stdout.flush()
    named = [word for case in cases(result) for word in ("--case", case.id)]
    if not named:
        raise CannotRun("the configuration amounts to no case that the probe can run")
    _check_versions()
    raise SystemExit(launch.start_torchrun(["probe", *named], launch.num_ranks("auto")))


@app.command(epilog="Exit codes: 0 written; 2 usage; 4 it cannot be written.")
def repro(
    case: Annotated[str, typer.Argument(metavar="CASE", help="The id of a case.")],
    out: Annotated[File, typer.Option("--out", "-o", metavar="FILE", help="Instead of stdout.")] = None,
    report: Annotated[
        File, typer.Option(metavar="REPORT", help="Expect what this JSON report has, not what the catalogue knows.")
    ] = None,
) -> None:
    """Write one standalone script, of torch and transformers alone, that reproduces a case under torchrun."""
    from fsdp_doctor import repro as scripts
    from fsdp_doctor.report.journal import read_report

    chosen = select(Selection(case_ids=(case,)))[0]
    expectation = scripts.reported(chosen, read_report(report)) if report is not None else scripts.expected(chosen)
    text = scripts.script(chosen, expectation, out.name if out is not None else "repro.py")
    _write(out, text)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="With this machine's name.")] = False,
) -> None:
    """Print the environment block of a report alone, also where torch cannot be imported."""
    from fsdp_doctor.machine.environment import collect, lines_of

    facts = collect(host_name)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(lines_of(facts)))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Which FSDP offload and weight-extraction combinations work here, which crash, hang or lie."""
    if show:
        print(f"fsdp-doctor {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point. Under torchrun every rank comes here; all but rank 0 follow what it says."""
    try:
        if launch.is_rank_zero() or sys.argv[1:2] == ["bench"]:
            app()
        elif sys.argv[1:2] == ["probe"] and "--help" not in sys.argv:
            raise SystemExit(_follow())
    except FsdpDoctorError as error:
        if not launch.is_rank_zero() and isinstance(error, CannotRun):
            # Most likely rank 0 says the same. If it does, torchrun ends this process meanwhile.
            time.sleep(2)
        # torchrun ends the other ranks when rank 0 has ended: why, rank 0 has said.
        if launch.is_rank_zero() or not isinstance(error, Interrupted):
            print(f"fsdp-doctor: {error}", file=sys.stderr)
        launch.tell_torchrun(str(error))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("fsdp-doctor: stopped by SIGINT", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None
    except Exception as error:
        traceback.print_exc()
        sentence = f"its own fault, {type(error).__name__}: {error}; please report the traceback above"
        print(f"fsdp-doctor: {sentence}", file=sys.stderr)
        launch.tell_torchrun(sentence)
        raise SystemExit(DoctorFault.exit_code) from None


def _follow() -> int:
    from fsdp_doctor.probe.command import follow

    _check_versions()
    return follow()


def _conduct(run: ProbeOptions) -> int:
    from fsdp_doctor.probe.command import conduct

    code = conduct(run)
    if code:
        launch.tell_torchrun(f"exit code {code}: a verdict is bad, or not the expected one")
    return code


def _write(output: pathlib.Path | None, text: str) -> None:
    """To a file, or to stdout."""
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text)
        return
    options.check_writable(output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorFault(f"cannot write {output}: {error.strerror or error}") from None


def _check_versions() -> None:
    """Without importing torch: what is installed, against the oldest that works."""
    import importlib.metadata

    for package, oldest in _NEEDS.items():
        needed = f"{package} {'.'.join(str(number) for number in oldest)} or newer"
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise CannotRun(f"{package} is not installed here; install {needed}") from None
        if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < oldest:
            raise CannotRun(f"{package} {installed} is too old; fsdp-doctor needs {needed}")


def _paths_as_text() -> str:
    lines = []
    for path in PATHS:
        contract = dataclasses.asdict(path.contract)
        lines.append(f"{path.name}  [{'+'.join(f'fsdp{version}' for version in path.fsdp)}]")
        lines.append(f"    {path.summary}")
        lines.append(f"    promises {', '.join(f'{name} {value}' for name, value in contract.items())}")
        if path.used_by:
            lines.append(f"    used by {path.used_by}")
    return "\n".join(lines)


def _axes_as_text() -> str:
    lines = []
    for axis in AXES:
        lines.append(f"{axis.name}  (default {axis.default})")
        lines += [f"    {value:<24}{meaning}" for value, meaning in axis.values.items()]
    return "\n".join(lines)
