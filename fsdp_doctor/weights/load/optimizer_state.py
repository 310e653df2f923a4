"""``load_optimizer_state``: loads a full optimizer state into the optimizer of a sharded model, without a step."""

from __future__ import annotations

import collections
import itertools
import numbers
from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.expert_groups import Experts, list_expert_meshes, place_experts
from fsdp_doctor.weights.load.agreement import LoadAgreement, announce_early_errors
from fsdp_doctor.weights.load.full_load import (
    LOAD_BUCKET_BYTES,
    check_arguments,
    check_between_steps,
    fill_targets,
    settle,
)
from fsdp_doctor.weights.load.layouts import Whole
from fsdp_doctor.weights.load.matching import Matching
from fsdp_doctor.weights.load.optimizer_matching import (
    OptimizerParameter,
    ScalarEntry,
    StateDtypeRule,
    StateForms,
    StateMatching,
    StateOutline,
    TensorEntry,
    check_kind,
    list_parameters,
    name_entry,
    read_outline,
)
from fsdp_doctor.weights.load.outcome import LoadError, LoadReport
from fsdp_doctor.weights.load.source import LoadSource
from fsdp_doctor.weights.load.targets import Target, compare_groups, find_place
from fsdp_doctor.weights.transport.agreement import describe_first_difference
from fsdp_doctor.weights.transport.rank_groups import describe_conflicts


@run_for_model
@disable_autograd
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    dtype: StateDtypeRule = "keep",
    whole: Collection[str] | None = None,
    experts: Experts | None = None,
    bucket_bytes: int = LOAD_BUCKET_BYTES,
) -> LoadReport:
    """Fills an optimizer, fresh or used, from a full state, without a step.

    Every rank of the model's mesh must call it with the same arguments. Only the source may differ: either every rank
    has it, or only rank 0 (the first of the mesh), and the others pass None or an empty mapping. The ranks agree as in
    :func:`load_full_tensors`.

    Unlike torch's ``set_optimizer_state_dict``, it makes no state by a step, does not cast moments to the parameter's
    dtype or move them to its device, and gathers no whole tensors on the devices.

    model, optimizer: under FSDP2 or FSDP1 (``use_orig_params`` or not), with an optimizer of the model's own
        parameters; any optimizer whose state has, for each parameter, tensors of its shape and single values.
    source: ``{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}``, the result of
        ``get_optimizer_state_dict`` with ``full_state_dict=True``; names as in :func:`load_full_tensors`.
    strict: False leaves state that the source lacks unchanged, and skips state that the optimizer does not have.
    dtype: the rule for floating-point tensors whose dtype differs from their parameter's, with which torch's optimizers
        cannot compute. ``keep``: raise an error. ``cast``: cast them to the parameter's dtype. ``source``: load them as
        they are.
    whole: keys of the state whose tensors the optimizer keeps whole, the same on each rank, as a Muon that gathers its
        gradients does. It is needed only for an optimizer that is not torch's and has made no step yet; otherwise the
        optimizer's own state shows it, and torch's optimizers have no such keys. ``()``: all are divided like their
        parameters.
    experts: see :func:`load_full_tensors`.
    bucket_bytes: device memory of one bucket, if only rank 0 has the source.

    Afterwards each parameter's state has the keys and values of the checkpoint. Tensors are sharded like their
    parameter, or whole on each rank if the optimizer keeps them so. Tensors stay on the device of the earlier state.
    Without earlier state they are put on the device on which a training step needs them: on the CPU under an offload
    policy, otherwise on the compute device, even while a framework has moved the parameters to the CPU. A step count is
    a host tensor, or a device tensor if its group is ``capturable`` or ``fused``; if the state already has a step
    count, its device is kept. A number gets the type that the optimizer uses. The options of the param groups are the
    checkpoint's, except for those that choose an implementation (``foreach``, ``fused``, ``capturable``,
    ``differentiable``); an option that is a tensor, such as a learning rate or a beta, is filled in place. A parameter
    that the checkpoint lists without any state, because it never had a gradient, has none afterwards; the report names
    these as ``without_state``.

    Raises LoadError on every rank, before anything is written, for

    - parameters that are missing or superfluous, and wrong shapes or dtypes;
    - the state of another optimizer, which the options of its param groups show (AdamW's in SGD; not if the two have
        most options in common), and param groups that do not correspond;
    - ranks whose sources differ in more than the values of their tensors, groups of ranks with different parameters
        under one name, and an optimizer of parameters that are not the model's;
    - state with which the optimizer cannot step: a parameter whose keys, or kinds of values, differ from those of most
        parameters of its group, or from the optimizer's present state with the same options;
    - an optimizer whose own state has tensors that are neither divided like the parameter nor whole, such as factored
        or 8-bit moments, ranks that keep one tensor in different forms, and a form that cannot be determined.

    Raises TypeError for a source of another format, and ValueError for an unknown ``dtype``.
    """
    with announce_early_errors(model):
        if dtype not in get_args(StateDtypeRule):
            raise ValueError(f"dtype must be one of {', '.join(get_args(StateDtypeRule))}, not {dtype!r}")
        check_arguments(model, bucket_bytes)
        if isinstance(whole, str):
            raise TypeError(f"whole must be a collection of keys, as in whole=({whole!r},), not a string")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        contents = place_experts(reader.read(model), list_expert_meshes(experts))
        check_between_steps(model, contents)
        otherwise = "load the state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        place = find_place(contents, otherwise=otherwise)
    agreement = LoadAgreement(place.ranks)
    with agreement.announce_errors():
        discarded = settle(model, contents, place.device)
        parameters = list_parameters(contents, place, optimizer)
        forms = StateForms(optimizer, parameters, whole)
        outline, tensors = read_outline(source) if source else (StateOutline(), {})
        opened = LoadSource(kind="mapping" if source else None, tensors=tensors)
        lines = [f"strict={strict} dtype={dtype} whole={whole and sorted(whole)} bucket_bytes={bucket_bytes}"] + [
            f"{' = '.join(part.names)}: {list(part.shape)} {part.layout} in group {parameter.group}"
            f"{forms.describe(parameter)}"
            for parameter in parameters
            for part in parameter.parts
        ]
        holders, _ = agreement.begin(opened, lambda: lines, compare_groups(contents, place))
        outline_of_first = StateOutline.from_word(agreement.agree(outline.to_word()))
        if source:
            _check_alike(outline_of_first, outline, place.first)
        check_kind(outline_of_first, optimizer)
        states = StateMatching(parameters, outline_of_first, strict=strict, dtype=dtype)
        conflicts = {n: agreement.conflicts[n] for p, _ in states.entries for n in p.names if n in agreement.conflicts}
        if conflicts:
            raise LoadError(describe_conflicts(conflicts))
        states.check_against(optimizer)
        new_state = _NewState(optimizer, states, forms, Whole(place.ranks))
        names = {name for target in new_state.targets for name in target.names}
        opened.tensors = {name: tensor for name, tensor in tensors.items() if name in names}
        matching = Matching(new_state.targets, strict=True, dtype="cast", holders=holders, conflicts={})
        report = fill_targets(place, new_state.targets, opened, holders, matching, agreement, bucket_bytes)
        new_state.put()
        return LoadReport(
            loaded=report.loaded,
            missing=tuple(states.missing),
            superfluous=tuple(states.superfluous),
            without_state=tuple(states.without_state),
            discarded=discarded,
        )


def _check_alike(outline_of_first: StateOutline, outline: StateOutline, first: int) -> None:
    """Raises LoadError with the first difference between this rank's source and rank 0's."""
    expected, lines, rank = outline_of_first.describe(), outline.describe(), dist.get_rank()
    if expected != lines:
        raise LoadError(describe_first_difference(f"rank {first}", expected, f"rank {rank}", lines, "load"))


class _NewState:
    """State that the optimizer will have.

    targets: the state's tensors, which are yet to be filled. A tensor that the optimizer already has in the right shape
    and dtype is filled in place.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, matching: StateMatching, forms: StateForms, whole: Whole
    ) -> None:
        """Makes the state without its values.

        whole: the layout of tensors that are whole on each rank.
        """
        self._optimizer = optimizer
        self._matching = matching
        self._forms, self._whole = forms, whole
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self.targets: list[Target] = []
        for parameter, entries in matching.entries:
            is_whole = any(forms.is_whole(parameter, k) for k, e in entries.items() if isinstance(e, TensorEntry))
            if parameter.has_state or is_whole:
                self._state[parameter.parameter] = {
                    key: self._make_value(parameter, key, entry) for key, entry in entries.items()
                }
            self.targets += [
                self._make_target(parameter, index, key, entry)
                for key, entry in entries.items()
                if isinstance(entry, TensorEntry)
                for index in range(len(parameter.parts))
            ]
        self._complete()

    def _complete(self) -> None:
        """Calls ``__setstate__`` of a copy of the optimizer with the state, as ``load_state_dict`` does at its end.

        This converts step counts from numbers to tensors. Raises LoadError if the optimizer cannot use the state.
        """
        optimizer = self._optimizer
        copy = object.__new__(type(optimizer))
        vars(copy).update(vars(optimizer), defaults=dict(optimizer.defaults))
        options = self._matching.options
        groups = [{**group, **options.get(index, {})} for index, group in enumerate(optimizer.param_groups)]
        try:
            # Whatever device the caller has set as the default.
            with torch.device("cpu"):
                copy.__setstate__({"state": collections.defaultdict(dict, self._state), "param_groups": groups})
        except Exception as error:
            raise LoadError(f"{type(optimizer).__name__} cannot use the state of the source: {error!r}") from error
        for parameter, entries in self._matching.entries:
            for key, entry in entries.items():
                value = self._state.get(parameter.parameter, {}).get(key)
                if isinstance(entry, ScalarEntry) and isinstance(value, torch.Tensor):
                    self._state[parameter.parameter][key] = value.to(self._choose_scalar_device(parameter, key))

    def put(self) -> None:
        """Gives the optimizer the new state and the options of the param groups."""
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = state
        for stateless in self._matching.stateless:
            self._optimizer.state.pop(stateless.parameter, None)
        for index, options in self._matching.options.items():
            group = self._optimizer.param_groups[index]
            for key, value in options.items():
                group[key] = _fill_option(group.get(key), value)

    def _make_value(self, parameter: OptimizerParameter, key: str, entry: TensorEntry | ScalarEntry) -> Any:
        tensor = parameter.parameter
        before = self._optimizer.state.get(tensor, {}).get(key)
        if isinstance(entry, TensorEntry):
            is_whole = self._forms.is_whole(parameter, key)
            if isinstance(before, torch.Tensor) and before.ndim:
                return before if before.dtype == entry.dtype else torch.zeros_like(before, dtype=entry.dtype)
            device = before.device if isinstance(before, torch.Tensor) else parameter.home
            if is_whole:
                return torch.zeros(entry.shape, dtype=entry.dtype, device=device)
            # Zeros, because nothing is loaded into the padding of a flat parameter.
            return torch.zeros_like(tensor, dtype=entry.dtype, device=device, requires_grad=False)
        is_number = isinstance(entry.value, numbers.Number)
        if is_number and isinstance(before, torch.Tensor):
            return torch.tensor(entry.value, dtype=entry.dtype or before.dtype, device=before.device)
        if is_number and isinstance(before, numbers.Number):
            return type(before)(entry.value)  # type: ignore[call-arg]
        if entry.dtype is None:
            return entry.value
        return torch.tensor(entry.value, dtype=entry.dtype, device=self._choose_scalar_device(parameter, key))

    def _choose_scalar_device(self, parameter: OptimizerParameter, key: str) -> torch.device:
        """Chooses the device of a tensor with one value."""
        before = self._optimizer.state.get(parameter.parameter, {}).get(key)
        if isinstance(before, torch.Tensor):
            return before.device
        group = self._optimizer.param_groups[parameter.group]
        return parameter.home if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _make_target(self, parameter: OptimizerParameter, index: int, key: str, entry: TensorEntry) -> Target:
        part = parameter.parts[index]
        state = self._state.get(parameter.parameter, {}).get(key)
        is_whole = self._forms.is_whole(parameter, key)

        def shard() -> torch.Tensor:
            if state is None:
                return torch.empty(0, dtype=entry.dtype, device="cpu")
            return (private.read_local_tensor(state) if is_whole else part.view_part(state)).detach()

        return Target(
            names=tuple(name_entry(key, name) for name in part.names),
            shape=part.shape,
            dtype=entry.dtype,
            layout=self._whole if is_whole else part.layout,
            shard=shard,
        )


def _fill_option(before: Any, value: Any) -> Any:
    """Returns the new value of an option: ``value``, or the tensor ``before`` filled with it.

    A tensor is filled in place because other code may refer to it, for example to a learning rate.
    """
    match before:
        case torch.Tensor():
            return before.copy_(value) if isinstance(value, torch.Tensor) else before.fill_(value)
        case tuple() | list() if type(value) in (tuple, list) and len(before) == len(value):
            return type(before)(itertools.starmap(_fill_option, zip(before, value, strict=True)))
        case _:
            return value
