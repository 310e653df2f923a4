"""The results of a benchmark, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from bench.measure import Links, Timing
from fsdp_doctor import __version__
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import Scenario


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of one method on one model.

    timing: the timing of the slowest rank, with the highest peak of all ranks; the CPU has no peak.
    full_bytes: the bytes of all full tensors, each counted once.
    ratio: the least seconds that the limiting link needs for the bytes, divided by the measured seconds.
    bucket_bytes: the given size of a bucket; None for the default.
    source: the place of the full tensors of a load.
    times_torch: the seconds of torch's broadcast from rank 0 with the same source, divided by this method's seconds.
    """

    scenario: Scenario
    dtypes: str
    method: str
    timing: Timing
    full_bytes: int = 0
    ratio: float | None = None
    bucket_bytes: int | None = None
    source: str = ""
    times_torch: float | None = None


@dataclass(kw_only=True)
class BenchResult:
    command: str
    device: str
    world_size: int
    environment: EnvironmentFacts
    processor: str
    links: Links
    measured: list[Measured] = field(default_factory=list)


def render_json(result: BenchResult) -> str:
    head = {"schema": "fsdp-doctor/bench", "schema_version": 2, "version": __version__}
    body = dataclasses.asdict(result)
    for row, measured in zip(body["measured"], result.measured, strict=True):
        del row["scenario"]
        values = measured.scenario.values
        row |= row.pop("timing") | {name: values[name] for name in ("strategy", "offload", "staging", "pinning")}
    return json.dumps(head | body, indent=1) + "\n"


def render_text(result: BenchResult, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    packages = ", ".join(f"{name} {version}" for name, version in result.environment["packages"].items())
    console.print(f"{result.world_size} ranks of {result.device}; {packages}", soft_wrap=True)
    console.print(f"processor      {result.processor}", soft_wrap=True)
    for name, rate in dataclasses.asdict(result.links).items():
        if rate is not None:
            console.print(f"{name.replace('_', ' '):14} {rate / 1e9:8.1f} GB/s a rank")
    is_load = any(row.source for row in result.measured)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("model", *(["source"] if is_load else []), "method"):
        table.add_column(column)
    for column in ("first ms", "ms", "GB/s", "of ceiling", *(["x torch"] if is_load else []), "peak extra MiB"):
        table.add_column(column, justify="right")
    for row in result.measured:
        table.add_row(*_format_cells(row, is_load))
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _format_cells(row: Measured, is_load: bool) -> list[str]:
    scenario, timing = row.scenario, row.timing
    words = [str(scenario.strategy), str(scenario.offload), *(["staged"] if scenario.staging.is_staged else [])]
    words += [] if scenario.pinning.is_pinned else ["unpinned"]
    first = [" ".join([*words, row.dtypes]), *([row.source] if is_load else [])]
    if timing.error:
        return [*first, f"{row.method}: {timing.error[:60]}"]
    bucket = "" if row.bucket_bytes is None else f" {row.bucket_bytes / 2**20:g} MiB"
    return [
        *first,
        row.method + bucket,
        f"{timing.first_seconds * 1e3:.1f}",
        f"{timing.seconds * 1e3:.1f}",
        f"{row.full_bytes / timing.seconds / 1e9:.1f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        *(["" if row.times_torch is None else f"{row.times_torch:.1f}"] if is_load else []),
        "" if timing.peak_extra_bytes is None else f"{timing.peak_extra_bytes / 2**20:.0f}",
    ]
