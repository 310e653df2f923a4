"""Checks the optimizer state: moments that are impossible, missing, or belong to other parameters."""

from __future__ import annotations

import itertools
import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy

from fsdp_doctor.checkpoints.checks.evidence import (
    EXPERT,
    GROUP_SETTING,
    LAYER,
    MOMENTS,
    CheckpointEvidence,
    Samples,
    measure_size,
    parse_number,
)
from fsdp_doctor.checkpoints.dtypes import is_floating_point
from fsdp_doctor.checkpoints.names import EMBEDDING, strip_wrappers
from fsdp_doctor.checkpoints.record import BUFFERS, Arrangement, SavedTensor, State, parse_optimizer_slot
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

# Slots with the same shape as their parameter. GaLore and similar optimizers keep smaller moments for most matrices.
_LIKE_PARAMETER = MOMENTS | {"max_exp_avg_sq", "momentum_buffer"}
_LIKE_NUMBER = frozenset({"exp_avg", "momentum_buffer"})
# Optimizers with further slots (SOAP, Adan, Adafactor, Prodigy) keep moments of something other than the gradient.
_SLOTS_OF_ADAM = MOMENTS | {"max_exp_avg_sq", "step"}
# The square of a smaller value is zero in float32.
_SQUARE_IS_ZERO = 1e-18
# Factors by which rounded moments may exceed the bound. _ROUNDING: in float32. _NARROW_ROUNDING: in narrower dtypes,
# whose rounding may stop a running mean from changing.
_ROUNDING, _NARROW_ROUNDING = 1.02, 4.0
# Bound that is used if the betas are unknown.
_WIDE_BOUND = 2000.0
# Names of the row and column factors of a mean of squares, and the relative difference of their means that rounding
# does not explain.
_FACTORS, _FACTORS_DIFFER = (("exp_avg_sq_row", "exp_avg_sq_col"), ("row_var", "col_var")), 0.02
_SMALLEST_MOMENT = 1e-15


@dataclass
class OptimizedParameter:
    """Optimizer state of one parameter: its tensors, the names of its plain values, and its step counts."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    steps: set[float] = field(default_factory=set)

    @property
    def is_of_adam(self) -> bool:
        """Returns whether the parameter's state has only entries that Adam keeps."""
        return self.tensors.keys() | self.values <= _SLOTS_OF_ADAM


class _Betas(NamedTuple):
    first: float
    second: float


def read_optimizer(evidence: CheckpointEvidence, state: State) -> dict[str, OptimizedParameter]:
    """Reads the optimizer state of each parameter, keyed by the parameter's name or number."""
    found: dict[str, OptimizedParameter] = defaultdict(OptimizedParameter)
    for tensor in state.select("optimizer"):
        if (slot := parse_optimizer_slot(tensor)) is None:
            continue
        found[slot[0]].tensors[slot[1]] = tensor
        if slot[1] == "step" and tensor.numel == 1:
            numbers = (parse_number(tensor.dtype, scan.head) for _, scan in evidence.find_scans(tensor))
            found[slot[0]].steps |= {number for number in numbers if number is not None}
    for (path, _), value in state.values.items():
        if len(path) > 2 and path[-3] == "state" and state.judge_keys(path) == "optimizer":
            found[path[-2]].values.add(path[-1])
            if path[-1] == "step" and isinstance(value, int | float):
                found[path[-2]].steps.add(float(value))
    return found


def compare_optimizer(evidence: CheckpointEvidence) -> Iterator[Symptom]:
    """Finds optimizer state that is impossible, and optimizer state that is missing.

    State is missing if a parameter has none although other parameters of the layer have it, or if there is none at all
    next to other training state.
    """
    states = evidence.checkpoint.states
    model = {tensor.parameter: tensor for state in states for tensor in state.select("model") if len(tensor.shape) > 0}
    with_state: set[str] = set()
    for state in states:
        optimizer = read_optimizer(evidence, state)
        yield from _compare_moments(evidence, state, optimizer)
        yield from _compare_shapes(evidence, state, optimizer)
        yield from _compare_factors(evidence, state, optimizer)
        yield from _compare_means_of_factors(evidence, state, optimizer)
        ids = {f"{key}" for (path, _), key in state.values.items() if path[-2:-1] == ("params",)}
        of_tensors = {name for name, parameter in optimizer.items() if parameter.tensors}
        with_state |= of_tensors
        if lacking := sorted(ids - of_tensors) if of_tensors else []:
            what = f"{len(lacking)} of {len(ids)} parameters have no state: {join_some(lacking)}"
            yield Symptom(Trouble.NO_OPTIMIZER, what, state.directory)
    has_training_state = any(state.label == "extra_state" for state in states) or any(
        pathlib.PurePath(path).name == "trainer_state.json" for path in evidence.checkpoint.settings
    )
    if model and not with_state and has_training_state:
        yield Symptom(Trouble.NO_OPTIMIZER, "there is no optimizer state", ".")
    families_with_state = {re.sub(r"\d+", "#", name) for name in with_state}
    layers_with_state = {found.group(1, 2) for name in with_state if (found := LAYER.match(name))}
    for name, tensor in model.items() if with_state & model.keys() else ():
        found = LAYER.match(name)
        is_like_others = re.sub(r"\d+", "#", name) in families_with_state and not EXPERT.match(name)
        if name not in with_state and is_like_others and found and found.group(1, 2) in layers_with_state:
            what = "the optimizer has state for other parameters of the layer, but not for this parameter"
            yield Symptom(Trouble.OPTIMIZER, what, tensor.file, name)


def _compare_moments(
    evidence: CheckpointEvidence, state: State, optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Finds impossible Adam moments, parameters with only one of the two moments, and moments that were lost."""
    has_both = [name for name, each in optimizer.items() if each.tensors.keys() >= MOMENTS]
    for name, parameter in optimizer.items():
        by_kind = parameter.tensors
        tensors = [by_kind[kind] for kind in sorted(MOMENTS & by_kind.keys())]
        if has_both and len(tensors) == 1 and parameter.is_of_adam:
            what = (
                f"the parameter has no {min(MOMENTS - by_kind.keys())}, but {len(has_both)} of {len(optimizer)} "
                "parameters have both moments"
            )
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)
        if len(tensors) < 2:
            continue
        if what := _judge_moments(evidence, by_kind, min(parameter.steps, default=None)):
            yield Symptom(Trouble.MOMENTS, what, by_kind["exp_avg_sq"].file, by_kind["exp_avg_sq"].name)
        elif tensors[0].shape != tensors[1].shape and tensors[1].numel > 1:
            what = f"the two moments are {list(tensors[0].shape)} and {list(tensors[1].shape)}"
            yield Symptom(Trouble.OPTIMIZER, what, tensors[0].file, name)
    yield from _find_unequal_moments(evidence, state, optimizer)
    yield from _find_lost_moments(evidence, optimizer)


def _find_unequal_moments(
    evidence: CheckpointEvidence, state: State, optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Finds second moments that contradict the first moment or the stored maximum.

    A second moment is impossible if no gradients yield both moments, or if it exceeds the maximum of AMSGrad.
    """
    betas, is_constant = _read_betas(state)
    found: list[tuple[SavedTensor, int, int]] = []
    num_compared = 0
    for parameter in optimizer.values():
        by_kind = parameter.tensors
        if not (by_kind.keys() >= MOMENTS and parameter.is_of_adam):
            continue
        bound = _compute_bound(betas, min(parameter.steps, default=None)) if is_constant else _WIDE_BOUND
        above, looked_at = _compare_with_bound(evidence, by_kind, bound)
        num_compared += looked_at > 0
        if above and above * 50 >= looked_at and not _judge_moments(evidence, by_kind, None):
            found.append((by_kind["exp_avg_sq"], above, looked_at))
        if below := _count_above_maximum(evidence, by_kind):
            what = f"{below} of the compared elements are above max_exp_avg_sq"
            yield Symptom(Trouble.MOMENTS, what, by_kind["exp_avg_sq"].file, by_kind["exp_avg_sq"].name)
    mostly = [tensor for tensor, above, looked_at in found if 2 * above > looked_at]
    if len(mostly) > 2 and 2 * len(mostly) > num_compared:
        evidence.checkpoint.unchecked.append(
            f"{state.files[0]}: whether the two moments fit each other, because most do not: the optimizer is "
            "probably not Adam"
        )
        return
    for tensor, above, looked_at in found:
        what = f"{above} of {looked_at} compared elements are too small for exp_avg, whatever the gradients were"
        yield Symptom(Trouble.MOMENTS, what, tensor.file, tensor.name)


def _judge_moments(evidence: CheckpointEvidence, by_kind: Mapping[str, SavedTensor], step: float | None) -> str:
    """Explains why Adam's two moments of a parameter are impossible; empty if they are possible."""
    first, second = by_kind["exp_avg"], by_kind["exp_avg_sq"]
    if negative := sum(scan.num_negative for _, scan in evidence.find_scans(second)):
        return f"{negative} values of a mean of squares are negative"
    has_first = bool(evidence.find_scans(first)) and not evidence.is_zero(first)
    if has_first and evidence.is_zero(second) and (measure_size(evidence, first) or 1.0) > _SQUARE_IS_ZERO:
        return "exp_avg_sq is zero, but exp_avg is not"
    if step == 0 and has_first:
        return "the step is 0, but there are moments"
    return ""


def _read_betas(state: State) -> tuple[_Betas | None, bool]:
    """Reads Adam's betas, and whether they are constant because no schedule changes them.

    If the groups differ, the betas with the widest bound are returned.
    """
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    is_constant = not any(path[-1:] in (("base_momentum",), ("max_momentum",)) for path, _ in state.values)
    for (path, _), value in state.values.items():
        if (
            (found := GROUP_SETTING.search(".".join(path)))
            and found["key"].startswith("betas")
            and isinstance(value, float)
        ):
            rates[found["group"]][found["key"]] = value
    pairs = {(each["betas.0"], each["betas.1"]) for each in rates.values() if len(each) == 2}
    return (_Betas(*max(pairs, key=lambda pair: _compute_bound(_Betas(*pair), None))) if pairs else None), is_constant


def _compute_bound(betas: _Betas | None, step: float | None) -> float:
    """Computes the largest possible ratio of the squared first moment to the second moment after this many steps.

    Both moments are means of the same gradients, with weights that decay by ``betas``. By the Cauchy-Schwarz inequality
    the ratio is at most (1 - b1)^2 / (1 - b2) times the sum of (b1^2 / b2)^i.
    """
    if betas is None or not (0 <= betas.first < 1 and 0 < betas.second < 1):
        return _WIDE_BOUND
    ratio = betas.first**2 / betas.second
    if ratio >= 1:
        return math.inf
    terms = 1.0 if step is None else 1 - ratio ** max(step, 1)
    return (1 - betas.first) ** 2 / (1 - betas.second) * terms / (1 - ratio)


def _compare_with_bound(
    evidence: CheckpointEvidence, by_kind: Mapping[str, SavedTensor], bound: float
) -> tuple[int, int]:
    """Returns (number of elements whose squared first moment exceeds ``bound`` times the second, number of compared
    elements).

    float16 moments are not compared, since optimizers that keep moments in float16 scale them.
    """
    above = looked_at = 0
    for first, second, dtype in _pair_samples(evidence, by_kind, "exp_avg", "exp_avg_sq"):
        rounding = _ROUNDING if dtype in ("float32", "float64") else _NARROW_ROUNDING
        is_moved = (numpy.abs(first) > _SMALLEST_MOMENT) & (dtype != "float16")
        is_above = (first**2 > bound * rounding * second) & is_moved
        above, looked_at = above + int(is_above.sum()), looked_at + int(is_moved.sum())
    return above, looked_at


def _count_above_maximum(evidence: CheckpointEvidence, by_kind: Mapping[str, SavedTensor]) -> int:
    pairs = _pair_samples(evidence, by_kind, "max_exp_avg_sq", "exp_avg_sq")
    return sum(int((most < second).sum()) for most, second, _ in pairs)


def _pair_samples(
    evidence: CheckpointEvidence, by_kind: Mapping[str, SavedTensor], one: str, other: str
) -> Iterator[tuple[Samples, Samples, str]]:
    """Yields elements at the same indices of the moments ``one`` and ``other``, and the dtype of ``one``."""
    if one in by_kind and other in by_kind:
        for first, second in evidence.pair_samples(by_kind[one], by_kind[other]):
            yield first, second, by_kind[one].dtype


def _find_lost_moments(evidence: CheckpointEvidence, optimizer: Mapping[str, OptimizedParameter]) -> Iterator[Symptom]:
    """Finds matrices whose moments are partly or wholly zero while the moments of similar matrices are not.

    Similar matrices have the same name in other layers, or the same shape if the optimizer numbers its parameters.
    Embeddings and experts are skipped: a row or an expert that no token reached has no gradient.
    """
    model = (tensor for state in evidence.checkpoint.states for tensor in state.select("model"))
    outside = {tensor.shape for tensor in model if not LAYER.match(tensor.parameter)}
    # FSDP gives an unused layer gradients of zero.
    used = {
        LAYER.sub(r"\g<stack>.\g<number>", name)
        for name, parameter in optimizer.items()
        if LAYER.match(name) and "exp_avg" in parameter.tensors and not evidence.is_zero(parameter.tensors["exp_avg"])
    }
    families: dict[object, list[SavedTensor]] = defaultdict(list)
    for name, parameter in optimizer.items():
        first = parameter.tensors.get("exp_avg")
        is_row_by_row = EMBEDDING.search(name) or EXPERT.match(name) or "lora_" in name
        if first is None or len(first.shape) != 2 or is_row_by_row or not any(parameter.steps):
            continue
        if LAYER.match(name) and LAYER.sub(r"\g<stack>.\g<number>", name) in used:
            families[re.sub(r"\d+", "#", name)].append(first)
        elif name.isdecimal() and outside and first.shape not in outside:
            families[first.shape].append(first)
    of_numbers = itertools.chain(*(members for family, members in families.items() if isinstance(family, tuple)))
    num_zero = sum(evidence.is_zero(tensor) for tensor in of_numbers)
    for family, members in families.items():
        # In a layer without gradients several moments are zero, and numbers do not say which layer a moment belongs to.
        most = max(2 - num_zero, 0) if isinstance(family, tuple) else (len(members) - 1) // 2
        scans = {tensor.path: evidence.find_scans(tensor) for tensor in members}
        zero = [tensor for tensor in members if scans[tensor.path] and evidence.is_zero(tensor)]
        for tensor in zero if len(zero) <= most and 2 * len(zero) < len(members) else ():
            what = f"the moment is zero, but {len(members) - len(zero)} of {len(members)} similar moments are not"
            yield Symptom(Trouble.MOMENTS, what, tensor.file, tensor.name)
        partly = [
            (tensor, piece, (begin, end))
            for tensor in members
            if tensor not in zero
            for piece, scan in scans[tensor.path]
            for begin, end in ([(0, scan.nbytes)] if scan.is_zero else scan.zero_runs)
            if piece.is_contiguous and (end - begin) * 8 >= scan.nbytes
        ]
        num_partly = len({tensor.path for tensor, *_ in partly})
        is_odd = num_partly <= most and 2 * num_partly < len(members)
        for tensor, piece, (begin, end) in partly if is_odd else ():
            width = piece.shape[1] * tensor.itemsize
            rows = piece.offsets[0] + begin // width, piece.offsets[0] + max(end // width, begin // width + 1)
            what = "these rows are zero, but not in other layers"
            yield Symptom(Trouble.MOMENTS, what, piece.file, tensor.name, rows, piece.rank)


def _compare_shapes(
    evidence: CheckpointEvidence, state: State, optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Compares the shapes of moments with the shapes of the model's parameters.

    Moments with parameter names are compared one by one, moments with parameter numbers only in total.
    """
    beside = [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]
    model = [tensor for each in beside for tensor in each.select("model") if is_floating_point(tensor.dtype)]
    moments = [
        (name, tensor)
        for name, parameter in optimizer.items()
        for slot, tensor in parameter.tensors.items()
        if slot in ("exp_avg", "momentum_buffer") and len(tensor.shape) > 1
    ]
    by_name = {tensor.parameter: tensor for tensor in model}
    named = [(by_name[strip_wrappers(name)], tensor) for name, tensor in moments if strip_wrappers(name) in by_name]
    odd = [(parameter, tensor) for parameter, tensor in named if parameter.shape != tensor.shape]
    for parameter, tensor in odd if len(odd) * 4 <= len(named) else ():
        what = f"the state is {list(tensor.shape)}, but the parameter is {list(parameter.shape)}"
        yield Symptom(Trouble.OTHER_OPTIMIZER, what, tensor.file, tensor.name)
    if named or not model or state.arrangement is not Arrangement.WHOLE:
        return
    yield from _compare_numbers(state, beside, optimizer)
    if moments and not any(each.keeps_order for each in beside if any(True for _ in each.select("model"))):
        evidence.checkpoint.unchecked.append(
            f"{state.files[0]}: which parameter each number means, because no file has the order of the parameters"
        )
    # Experts may be one tensor in the model and many on the Hub, so only matrices are compared.
    matrices = Counter(tensor.shape for _, tensor in moments if len(tensor.shape) == 2)
    of_model = Counter(tensor.shape for tensor in model if len(tensor.shape) == 2)
    strange = {
        shape: count - of_model[shape]
        for shape, count in matrices.items()
        if count > of_model[shape] and not any(_is_projection(shape, whole) for whole in of_model)
    }
    if matrices.total() > 2 and sum(strange.values()) * 4 > matrices.total():
        shape = max(strange, key=lambda each: strange[each])
        what = (
            f"the model has no parameters for {sum(strange.values())} of the optimizer's {matrices.total()} "
            f"matrices, such as {list(shape)}"
        )
        yield Symptom(Trouble.OTHER_OPTIMIZER, what, state.files[0])


def _compare_factors(
    evidence: CheckpointEvidence, state: State, optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Compares the row and column factors that Adafactor keeps for a matrix with the shape of that matrix."""
    beside = [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]
    model = {tensor.parameter: tensor for each in beside for tensor in each.select("model")}
    places = name_numbers(state, beside, optimizer)
    factored: list[tuple[SavedTensor, tuple[int, ...], SavedTensor | None]] = []
    for name, parameter in optimizer.items():
        pair = [parameter.tensors.get(slot) for slot in ("exp_avg_sq_row", "exp_avg_sq_col")]
        of_torch = [parameter.tensors.get(slot) for slot in ("row_var", "col_var")]
        row, column = pair if None not in pair else of_torch
        if row is not None and column is not None and row.shape and column.shape:
            lengths = row.shape if None not in pair else row.shape[:-1]
            whole = places.get(name) or model.get(strip_wrappers(name))
            factored.append((row, (*lengths, column.shape[-1]), whole))
    shapes = {tensor.shape for tensor in model.values()}
    known = [(row, shape, whole) for row, shape, whole in factored if whole is not None]
    odd = [(row, shape, f"the parameter is {list(whole.shape)}") for row, shape, whole in known if shape != whole.shape]
    if not known and model and state.arrangement is Arrangement.WHOLE:
        odd = [(row, shape, "no parameter has this shape") for row, shape, _ in factored if shape not in shapes]
    # The factors of a projected gradient have fewer rows or columns, and an expert's factors may be split into many.
    if len(odd) * 4 > len(factored) and any(_is_projection(shape, whole) for _, shape, _ in odd for whole in shapes):
        return
    for row, shape, why in odd if known or len(odd) == 1 < len(factored) else ():
        what = f"the row and column factors belong to a matrix of {list(shape)}, but {why}"
        yield Symptom(Trouble.OTHER_OPTIMIZER, what, row.file, row.name)


def _compare_means_of_factors(
    evidence: CheckpointEvidence, state: State, optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Finds row and column factors that no gradients yield: both are means of the same squares, so their means are
    equal.
    """
    compared: list[tuple[SavedTensor, float, float]] = []
    for name, parameter in optimizer.items():
        for slots in _FACTORS:
            row, column = (parameter.tensors.get(slot) for slot in slots)
            factors = [each for each in (row, column) if each is not None]
            for factor in factors:
                if negative := sum(scan.num_negative for _, scan in evidence.find_scans(factor)):
                    what = f"{negative} values of a mean of squares are negative"
                    yield Symptom(Trouble.MOMENTS, what, factor.file, factor.name)
            if len(factors) == 1:
                (lost,) = {*slots} - parameter.tensors.keys()
                what = f"the parameter has {factors[0].last_name}, but no {lost}"
                yield Symptom(Trouble.OPTIMIZER, what, factors[0].file, name)
            elif row is not None and column is not None and not row.is_divided | column.is_divided:
                means = [_compute_mean(evidence, each) for each in (row, column)]
                if row.dtype == column.dtype == "float32" and means[0] is not None and means[1] is not None:
                    compared.append((row, means[0], means[1]))
    odd = [each for each in compared if not math.isclose(each[1], each[2], rel_tol=_FACTORS_DIFFER)]
    if odd and 3 * len(odd) > len(compared):
        what = "whether the row and column factors fit each other, because most do not"
        evidence.checkpoint.unchecked.append(f"{state.files[0]}: {what}")
        return
    for row, of_rows, of_columns in odd:
        what = f"the mean of the row factors is {of_rows:.3g}, but that of the column factors is {of_columns:.3g}"
        yield Symptom(Trouble.MOMENTS, what, row.file, row.name)


def _compute_mean(evidence: CheckpointEvidence, tensor: SavedTensor) -> float | None:
    scans = evidence.find_scans(tensor)
    total = scans[0][1].total if scans else math.nan
    return total / tensor.numel if math.isfinite(total) and not scans[0][1].num_negative else None


def _is_projection(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether an optimizer that projects the gradient of ``whole`` may keep moments of the shape ``shape``."""
    are_matrices = len(shape) == len(whole) == 2
    return are_matrices and any(shape[at] == whole[at] and shape[1 - at] < whole[1 - at] for at in (0, 1))


def name_numbers(
    state: State, beside: list[State], optimizer: Mapping[str, OptimizedParameter]
) -> dict[str, SavedTensor]:
    """Maps the optimizer's parameter numbers to the model's parameters; empty if the files do not keep the parameters'
    order.
    """
    places = {
        tensor.pieces[0][:2]: tensor
        for each in beside
        if each.keeps_order
        for tensor in each.select("model")
        if is_floating_point(tensor.dtype) and tensor.pieces and tensor.last_name not in BUFFERS
    }
    groups = {path[:-1] for path, _ in state.values if path[-2:-1] == ("params",)}
    is_of_all = len(groups) == 1 and {*map(str, range(len(places)))} == optimizer.keys()
    return {str(number): tensor for number, tensor in enumerate(places.values())} if is_of_all else {}


def name_parameters(evidence: CheckpointEvidence, state: State, beside: list[State]) -> dict[str, OptimizedParameter]:
    """Reads the optimizer state of each parameter, keyed by the parameter's name in the model or, if that is unknown,
    by its key in the optimizer.
    """
    optimizer = read_optimizer(evidence, state)
    places = name_numbers(state, beside, optimizer)
    return {
        places[name].parameter if name in places else strip_wrappers(name): parameter
        for name, parameter in optimizer.items()
    }


def _compare_numbers(
    state: State, beside: list[State], optimizer: Mapping[str, OptimizedParameter]
) -> Iterator[Symptom]:
    """Finds two parameters whose states were swapped, or a parameter with the transposed shape of its state.

    The files must keep the order of the parameters.
    """
    odd = [
        (number, parameter, tensor)
        for number, parameter in name_numbers(state, beside, optimizer).items()
        for slot in _LIKE_NUMBER & optimizer[number].tensors.keys()
        if (tensor := optimizer[number].tensors[slot]).shape != parameter.shape
    ]
    is_pair = len(odd) == 2 and odd[0][1].shape == odd[1][2].shape and odd[1][1].shape == odd[0][2].shape
    is_transposed = len(odd) == 1 and odd[0][2].shape == (*odd[0][1].shape[1::-1], *odd[0][1].shape[2:])
    if is_pair or is_transposed:
        for number, parameter, tensor in odd:
            what = (
                f"the state is {list(tensor.shape)}, but parameter {number}, {parameter.parameter}, is "
                f"{list(parameter.shape)}"
            )
            yield Symptom(Trouble.OTHER_OPTIMIZER, what, tensor.file, tensor.name)
