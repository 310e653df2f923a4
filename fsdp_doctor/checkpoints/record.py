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

Shape: TypeAlias = tuple[int, ...]
PlainValue: TypeAlias = float | str | None
StateRole: TypeAlias = Literal["model", "optimizer", "other"]

# The keys under which programs put a model's or an optimizer's state.
_MODEL_KEYS = frozenset({"model", "module", "state_dict", "app"})
_OPTIMIZER_KEY = re.compile(r"optim|optimizers?|optimizer_\d+|optimizer_states?|optimizer_state_dict")
# Those under which torchtitan puts its counters, beside the names of the model.
_OTHER_KEYS = frozenset({"train_state", "dataloader", "lr_scheduler"})
_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq"})
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<slot>\w+)$")


class Arrangement(Enum):
    """How the files of a state belong together."""

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
        """The rows of the whole tensor in which it lies: the first, and the one behind the last."""
        return (self.offsets[0], self.offsets[0] + self.shape[0]) if self.shape else None

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        if not self.numel:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other, in the order of rows."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


@dataclass(slots=True)
class SavedTensor:
    """A tensor of a state. path: the keys of the nested dicts that lead to it. shape: of the whole tensor."""

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    pieces: list[SavedPiece] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def last_name(self) -> str:
        """Of an attribute of a module, or a kind of an optimizer's state."""
        return self.name.rpartition(".")[2]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def file(self) -> str:
        """That of the first piece."""
        return self.pieces[0].file if self.pieces else ""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def is_divided(self) -> bool:
        """Whether some rank had a part of it."""
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

    unread: what is neither, by its path, each with its file and its kind: a quantized tensor, say.
    has_model_key: the model is one entry of a dict among others, such as of ``{"model", "optimizer", "rng"}``.
    """

    arrangement: Arrangement
    directory: str
    label: str
    tensors: dict[tuple[str, ...], SavedTensor] = field(default_factory=dict)
    values: dict[tuple[tuple[str, ...], int | None], PlainValue] = field(default_factory=dict)
    unread: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    has_model_key: bool = False

    def find_role(self, path: tuple[str, ...]) -> StateRole:
        if (
            self.label.startswith("optim")
            or (len(path) > 1 and _OPTIMIZER_KEY.fullmatch(path[0]))
            or re.match(r"(optim|optimizer|optimizer_\d+)\.|state\..+\.|param_groups\.", ".".join(path))
        ):
            return "optimizer"
        is_beside_model = self.has_model_key and not is_under_model_key(path)
        if self.label.startswith("extra_state") or _OTHER_KEYS & set(path[:1]) or is_beside_model:
            return "other"
        return "model"

    def select(self, role: StateRole) -> Iterator[SavedTensor]:
        return (tensor for path, tensor in self.tensors.items() if self.find_role(path) == role)


def is_under_model_key(path: tuple[str, ...]) -> bool:
    return len(path) > 1 and path[0] in _MODEL_KEYS


def get_parameter_name(tensor: SavedTensor) -> str:
    """The name of a tensor of a model, without the keys of the dicts around the model's state."""
    path = tensor.path
    while is_under_model_key(path):
        path = path[1:]
    return ".".join(path)


def parse_optimizer_slot(tensor: SavedTensor) -> tuple[str, str] | None:
    """The parameter and the kind of an optimizer's state, such as ``exp_avg``."""
    found = _OPTIMIZER_STATE.search(tensor.name)
    return (found["parameter"], found["slot"]) if found else None


@dataclass(slots=True)
class SavedCheckpoint:
    """What lies in a directory, or a file alone.

    settings: the JSON files beside the states, by their path. symptoms: what was found wrong while it was read.
    unchecked: what was not looked at, and why.
    is_one_file: whether only one file of a directory was asked about, which has perhaps others that belong to it.
    """

    root: pathlib.Path
    is_one_file: bool = False
    states: list[State] = field(default_factory=list)
    files: dict[str, SavedFile] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    symptoms: list[Symptom] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def list_paths(self) -> list[pathlib.Path]:
        """Those of all files that were read."""
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
        of_model = {get_parameter_name(tensor): tensor for tensor in state.select("model")}
        if both := of_model.keys() & model.tensors.keys():
            name, other = min(both), model.tensors[min(both)].file
            if any(_order_state(state) == _order_state(chosen) for chosen in model.states):
                raise BadFile(f"has {name} in {other} and in {of_model[name].file}: name one of them")
        elif of_model:
            model.tensors.update(of_model)
            model.states.append(state)
    if model.tensors:
        return model
    every = {tensor.name: tensor for state in checkpoint.states for tensor in state.tensors.values()}
    return SavedModel(every, checkpoint.states)


def list_settings_places(
    checkpoint: SavedCheckpoint, model: SavedModel, config: str | None = None
) -> list[pathlib.Path]:
    """Where the model's settings and its tokenizer may lie."""
    places = [place for state in model.states for place in (state.directory, f"{state.directory}/huggingface")]
    asked = [pathlib.Path(config)] if config is not None else []
    return [*asked, *(checkpoint.root / place for place in (*places, "huggingface", "."))]


def _order_state(state: State) -> tuple[bool, bool]:
    is_safetensors = bool(state.files) and state.files[0].endswith(".safetensors")
    return state.arrangement is not Arrangement.WHOLE, not is_safetensors
