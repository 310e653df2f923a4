"""What was measured, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from fsdp_doctor import __version__
from fsdp_doctor.bench.links import Links
from fsdp_doctor.machine.environment import EnvironmentFacts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One path over one model.

    seconds: the median of ``times``, each the slowest rank's. full_bytes: of all full tensors, each
    once. peak_extra_bytes: of device memory, on the rank that took the most; None on the CPU.
    ratio: the least time in which the bounding link carries the bytes, over ``seconds``. error: what the
    path raised, if it did; there are no figures then.
    """

    strategy: str
    offload: str
    dtypes: str
    path: str
    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    full_bytes: int = 0
    peak_extra_bytes: int | None = None
    ratio: float | None = None
    error: str = ""


@dataclass(kw_only=True)
class BenchResult:
    command: str
    device: str
    world_size: int
    environment: EnvironmentFacts
    links: Links
    measured: list[Measured] = field(default_factory=list)


def as_json(result: BenchResult) -> str:
    head = {"schema": "fsdp-doctor/bench", "schema_version": 1, "version": __version__}
    return json.dumps(head | dataclasses.asdict(result), indent=1) + "\n"


def as_text(result: BenchResult, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    packages = ", ".join(f"{name} {version}" for name, version in result.environment["packages"].items())
    console.print(f"{result.world_size} ranks of {result.device}; {packages}", soft_wrap=True)
    for name, rate in dataclasses.asdict(result.links).items():
        if rate is not None:
            console.print(f"{name.replace('_', ' '):14} {rate / 1e9:8.1f} GB/s a rank")
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("model", "path"):
        table.add_column(column)
    for column in ("ms", "GB/s", "of ceiling", "peak extra MiB"):
        table.add_column(column, justify="right")
    for one in result.measured:
        if one.error:
            table.add_row(f"{one.strategy} {one.offload} {one.dtypes}", f"{one.path}: {one.error[:60]}")
            continue
        table.add_row(
            f"{one.strategy} {one.offload} {one.dtypes}",
            one.path,
            f"{one.seconds * 1e3:.1f}",
            f"{one.full_bytes / one.seconds / 1e9:.1f}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            "" if one.peak_extra_bytes is None else f"{one.peak_extra_bytes / 2**20:.0f}",
        )
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
