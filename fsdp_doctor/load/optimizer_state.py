"""A full optimizer state into the optimizer of a sharded model, without a step of it."""

from __future__ import annotations

import collections
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.extract.agreement import first_difference
from fsdp_doctor.extract.rank_groups import refusal
from fsdp_doctor.extract.without_autograd import without_autograd
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.load.checks import Rules
from fsdp_doctor.load.given import GivenSource
from fsdp_doctor.load.optimizer_checkpoint import ScalarEntry, StateOutline, TensorEntry, entry_name, outline_of
from fsdp_doctor.load.optimizer_matching import StateDtypeRule, StateMatching, check_kind
from fsdp_doctor.load.optimizer_parameters import Optimized, optimized
from fsdp_doctor.load.outcome import LoadError, LoadReport
from fsdp_doctor.load.targets import Target, comparison_of, loaded_model, settle
from fsdp_doctor.load.together import Together, refused
from fsdp_doctor.load.writing import LOAD_BUCKET_BYTES, Load, check_arguments


@without_autograd
def load_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    dtype: StateDtypeRule = "keep",
    bucket_bytes: int = LOAD_BUCKET_BYTES,
) -> LoadReport:
    """Fills an optimizer, fresh or used, from a full state, without a step.

    Every rank of the model's mesh must call it, with the same arguments but for the source, which rank 0 alone (the
    first of the mesh; the others pass None or an empty mapping) or every rank has. They agree as in
    :func:`load_full_tensors`.

    What torch's ``set_optimizer_state_dict`` does otherwise: it makes the state by a step, casts moments to the
    parameter's dtype and moves them to its device, and gathers whole tensors on the device of every rank.

    model, optimizer: under FSDP2 or FSDP1 (``use_orig_params`` or not), on the optimizer's own parameters; any
        optimizer whose state has, for each parameter, tensors of its shape and single values.
    source: ``{"state": {name: {key: value}}, "param_groups": [{"params": [names], ...}]}``, as
        ``get_optimizer_state_dict`` returns it with ``full_state_dict=True``; names as in :func:`load_full_tensors`.
    strict: False to leave as it is what the source lacks, and to skip what the optimizer does not have.
    dtype: of a floating-point tensor of another dtype than its parameter's, with which torch's optimizers cannot
        compute: ``keep`` it is an error; ``cast`` it is cast to the parameter's; ``source`` it is loaded as it is.
    bucket_bytes: of device memory of one bucket, where rank 0 alone has the source.

    Afterwards each parameter's state has the keys and values of the checkpoint. Tensors are sharded like their
    parameter; they lie where the state lay before, else where a training step needs them: on the CPU under an offload
    policy, otherwise on the compute device, also while a framework has moved the parameters to the CPU. A step is a
    host tensor, or, where its group is ``capturable`` or ``fused``, one there, unless there was one before; a number is
    made what the optimizer has. The options of the param groups are the checkpoint's, but for how the optimizer
    computes (``foreach``, ``fused``, ``capturable``, ``differentiable``). A parameter that the checkpoint lists without
    any state, because it never had a gradient, has none afterwards; the report names these as ``without_state``.

    Raises LoadError on every rank, before anything is written, for parameters that are missing or superfluous, for
    other shapes and dtypes, for the state of another optimizer, as the options of its param groups tell (AdamW's in
    SGD; not where the two have most options in common), for param groups that do not correspond, for ranks whose
    sources differ in more than the values of their tensors, for parameters of which groups of ranks have others under
    one name, and for an optimizer of parameters that are not the model's. So it does for state with which the optimizer
    cannot step: where a parameter's keys, or the kinds of its values, are other than those of most parameters of its
    group, or than the optimizer has with the same options.
    Raises TypeError for a source that is not of the format, ValueError for a rule that there is not.
    """
    with refused(model):
        if dtype not in get_args(StateDtypeRule):
            raise ValueError(f"dtype must be one of {', '.join(get_args(StateDtypeRule))}, not {dtype!r}")
        check_arguments(model, bucket_bytes)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        held = reader.read(model)
        place = loaded_model(held)
    together = Together(place.ranks)
    with together.lasting():
        settle(model, held, place.device)
        parameters = optimized(held, place, optimizer)
        outline, tensors = outline_of(source) if source else (StateOutline(), {})
        have = GivenSource(kind="mapping" if source else None, tensors=tensors)
        settings = f"strict={strict} dtype={dtype} bucket_bytes={bucket_bytes}"
        holders = together.begin(have, lambda: _plan(parameters, settings), comparison_of(held, place))
        of_first = StateOutline.of_word(together.agree(outline.as_word()))
        if source and (difference := _difference(of_first, outline, place.first)):
            raise LoadError(difference)
        check_kind(of_first, optimizer.defaults, optimizer.param_groups)
        matching = StateMatching(parameters, of_first, strict=strict, dtype=dtype)
        names = [name for one, _ in matching.found for name in one.names if name in together.refused]
        if names:
            raise LoadError(refusal({name: together.refused[name] for name in names}))
        matching.check_against(optimizer.state, optimizer.param_groups)
        state = NewState(optimizer, matching)
        wanted = {name for target in state.targets for name in target.names}
        have.tensors = {name: tensor for name, tensor in tensors.items() if name in wanted}
        load = Load(place, state.targets, together, bucket_bytes)
        report = load.run(have, holders, Rules(strict=True, dtype="cast"), lambda: None)
        state.put()
        return LoadReport(
            loaded=report.loaded,
            missing=tuple(matching.missing),
            superfluous=tuple(matching.superfluous),
            without_state=tuple(matching.without_state),
        )


def _plan(parameters: Sequence[Optimized], settings: str) -> list[str]:
    return [
        settings,
        *(
            f"{' = '.join(stretch.names)}: {list(stretch.shape)} {stretch.layout} in group {one.group}"
            for one in parameters
            for stretch in one.stretches
        ),
    ]


def _difference(of_first: StateOutline, own: StateOutline, first: int) -> str:
    """A sentence about the first, empty for none."""
    lines, own_lines = of_first.lines(), own.lines()
    rank = dist.get_rank()
    return first_difference(f"rank {first}", lines, f"rank {rank}", own_lines, "load") if lines != own_lines else ""


class NewState:
    """The state that the optimizer will have. targets: its tensors, which are yet to be filled.

    What the optimizer has already in the right shape and dtype is filled where it lies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, matching: StateMatching) -> None:
        self._optimizer = optimizer
        self._matching = matching
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        self.targets: list[Target] = []
        for one, entries in matching.found:
            if one.has_elements:
                self._state[one.parameter] = {key: self._entry(one, key, entry) for key, entry in entries.items()}
            self.targets += [
                self._target(one, index, key, entry)
                for key, entry in entries.items()
                if isinstance(entry, TensorEntry)
                for index in range(len(one.stretches))
            ]
        self._complete()

    def _complete(self) -> None:
        """Has a copy of the optimizer do with the state what it does at the end of its ``load_state_dict``.

        That makes tensors of the numbers that it counts steps by. Raises LoadError where it cannot use the state.
        """
        optimizer = self._optimizer
        other = object.__new__(type(optimizer))
        vars(other).update(vars(optimizer), defaults=dict(optimizer.defaults))
        options = self._matching.options
        groups = [{**group, **options.get(index, {})} for index, group in enumerate(optimizer.param_groups)]
        try:
            # Not where the caller has tensors made by default.
            with torch.device("cpu"):
                other.__setstate__({"state": collections.defaultdict(dict, self._state), "param_groups": groups})
        except Exception as error:
            raise LoadError(f"{type(optimizer).__name__} cannot use the state of the source: {error!r}") from error
        for one, entries in self._matching.found:
            for key, entry in entries.items():
                value = self._state.get(one.parameter, {}).get(key)
                if isinstance(entry, ScalarEntry) and isinstance(value, torch.Tensor):
                    self._state[one.parameter][key] = value.to(self._place(one, key))

    def put(self) -> None:
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = state
        for one in self._matching.stateless:
            self._optimizer.state.pop(one.parameter, None)
        for index, options in self._matching.options.items():
            group = self._optimizer.param_groups[index]
            for key, value in options.items():
                group[key] = _option(group.get(key), value)

    def _entry(self, one: Optimized, key: str, entry: TensorEntry | ScalarEntry) -> Any:
        before = self._optimizer.state.get(one.parameter, {}).get(key)
        if isinstance(entry, TensorEntry):
            if isinstance(before, torch.Tensor) and before.shape == one.parameter.shape and before.dtype == entry.dtype:
                return before
            device = private.local_tensor(before).device if isinstance(before, torch.Tensor) else one.home
            # Zeros, for what is padding of a flat parameter stays what it is.
            return torch.zeros_like(one.parameter, dtype=entry.dtype, device=device, requires_grad=False)
        is_number = isinstance(entry.value, numbers.Number)
        if is_number and isinstance(before, torch.Tensor):
            return torch.tensor(entry.value, dtype=entry.dtype or before.dtype, device=before.device)
        if is_number and isinstance(before, numbers.Number):
            return type(before)(entry.value)  # type: ignore[call-arg]
        if entry.dtype is None:
            return entry.value
        return torch.tensor(entry.value, dtype=entry.dtype, device=self._place(one, key))

    def _place(self, one: Optimized, key: str) -> torch.device:
        """Where a tensor with one value belongs."""
        before = self._optimizer.state.get(one.parameter, {}).get(key)
        if isinstance(before, torch.Tensor):
            return before.device
        group = self._optimizer.param_groups[one.group]
        return one.home if group.get("capturable") or group.get("fused") else torch.device("cpu")

    def _target(self, one: Optimized, index: int, key: str, entry: TensorEntry) -> Target:
        stretch = one.stretches[index]
        state = self._state.get(one.parameter, {}).get(key)

        def shard() -> torch.Tensor:
            return torch.empty(0, dtype=entry.dtype, device="cpu") if state is None else stretch.part_of(state).detach()

        return Target(
            names=tuple(entry_name(key, name) for name in stretch.names),
            shape=stretch.shape,
            dtype=entry.dtype,
            layout=stretch.layout,
            shard=shard,
        )


def _option(before: Any, value: Any) -> Any:
    """A tensor, such as a learning rate's, stays the tensor that it was."""
    if isinstance(before, torch.Tensor):
        return before.fill_(value)
    return value.item() if isinstance(value, torch.Tensor) else value
