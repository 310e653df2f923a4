"""The record of a run: what each rank wrote at each optimizer step, read back."""

from __future__ import annotations

import contextlib
import pathlib
import re
from typing import Any, TypeAlias

import msgspec

Digests: TypeAlias = dict[str, str]
RecordedValues: TypeAlias = dict[str, dict[str, Any]]


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one rank's process.

    frameworks: those whose code called the optimizer. unseen: modules that are loaded, and keep state that is not seen.
    """

    rank: int
    ranks: int
    torch: str
    device: str
    frameworks: list[str]
    unseen: list[str]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State from which a step starts, on one rank; digests are of this rank's shards.

    step: from 1, in this process. weights: of the optimizers' parameters; rounded: the same, rounded to bfloat16.
    others: parameters of the model that no optimizer has. options: of each parameter group. groups: that of each
    parameter.
    averages: of classes that keep averages of weights, and of other models in the process.
    batches: of each forward since the last step, the tensors that entered the model. generators: at its first forward.
    epochs: the lengths of the loaders, in batches. written: files that have changed since the last step.
    ended: the last record, of what the last step led to; it has the weights alone.
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
    epochs: list[int] = []
    written: list[str] = []
    seconds: float = 0.0
    ended: bool = False

    @property
    def options_of(self) -> RecordedValues:
        """Options of each parameter: the order of groups is no state."""
        return {name: self.options[group] for name, group in self.groups.items()}


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one rank. final: None for a process that ended by itself. error: why the recorder gave up."""

    facts: ProcessFacts
    steps: list[StepRecord]
    final: StepRecord | None = None
    error: str = ""
    forwards: int = 0


def read_ranks(directory: pathlib.Path) -> dict[int, RankRecord]:
    """The records of a run, by rank; a line that a process could not finish is left out."""
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
    """Reads the reason of each process in which the recorder could not start."""
    return sorted({file.read_text() for file in directory.glob("failed-*")})
