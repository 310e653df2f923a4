"""A checkpoint as data, whatever its format: its files, and for each tensor where its bytes lie."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

from fsdp_doctor.checkpoints.dtypes import DTYPES, is_floating_point
from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.troubles import Symptom
from fsdp_doctor.text import join_some

Shape: TypeAlias = tuple[int, ...]
PlainValue: TypeAlias = float | str | None
StateRole: TypeAlias = Literal["model", "optimizer", "other"]

_OPTIMIZER_KEY = re.compile(r"optim(izers?)?(_\w+)?")
_FLAT_OPTIMIZER = re.compile(r"(optim|optimizer|optimizer_\d+)\.|state\..+\.|param_groups\.")
# Those under which torchtitan puts its counters, beside the names of the model.
_OTHER_KEYS = frozenset({"train_state", "dataloader", "lr_scheduler"})
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq"})
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<slot>\w+)$")


class Arrangement(Enum):
    """Arrangements of the files of one state."""

    DCP = "a distributed checkpoint (DCP)"
    RANK_FILES = "a file of each rank"
    SHARDED_SAFETENSORS = "safetensors of each rank's rows (HuggingFaceStorageWriter)"
    WHOLE = "whole tensors"


class Member(NamedTuple):
    """A range of a file that was written at once. crc: the CRC-32 that stands in the file; None if none does."""

    name: str
    begin: int
    nbytes: int
    crc: int | None


class SavedPiece(NamedTuple):
    """A block of a tensor in a file. begin: its first byte; -1 if it cannot be read. strides: in elements."""

    file: str
    begin: int
    shape: Shape
    offsets: Shape
    strides: Shape
    rank: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, int] | None:
        """Returns the rows of the whole tensor that the piece covers: the first row, and the row after the last."""
        return (self.offsets[0], self.offsets[0] + self.shape[0]) if self.shape else None

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        if not self.numel:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Returns whether the elements are contiguous, in the order of rows."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


@dataclass(slots=True)
class SavedTensor:
    """A tensor of a state. path: the keys of the nested dicts that lead to the tensor. shape: of the whole tensor.

    parameter: the tensor's name in the model, without those keys and the prefixes of wrappers; empty if it belongs to
    no parameter.
    """

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    pieces: list[SavedPiece] = field(default_factory=list)
    parameter: str = ""

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def last_name(self) -> str:
        """Last part of the name: a module's attribute, or a kind of optimizer state."""
        return self.name.rpartition(".")[2]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def file(self) -> str:
        """File of the first piece."""
        return self.pieces[0].file if self.pieces else ""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def is_divided(self) -> bool:
        """Returns whether some rank had a part of the tensor."""
        return any(piece.shape != self.shape for piece in self.pieces)


@dataclass(slots=True)
class SavedFile:
    """A file that was read. path: relative to the checkpoint's directory.

    ranks, world_sizes: what the tensors in it say of who saved them, or its name when it was saved.
    """

    path: str
    size: int
    members: list[Member] = field(default_factory=list)
    version: tuple[int, int, int, int] | None = None
    ranks: set[int] = field(default_factory=set)
    world_sizes: set[int] = field(default_factory=set)
    has_checksums: bool = False


@dataclass(slots=True)
class State:
    """Tensors that were saved together. values: numbers, texts and None beside them, by their path and rank.

    is_incomplete: whether files of it are not there. unread: what is neither a tensor nor a value, by its path, each
    with its file and its kind: a quantized tensor, say.

    Set once all is read: roles, of each tensor and of what was not read. head: the keys that lead to the model; None if
    there is none. candidates: parts of which each may be the model. left_out: other parts, with their tensors.
    """

    arrangement: Arrangement
    directory: str
    label: str
    tensors: dict[tuple[str, ...], SavedTensor] = field(default_factory=dict)
    values: dict[tuple[tuple[str, ...], int | None], PlainValue] = field(default_factory=dict)
    unread: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    roles: dict[tuple[str, ...], StateRole] = field(default_factory=dict)
    head: tuple[str, ...] | None = None
    candidates: list[str] = field(default_factory=list)
    is_incomplete: bool = False
    left_out: dict[str, int] = field(default_factory=dict)

    def select(self, role: StateRole) -> Iterator[SavedTensor]:
        return (tensor for path, tensor in self.tensors.items() if self.roles[path] == role)

    def get_saved_name(self, tensor: SavedTensor) -> str:
        """The name of a tensor of the model as it was saved, without the keys that lead to the model."""
        return ".".join(tensor.path[len(self.head or ()) :])

    def judge_keys(self, path: tuple[str, ...]) -> StateRole:
        """Answer of the keys alone: ``model`` for what may be one."""
        name, first = ".".join(path), "".join(path[:1])
        is_flat = len(path) == 1 and _FLAT_OPTIMIZER.match(name)
        is_of_alone = first == "state" and len(path) > 2 and self.has_groups
        at = next((at for at, key in enumerate(path[:-1]) if _OPTIMIZER_KEY.fullmatch(key)), None)
        # Loops and schedulers count the steps of an optimizer under such a key, too.
        is_below = at is not None and (not at or any(re.match(r"state\b|param_groups\b", key) for key in path[at:]))
        if self.label.startswith("optim") or is_flat or is_of_alone or is_below:
            return "optimizer"
        if first == "param_groups":
            return "optimizer"
        return "other" if self.label.startswith("extra_state") or _OTHER_KEYS & set(path[:1]) else "model"

    @property
    def is_safetensors(self) -> bool:
        return bool(self.files) and self.files[0].endswith(".safetensors")

    @property
    def keeps_order(self) -> bool:
        """Returns whether the tensors are in the order of ``state_dict()``: in files of torch.save they are.

        DCP's metadata and safetensors do not keep it.
        """
        is_of_dicts = self.arrangement in (Arrangement.RANK_FILES, Arrangement.WHOLE)
        return bool(self.files) and is_of_dicts and not self.is_safetensors

    @property
    def has_groups(self) -> bool:
        """Says whether the part is an optimizer's by itself."""
        return any(path[0] == "param_groups" for path, _ in self.values if path)


def parse_optimizer_slot(tensor: SavedTensor) -> tuple[str, str] | None:
    """The parameter and the kind of an optimizer's state, such as ``exp_avg``."""
    found = _OPTIMIZER_STATE.search(tensor.name)
    return (found["parameter"], found["slot"]) if found else None


@dataclass(slots=True)
class SavedCheckpoint:
    """Contents of a checkpoint: of a directory, or of a single file.

    settings: the JSON files beside the states, by their path. values_beside: numbers and texts in files that are no
    state, as a scheduler's, by the file and their path in it. symptoms: what was found wrong while it was read.
    unchecked: what was not looked at, and why. part: that was asked for.
    is_one_file: whether only one file of a directory was asked about, which has perhaps others that belong to it.
    """

    root: pathlib.Path
    is_one_file: bool = False
    states: list[State] = field(default_factory=list)
    files: dict[str, SavedFile] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    values_beside: dict[str, dict[tuple[str, ...], PlainValue]] = field(default_factory=dict)
    symptoms: list[Symptom] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    part: str | None = None

    def list_paths(self) -> list[pathlib.Path]:
        """Lists the paths of all files that were read."""
        return [self.root / path for path in (*self.files, *self.settings)]

    def find_setting(self, directory: str, name: str) -> dict[str, Any]:
        """A JSON object beside a state, in its ``huggingface`` folder or a directory above; empty if none."""
        here = pathlib.PurePath(directory)
        for place in (here, here / "huggingface", here.parent, here.parent / "huggingface"):
            if isinstance(found := self.settings.get(str(place / name)), dict):
                return found
        return {}


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a checkpoint: its tensors by its own names, and the states that they are of."""

    tensors: dict[str, SavedTensor]
    states: list[State]

    def select_parameters(self, buffers: Collection[str] = ()) -> dict[str, SavedTensor]:
        """Leaves out the buffers, as far as the files say which these are: ranks divide parameters alone.

        buffers: names of further ones, or the last parts of names.
        """
        is_of_ranks = any(state.arrangement is not Arrangement.WHOLE for state in self.states)
        are_divided = is_of_ranks and any(tensor.is_divided for tensor in self.tensors.values())
        is_by_ranks = all(state.arrangement is Arrangement.RANK_FILES for state in self.states)
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if is_floating_point(tensor.dtype)
            and tensor.last_name not in _BUFFERS
            and not {name, tensor.last_name} & set(buffers)
            # DCP has one chunk of what has one row, whoever had it.
            and (tensor.is_divided or not are_divided or (not is_by_ranks and tensor.shape[:1] in ((), (1,))))
        }


def choose_model(checkpoint: SavedCheckpoint) -> SavedModel:
    """The model, without an optimizer, unless there is nothing else.

    Of a model that is there in several forms one is taken: safetensors, else the whole tensors, else the shards.
    Raises BadFile if two states of one form have the same names.
    """
    model = SavedModel({}, [])
    for state in sorted(checkpoint.states, key=_order_state):
        if state.candidates:
            raise BadFile(
                f"has several parts that may be the model; choose one with --part: {join_some(state.candidates)}"
            )
        of_model = {state.get_saved_name(tensor): tensor for tensor in state.select("model")}
        if both := of_model.keys() & model.tensors.keys():
            name, other = min(both), model.tensors[min(both)].file
            if any(_order_state(state) == _order_state(chosen) for chosen in model.states):
                raise BadFile(f"has {name} in {other} and in {of_model[name].file}: pass one of the two")
        elif of_model:
            model.tensors.update(of_model)
            model.states.append(state)
    if model.tensors:
        return model
    if checkpoint.part is not None:
        raise BadFile(f"has no part {checkpoint.part}")
    every = {tensor.name: tensor for state in checkpoint.states for tensor in state.tensors.values()}
    return SavedModel(every, checkpoint.states)


def list_settings_places(
    checkpoint: SavedCheckpoint, model: SavedModel, config: str | None = None
) -> list[pathlib.Path]:
    """Lists the directories where the model's settings and tokenizer may be."""
    places = [place for state in model.states for place in (state.directory, f"{state.directory}/huggingface")]
    asked = [pathlib.Path(config)] if config is not None else []
    return [*asked, *(checkpoint.root / place for place in (*places, "huggingface", "."))]


def _order_state(state: State) -> tuple[bool, bool]:
    return state.arrangement is not Arrangement.WHOLE, not state.is_safetensors
