"""Checks the training state other than the model: optimizer settings, step counts, schedulers, random states."""

from __future__ import annotations

import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from fsdp_doctor.checkpoints.checks.evidence import (
    EXPERT,
    GROUP_SETTING,
    CheckpointEvidence,
    find_rank_file,
    parse_number,
)
from fsdp_doctor.checkpoints.checks.optimizer import name_numbers, read_optimizer
from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.checkpoints.record import Arrangement, PlainValue, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

_COUNTERS = frozenset({"step", "last_epoch", "_step_count", "global_step"})
_STEP_FOLDER = re.compile(r"(?:checkpoint|global_step|step)[-_](\d+)")
# Projections of one module: in each step, either all of them have a gradient or none. The files of an optimizer are
# compared if they share at least _FEWEST_MODULES modules.
_PROJECTION = re.compile(
    r"(?P<module>.*\b(?:layers|layer|h|blocks|block)\.\d+\..*?)"
    r"(?P<kind>(?:[qkvo]|out|gate|up|down)_proj|query|key|value|[qkvo])\.weight"
)
_FEWEST_MODULES = 2
# No job makes this many steps.
_MOST_STEPS = 1e9
_RATES = re.compile(r"(?:^|\.)(?:_last_lr|base_lrs)\.\d+$")
_SCALE = re.compile(r"(?:^|scaler\.)_?scale$")
# Sizes in bytes of torch's random number generator states. _RANDOM_STATE_BYTES: the sizes on the CPU, including torch
# before 1.7. _MOST_OF_DEVICE: the largest size on a device.
_RANDOM_STATE = re.compile(r"(?:^|[._])rng(?:[._]|$)|random_states?(?:[._]|$)|^torch_manual_seed$")
_RANDOM_STATE_FILE = re.compile(r"(?P<before>(?:.*/)?(?:rng_state|random_states)_)(?P<rank>\d{1,5})(?P<after>\.p\w+)")
_RANDOM_STATE_BYTES, _MOST_OF_DEVICE = frozenset({5056, 5048, 824816, 824832}), 64


def compare_steps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds step counts that are impossible, that differ between ranks, or that differ between parameters."""
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
                what = f"this rank's step is {number:g}, but {most} of {len(by_rank)} ranks have {common:g}"
            yield Symptom(Trouble.STEPS, what, file or find_rank_file(state, rank), ".".join(path), rank=rank)
        if state.judge_keys(path) != "optimizer":
            continue
        steps |= set(by_rank.values())
        for (file, rank), number in by_rank.items():
            if not (0 <= number < _MOST_STEPS and number == int(number)):
                what = f"the step is {number:g}, which is not a valid step count"
                yield Symptom(Trouble.SETTING, what, file or find_rank_file(state, rank), ".".join(path), rank=rank)
    if len(steps) > 1:
        what = f"the parameters' steps are between {min(steps):g} and {max(steps):g}"
        yield Symptom(Trouble.STEPS_VARY, what, state.directory)


def find_torn_steps(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds an optimizer that was saved in the middle of a step, or that has a file from another save.

    A step may skip layers and experts, and a kind of parameter may be frozen in all layers. But a step never skips a
    single projection of a module in only one layer.
    """
    beside = [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]
    optimizer = read_optimizer(evidence, state)
    places = name_numbers(state, beside, optimizer)
    steps: dict[str, dict[str, float]] = defaultdict(dict)
    files: dict[str, dict[float, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key, parameter in optimizer.items():
        name = places[key].parameter if key in places else strip_wrappers(key)
        found = _PROJECTION.fullmatch(name)
        if not found or EXPERT.match(name) or len(parameter.steps) != 1:
            continue
        (step,) = parameter.steps
        steps[found["module"]][found["kind"]] = step
        if (tensor := parameter.tensors.get("step")) is not None and state.arrangement is Arrangement.DCP:
            files[tensor.file][step].add(found["module"])
    if (old := _find_file_of_another_save(files)) is not None:
        file, step, common = old
        what = (
            f"the parameters in this file are at step {step:g}, but other parameters of the same modules, in "
            f"other files, are at step {common:g}"
        )
        yield Symptom(Trouble.STEPS, what, file)
        return
    found_steps = sorted({step for kinds in steps.values() for step in kinds.values()})
    if len(found_steps) != 2 or found_steps[1] - found_steps[0] != 1:
        return
    for module, kinds in steps.items():
        behind = [kind for kind, step in kinds.items() if step == found_steps[0]]
        family = re.sub(r"\d+", "#", module)
        like = [each for other, each in steps.items() if other != module and re.sub(r"\d+", "#", other) == family]
        is_alone = any(each.get(kind) == found_steps[1] for each in like for kind in behind)
        is_passed = any(each.get(kind) == found_steps[0] for each in like for kind in kinds.keys() - {*behind})
        if 0 < len(behind) < len(kinds) and (is_alone or is_passed):
            what = (
                f"{join_some(behind)} made {found_steps[0]:g} steps, but the other parameters of the module made "
                f"{found_steps[1]:g}"
            )
            yield Symptom(Trouble.TORN_STEP, what, state.files[0], module)


def _find_file_of_another_save(
    files: Mapping[str, Mapping[float, Collection[str]]],
) -> tuple[str, float, float] | None:
    """Finds the file whose steps all differ from the steps in the other files, although it has parameters of the same
    modules.

    Returns (file, its step, step of the other files), or None.
    """
    of_one = {file: next(iter(by_step)) for file, by_step in files.items() if len(by_step) == 1}
    counts = Counter(of_one.values())
    if len(of_one) < len(files) or len(counts) != 2:
        return None
    rare, common = sorted(counts, key=lambda step: (counts[step], step))
    file = next(each for each, step in of_one.items() if step == rare)
    modules = {module for each, step in of_one.items() if step == common for module in files[each][step]}
    return (file, rare, common) if len(modules & {*files[file][rare]}) >= _FEWEST_MODULES else None


def judge_settings(_: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds optimizer settings that make a step impossible, and parameters listed twice in the optimizer's groups."""
    # Keyed by rank and by the path of the optimizer.
    params: dict[tuple[int | None, str], Counter[object]] = defaultdict(Counter)
    for (path, rank), value in state.values.items():
        name = ".".join(path)
        if (found := GROUP_SETTING.search(name)) and found["key"].startswith("params"):
            params[rank, name[: found.start()]][value] += 1
        elif _is_impossible(name, value, state.label):
            yield Symptom(Trouble.SETTING, f"the value is {value:g}", _find_file(state, rank), name, rank=rank)
    for (rank, _head), counts in params.items():
        if twice := [str(key) for key, count in counts.items() if count > 1]:
            what = f"the param groups contain {join_some(twice)} twice"
            yield Symptom(Trouble.OTHER_OPTIMIZER, what, _find_file(state, rank), "param_groups", rank=rank)


def judge_settings_beside(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Finds impossible settings in other files, such as those of a scheduler or a gradient scaler."""
    for file, values in evidence.checkpoint.values_beside.items():
        for path, value in values.items():
            if _is_impossible(".".join(path), value, pathlib.PurePath(file).stem):
                yield Symptom(Trouble.SETTING, f"the value is {value:g}", file, ".".join(path))


def _is_impossible(name: str, value: PlainValue, label: str) -> bool:
    """Returns whether the value makes it impossible for the optimizer, the scheduler or the scaler to make a step."""
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
    """Finds random number generator states whose length no torch generator has."""
    for tensor in state.tensors.values():
        is_state = tensor.dtype == "uint8" and len(tensor.shape) == 1 and bool(_RANDOM_STATE.search(tensor.name))
        if is_state and tensor.numel > _MOST_OF_DEVICE and tensor.numel not in _RANDOM_STATE_BYTES:
            what = f"the state has {tensor.numel} bytes, but a CPU generator's state has 5056"
            yield Symptom(Trouble.RANDOM_STATE, what, tensor.file, tensor.name)


def find_missing_random_states(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Finds ranks without a file of random number generator states although a higher rank has such a file."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for file in evidence.checkpoint.files:
        if found := _RANDOM_STATE_FILE.fullmatch(file):
            ranks[f"{found['before']}#{found['after']}"].add(int(found["rank"]))
    for name, found_ranks in ranks.items():
        for rank in sorted(set(range(max(found_ranks))) - found_ranks):
            what = f"the file is missing, but rank {max(found_ranks)} has one"
            yield Symptom(Trouble.NO_RANDOM_STATE, what, name.replace("#", str(rank)), rank=rank)


def compare_trainer_step(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    for path, settings in evidence.checkpoint.settings.items():
        place = pathlib.PurePath(path)
        folder = _STEP_FOLDER.fullmatch((evidence.checkpoint.root.resolve() / place).parent.name)
        step = settings.get("global_step") if isinstance(settings, dict) else None
        if place.name == "trainer_state.json" and folder and step != int(folder[1]):
            yield Symptom(Trouble.STEP_NAME, f"global_step is {step}", path)


class _Count(NamedTuple):
    """Step count from one file, and its name in the file.

    ``rates`` are the learning rates that a scheduler last set, or that an optimizer has.
    """

    file: str
    name: str
    steps: float
    rates: frozenset[float] = frozenset()


def compare_counts(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Finds step counts of the optimizer, the scheduler and the training loop that contradict each other.

    Trainer steps all three together, except that a gradient scaler may skip steps of the optimizer. In other loops a
    scheduler may step once per epoch, or once per step for every process, and the loop may count batches.
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
                    what = f"the count is {loop.steps:g}, but the optimizer made {optimizer.steps:g} steps"
                    yield Symptom(Trouble.STEPS_DIFFER, what, loop.file, loop.name)
            for scheduler in schedulers:
                if scheduler.steps > optimizer.steps and scheduler.steps % max(optimizer.steps, 1):
                    what = f"the count is {scheduler.steps:g}, but the optimizer made {optimizer.steps:g} steps"
                    yield Symptom(Trouble.STEPS_DIFFER, what, scheduler.file, scheduler.name)
            if len(schedulers) == 1:
                yield from _judge_older_scheduler(schedulers[0], optimizer, loops)


def _judge_older_scheduler(scheduler: _Count, optimizer: _Count, loops: list[_Count]) -> Iterator[Symptom]:
    """Judges a single scheduler that counted fewer steps than its optimizer.

    The scheduler may count epochs or have started late. In both cases the optimizer still has the learning rate that
    the scheduler set, so only a different rate is reported.
    """
    has_other_rate = scheduler.rates and optimizer.rates and not _are_near(scheduler.rates, optimizer.rates)
    if not has_other_rate or scheduler.steps > optimizer.steps:
        return
    counts_steps = 2 * scheduler.steps > optimizer.steps
    is_denied = counts_steps and any(loop.steps == optimizer.steps for loop in loops)
    what = (
        f"the count is {scheduler.steps:g}, but the optimizer made {optimizer.steps:g} steps and has another "
        "learning rate"
    )
    trouble = Trouble.STEPS_CONTRADICT if is_denied else Trouble.STEPS_DIFFER
    yield Symptom(trouble, what, scheduler.file, scheduler.name)


def _are_near(some: frozenset[float], others: frozenset[float]) -> bool:
    return all(any(math.isclose(one, other, rel_tol=1e-6) for other in others) for one in some)


def _read_rates(values: Mapping[tuple[str, ...], PlainValue], head: tuple[str, ...]) -> frozenset[float]:
    """Reads the learning rates that a scheduler last set."""
    return frozenset(
        value
        for path, value in values.items()
        if path[: len(head) + 1] == (*head, "_last_lr") and isinstance(value, int | float)
    )


def _read_rates_of_groups(state: State) -> frozenset[float]:
    settings = ((GROUP_SETTING.search(".".join(path)), value) for (path, _), value in state.values.items())
    return frozenset(
        value for found, value in settings if found and found["key"] == "lr" and isinstance(value, int | float)
    )


def _count_steps(evidence: CheckpointEvidence, states: list[State]) -> tuple[_Count | None, list[_Count], list[_Count]]:
    """Returns (highest step count of an optimizer, all counts of schedulers, all counts of training loops)."""
    optimizer: _Count | None = None
    schedulers: list[_Count] = []
    loops: list[_Count] = []
    for file, values in evidence.checkpoint.values_beside.items():
        epoch = values.get(("last_epoch",))
        if pathlib.PurePath(file).parent == pathlib.PurePath(states[0].directory) and isinstance(epoch, int):
            schedulers.append(_Count(file, "last_epoch", epoch, _read_rates(values, ())))
    for state in states:
        steps = [step for parameter in read_optimizer(evidence, state).values() for step in parameter.steps]
        if steps and (optimizer is None or max(steps) > optimizer.steps):
            optimizer = _Count(state.files[0], "step", max(steps), _read_rates_of_groups(state))
        for (path, _), value in state.values.items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            name = ".".join(path)
            if path[-1:] == ("last_epoch",) and ("sched" in name or "sched" in state.label or len(path) == 1):
                of_all = {path: value for (path, _), value in state.values.items()}
                schedulers.append(_Count(state.files[0], name, value, _read_rates(of_all, path[:-1])))
            elif path in (("global_step",), ("step",), ("iteration",), ("train_state", "step")):
                loops.append(_Count(state.files[0], name, value))
    return optimizer, schedulers, loops


def _find_odd_count(counts: list[_Count], states: list[State]) -> Iterator[Symptom]:
    has_scaler = any("scaler" in file for state in states for file in state.files)
    for odd in counts:
        others = [each for each in counts if each is not odd]
        if others[0].steps == others[1].steps != odd.steps:
            witnesses = " and ".join(f"{each.name} in {each.file}" for each in others)
            what = f"the count is {odd.steps:g}, but {witnesses} are {others[0].steps:g}"
            is_skipped = has_scaler and odd.name == "step" and odd.steps < others[0].steps
            trouble = Trouble.STEPS_DIFFER if is_skipped else Trouble.STEPS_CONTRADICT
            yield Symptom(trouble, what, odd.file, odd.name)
