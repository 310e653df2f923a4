"""``fsdp-doctor probe`` and ``fsdp-doctor repro``: run cases of the matrix, and write a case as a standalone script."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import typer

from fsdp_doctor.cli import options, output
from fsdp_doctor.cli.options import VERBOSE, DeviceOptions, declare_output_file, declare_report_format, declare_size
from fsdp_doctor.cli.selection import SelectionOptions
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import launch
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.selection import Selection, select

if TYPE_CHECKING:
    from fsdp_doctor.probe.probe_options import ProbeOptions
    from fsdp_doctor.report.formats import AnyFormat

PROBE_EXIT_CODES = (
    "Exit codes: 0 every verdict is as expected; 1 a verdict is not, or with --strict a verdict is bad; 2 "
    "usage; 3 cannot run here; 4 the doctor's own fault; 130 interrupted."
)
REPRO_EXIT_CODES = "Exit codes: 0 written; 2 usage; 4 the output cannot be written."


def _declare_seconds(*, help: str) -> Any:
    return typer.Option(min=0.001, metavar="SECONDS", help=help)


@dataclass(frozen=True, kw_only=True)
class ProbeRankOptions(DeviceOptions):
    saved_by: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of ranks that save the checkpoint of other-world.  [default: one more than the ranks "
                "that load it, or one less if there are not enough devices]"
            ),
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of groups of ranks that run side by side on the same devices, when not run under torchrun.  "
            "[default: as many as the cases, the processors and the devices' memory allow, at most 4]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    PANEL: ClassVar[str] = "Limits"

    timeout: Annotated[
        float | None,
        _declare_seconds(
            help="Seconds for each stage of a case.  [default: 5 to 30, depending on how long earlier stages took]"
        ),
    ] = None
    start_timeout: Annotated[float, _declare_seconds(help="Seconds for starting workers and building a model.")] = 300.0
    grace: Annotated[
        float | None,
        _declare_seconds(
            help="Seconds to wait for the other ranks after one has failed.  [default: 5, or 1 if they idle]"
        ),
    ] = None
    host_memory: Annotated[int | None, declare_size(help="Host memory that one worker may use, for example 8GiB.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    PANEL: ClassVar[str] = "Output"

    format: Annotated[str, declare_report_format("auto", help="memory needs --memory.")] = "auto"
    verbose: Annotated[bool, VERBOSE] = False
    json_file: Annotated[pathlib.Path | None, declare_output_file("--json", help="Write the whole report.")] = None
    markdown: Annotated[pathlib.Path | None, declare_output_file(help="Write the report for a GitHub issue.")] = None
    junit: Annotated[pathlib.Path | None, declare_output_file(help="Write JUnit XML.")] = None
    svg: Annotated[pathlib.Path | None, declare_output_file(help="Write a picture of the matrix.")] = None
    html: Annotated[
        pathlib.Path | None, declare_output_file(help="Write an HTML page in which cases can be looked up.")
    ] = None
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Add to the report the memory of each rank at each stage, for cases that extract."
        ),
    ] = False
    host_name: Annotated[bool, typer.Option("--host-name", help="Put this machine's host name into the report.")] = (
        False
    )

    @property
    def files(self) -> dict[AnyFormat, pathlib.Path]:
        """The files to write, by format."""
        named: dict[AnyFormat, pathlib.Path | None] = {
            "json": self.json_file,
            "markdown": self.markdown,
            "junit": self.junit,
            "svg": self.svg,
        }
        return {name: file for name, file in named.items() if file is not None}


def probe(
    *,
    selection: SelectionOptions,
    ranks: ProbeRankOptions,
    limits: LimitOptions,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Run each bad case a second time, in fresh workers.")
    ] = False,
    outputs: OutputOptions,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="known|TOML|REPORT",
            help=(
                "The expected verdicts: those of the catalogue for this torch, device and number of ranks "
                "(known), of a TOML file that `fsdp-doctor report expect` writes, or of a JSON report. Other "
                "verdicts are listed, and lead to exit code 1.  [default: known]"
            ),
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 for every bad verdict, even if the catalogue expects it.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the partial report that --json names.")] = False,
) -> None:
    """Run the matrix and report what works here.

    Under torchrun it runs on torchrun's ranks; otherwise it starts ranks on this node.

    An option that selects cases can be repeated, or take several values separated by commas.
    """
    from fsdp_doctor.probe.probe_options import ProbeOptions
    from fsdp_doctor.report.journal import name_journal, read_report

    if resume and outputs.json_file is None:
        raise UsageError("--resume continues the report that --json names; give --json FILE")
    if outputs.json_file is not None:
        output.check_writable(name_journal(outputs.json_file))
    selected = selection.select()
    earlier = outputs.json_file if resume else None
    conduct(
        ProbeOptions(
            cases=selected.cases,
            device=ranks.run_device,
            model=selected.model,
            saved_by=ranks.saved_by,
            confirm=confirm,
            with_ledgers=outputs.memory,
            format=cast("AnyFormat | Literal['auto']", outputs.format),
            is_verbose=outputs.verbose,
            outputs=outputs.files,
            page=outputs.html,
            expect=options.read_expectation(expect, strict=strict),
            resume_from=read_report(earlier) if earlier and earlier.exists() else None,
            host_name=outputs.host_name,
            **vars(limits),
        ),
        ranks,
        jobs=1 if outputs.memory else ranks.jobs,
    )


def conduct(asked: ProbeOptions, ranks: options.RankOptions, *, jobs: int | None = 1) -> None:
    """Runs a probe as rank 0, and exits with its exit code. Outside torchrun, starts the ranks instead."""
    options.check_versions()
    if not launch.is_under_torchrun():
        options.start_ranks(ranks, jobs=jobs, num_cases=len(asked.cases))
    if jobs not in (None, 1) and launch.RankGroup.read() is None:
        raise UsageError("--jobs starts ranks, but torchrun has already started them: leave out one of the two")
    from fsdp_doctor.probe.command import conduct

    code = conduct(asked)
    if code:
        launch.tell_torchrun(f"exit code {code}: a verdict is not the expected one")
    raise SystemExit(code)


def repro(
    *,
    case: Annotated[str, typer.Argument(metavar="CASE", help="The id of a case.")],
    out: Annotated[
        pathlib.Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to a file instead of stdout.")
    ] = None,
    report: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="REPORT", help="Expect the verdict in this JSON report, instead of the catalogue's."),
    ] = None,
    minimal: Annotated[
        bool,
        typer.Option(
            "--minimal",
            help="Write at most 25 lines that use only torch, on the CPU and with one rank if they show the failure.",
        ),
    ] = False,
    as_test: Annotated[
        bool,
        typer.Option("--as-test", help="Make the script exit with 1 if the case fails, as `git bisect run` needs."),
    ] = False,
) -> None:
    """Write a standalone script that reproduces a case.

    The script runs under torchrun and needs only torch and transformers (and peft, for a case with adapters). The
    script of a framework's case needs the framework and two GPUs.
    """
    from fsdp_doctor import repro
    from fsdp_doctor.report.journal import read_report

    chosen = select(Selection(case_ids=(case,)))[0]
    if minimal and (report is not None or isinstance(chosen, FrameworkCase)):
        raise UsageError(
            "--minimal cannot be combined with --report or with the case of a framework; leave out one of the two"
        )
    expectation = (
        repro.read_reported(chosen, read_report(report)) if report is not None else repro.find_expected(chosen)
    )
    name = out.name if out is not None else "repro.py"
    if isinstance(chosen, FrameworkCase):
        text = repro.render_framework_script(chosen, expectation, name, as_test=as_test)
    elif minimal:
        text = repro.render_minimal(chosen, name, as_test=as_test)
    else:
        text = repro.render_script(chosen, expectation, name, as_test=as_test)
    output.write(out, text)
