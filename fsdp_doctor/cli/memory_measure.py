"""``fsdp-doctor memory measure``: its options, made into a probe whose stages are watched."""

from __future__ import annotations

import dataclasses
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdp_doctor.cli import files, starting, values
from fsdp_doctor.cli.probe_command import DeviceOptions, conduct_probe
from fsdp_doctor.cli.selecting import Selected, SelectionOptions
from fsdp_doctor.cli.starting import RankOptions
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine import launch
from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize

if TYPE_CHECKING:
    from fsdp_doctor.report.formats import Format

NAME = "measure"
EXIT_CODES = (
    "Exit codes: 0 measured; 1 measured, and a case broke; 2 usage; 3 cannot run here, or no stage could be measured; "
    "4 the doctor's own fault; 130 interrupted."
)
_STRATEGY, _OFFLOAD, _STAGING, _PATH = "fsdp2", "none,param+optimizer,policy", "staged", "full_tensors"
_FORMATS: dict[str, Format] = {"table": "memory", "json": "ledgers", "svg": "memory-svg"}


def _values(axis: str) -> str:
    return ", ".join(AXIS[axis].values)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    PANEL: ClassVar[str] = "Job"

    strategy: Annotated[list[str] | None, typer.Option(help=f"{_values('strategy')}.  [default: {_STRATEGY}]")] = None
    offload: Annotated[list[str] | None, typer.Option(help=f"{_values('offload')}.  [default: {_OFFLOAD}]")] = None
    staging: Annotated[list[str] | None, typer.Option(help=f"{_values('staging')}.  [default: {_STAGING}]")] = None
    sharding: Annotated[list[str] | None, typer.Option(help=f"{_values('sharding')}.")] = None
    pinning: Annotated[list[str] | None, typer.Option(help=f"{_values('pinning')}.")] = None
    model: Annotated[
        list[str] | None,
        typer.Option(help="A built-in model (see `fsdp-doctor list --axes`), or the directory of a configuration."),
    ] = None
    path: Annotated[
        list[str] | None,
        typer.Option(help=f"The path that extracts; module:function adds one of your own.  [default: {_PATH}]"),
    ] = None
    batch: Annotated[int, typer.Option(help="Sequences of each rank in a training step.")] = SMALL_STEP.batch
    sequence: Annotated[int, typer.Option(help="Tokens of each sequence.")] = SMALL_STEP.sequence
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Compute decoder layers anew in the backward.")
    ] = False

    def select(self) -> Selected:
        """One scenario for each combination, with those of the named paths that it has.

        Raises as :meth:`SelectionOptions.select` does.
        """
        paths = values.split(self.path) or [_PATH]
        selected = SelectionOptions(
            direction="out",
            strategy=self.strategy or [_STRATEGY],
            offload=self.offload or [_OFFLOAD],
            staging=self.staging or [_STAGING],
            sharding=self.sharding or ["full"],
            pinning=self.pinning or ["pinned"],
            model=self.model or ["qwen3"],
            dims=["even"],
            phase=["trained"],
            backend=["mixed"],
            transfer=["blocking"],
            precision=["bf16-compute"],
            context=["ordinary"],
            path=paths,
        ).select()
        # With a path of the user a probe runs all others, too.
        return dataclasses.replace(selected, cases=tuple(case for case in selected.cases if case.path in paths))

    def training(self) -> TrainingSize:
        return TrainingSize(
            batch=values.positive("--batch", self.batch),
            sequence=values.positive("--sequence", self.sequence),
            checkpointing=self.activation_checkpointing,
        )


@dataclass(frozen=True, kw_only=True)
class LedgerOutputOptions:
    PANEL: ClassVar[str] = "Output"

    format: Annotated[str, typer.Option(help=f"Of stdout: {', '.join(_FORMATS)}.")] = "table"
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write every rank's ledgers.")
    ] = None
    svg: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write the picture.")] = None
    html: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Write the picture into a page, with the verdicts.")
    ] = None

    def check(self) -> None:
        if self.format not in _FORMATS:
            raise UsageError(f"--format: unknown value {self.format!r}; use one of {', '.join(_FORMATS)}")
        named = {"--json": self.json_file, "--svg": self.svg, "--html": self.html}
        given = {name: file for name, file in named.items() if file is not None}
        files.check_distinct(given)
        for file in given.values():
            files.check_writable(file)

    @property
    def files(self) -> dict[Format, pathlib.Path]:
        named: dict[Format, pathlib.Path | None] = {"ledgers": self.json_file, "memory-svg": self.svg}
        return {name: file for name, file in named.items() if file is not None}


def run(*, job: JobOptions, ranks: RankOptions, device: DeviceOptions, output: LedgerOutputOptions) -> None:
    """Measure the memory of each rank at each stage of a job, by class.

    A job is built, trains, is offloaded, staged, extracted from, offloaded again, loaded, and trains on.
    Under torchrun it runs on torchrun's ranks; otherwise it starts torchrun on this node.

    An option that takes a list can be repeated, or take several values separated by commas.
    """
    from fsdp_doctor.probe.probe_options import ProbeOptions

    selected = job.select()
    ranks.check()
    options = ProbeOptions(
        cases=selected.cases,
        device=device.of_type(ranks.device),
        model=selected.model,
        training=job.training(),
        with_ledgers=True,
        format=_FORMATS.get(output.format, "memory"),
        outputs=output.files,
        page=output.html,
    )
    output.check()
    starting.check_versions()
    if not launch.under_torchrun():
        starting.start_ranks(ranks)
    raise SystemExit(conduct_probe(options))
