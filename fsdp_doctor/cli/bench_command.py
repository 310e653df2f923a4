"""``fsdp-doctor bench``: its options, made into what the benchmark is asked to measure."""

from __future__ import annotations

import itertools
import pathlib
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdp_doctor.bench.request import (
    DTYPES,
    LOADS,
    OFFLOADS,
    SOURCES,
    STRATEGIES,
    BenchOptions,
    extractions_of,
    scenarios_of,
)
from fsdp_doctor.cli import files, starting, values
from fsdp_doctor.cli.starting import RankOptions
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.machine import imports, launch
from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.paths import is_user_path
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES

if TYPE_CHECKING:
    from fsdp_doctor.bench.results import BenchResult

NAME = "bench"
EXIT_CODES = (
    "Exit codes: 0 measured; 2 usage; 3 cannot run here, or nothing was measured; "
    "4 the doctor's own fault; 130 interrupted."
)


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    PANEL: ClassVar[str] = "Measured"

    direction: Annotated[str, typer.Option(help="out: full tensors out of a sharded model; in: into one.")] = "out"
    source: Annotated[
        list[str] | None,
        typer.Option(help=f"With --direction in, where the full tensors are: {', '.join(SOURCES)}.  [default: all]"),
    ] = None
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODEL_SHAPES)}; or the directory of a Hugging Face configuration.")
    ] = "small"
    layers: Annotated[int | None, typer.Option(help="Number of decoder layers, instead of the model's own.")] = None
    strategy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STRATEGIES)}.  [default: fsdp2]")] = None
    offload: Annotated[list[str] | None, typer.Option(help=f"{', '.join(OFFLOADS)}.  [default: none]")] = None
    staging: Annotated[
        list[str] | None,
        typer.Option(
            help="unstaged; or staged, under a manual offload: to move the whole model to the device is part of the "
            "extraction.  [default: unstaged]"
        ),
    ] = None
    pinning: Annotated[
        list[str] | None, typer.Option(help="Of the policy's host memory: pinned, unpinned.  [default: pinned]")
    ] = None
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"Of the shards and, after a colon, of the output: {', '.join(DTYPES)}.  [default: bf16]"),
    ] = None
    bucket_bytes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Device memory of one bucket of full_tensors: default, or a size such as 128MiB."
        ),
    ] = None
    path: Annotated[
        list[str] | None,
        typer.Option(help="Only this path; module:function measures a function of your own."),
    ] = None
    repeat: Annotated[int, typer.Option(help="Timed runs of each path; the median is reported.")] = 5

    def read(self, device: str) -> BenchOptions:
        direction = values.direction(self.direction)
        if direction == "out" and self.source:
            raise UsageError("--source says where a load is from: use it with --direction in")
        stagings = values.words("--staging", self.staging, AXIS["staging"].values, "unstaged")
        if direction == "in" and "staged" in stagings:
            raise UsageError("--staging staged is of an extraction: use it with --direction out")
        scenarios = scenarios_of(
            values.words("--strategy", self.strategy, STRATEGIES, "fsdp2"),
            values.words("--offload", self.offload, OFFLOADS, "none"),
            stagings,
            values.words("--pinning", self.pinning, AXIS["pinning"].values, "pinned"),
        )
        if not scenarios:
            raise UsageError(
                "--offload, --staging and --pinning do not go together: staged needs --offload param, and "
                "unpinned needs --offload policy with --strategy fsdp2"
            )
        return BenchOptions(
            direction=direction,
            sources=values.words("--source", self.source, SOURCES, ",".join(SOURCES)),
            model=self.model if self.model in MODEL_SHAPES else str(values.model_directory(self.model, MODEL_SHAPES)),
            layers=None if self.layers is None else values.positive("--layers", self.layers),
            scenarios=scenarios,
            dtypes=values.words("--dtype", self.dtype, DTYPES, "bf16"),
            bucket_bytes=_bucket_sizes(values.split(self.bucket_bytes) or ["default"]),
            paths=_known_paths(values.split(self.path), scenarios, direction),
            repeat=values.positive("--repeat", self.repeat),
            device=device,
        )


def run(
    *,
    measured: MeasuredOptions,
    ranks: RankOptions,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was measured.")
    ] = None,
) -> None:
    """Measure how fast weights can be extracted, or loaded, against the bandwidth.

    One run measures the bandwidth of the links (copies between host and device, the all-gather), then every path.

    An option that takes a list can be repeated, or take several values separated by commas.
    """
    ranks.check()
    if json_file is not None and launch.is_rank_zero():
        files.check_writable(json_file)
    options = measured.read(ranks.device)
    starting.check_versions()
    if not launch.under_torchrun():
        starting.start_ranks(ranks)
    with imports.of_what_stays():
        from fsdp_doctor.bench import results
        from fsdp_doctor.bench.benchmark import run as measure

    result = measure(options)
    if launch.is_rank_zero():
        sys.stdout.write(results.as_text(result, shutil.get_terminal_size((132, 24)).columns))
        if json_file is not None:
            files.write(json_file, results.as_json(result))
        _report_what_is_missing(options, result)


def _bucket_sizes(words: list[str]) -> tuple[int | None, ...]:
    sizes = [None if word == "default" else values.size("--bucket-bytes", word) for word in words]
    return tuple(dict.fromkeys(sizes))


def _known_paths(names: list[str], scenarios: tuple[Scenario, ...], direction: Direction) -> tuple[str, ...]:
    """Raises UsageError for a path that none of the strategies has."""
    if direction == "in":
        if unknown := [name for name in names if name not in LOADS]:
            raise UsageError(f"--path: there is no path {unknown[0]!r} to load by; use one of {', '.join(LOADS)}")
        return tuple(names)
    strategies = dict.fromkeys(scenario.strategy for scenario in scenarios)
    known = dict.fromkeys(name for each in scenarios for name in extractions_of(each.without_offload()))
    for name in names:
        if not is_user_path(name) and name not in known:
            raise UsageError(
                f"--path: {' and '.join(strategies)} has no path {name!r} to measure; "
                f"use one of {', '.join(known)}, or module:function"
            )
    return tuple(names)


def _report_what_is_missing(options: BenchOptions, result: BenchResult) -> None:
    """Prints the named paths that were not measured. Raises CannotRun where none was."""
    measured = {(row.scenario, row.path) for row in result.measured}
    wanted = itertools.product(options.scenarios, options.paths)
    missing = [f"{scenario.id}/{path}" for scenario, path in wanted if (scenario, path) not in measured]
    if missing:
        print(
            f"note: not measured: {', '.join(missing)}; "
            "the strategy has no such path, or the path is known to fail under that offload",
            file=sys.stderr,
        )
    if not measured:
        raise CannotRun("nothing was measured: no path of --path works under this --strategy and --offload")
    if all(row.timing.error for row in result.measured):
        raise CannotRun("nothing was measured: every path raised")
