"""Checks other copies of the model: averaged weights, and the float32 master weights of a lower-precision model."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from re import Pattern

import numpy

from fsdp_doctor.checkpoints.checks.evidence import LAYER, CheckpointEvidence, Samples
from fsdp_doctor.checkpoints.checks.optimizer import name_numbers, name_parameters, read_optimizer
from fsdp_doctor.checkpoints.names import strip_prefixes, strip_wrappers
from fsdp_doctor.checkpoints.parts import AVERAGE, MASTER
from fsdp_doctor.checkpoints.record import SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

# _FEWEST: the fewest copies from which the usual value is derived. _FEW: the fraction of a sample that may differ.
# _MANY_STEPS: the number of steps after which an average must differ from the weights.
_FEWEST, _FEW, _MANY_STEPS = 3, 0.02, 100
# Relative size of one unit in the last place. Stochastic rounding is off by less than that.
_UNITS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
_SMALLEST = 1e-7


def list_parts(state: State) -> Iterator[State]:
    """Yields the parts of a state that are copies of the model, such as an average of the weights. A copy has mostly
    the model's tensor names.
    """
    names = {tensor.parameter for tensor in state.select("model")}
    for part, count in state.left_out.items():
        head = tuple(part.split(".")) if part else ()
        tensors = {path: tensor for path, tensor in state.tensors.items() if head and path[: len(head)] == head}
        of_names = strip_prefixes([".".join(path[len(head) :]) for path in tensors])
        if count > 1 and 2 * len(names & set(of_names.values())) > len(of_names):
            yield dataclasses.replace(
                state,
                tensors={
                    path: dataclasses.replace(tensor, parameter=of_names[".".join(path[len(head) :])])
                    for path, tensor in tensors.items()
                },
                roles=dict.fromkeys(tensors, "model"),
                head=head,
                values={},
                left_out={},
            )


def _list_copies(evidence: CheckpointEvidence, state: State, kind: Pattern[str]) -> Iterator[dict[str, SavedTensor]]:
    """Yields each copy of the model in a part or state whose name matches ``kind``, as tensors by the model's names.

    Copies are searched in this state and in other states of the same directory.
    """
    for part in list_parts(state):
        if kind.search(".".join(part.head or ())):
            yield {tensor.parameter: tensor for tensor in part.select("model")}
    for other in evidence.checkpoint.states:
        if other is not state and other.directory == state.directory and kind.search(other.label):
            yield {tensor.parameter: tensor for tensor in other.select("model")}


def compare_averages(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Compares averaged weights with the model.

    The average must have all trained layers and equal shapes. After many steps, the values must differ.
    """
    model = {tensor.parameter: tensor for tensor in state.select("model")}
    for average in () if AVERAGE.search(state.label) else _list_copies(evidence, state, AVERAGE):
        pairs = [(model[name], tensor) for name, tensor in average.items() if name in model]
        odd = [(tensor, copy) for tensor, copy in pairs if tensor.shape != copy.shape]
        # A rank may have averaged only its own rows.
        may_be_shards = len(odd) * 4 > len(pairs) and all(
            len(copy.shape) < len(tensor.shape) or (copy.shape[1:] == tensor.shape[1:] and copy.numel < tensor.numel)
            for tensor, copy in odd
        )
        for tensor, copy in () if may_be_shards else odd:
            what = f"the average is {list(copy.shape)}, but the model's tensor is {list(tensor.shape)}"
            yield Symptom(Trouble.AVERAGE, what, copy.file, copy.name)
        yield from _find_layers_not_averaged(evidence, state, average)
        steps = [step for each in _list_beside(evidence, state) for step in _list_steps(evidence, each)]
        sums = [(evidence.find_checksum(tensor), evidence.find_checksum(copy)) for tensor, copy in pairs]
        if (
            len(sums) > 1
            and all(one == other is not None for one, other in sums)
            and max(steps, default=0) >= _MANY_STEPS
        ):
            what = f"all {len(sums)} averaged tensors equal the model's, bit by bit, after {max(steps):g} steps"
            yield Symptom(Trouble.EQUAL_AVERAGE, what, pairs[0][1].file, pairs[0][1].name)
        else:
            yield from _find_copied_parts(evidence, state, pairs)
            what = "whether the average was updated until this step: no file says how it was averaged"
            evidence.checkpoint.unchecked.append(f"{pairs[0][1].file if pairs else state.directory}: {what}")


def _find_layers_not_averaged(
    evidence: CheckpointEvidence, state: State, average: Mapping[str, SavedTensor]
) -> Iterator[Symptom]:
    """Finds layers that an average lacks, although the optimizer trained them and the average has other layers."""
    layers = {found.group("stack", "number") for name in average if (found := LAYER.match(name))}
    stacks = {stack for stack, _ in layers}
    lacking: dict[str, list[str]] = defaultdict(list)
    for tensor in state.select("model"):
        found = LAYER.match(tensor.parameter)
        if found and found["stack"] in stacks and found.group("stack", "number") not in layers:
            lacking[f"{found['stack']}.{found['number']}"].append(tensor.parameter)
    trained = _list_trained(evidence, state, 1) if lacking else set()
    for layer, names in lacking.items():
        if {*names} & trained:
            what = f"the average has no tensor of this layer, but it has {len(layers)} other layers"
            file = next(iter(average.values())).file
            yield Symptom(Trouble.AVERAGE, f"{what}, and the optimizer trained this one", file, layer)


def _list_trained(evidence: CheckpointEvidence, state: State, fewest_steps: int) -> set[str]:
    """Lists the parameters for which Adam has nonzero first moments after at least ``fewest_steps`` steps."""
    beside = _list_beside(evidence, state)
    return {
        name
        for each in beside
        for name, parameter in name_parameters(evidence, each, beside).items()
        if max(parameter.steps, default=0) >= fewest_steps
        and "exp_avg" in parameter.tensors
        and not evidence.is_zero(parameter.tensors["exp_avg"])
    }


def _find_copied_parts(
    evidence: CheckpointEvidence, state: State, pairs: list[tuple[SavedTensor, SavedTensor]]
) -> Iterator[Symptom]:
    """Finds matrices of an average that equal the model's, although the optimizer trained them and others differ."""
    trained = _list_trained(evidence, state, _MANY_STEPS)
    sums = [(copy, evidence.find_checksum(tensor), evidence.find_checksum(copy)) for tensor, copy in pairs]
    matrices = [each for each in sums if each[0].parameter in trained and len(each[0].shape) > 1 and None not in each]
    equal = [copy for copy, one, other in matrices if one == other]
    for copy in equal if 2 * len(equal) < len(matrices) else ():
        what = (
            f"the average equals the model's tensor, bit by bit, but {len(matrices) - len(equal)} others differ from "
            "theirs, and the optimizer trained all of them"
        )
        yield Symptom(Trouble.PART_OF_AVERAGE, what, copy.file, copy.name)


def _list_beside(evidence: CheckpointEvidence, state: State) -> list[State]:
    return [each for each in evidence.checkpoint.states if each is state or each.directory == state.directory]


def _list_steps(evidence: CheckpointEvidence, state: State) -> Iterator[float]:
    for parameter in read_optimizer(evidence, state).values():
        yield from parameter.steps


def compare_masters(evidence: CheckpointEvidence, state: State) -> Iterator[Symptom]:
    """Finds float32 master weights that do not round to the model's weights although most master weights do.

    Such a master weight comes from another step.
    """
    model = {tensor.parameter: tensor for tensor in state.select("model") if tensor.dtype in _UNITS}
    for masters in _list_masters(evidence, state) if model else ():
        pairs = [
            (model[name], master)
            for name, master in masters.items()
            if name in model and master.dtype == "float32" and master.shape == model[name].shape
        ]
        rounded = [(master, _compare_rounded(evidence, weight, master)) for weight, master in pairs]
        rounded = [(master, shares) for master, shares in rounded if shares is not None]
        for is_near in (False, True):
            odd = [master for master, shares in rounded if shares and shares[is_near] > _FEW]
            if len(rounded) >= _FEWEST and 3 * len(odd) <= len(rounded):
                for master in odd:
                    what = (
                        f"the float32 tensor does not round to the model's tensor, but {len(rounded) - len(odd)} "
                        "others do"
                    )
                    yield Symptom(Trouble.MASTER, what, master.file, master.name)
                break
        else:
            if rounded:
                line = (
                    f"{rounded[0][0].file}: whether the float32 weights round to the model's weights, because "
                    "most do not"
                )
                evidence.checkpoint.unchecked.append(line)


def _list_masters(evidence: CheckpointEvidence, state: State) -> Iterator[dict[str, SavedTensor]]:
    yield from _list_copies(evidence, state, MASTER)
    beside = _list_beside(evidence, state)
    for each in beside:
        optimizer = read_optimizer(evidence, each)
        places = name_numbers(each, beside, optimizer)
        for slot in sorted({slot for parameter in optimizer.values() for slot in parameter.tensors}):
            if MASTER.search(slot):
                yield {
                    places[name].parameter if name in places else strip_wrappers(name): parameter.tensors[slot]
                    for name, parameter in optimizer.items()
                    if slot in parameter.tensors
                }


def _compare_rounded(
    evidence: CheckpointEvidence, weight: SavedTensor, master: SavedTensor
) -> tuple[float, float] | None:
    """Compares a sample of rounded weights with the float32 weights.

    Returns (the fraction that is not rounded to the nearest value, the fraction that is off by more than one unit in
    the last place), or None if there is no sample.
    """
    off = far = count = 0
    for narrow, wide in evidence.pair_samples(weight, master):
        off += int(numpy.count_nonzero(_round(wide, weight.dtype) != narrow))
        far += int(numpy.count_nonzero(abs(narrow - wide) > _UNITS[weight.dtype] * abs(wide) + _SMALLEST))
        count += len(narrow)
    return (off / count, far / count) if count else None


def _round(values: Samples, dtype: str) -> Samples:
    if dtype == "float16":
        return values.astype(numpy.float16).astype(numpy.float64)
    bits = values.astype(numpy.float32).view(numpy.uint32)
    bits = bits + ((bits >> 16 & 1) + 0x7FFF)
    return (bits & 0xFFFF0000).view(numpy.float32).astype(numpy.float64)
