"""``fsdp-doctor bench``: its options, made into what the benchmark is asked to measure."""

from __future__ import annotations

import itertools
import pathlib
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, cast, get_args

import typer

from fsdp_doctor.bench.request import (
    DTYPES,
    LOADS,
    OFFLOADS,
    SOURCES,
    STRATEGIES,
    BenchOptions,
    BenchSource,
    list_extractions,
    list_scenarios,
)
from fsdp_doctor.cli import options, output
from fsdp_doctor.cli.options import (
    RankOptions,
    declare_choice,
    declare_model_shape,
    declare_output_file,
    declare_words,
    parse_bytes,
)
from fsdp_doctor.cli.selection import declare_axis
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.machine import imports, launch
from fsdp_doctor.matrix.axes import AXIS, Staging
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.methods import is_user_method

if TYPE_CHECKING:
    from fsdp_doctor.bench.results import BenchResult

EXIT_CODES = (
    "Exit codes: 0 measured; 2 usage; 3 cannot run here, or nothing was measured; "
    "4 the doctor's own fault; 130 interrupted."
)


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    PANEL: ClassVar[str] = "Measured"

    direction: Annotated[
        str, declare_choice(get_args(Direction), help="out: full tensors out of a sharded model; in: into one. One of")
    ] = "out"
    source: Annotated[
        list[str] | None,
        declare_choice(SOURCES, help="With --direction in, where the full tensors are, by default all of"),
    ] = None
    model: Annotated[str, declare_model_shape()] = "small"
    layers: Annotated[int | None, typer.Option(min=1, help="Number of decoder layers, instead of the model's own.")] = (
        None
    )
    strategy: Annotated[list[str] | None, declare_choice(STRATEGIES, default="fsdp2")] = None
    offload: Annotated[list[str] | None, declare_choice(OFFLOADS, default="none")] = None
    staging: Annotated[
        list[str] | None,
        declare_choice(
            AXIS["staging"].values,
            help="Under a manual offload, staged: to move the whole model to the device is part of the extraction.",
            default="unstaged",
        ),
    ] = None
    pinning: Annotated[list[str] | None, declare_axis("pinning", "pinned")] = None
    dtype: Annotated[
        list[str] | None,
        declare_choice(DTYPES, help="Of the shards and, after a colon, of the output:", default="bf16"),
    ] = None
    bucket_bytes: Annotated[
        list[str] | None,
        declare_words(
            metavar="SIZE", help="Device memory of one bucket of full_tensors: default, or a size like 128MiB."
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        declare_words("--method", help="Only this method; module:function measures a function of your own."),
    ] = None
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each method; the median is reported.")] = 5

    def read(self, device: str) -> BenchOptions:
        assert self.staging
        if self.direction == "out" and self.source:
            raise UsageError("--source says where a load is from: use it with --direction in")
        if self.direction == "in" and Staging.STAGED in self.staging:
            raise UsageError("--staging staged is of an extraction: use it with --direction out")
        scenarios = list_scenarios(self.strategy or (), self.offload or (), self.staging, self.pinning or ())
        if not scenarios:
            raise UsageError(
                "--offload, --staging and --pinning do not go together: staged needs --offload param, and "
                "unpinned needs --offload policy with --strategy fsdp2"
            )
        direction = cast(Direction, self.direction)
        buckets = [
            None if word == "default" else parse_bytes(word, "'--bucket-bytes'")
            for word in self.bucket_bytes or ["default"]
        ]
        return BenchOptions(
            direction=direction,
            sources=tuple(map(BenchSource, self.source or SOURCES)),
            model=self.model,
            layers=self.layers,
            scenarios=scenarios,
            dtypes=tuple(self.dtype or ()),
            bucket_bytes=tuple(dict.fromkeys(buckets)),
            methods=_check_methods(self.method or [], scenarios, direction),
            repeat=self.repeat,
            device=device,
        )


def bench(
    *,
    measured: MeasuredOptions,
    ranks: RankOptions,
    json_file: Annotated[
        pathlib.Path | None, declare_output_file("--json", help="Write everything that was measured.")
    ] = None,
) -> None:
    """Measure how fast weights can be extracted, or loaded, against the bandwidth.

    One run measures the bandwidth of the links (copies between host and device, the all-gather), then every method.

    An option that takes a list can be repeated, or take several values separated by commas.
    """
    asked = measured.read(ranks.device)
    options.check_versions()
    if not launch.is_under_torchrun():
        options.start_ranks(ranks)
    with imports.freeze_imports():
        from fsdp_doctor.bench import results
        from fsdp_doctor.bench.benchmark import run as measure

    result = measure(asked)
    if launch.is_rank_zero():
        sys.stdout.write(results.render_text(result, shutil.get_terminal_size((132, 24)).columns))
        if json_file is not None:
            output.write(json_file, results.render_json(result))
        _report_unmeasured(asked, result)


def _check_methods(names: list[str], scenarios: tuple[Scenario, ...], direction: Direction) -> tuple[str, ...]:
    """Raises UsageError for a method that none of the strategies has."""
    if direction == "in":
        if unknown := [name for name in names if name not in LOADS]:
            raise UsageError(f"--method: no method that loads is called {unknown[0]!r}; use one of {', '.join(LOADS)}")
        return tuple(names)
    strategies = dict.fromkeys(scenario.strategy for scenario in scenarios)
    known = dict.fromkeys(name for each in scenarios for name in list_extractions(each.drop_offload()))
    for name in names:
        if not is_user_method(name) and name not in known:
            raise UsageError(
                f"--method: {' and '.join(strategies)} has no method {name!r} to measure; "
                f"use one of {', '.join(known)}, or module:function"
            )
    return tuple(names)


def _report_unmeasured(asked: BenchOptions, result: BenchResult) -> None:
    """Prints which named methods were not measured. Raises CannotRun if none was."""
    measured = {(row.scenario, row.method) for row in result.measured}
    wanted = itertools.product(asked.scenarios, asked.methods)
    missing = [f"{scenario.id}/{method}" for scenario, method in wanted if (scenario, method) not in measured]
    if missing:
        print(
            f"note: not measured: {', '.join(missing)}; "
            "the strategy has no such method, or it is known to fail under that offload",
            file=sys.stderr,
        )
    if not measured:
        raise CannotRun("nothing was measured: no method of --method works under this --strategy and --offload")
    if all(row.timing.error for row in result.measured):
        raise CannotRun("nothing was measured: every method raised")
