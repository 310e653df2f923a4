"""Compares the predictions of ``fsdp-doctor memory plan`` with measured ledgers, stage by stage.

    python benchmarks/plan_accuracy.py stages.json                                     # of benchmarks/memory_stages.py
    python benchmarks/plan_accuracy.py memory.json --model DIR --batch 2 --sequence 128  # of memory measure --json

Prints a line for each stage of rank 0, with the exactly known parts and the whole peak, and the worst deviation of
each. The stage "built" of the benchmark is left out, because the benchmark fills its models with random numbers while
it builds them, which no job does. If a file has the estimates of other tools for a job, they are printed next to the
peak of "trained".
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_doctor.examination.memory_records import JobStage, MemoryClass, MemoryFile, StageMemory, read_memory_file
from fsdp_doctor.matrix.axes import AXIS_OF_VALUE
from fsdp_doctor.matrix.cases import Scenario, make_scenario
from fsdp_doctor.plan.job import RoleSetup
from fsdp_doctor.plan.stages import Predictor

EXACT: tuple[MemoryClass, ...] = ("parameters", "gradients", "optimizer state", "gathered outputs")
_PARTS = ("held", "the peak", "on the host")
# The names of other tools' estimates in benchmarks/memory_stages.py.
_OTHERS = ("FSDPMemTracker Total", "accelerate estimate-memory / ranks")
_MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """A job, as the job's name in the file of ledgers describes it."""

    model: str
    layers: int | None
    scenario: Scenario
    batch: int
    sequence: int
    checkpointing: bool
    # Whether the job is the benchmark's, which calls full_tensors with bfloat16.
    of_benchmark: bool


@dataclass(frozen=True)
class Compared:
    """The predicted and the measured bytes of one stage.

    held: the bytes of the exactly known classes.
    peak: the bytes at the peak of the device.
    host: the bytes on the host.
    """

    job: str
    stage: str
    held: tuple[int, int]
    peak: tuple[int, int]
    host: tuple[int, int]

    @property
    def title(self) -> str:
        return f"{self.job}: {self.stage}"

    @property
    def deviations(self) -> tuple[float, float, float]:
        # The process itself uses some pinned memory, through which it stages small copies.
        return _deviation(*self.held), _deviation(*self.peak), _deviation(*self.host, nothing=max(self.peak) // 500)


def _headed(estimator: str) -> str:
    return f"  {estimator}"


def _deviation(predicted: int, measured: int, nothing: int = 0) -> float:
    """Returns the relative deviation, or 0 if both numbers are below a MiB or below ``nothing``."""
    is_nothing = max(predicted, measured) <= max(_MIB, nothing)
    return (predicted - measured) / measured if measured and not is_nothing else 0.0


def job_of(name: str, options: argparse.Namespace) -> Job:
    if options.model:
        scenario = make_scenario({AXIS_OF_VALUE[value]: value for value in name.split("/")})
        return Job(
            options.model, None, scenario, options.batch, options.sequence, options.checkpointing, of_benchmark=False
        )
    shape, layers, strategy, offload, size, kept = name.split("/")
    batch, sequence = map(int, size.split("x"))
    staging = "staged" if "param" in offload else "unstaged"
    scenario = make_scenario({"strategy": strategy, "offload": offload, "staging": staging})
    return Job(shape, int(layers), scenario, batch, sequence, kept == "checkpointing", of_benchmark=True)


def compared(file: MemoryFile, options: argparse.Namespace) -> Iterator[Compared]:
    predictor = functools.cache(Predictor)
    ranks = 1 + max(memory.rank for memory in file.ledgers)
    jobs = dict.fromkeys(memory.job for memory in file.ledgers)
    for name in jobs:
        job = job_of(name, options)
        measured = [memory for memory in file.ledgers if memory.job == name and memory.rank == 0]
        if job.of_benchmark:
            measured = [memory for memory in measured if memory.stage != "built"]
        shard_ranks = {"size1": 1, "hsdp": 2}.get(job.scenario.sharding, ranks)
        setup = RoleSetup(
            role=name,
            scenario=job.scenario,
            shard_ranks=shard_ranks,
            replicas=ranks // shard_ranks,
            sequences=job.batch,
            length=job.sequence,
            checkpointing=job.checkpointing,
            extracted_bytes=2 if job.of_benchmark else None,
        )
        predicted = {
            (memory.stage, memory.method): memory
            for method in dict.fromkeys(memory.method for memory in measured)
            for memory in predictor(job.model, job.layers).predict_stages(replace(setup, method=method))
        }
        yield from _of_stages(name, measured, predicted)


def _of_stages(
    name: str, measured: Sequence[StageMemory], predicted: Mapping[tuple[JobStage, str], StageMemory]
) -> Iterator[Compared]:
    for memory in measured:
        ours = predicted[memory.stage, memory.method]
        assert memory.device is not None
        assert ours.device is not None
        held = [sum(each.device.held.get(part, 0) for part in EXACT) for each in (ours, memory) if each.device]
        host = [each.host.taken for each in (ours, memory)]
        peaks = (ours.peak, memory.peak)
        yield Compared(name, memory.name, (held[0], held[1]), peaks, (host[0], host[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--model", help="the model's directory or shape, for a file of fsdp-doctor memory measure")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    file = read_memory_file(options.file.read_text())
    rows = list(compared(file, options))
    width = max(len(row.title) for row in rows)
    others = [name for name in _OTHERS if any(name in said for said in file.estimates.values())]
    print(
        "".join([f"{'MiB: predicted, measured':{width}}", *(f"{name:>30}" for name in _PARTS), *map(_headed, others)])
    )
    for row in rows:
        said = file.estimates.get(row.job, {}) if row.stage == "trained" else {}
        numbers = [
            f"{pair[0] / _MIB:11.1f} {pair[1] / _MIB:10.1f} {deviation:+7.1%}"
            for pair, deviation in zip((row.held, row.peak, row.host), row.deviations, strict=True)
        ]
        estimates = [f"{said[name] / _MIB:{len(_headed(name))}.0f}" if name in said else "" for name in others]
        print("".join([f"{row.title:{width}}", *numbers, *estimates]).rstrip())
    for at, part in enumerate(_PARTS):
        worst = max(rows, key=lambda row: abs(row.deviations[at]))
        print(f"worst of what is {part}: {worst.deviations[at]:+.1%} in {worst.title}")


if __name__ == "__main__":
    main()
