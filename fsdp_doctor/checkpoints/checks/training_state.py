"""Checks of what a resume needs beside the model: the optimizer, its steps, and who else counts them."""

from __future__ import annotations

import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from fsdp_doctor.checkpoints.checks.evidence import (
    EXPERT,
    LAYER,
    CheckpointEvidence,
    find_rank_file,
    measure_size,
    parse_number,
)
from fsdp_doctor.checkpoints.record import SavedTensor, State, parse_optimizer_slot
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

_MOMENTS = {"exp_avg", "exp_avg_sq"}
# Its square is zero in float32.
_SQUARE_IS_ZERO = 1e-18
_COUNTERS = frozenset({"step", "last_epoch", "_step_count", "global_step"})
_STEP_FOLDER = re.compile(r"(?:checkpoint|global_step|step)[-_](\d+)")


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
    of_parameters = (numbers for path, numbers in values.items() if state.judge_keys(path) == "optimizer")
    steps = {number for numbers in of_parameters for number in numbers.values()}
    if len(steps) > 1:
        what = f"the parameters' steps are between {min(steps):g} and {max(steps):g}"
        yield Symptom(Trouble.STEPS_VARY, what, state.directory)


def compare_optimizer(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Parameters without the optimizer's state that others of their layer have."""
    states = evidence.checkpoint.states
    with_state: set[str] = set()
    for state in states:
        slots = [slot for tensor in state.select("optimizer") if (slot := parse_optimizer_slot(tensor))]
        yield from _compare_moments(evidence, state)
        ids = {f"{key}" for (path, _), key in state.values.items() if path[-2:-1] == ("params",)}
        with_state |= {name for name, _ in slots}
        if lacking := sorted(ids - {name for name, _ in slots}) if slots else []:
            what = f"of {len(ids)} parameters {len(lacking)} have no state: {join_some(lacking)}"
            yield Symptom(Trouble.NO_OPTIMIZER, what, state.directory)
    model = {tensor.parameter: tensor for state in states for tensor in state.select("model") if len(tensor.shape) > 0}
    has_training_state = any(state.label == "extra_state" for state in states) or any(
        pathlib.PurePath(path).name == "trainer_state.json" for path in evidence.checkpoint.settings
    )
    if model and not with_state and has_training_state:
        yield Symptom(Trouble.NO_OPTIMIZER, "there is no state of an optimizer", ".")
    families_with_state = {re.sub(r"\d+", "#", name) for name in with_state}
    layers_with_state = {found.group(1, 2) for name in with_state if (found := LAYER.match(name))}
    for name, tensor in model.items() if with_state & model.keys() else ():
        found = LAYER.match(name)
        is_like_others = re.sub(r"\d+", "#", name) in families_with_state and not EXPERT.match(name)
        if name not in with_state and is_like_others and found and found.group(1, 2) in layers_with_state:
            what = "the optimizer has no state of it, and has of others in its layer"
            yield Symptom(Trouble.OPTIMIZER, what, tensor.file, name)


def _judge_moments(evidence: CheckpointEvidence, by_kind: dict[str, SavedTensor], step: float | None) -> str:
    """Says what is wrong with the moments of Adam, whose second is a mean of squares; empty if nothing is."""
    first, second = by_kind.get("exp_avg"), by_kind.get("exp_avg_sq")
    if first is None or second is None:
        return ""
    if negative := sum(scan.num_negative for _, scan in evidence.find_scans(second)):
        return f"{negative} values of a mean of squares are negative"
    has_first = bool(evidence.find_scans(first)) and not evidence.is_zero(first)
    if has_first and evidence.is_zero(second) and (measure_size(evidence, first) or 1.0) > _SQUARE_IS_ZERO:
        return "it is zero, and exp_avg is not"
    if step == 0 and has_first:
        return "the step is 0, and there are moments"
    return ""


def _compare_moments(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Parameters that lack one of the two moments that Adam keeps of others, or have them in different shapes."""
    moments: dict[str, dict[str, SavedTensor]] = defaultdict(dict)
    for tensor in state.select("optimizer"):
        if slot := parse_optimizer_slot(tensor):
            moments[slot[0]][slot[1]] = tensor
    steps = _read_steps(evidence, state, moments)
    has_both = [name for name, by_kind in moments.items() if by_kind.keys() >= _MOMENTS]
    for name, by_kind in moments.items():
        present = _MOMENTS & by_kind.keys()
        tensors = [by_kind[kind] for kind in sorted(present)]
        if has_both and len(present) == 1 and by_kind.keys() <= {*_MOMENTS, "step"}:
            what = f"it has no {min(_MOMENTS - present)}, which {len(has_both)} of {len(moments)} have"
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)
        elif (what := _judge_moments(evidence, by_kind, steps.get(name))) and len(tensors) == 2:
            yield Symptom(Trouble.MOMENTS, what, by_kind["exp_avg_sq"].file, by_kind["exp_avg_sq"].name)
        elif len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
            what = f"its moments are {list(tensors[0].shape)} and {list(tensors[1].shape)}"
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)


def _read_steps(
    evidence: CheckpointEvidence, state: State, moments: dict[str, dict[str, SavedTensor]]
) -> dict[str, float]:
    steps: dict[str, float] = {}
    for name, by_kind in moments.items():
        tensor = by_kind.get("step")
        if tensor is not None and tensor.numel == 1:
            for _, scan in evidence.find_scans(tensor):
                if (value := parse_number(tensor.dtype, scan.head)) is not None:
                    steps[name] = value
    for (path, _), plain in state.values.items():
        if path[-1:] == ("step",) and len(path) > 2 and isinstance(plain, int | float):
            steps.setdefault(path[-2], plain)
    return steps


def compare_trainer_step(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    for path, settings in evidence.checkpoint.settings.items():
        place = pathlib.PurePath(path)
        folder = _STEP_FOLDER.fullmatch((evidence.checkpoint.root.resolve() / place).parent.name)
        step = settings.get("global_step") if isinstance(settings, dict) else None
        if place.name == "trainer_state.json" and folder and step != int(folder[1]):
            yield Symptom(Trouble.STEP_NAME, f"global_step is {step}", path)
