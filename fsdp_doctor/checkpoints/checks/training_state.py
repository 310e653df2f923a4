"""Checks of what a resume needs beside the model: the optimizer, its settings and steps, and who else counts them."""

from __future__ import annotations

import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from fsdp_doctor.checkpoints.checks.evidence import (
    GROUP_SETTING,
    CheckpointEvidence,
    find_rank_file,
    parse_number,
)
from fsdp_doctor.checkpoints.checks.optimizer import read_optimizer
from fsdp_doctor.checkpoints.record import PlainValue, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

_COUNTERS = frozenset({"step", "last_epoch", "_step_count", "global_step"})
_STEP_FOLDER = re.compile(r"(?:checkpoint|global_step|step)[-_](\d+)")
# No job takes as many.
_MOST_STEPS = 1e9
_RATES = re.compile(r"(?:^|\.)(?:_last_lr|base_lrs)\.\d+$")
_SCALE = re.compile(r"(?:^|scaler\.)_?scale$")
# CPU generators of torch have as many bytes, those of devices at most 64; and those of torch before 1.7.
_RANDOM_STATE = re.compile(r"(?:^|[._])rng(?:[._]|$)|random_states?(?:[._]|$)|^torch_manual_seed$")
_RANDOM_STATE_BYTES, _MOST_OF_DEVICE = frozenset({5056, 5048, 824816, 824832}), 64


def compare_steps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Counters that must be the same on all ranks, and those of parameters that mostly are."""
    values: dict[tuple[str, ...], dict[tuple[str, int | None], float]] = defaultdict(dict)
    for (path, rank), number in state.values.items():
        if path and path[-1] in _COUNTERS and isinstance(number, int | float):
            values[path]["", rank] = number
    for tensor in state.tensors.values():
        if tensor.last_name == "step" and tensor.numel == 1:
            for piece, scan in evidence.find_scans(tensor):
                if (value := parse_number(tensor.dtype, scan.head)) is not None:
                    values[tensor.path][piece.file, piece.rank] = value
    steps: set[float] = set()
    for path, by_rank in values.items():
        if len(set(by_rank.values())) > 1:
            counts = Counter(by_rank.values())
            common, most = counts.most_common(1)[0]
            numbers = sorted({f"{number:g}" for number in by_rank.values()})
            what = f"the ranks have {join_some(numbers)}"
            (file, rank), number = next(item for item in by_rank.items() if item[1] != common)
            if 2 * most > len(by_rank):
                what = f"it is {number:g}, and {most} of {len(by_rank)} ranks have {common:g}"
            yield Symptom(Trouble.STEPS, what, file or find_rank_file(state, rank), ".".join(path), rank=rank)
        if state.judge_keys(path) != "optimizer":
            continue
        steps |= set(by_rank.values())
        for (file, rank), number in by_rank.items():
            if not (0 <= number < _MOST_STEPS and number == int(number)):
                what = f"the step is {number:g}, which no count of steps is"
                yield Symptom(Trouble.SETTING, what, file or find_rank_file(state, rank), ".".join(path), rank=rank)
    if len(steps) > 1:
        what = f"the parameters' steps are between {min(steps):g} and {max(steps):g}"
        yield Symptom(Trouble.STEPS_VARY, what, state.directory)


def judge_settings(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Settings with which no step can be made, and parameters that stand twice in the optimizer's groups."""
    # By the rank and the optimizer.
    params: dict[tuple[int | None, str], Counter[object]] = defaultdict(Counter)
    for (path, rank), value in state.values.items():
        name = ".".join(path)
        if (found := GROUP_SETTING.search(name)) and found["key"].startswith("params"):
            params[rank, name[: found.start()]][value] += 1
        elif _is_impossible(name, value, state.label):
            yield Symptom(Trouble.SETTING, f"it is {value:g}", _find_file(state, rank), name, rank=rank)
    for (rank, _head), counts in params.items():
        if twice := [str(key) for key, count in counts.items() if count > 1]:
            what = f"the groups have {join_some(twice)} twice"
            yield Symptom(Trouble.OTHER_OPTIMIZER, what, _find_file(state, rank), "param_groups", rank=rank)


def judge_settings_beside(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """The same of files that are no state of a model or an optimizer: a scheduler's, a gradient scaler's."""
    for file, values in evidence.checkpoint.values_beside.items():
        for path, value in values.items():
            if _is_impossible(".".join(path), value, pathlib.PurePath(file).stem):
                yield Symptom(Trouble.SETTING, f"it is {value:g}", file, ".".join(path))


def _is_impossible(name: str, value: PlainValue, label: str) -> bool:
    """Says whether a number is one with which the optimizer, the scheduler or the scaler can make no step."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if _SCALE.search(name) and ("scaler" in name or "scaler" in label):
        return not math.isfinite(value) or value <= 0
    found = GROUP_SETTING.search(name)
    if found and found["key"].startswith("betas"):
        return not 0 <= value < 1
    return bool(found or _RATES.search(name)) and not (math.isfinite(value) and value >= 0)


def _find_file(state: State, rank: int | None) -> str:
    return find_rank_file(state, rank) if rank is not None else (state.files or [state.directory])[0]


def judge_random_states(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """States of torch's generators of random numbers that have another length than any has."""
    for tensor in state.tensors.values():
        is_state = tensor.dtype == "uint8" and len(tensor.shape) == 1 and bool(_RANDOM_STATE.search(tensor.name))
        if is_state and tensor.numel > _MOST_OF_DEVICE and tensor.numel not in _RANDOM_STATE_BYTES:
            what = f"it has {tensor.numel} bytes, and a generator of the CPU has 5056"
            yield Symptom(Trouble.RANDOM_STATE, what, tensor.file, tensor.name)


def compare_trainer_step(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    for path, settings in evidence.checkpoint.settings.items():
        place = pathlib.PurePath(path)
        folder = _STEP_FOLDER.fullmatch((evidence.checkpoint.root.resolve() / place).parent.name)
        step = settings.get("global_step") if isinstance(settings, dict) else None
        if place.name == "trainer_state.json" and folder and step != int(folder[1]):
            yield Symptom(Trouble.STEP_NAME, f"global_step is {step}", path)


class _Count(NamedTuple):
    """Steps by one witness: its file, and what it calls them."""

    file: str
    name: str
    steps: float


def compare_counts(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Steps that the optimizer, the scheduler and the loop count, where one denies what the others say.

    Trainer steps all three together, except that a gradient scaler passes over steps of the optimizer. In other loops a
    scheduler may count epochs or processes, and the loop batches.
    """
    by_place: dict[str, list[State]] = defaultdict(list)
    for state in evidence.checkpoint.states:
        by_place[state.directory].append(state)
    for directory, states in by_place.items():
        trainer = evidence.checkpoint.settings.get(str(pathlib.PurePath(directory) / "trainer_state.json"))
        step = trainer.get("global_step") if isinstance(trainer, dict) else None
        optimizer, schedulers, loops = _count_steps(evidence, states)
        if isinstance(step, int) and optimizer is not None and schedulers:
            file = str(pathlib.PurePath(directory) / "trainer_state.json")
            yield from _find_odd_count([_Count(file, "global_step", step), optimizer, schedulers[0]], states)
            if not list((evidence.checkpoint.root / directory).glob("rng_state*")):
                yield Symptom(Trouble.NO_RANDOM_STATE, "Trainer's rng_state.pth is missing", directory)
        elif optimizer is not None:
            for loop in loops:
                if loop.steps < optimizer.steps:
                    what = f"it is {loop.steps:g}, and the optimizer made {optimizer.steps:g} steps"
                    yield Symptom(Trouble.STEPS_DIFFER, what, loop.file, loop.name)
            for scheduler in schedulers:
                if scheduler.steps > optimizer.steps and scheduler.steps % max(optimizer.steps, 1):
                    what = f"it is {scheduler.steps:g}, and the optimizer made {optimizer.steps:g} steps"
                    yield Symptom(Trouble.STEPS_DIFFER, what, scheduler.file, scheduler.name)


def _count_steps(evidence: CheckpointEvidence, states: list[State]) -> tuple[_Count | None, list[_Count], list[_Count]]:
    """Counts by the optimizer, the schedulers and the loop."""
    optimizer: _Count | None = None
    schedulers: list[_Count] = []
    loops: list[_Count] = []
    for file, values in evidence.checkpoint.values_beside.items():
        epoch = values.get(("last_epoch",))
        if pathlib.PurePath(file).parent == pathlib.PurePath(states[0].directory) and isinstance(epoch, int):
            schedulers.append(_Count(file, "last_epoch", epoch))
    for state in states:
        steps = [step for parameter in read_optimizer(evidence, state).values() for step in parameter.steps]
        if steps and (optimizer is None or max(steps) > optimizer.steps):
            optimizer = _Count(state.files[0], "step", max(steps))
        for (path, _), value in state.values.items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            name = ".".join(path)
            if path[-1:] == ("last_epoch",) and ("sched" in name or "sched" in state.label or len(path) == 1):
                schedulers.append(_Count(state.files[0], name, value))
            elif path in (("global_step",), ("step",), ("iteration",), ("train_state", "step")):
                loops.append(_Count(state.files[0], name, value))
    return optimizer, schedulers, loops


def _find_odd_count(counts: list[_Count], states: list[State]) -> Iterator[Symptom]:
    has_scaler = any("scaler" in file for state in states for file in state.files)
    for odd in counts:
        others = [each for each in counts if each is not odd]
        if others[0].steps == others[1].steps != odd.steps:
            witnesses = " and ".join(f"{each.name} in {each.file}" for each in others)
            what = f"it is {odd.steps:g}, and {witnesses} are {others[0].steps:g}"
            is_skipped = has_scaler and odd.name == "step" and odd.steps < others[0].steps
            trouble = Trouble.STEPS_DIFFER if is_skipped else Trouble.STEPS_CONTRADICT
            yield Symptom(trouble, what, odd.file, odd.name)
