"""Measures how fast weights are extracted from or loaded into a sharded model, compared with the links' bandwidth.

    python benchmarks/weights.py --model qwen3-4b --offload none,policy
    python benchmarks/weights.py --model qwen3-4b --offload policy --dtype fp32:bf16 --method full_tensors
    python benchmarks/weights.py --method mytrainer.sync:weights
    python benchmarks/weights.py --direction in --source files --method load_full_tensors

One run first measures the bandwidth of the links: copies between host and device, pinned and pageable, on all ranks at
once, and the all-gather. Then it measures each method: time, GB/s, ratio to the ceiling, and the peak of additional
device memory. The model has the named shape and random weights. An option with several values has them separated by
commas.

- ``first ms`` is the first call, which makes the plan; ``ms`` is the median of the later calls.
- ``of ceiling`` is the least time that the limiting link needs, divided by the measured time. The limiting link of an
  extraction is the link from the host if the shards are there, otherwise the all-gather. The bandwidth from pageable
  memory is measured with plain copies, which threads can exceed. The limiting link of a load is the link from the host
  to the device; for shards on the host, copies within the host; for files, at most the rate at which threads read from
  the page cache.
- ``x torch`` is the time of torch's broadcast from rank 0 with the same source, divided by the measured time.
- ``peak extra MiB`` is the peak minus the memory before the call; it includes the one tensor that a consumer holds.

The methods run in the benchmark's own processes, so that a method that hangs makes the benchmark hang: run
``fsdp-doctor probe`` first. Exit codes: 0 measured; 2 usage; 3 cannot run here, or nothing was measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, get_args

import typer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from bench.request import (
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

from fsdp_doctor.cli.options import find_model_directory, parse_bytes
from fsdp_doctor.errors import CannotRun, FsdpDoctorError, UsageError
from fsdp_doctor.machine import devices, launch
from fsdp_doctor.matrix.axes import AXIS, Staging
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.methods import is_user_method
from fsdp_doctor.matrix.model_shapes import MODEL_SHAPES

if TYPE_CHECKING:
    from bench.results import BenchResult


def main() -> None:
    parser = make_parser()
    given = parser.parse_args()
    try:
        options = read_options(given)
        if not launch.is_under_torchrun():
            start_ranks(given.ranks or launch.choose_num_ranks(options.device))
        # Imported here, so that a wrong option is refused before torch is imported.
        from bench.benchmark import run
        from bench.results import render_json, render_text

        result = run(options)
        if launch.is_rank_zero():
            sys.stdout.write(render_text(result, shutil.get_terminal_size((132, 24)).columns))
            if given.json is not None:
                given.json.write_text(render_json(result), encoding="utf-8")
            report_unmeasured(options, result)
    except FsdpDoctorError as error:
        if launch.is_rank_zero():
            print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--direction", choices=get_args(Direction), default="out", help="full tensors out of a sharded model, or in")
    add(
        "--source",
        type=read_words(SOURCES),
        help="with --direction in, where the full tensors are: rank0 (pinned memory of rank 0 alone), ranks (pinned "
        "memory of each rank), files (safetensors in the page cache, written to TMPDIR); default all",
    )
    add("--model", default="small", help=f"{', '.join(MODEL_SHAPES)}; or a configuration's directory")
    add("--layers", type=read_positive, help="number of decoder layers, instead of the model's own")
    add("--strategy", type=read_words(STRATEGIES), default=["fsdp2"], help=", ".join(STRATEGIES))
    add("--offload", type=read_words(OFFLOADS), default=["none"], help=", ".join(OFFLOADS))
    add(
        "--staging",
        type=read_words(AXIS["staging"].values),
        default=["unstaged"],
        help="staged, with --offload param: the whole model is moved to the device first, which is part of the time",
    )
    add("--pinning", type=read_words(AXIS["pinning"].values), default=["pinned"], help="of the policy's host memory")
    add("--dtype", type=read_words(DTYPES), default=["bf16"], help=f"{', '.join(DTYPES)}: of the shards, of the output")
    add("--bucket-bytes", type=read_sizes, default=[None], help="of one bucket of full_tensors: default, or 128MiB")
    add("--method", type=read_words(), default=[], help="only these methods; module:function is one of your own")
    add("--repeat", type=read_positive, default=5, help="timed runs of each method; the median is reported")
    add("--device", choices=devices.NAMES, default="auto")
    add("--ranks", type=read_positive, help="number of ranks on this node; by default as fsdp-doctor probe")
    add("--json", type=pathlib.Path, help="a file for everything that was measured")
    return parser


def read_words(known: Collection[str] = ()) -> Callable[[str], list[str]]:
    """Returns a parser of words separated by commas, each of which must be in ``known`` unless it is empty."""

    def read(text: str) -> list[str]:
        words = list(dict.fromkeys(filter(None, text.split(","))))
        for word in words:
            if known and word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return words

    return read


def read_sizes(text: str) -> list[int | None]:
    try:
        return [None if word == "default" else parse_bytes(word) for word in text.split(",")]
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def read_options(given: argparse.Namespace) -> BenchOptions:
    """Converts the parsed arguments to options. Raises UsageError for options that cannot be combined."""
    if given.direction == "out" and given.source:
        raise UsageError("--source says where a load is from: use it with --direction in")
    if given.direction == "in" and Staging.STAGED in given.staging:
        raise UsageError("--staging staged is of an extraction: use it with --direction out")
    scenarios = list_scenarios(given.strategy, given.offload, given.staging, given.pinning)
    if not scenarios:
        raise UsageError(
            "--offload, --staging and --pinning do not go together: staged needs --offload param, and "
            "unpinned needs --offload policy with --strategy fsdp2"
        )
    check_methods(given.method, scenarios, given.direction)
    return BenchOptions(
        direction=given.direction,
        sources=tuple(map(BenchSource, given.source or SOURCES)),
        model=given.model if given.model in MODEL_SHAPES else str(find_model_directory(given.model, MODEL_SHAPES)),
        layers=given.layers,
        scenarios=scenarios,
        dtypes=tuple(given.dtype),
        bucket_bytes=tuple(dict.fromkeys(given.bucket_bytes)),
        methods=tuple(given.method),
        repeat=given.repeat,
        device=given.device,
    )


def check_methods(names: list[str], scenarios: tuple[Scenario, ...], direction: Direction) -> None:
    """Raises UsageError for a method that none of the strategies has."""
    if direction == "in":
        if unknown := [name for name in names if name not in LOADS]:
            raise UsageError(f"--method: no method that loads is called {unknown[0]!r}; use one of {', '.join(LOADS)}")
        return
    strategies = dict.fromkeys(scenario.strategy for scenario in scenarios)
    known = dict.fromkeys(name for each in scenarios for name in list_extractions(each.drop_offload()))
    for name in names:
        if not is_user_method(name) and name not in known:
            raise UsageError(
                f"--method: {' and '.join(strategies)} has no method {name!r} to measure; "
                f"use one of {', '.join(known)}, or module:function"
            )


def start_ranks(nproc: int) -> None:
    """Replaces this process by torchrun, which runs this program on ``nproc`` ranks of this node."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    os.execv(sys.executable, [*launcher, *sys.argv])


def report_unmeasured(asked: BenchOptions, result: BenchResult) -> None:
    """Prints the named methods that were not measured. Raises CannotRun if no method was measured."""
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


if __name__ == "__main__":
    main()
