"""Matches the optimizer state in a checkpoint with the state of the optimizer."""

from __future__ import annotations

import base64
import collections
import enum
import numbers
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import assert_never

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.reader import Fsdp1Unit, ModelContents
from fsdp_doctor.weights.fsdp.shards import Slices
from fsdp_doctor.weights.load.layouts import InFlatParameter, Layout, Layouts, ShardsOfUnit, Whole
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.source import check_value, describe_unless_dense
from fsdp_doctor.weights.load.targets import ModelPlace, find_home

StateDtypeRule = Literal["keep", "cast", "source"]

# Types of a single value in a parameter's state; torch's own optimizers have numbers only.
SINGLE_TYPES = (numbers.Number, str, NoneType)
_FORMAT = "the source must be the result of get_optimizer_state_dict(..., full_state_dict=True)"
# Options that say how an optimizer computes: they belong to the run, and not to what the optimizer has learned.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
# Options that most optimizers have, so that they do not tell one from another.
_COMMON = ("lr", "weight_decay", "maximize")
# Options on which no optimizer's choice of state depends.
_SCHEDULED = ("initial_lr", *_COMMON)


@dataclass(frozen=True)
class TensorEntry:
    """Entry of a parameter's state: a tensor with a value for each element of the parameter."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class ScalarEntry:
    """Entry of a parameter's state: one value, such as a step count.

    dtype: the dtype if the value is in a tensor; None otherwise.
    """

    value: Any
    dtype: torch.dtype | None


Entries: TypeAlias = dict[str, TensorEntry | ScalarEntry]


@dataclass
class StateOutline:
    """Full optimizer state without the values of its tensors; every rank has to know it.

    entries: the entries of each parameter's state, by the parameter's name and then by key, such as ``exp_avg``.
    groups: the options of each param group, and the names of its parameters under ``params``.
    """

    entries: dict[str, Entries] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Returns lines that are the same for equal outlines."""
        lines = [
            f"{name_entry(key, name)}: {e}" for name, entries in self.entries.items() for key, e in entries.items()
        ]
        for index, group in enumerate(self.groups):
            lines += [f"{name} in param group {index}" for name in group["params"]]
            lines += [f"param group {index} with {key} = {group[key]!r}" for key in group if key != "params"]
        return sorted(lines)

    def to_word(self) -> str:
        return base64.b85encode(pickle.dumps(self)).decode()

    @staticmethod
    def from_word(word: str) -> StateOutline:
        """Unpickles an outline that rank 0 of this process group made with ``to_word``."""
        outline: StateOutline = pickle.loads(base64.b85decode(word))
        return outline


def read_outline(source: Any) -> tuple[StateOutline, dict[str, torch.Tensor]]:
    """Reads a full state; returns its outline, and its tensors under the names that ``name_entry`` makes.

    Raises TypeError or LoadError if the source has another format.
    """
    if isinstance(source, str | os.PathLike):
        raise TypeError(
            f"{_FORMAT}, not the path {source}: pass torch.load({str(source)!r}, mmap=True, weights_only=True)"
        )
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= set(source):
        raise TypeError(f"{_FORMAT}, with state and param_groups")
    groups = source["param_groups"]
    are_groups = isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    )
    if not isinstance(source["state"], Mapping) or not are_groups:
        raise TypeError(f"{_FORMAT}: its state must be a mapping, and its param_groups a list of mappings with params")
    outline, tensors = StateOutline(), {}
    for name, values in source["state"].items():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            raise LoadError(f"{_FORMAT}: its state has {name!r} instead of a parameter's name")
        entries: Entries = outline.entries.setdefault(name, {})
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                check_value(name_entry(key, name), value)
                if value.ndim:
                    tensors[name_entry(key, name)] = value
                    entries[key] = TensorEntry(value.shape, value.dtype)
                else:
                    entries[key] = ScalarEntry(value.item(), value.dtype)
            elif isinstance(value, SINGLE_TYPES):
                entries[key] = ScalarEntry(value, None)
            else:
                raise LoadError(
                    f"{name_entry(key, name)} is a {type(value).__name__} in the source: state must be tensors "
                    "and numbers"
                )
    for group in groups:
        if not all(isinstance(name, str) for name in group["params"]):
            raise LoadError(f"{_FORMAT}: its param_groups have indices where parameters' names are expected")
        outline.groups.append({key: read_option(value) for key, value in group.items()})
    listed = collections.Counter(name for group in outline.groups for name in group["params"])
    if twice := [name for name, count in listed.items() if count > 1]:
        raise LoadError(f"the source has {join_some(twice)} in two param groups")
    return outline, tensors


def name_entry(key: str, name: str) -> str:
    return f"{key} of {name}"


def read_option(option: Any) -> Any:
    """Returns an option of a param group with numbers in place of one-element tensors, such as a learning rate on a
    device.

    Other tensors are copied to the host.
    """
    match option:
        case torch.Tensor():
            return option.item() if option.numel() == 1 else option.detach().cpu()
        case tuple() | list():
            return type(option)(map(read_option, option)) if type(option) in (tuple, list) else option
        case _:
            return option


class StateForm(enum.Enum):
    """Form of a state tensor on this rank, found by its shape.

    EITHER means that this rank's shard has the shape of the whole parameter, so the shape does not decide.
    """

    SINGLE = "a single value"
    SHARD = "this rank's shard"
    WHOLE = "the whole tensor"
    EITHER = "the whole tensor, or this rank's shard"


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPart:
    """Parameter of the model that the optimizer has, either by itself or as a part of a flat parameter.

    shape: the shape of the full parameter.
    slices: the place of this rank's part in the optimizer's flat parameter; None if the optimizer has no flat parameter
        but this parameter itself.
    """

    names: tuple[str, ...]
    shape: torch.Size
    layout: Layout
    slices: Slices | None = None

    def view_part(self, state: torch.Tensor) -> torch.Tensor:
        """Returns a view of this parameter's elements in a tensor that has the form of the optimizer's parameter."""
        local = private.read_local_tensor(state)
        if self.slices is not None:
            return local[self.slices]
        if not isinstance(self.layout, InFlatParameter):
            return local
        return self.layout.arrange(local) if local.shape == self.shape else local.view(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerParameter:
    """Parameter of an optimizer: a model's parameter, this rank's part of a parameter, or a flat parameter of several.

    group: the index of the param group.
    home: the device of the parameter during a training step.
    own_shape: the shape of this rank's part between two steps, which is also the shape of the state. The parameter
        itself may be whole now, because a step that raised leaves an FSDP1 parameter unsharded.
    """

    parameter: torch.Tensor
    own_shape: torch.Size
    group: int
    home: torch.device
    parts: tuple[ParameterPart, ...]

    @property
    def names(self) -> list[str]:
        """First names of the parts."""
        return [part.names[0] for part in self.parts]

    @property
    def has_state(self) -> bool:
        """True if the optimizer makes state for the parameter on this rank; under FSDP1 it makes none for an empty
        part.
        """
        return isinstance(self.parameter, DTensor) or self.own_shape.numel() > 0

    @property
    def whole_shape(self) -> torch.Size | None:
        """Shape of the parameter before it was divided; None for a flat parameter, which holds several parameters."""
        return None if self.parts[0].slices is not None else self.parts[0].shape

    def find_form(self, key: str, value: torch.Tensor) -> StateForm:
        """Finds the form of a state tensor.

        Raises LoadError if the tensor is neither divided like the parameter, nor whole, nor a single value.
        """
        local = private.read_local_tensor(value)
        if form := describe_unless_dense(local):
            raise LoadError(f"{name_entry(key, self.names[0])} is {form}, not a tensor with a value per element")
        if (
            isinstance(value, DTensor)
            and isinstance(self.parameter, DTensor)
            and value.shape == self.parameter.shape
            and value.device_mesh == self.parameter.device_mesh
            and value.placements == self.parameter.placements
        ):
            return StateForm.SHARD
        if not isinstance(value, DTensor) or all(isinstance(placement, Replicate) for placement in value.placements):
            is_shard, is_whole = local.shape == self.own_shape, local.shape == self.whole_shape
            if not local.ndim:
                return StateForm.SINGLE
            if is_whole:
                return StateForm.EITHER if is_shard and not isinstance(value, DTensor) else StateForm.WHOLE
            if is_shard and not isinstance(value, DTensor):
                return StateForm.SHARD
        placed = f", placed as {list(value.placements)}" if isinstance(value, DTensor) else ""
        raise LoadError(
            f"{name_entry(key, self.names[0])} has the shape {list(value.shape)}{placed}: this is neither the "
            f"shape of the parameter, {list(self.whole_shape or self.own_shape)}, nor the shape of this rank's shard, "
            f"{list(self.own_shape)}, nor a single value, so it is unknown which elements this rank has"
        )


def list_parameters(
    contents: ModelContents, place: ModelPlace, optimizer: torch.optim.Optimizer
) -> list[OptimizerParameter]:
    """Lists the optimizer's parameters. Raises LoadError for a parameter that the model does not have."""
    known = {id(parameter): (own, home, parts) for parameter, own, home, parts in _list_trainable(contents, place)}
    parameters = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise LoadError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have: "
                    "make the optimizer after the model was sharded, or loaded with assign=True"
                )
            own_shape, home, parts = known[id(parameter)]
            parameters.append(
                OptimizerParameter(parameter=parameter, own_shape=own_shape, group=index, home=home, parts=parts)
            )
    return parameters


def _list_trainable(
    contents: ModelContents, place: ModelPlace
) -> Iterator[tuple[torch.Tensor, torch.Size, torch.device, tuple[ParameterPart, ...]]]:
    """Yields (parameter, shape of this rank's part, its device in training, its parts) for all parameters that an
    optimizer may have.
    """
    layouts = Layouts(place.ranks, place.meshes)
    for unit in contents.fsdp1_units:
        home = torch.device("cpu") if unit.offloads else unit.compute_device
        for tensor, own_shape, unit_parts in _list_trainable_of_unit(unit, place):
            yield tensor, own_shape, home, unit_parts
    for parameter in contents.parameters:
        local = private.read_local_tensor(parameter.tensor)
        if local.is_meta:
            raise LoadError(f"{parameter.names[0]} is on the meta device: load the model first")
        part = ParameterPart(
            names=parameter.names, shape=parameter.placed.shape, layout=layouts.choose(parameter.placed)
        )
        yield parameter.tensor, local.shape, find_home(parameter, place.device), (part,)


def _list_trainable_of_unit(
    unit: Fsdp1Unit, place: ModelPlace
) -> Iterator[tuple[nn.Parameter, torch.Size, tuple[ParameterPart, ...]]]:
    shards = ShardsOfUnit(unit, place.first)
    pieces = [
        (names, piece.shape, InFlatParameter(shards, piece.offset, piece.stride))
        for names, piece in zip(unit.names, unit.read_layout(), strict=True)
    ]
    yield (
        unit.flat_parameter,
        torch.Size([shards.length]),
        tuple(
            ParameterPart(names=names, shape=shape, layout=layout, slices=layout.find_slices(shape))
            for names, shape, layout in pieces
        ),
    )
    for original, (names, shape, layout) in zip(unit.originals, pieces, strict=False):
        (own,) = layout.find_slices(shape)
        own_shape = torch.Size([own.stop - own.start]) if unit.is_sharded else shape
        yield original, own_shape, (ParameterPart(names=names, shape=shape, layout=layout),)


class StateForms:
    """Forms in which an optimizer keeps the tensors of its state: divided like their parameter, or whole on each rank.

    The state that the optimizer already has shows the form. For a key that no parameter's state has, ``whole`` decides.
    If ``whole`` is None, torch's own optimizers divide such tensors, and for other optimizers the form is unknown.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[OptimizerParameter],
        whole: Collection[str] | None,
    ) -> None:
        """Reads the forms in the optimizer's state.

        Raises LoadError for a tensor that is neither divided like its parameter, nor whole, nor a single value.
        """
        self._optimizer, self._whole = optimizer, whole
        self._forms = {
            (id(parameter), key): parameter.find_form(key, value)
            for parameter in parameters
            for key, value in optimizer.state.get(parameter.parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        self._by_key: dict[str, set[StateForm]] = collections.defaultdict(set)
        for (_, key), form in self._forms.items():
            if form in (StateForm.SHARD, StateForm.WHOLE):
                self._by_key[key].add(form)

    def is_whole(self, parameter: OptimizerParameter, key: str) -> bool:
        """Returns whether the optimizer keeps whole tensors for the key. Raises LoadError if this is unknown."""
        form = self._forms.get((id(parameter), key))
        if form in (StateForm.SHARD, StateForm.WHOLE):
            return form is StateForm.WHOLE
        if known := self._by_key.get(key):
            # Of a parameter whose shard is all of it, or that has had no gradient.
            return known == {StateForm.WHOLE}
        if form is StateForm.EITHER or isinstance(parameter.parts[0].layout, Whole):
            return False
        if self._whole is not None:
            if key in self._whole and parameter.whole_shape is None:
                raise LoadError(
                    f"whole: {join_some(parameter.names)} are in one flat parameter, and FSDP1 divides its state"
                )
            return key in self._whole
        if not _steps_as_torch_does(self._optimizer):
            kind = type(self._optimizer).__name__
            raise LoadError(
                f"{kind} has no {key} yet, and it is unknown whether {kind} divides it among the ranks. If it divides "
                f"{key} like the parameters, pass whole=(); if it keeps {key} whole, pass whole=({key!r},); or let the "
                "optimizer make a step before the load"
            )
        return False

    def describe(self, parameter: OptimizerParameter) -> str:
        """Describes for which keys the tensors are whole. The description must be the same on all ranks."""
        keys = [key for at, key in self._forms if at == id(parameter) and self.is_whole(parameter, key)]
        return f" with {join_some(sorted(keys))} whole on each rank" if keys else ""


def _steps_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    step = next(vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")


def check_kind(outline: StateOutline, optimizer: torch.optim.Optimizer) -> None:
    """Raises LoadError for the state of another kind of optimizer, which the options of the param groups show.

    Versions of one optimizer differ in an option or two; another optimizer lacks most of the options and has others
    instead.
    """
    options = set(optimizer.defaults) - {*_IMPLEMENTATION, *_COMMON}
    known = options | {key for group in optimizer.param_groups for key in group}
    for group in outline.groups:
        lacking, unknown = options - set(group), set(group) - known - set(_COMMON)
        if unknown and 2 * len(lacking) > len(options):
            raise LoadError(
                "the source is the state of another optimizer: its param groups have "
                f"{join_some(sorted(unknown))}, but not {join_some(sorted(lacking))}"
            )


class StateMatching:
    """Entries of a checkpoint for each parameter of an optimizer.

    Raises LoadError for entries that do not fit and, if ``strict``, for missing and superfluous parameters.

    entries: (parameter, its entries by key), in the dtypes in which they are loaded.
    stateless: parameters for which the checkpoint has no state.
    options: the options of the param groups, by index.
    missing, superfluous, without_state: see LoadReport.
    """

    def __init__(
        self, parameters: Sequence[OptimizerParameter], outline: StateOutline, *, strict: bool, dtype: StateDtypeRule
    ) -> None:
        self._outline = outline
        self._dtype = dtype
        self._group_of = {name: index for index, group in enumerate(outline.groups) for name in group["params"]}
        self.entries: list[tuple[OptimizerParameter, Entries]] = []
        self.stateless: list[OptimizerParameter] = []
        self.missing: list[str] = []
        for parameter in parameters:
            self._match(parameter)
        self.without_state = [name for parameter in self.stateless for name in parameter.names]
        known = {name for parameter in parameters for part in parameter.parts for name in part.names}
        self.superfluous = [name for name in outline.entries if name not in known]
        if strict and self.missing:
            raise LoadError(
                f"the source lacks {len(self.missing)} of the optimizer's parameters: {join_some(self.missing)}"
            )
        if strict and self.superfluous:
            raise LoadError(
                f"the source has {len(self.superfluous)} parameters that the optimizer does not have: "
                f"{join_some(self.superfluous)}"
            )
        ungrouped = [name for name in outline.entries if name in known and name not in self._group_of]
        if strict and ungrouped:
            raise LoadError(
                f"the source has {len(ungrouped)} parameters with state in none of its param groups: "
                f"{join_some(ungrouped)}"
            )
        self.options = self._match_groups(parameters)
        self._check_groups_are_alike()

    def check_against(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises LoadError if the entries' keys or kinds differ from those in the optimizer's present state.

        The comparison is made only for param groups with the same options.
        """
        for parameter, entries in self.entries:
            state = optimizer.state.get(parameter.parameter, {})
            kinds = {key: _describe_kind_of_value(value, parameter) for key, value in state.items()}
            group = optimizer.param_groups[parameter.group]
            options = self.options.get(parameter.group, {})
            if kinds and all(_is_same_option(group.get(k, v), v) for k, v in options.items() if k not in _SCHEDULED):
                _check_kinds(parameter, entries, kinds, "but the optimizer has")

    def _match(self, parameter: OptimizerParameter) -> None:
        names = [self._find_name_in_source(part) for part in parameter.parts]
        if not any(names):
            if parameter.parameter.requires_grad:
                self.missing += parameter.names
            return
        of_parts = [self._outline.entries.get(name, {}) if name else {} for name in names]
        if not any(of_parts):
            self.stateless.append(parameter)
            return
        for part, name, entries in zip(parameter.parts, names, of_parts, strict=True):
            for key, entry in entries.items():
                if isinstance(entry, TensorEntry) and entry.shape != part.shape:
                    raise LoadError(
                        f"{name_entry(key, name)} has the shape {list(entry.shape)} in the source, but the "
                        f"parameter has {list(part.shape)}"
                    )
            if key := _find_differing_key(of_parts[0], entries):
                raise LoadError(
                    f"{parameter.names[0]} and {part.names[0]} are in one flat parameter, but their {key} differs "
                    "in the source"
                )
        self.entries.append((parameter, {key: self._cast(parameter, key, e) for key, e in of_parts[0].items()}))

    def _cast(
        self, parameter: OptimizerParameter, key: str, entry: TensorEntry | ScalarEntry
    ) -> TensorEntry | ScalarEntry:
        dtype = parameter.parameter.dtype
        if not isinstance(entry, TensorEntry) or entry.dtype == dtype or not entry.dtype.is_floating_point:
            return entry
        match self._dtype:
            case "keep":
                raise LoadError(
                    f"{name_entry(key, parameter.names[0])} is {entry.dtype} in the source, but the parameter is "
                    f"{dtype}: torch's optimizers compute with one dtype; dtype='cast' casts the state, "
                    "dtype='source' keeps its dtype"
                )
            case "cast":
                return TensorEntry(entry.shape, dtype)
            case "source":
                return entry
            case _:
                assert_never(self._dtype)

    def _find_name_in_source(self, part: ParameterPart) -> str:
        """Finds the name of the part in the source: a name with entries, otherwise a name in a param group, otherwise
        empty.
        """
        with_entries = (name for name in part.names if name in self._outline.entries)
        listed = (name for name in part.names if name in self._group_of)
        return next(with_entries, next(listed, ""))

    def _match_groups(self, parameters: Sequence[OptimizerParameter]) -> dict[int, dict[str, Any]]:
        """Returns the checkpoint's options for each group of the optimizer.

        Raises LoadError if the checkpoint's groups divide the parameters in another way.
        """
        by_ours: dict[int, tuple[int, str]] = {}
        by_theirs: dict[int, tuple[int, str]] = {}
        for parameter in parameters:
            for part in parameter.parts:
                theirs = next((self._group_of[name] for name in part.names if name in self._group_of), None)
                if theirs is None:
                    continue
                ours, name = parameter.group, part.names[0]
                for group, match, known in ((ours, theirs, by_ours), (theirs, ours, by_theirs)):
                    expected, first = known.setdefault(group, (match, name))
                    if expected != match:
                        raise LoadError(
                            f"the param groups differ: {first} and {name} are in one group of the optimizer or the "
                            "source, but in two groups of the other"
                        )
        return {
            ours: {key: v for key, v in self._outline.groups[theirs].items() if key not in _IMPLEMENTATION}
            for ours, (theirs, _) in by_ours.items()
        }

    def _check_groups_are_alike(self) -> None:
        """Raises LoadError for a parameter whose entries differ in kind from the entries of most parameters of its
        group.
        """
        counts: dict[int, collections.Counter[tuple[tuple[str, str], ...]]] = collections.defaultdict(
            collections.Counter
        )
        for parameter, entries in self.entries:
            counts[parameter.group][
                tuple((key, _describe_kind(e, parameter)) for key, e in sorted(entries.items()))
            ] += 1
        for parameter, entries in self.entries:
            ((most, _),) = counts[parameter.group].most_common(1)
            _check_kinds(parameter, entries, dict(most), "but most parameters of its group have")
        for parameter in self.stateless:
            # A parameter that never had a gradient has no entries, not an empty dictionary.
            has_entries = self._outline.entries.keys() & {self._find_name_in_source(part) for part in parameter.parts}
            if counts[parameter.group] and has_entries:
                raise LoadError(
                    f"{parameter.names[0]} has an empty state in the source, unlike other parameters of its group"
                )


def _is_same_option(ours: Any, theirs: Any) -> bool:
    """Returns whether two options are the same.

    theirs: the option as ``read_option`` returns it.
    """
    ours = read_option(ours)
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    return bool(ours == theirs)


def _describe_kind(entry: TensorEntry | ScalarEntry, parameter: OptimizerParameter) -> str:
    """Returns the kind of an entry, in the words of ``_describe_kind_of_value``."""
    if isinstance(entry, TensorEntry) or (entry.dtype is not None and not parameter.own_shape):
        return "a tensor"
    return "a number" if isinstance(entry.value, numbers.Number) else type(entry.value).__name__


def _describe_kind_of_value(value: Any, parameter: OptimizerParameter) -> str:
    """Returns the kind of a value in an optimizer's state; a tensor with one value counts as a number."""
    if isinstance(value, torch.Tensor) and (value.ndim or not parameter.own_shape):
        return "a tensor"
    return "a number" if isinstance(value, numbers.Number | torch.Tensor) else type(value).__name__


def _check_kinds(parameter: OptimizerParameter, entries: Entries, expected: Mapping[str, str], whose: str) -> None:
    kinds = {key: _describe_kind(entry, parameter) for key, entry in entries.items()}
    for key in {**expected, **kinds}:
        if kinds.get(key) != expected.get(key):
            raise LoadError(
                f"{name_entry(key, parameter.names[0])} is {kinds.get(key, 'missing')} in the source, {whose} "
                f"{expected.get(key, 'no such value')}: a step would fail or start from zero"
            )


def _find_differing_key(entries: Entries, others: Entries) -> str:
    """Returns the first key whose tensors differ in dtype or whose single values differ; empty if there is none."""
    for key in {**entries, **others}:
        left, right = (e.dtype if isinstance(e, TensorEntry) else e for e in (entries.get(key), others.get(key)))
        if left != right:
            return key
    return ""
