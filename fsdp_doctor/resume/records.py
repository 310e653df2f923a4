"""Reads the records that each rank of a run wrote at each optimizer step."""

from __future__ import annotations

import contextlib
import pathlib
import re
from typing import Any, TypeAlias

import msgspec

Digests: TypeAlias = dict[str, str]
RecordedValues: TypeAlias = dict[str, dict[str, Any]]


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one rank's process.

    frameworks: the frameworks whose code called the optimizer.
    unseen: imported modules that keep training state which the recorder cannot see.
    """

    rank: int
    ranks: int
    torch: str
    device: str
    frameworks: list[str]
    unseen: list[str]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank before a step; digests are of this rank's shards.

    step: the number of the step in this process, from 1.
    weights: digests of the optimizers' parameters.
    rounded: digests of the same parameters, rounded to bfloat16.
    others: digests of the model's parameters that no optimizer has.
    options: the options of each parameter group.
    groups: the name of each parameter's group.
    averages: the state of objects that average weights, and the parameters of other models in the process.
    batches: digests of the model's input tensors, for each forward since the last step.
    generators: digests of the random number generators' states at the first forward since the last step.
    not_loaded: the indexes in ``optimizers`` of optimizers whose load_state_dict this process has not called.
    epochs: the lengths of the data loaders, in batches.
    written: files of the job that have changed since the last step.
    ended: whether this is the final record, which has only the weights after the last step.
    """

    step: int
    weights: Digests = {}
    rounded: Digests = {}
    others: Digests = {}
    gradients: Digests = {}
    state: RecordedValues = {}
    options: RecordedValues = {}
    groups: dict[str, str] = {}
    schedulers: RecordedValues = {}
    scalers: RecordedValues = {}
    averages: RecordedValues = {}
    buffers: Digests = {}
    batches: list[list[str]] = []
    generators: Digests = {}
    optimizers: list[str] = []
    not_loaded: list[int] = []
    epochs: list[int] = []
    written: list[str] = []
    seconds: float = 0.0
    ended: bool = False

    @property
    def options_of(self) -> RecordedValues:
        """Options of each parameter, which unlike ``options`` do not depend on the order of the groups."""
        return {name: self.options[group] for name, group in self.groups.items()}


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one rank.

    final: the record after the last step; None for a process that ended by itself.
    error: the reason why the recorder stopped early; empty if it did not.
    forwards: the number of forwards of a rank that took no optimizer step.
    """

    facts: ProcessFacts
    steps: list[StepRecord]
    final: StepRecord | None = None
    error: str = ""
    forwards: int = 0


def read_ranks(directory: pathlib.Path) -> dict[int, RankRecord]:
    """Maps each rank of a run to its record; an incomplete line is left out."""
    ranks: dict[int, RankRecord] = {}
    for file in directory.glob("rank*.jsonl"):
        lines: list[dict[str, Any]] = []
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                lines.append(msgspec.json.decode(line))
        lines = [line for line in lines if line]
        if not lines or "facts" not in lines[0]:
            continue
        steps = [msgspec.convert(line, StepRecord) for line in lines if "step" in line]
        ranks[int(re.sub(r"\D", "", file.name))] = RankRecord(
            facts=msgspec.convert(lines[0]["facts"], ProcessFacts),
            steps=[step for step in steps if not step.ended],
            final=next((step for step in steps if step.ended), None),
            error=next((line["error"] for line in lines if "error" in line), ""),
            forwards=sum(line.get("forwards", 0) for line in lines),
        )
    return dict(sorted(ranks.items()))


def read_start_failures(directory: pathlib.Path) -> list[str]:
    """Lists the reasons why the recorder could not start in some processes; empty if it started in all."""
    return sorted({file.read_text() for file in directory.glob("failed-*")})
