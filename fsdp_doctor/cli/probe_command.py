"""``fsdp-doctor probe``: its options, made into what the probe is asked to do."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdp_doctor.cli import files, starting, values
from fsdp_doctor.cli.selecting import SelectionOptions
from fsdp_doctor.cli.starting import RankOptions
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import launch
from fsdp_doctor.machine.devices import RunDevice

if TYPE_CHECKING:
    from fsdp_doctor.probe.probe_options import ProbeOptions
    from fsdp_doctor.report.formats import Format

NAME = "probe"
EXIT_CODES = (
    "Exit codes: 0 nothing bad, or all as --expect says; 1 a bad verdict, or one that --expect does not have; "
    "2 usage; 3 cannot run here; 4 the doctor's own fault; 130 interrupted."
)


@dataclass(frozen=True, kw_only=True)
class ProbeRankOptions(RankOptions):
    saved_by: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks that save the checkpoint of other-world.  "
            "[default: one more than load it, or one less where there are no more devices]"
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.saved_by is not None:
            values.positive("--saved-by", self.saved_by)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    PANEL: ClassVar[str] = "Ranks and devices"

    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that each device has, for example 2GiB.")
    ] = None
    no_late_completion: Annotated[
        bool,
        typer.Option("--no-late-completion", help="Let non-blocking copies of the emulated device finish immediately."),
    ] = False

    def of_type(self, name: str) -> RunDevice:
        return RunDevice(
            type=values.device(name),
            memory=values.size("--device-memory", self.device_memory) if self.device_memory is not None else None,
            late_completion=not self.no_late_completion,
        )


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    PANEL: ClassVar[str] = "Limits"

    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for each stage of a case.  [default: 5 to 30, following what stages have taken]"),
    ] = None
    start_timeout: Annotated[float, typer.Option(help="Seconds for starting workers and building a model.")] = 300.0
    grace: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for the other ranks after one has failed.  [default: 5, or 2 if they idle]"),
    ] = None
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that one worker may use, for example 8GiB.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    PANEL: ClassVar[str] = "Output"

    format: Annotated[
        str,
        typer.Option(
            help="Of stdout: table, lines, json, markdown, junit, svg, github, and with --memory: memory, memory-svg, "
            "ledgers; auto is table on a terminal, else lines."
        ),
    ] = "auto"
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write the whole report.")
    ] = None
    markdown: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Write the report for a GitHub issue.")
    ] = None
    junit: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None
    svg: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write a picture of the matrix.")] = None
    html: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write a page to look cases up in.")] = None
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Add to the report what each rank holds at each stage, of cases that extract."),
    ] = False
    host_name: Annotated[bool, typer.Option("--host-name", help="Put this machine's host name into the report.")] = (
        False
    )

    @property
    def files(self) -> dict[Format, pathlib.Path]:
        """By format, those that were asked for."""
        named: dict[Format, pathlib.Path | None] = {
            "json": self.json_file,
            "markdown": self.markdown,
            "junit": self.junit,
            "svg": self.svg,
        }
        return {name: file for name, file in named.items() if file is not None}

    def check_writable(self) -> None:
        from fsdp_doctor.report.journal import journal_of

        named = {f"--{name}": file for name, file in self.files.items()}
        named |= {"--html": self.html} if self.html is not None else {}
        files.check_distinct(named)
        for file in named.values():
            files.check_writable(file)
        if self.json_file is not None:
            files.check_writable(journal_of(self.json_file))


def run(
    *,
    selection: SelectionOptions,
    ranks: ProbeRankOptions,
    device: DeviceOptions,
    limits: LimitOptions,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Run each bad case a second time, in fresh workers.")
    ] = False,
    output: OutputOptions,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="known|TOML|REPORT",
            help="The expected verdicts: as the catalogue has them for this torch, device and number of ranks, "
            "as in a TOML file that `fsdp-doctor report expect` writes, or as in a JSON report. Exit code 1 if there "
            "are others, which are listed.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the partial report that --json names.")] = False,
) -> None:
    """Run the matrix and report what works here.

    Under torchrun it runs on torchrun's ranks; otherwise it starts torchrun on this node.

    An option that selects cases can be repeated, or take several values separated by commas.
    """
    from fsdp_doctor.probe.probe_options import ProbeOptions
    from fsdp_doctor.report.journal import read_report

    if resume and output.json_file is None:
        raise UsageError("--resume continues the report that --json names; give --json FILE")
    selected = selection.select()
    ranks.check()
    earlier = output.json_file if resume else None
    options = ProbeOptions(
        cases=selected.cases,
        device=device.of_type(ranks.device),
        model=selected.model,
        timeout=values.positive("--timeout", limits.timeout) if limits.timeout is not None else None,
        start_timeout=values.positive("--start-timeout", limits.start_timeout),
        grace=values.positive("--grace", limits.grace) if limits.grace is not None else None,
        host_memory=values.size("--host-memory", limits.host_memory) if limits.host_memory is not None else None,
        saved_by=ranks.saved_by,
        confirm=confirm,
        with_ledgers=output.memory,
        format=values.output_format(output.format),
        outputs=output.files,
        page=output.html,
        expect=values.baseline(expect) if expect is not None else None,
        resume_from=read_report(earlier) if earlier and earlier.exists() else None,
        host_name=output.host_name,
    )
    output.check_writable()
    starting.check_versions()
    if not launch.under_torchrun():
        starting.start_ranks(ranks)
    raise SystemExit(conduct_probe(options))


def conduct_probe(options: ProbeOptions) -> int:
    """Under torchrun, on rank 0. Returns the exit code."""
    from fsdp_doctor.probe.command import conduct

    code = conduct(options)
    if code:
        launch.tell_torchrun(f"exit code {code}: a verdict is bad, or not the expected one")
    return code
