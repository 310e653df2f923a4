"""Records of a checkpoint in any format: its files, and the location of each tensor's bytes."""

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
# Names of the files in which each rank saves its part.
RANK_FILE = re.compile(
    r"(?P<label>.+?)(?:_world_size_(?P<world>\d+))?_rank_?(?P<rank>\d+)(?:_of_(?P<of>\d+))?\.(?:pt|bin)"
    r"|(?P<item>.+)_(?P<number>\d+)\.pt"
)
_FLAT_OPTIMIZER = re.compile(r"(optim|optimizer|optimizer_\d+)\.|state\..+\.|param_groups\.")
# Keys under which torchtitan stores its counters, next to the names of the model.
_OTHER_KEYS = frozenset({"train_state", "dataloader", "lr_scheduler"})
# Last names of tensors that are no parameters.
BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq"})
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<slot>\w+)$")


class Arrangement(Enum):
    """Distribution of a state's tensors over files."""

    DCP = "a distributed checkpoint (DCP)"
    RANK_FILES = "a file of each rank"
    SHARDED_SAFETENSORS = "safetensors of each rank's rows (HuggingFaceStorageWriter)"
    WHOLE = "whole tensors"


class Member(NamedTuple):
    """Range of a file with its stored checksum. ``crc`` is the CRC-32 stored in the file; None if none is stored."""

    name: str
    begin: int
    nbytes: int
    crc: int | None


class SavedPiece(NamedTuple):
    """Block of a tensor in a file.

    ``begin`` is the offset of its first byte, or -1 if it cannot be read. ``strides`` count elements.
    """

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
        """Number of elements in the file from the piece's first element to its last, including gaps."""
        if not self.numel:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Returns whether the elements are contiguous in row-major order."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


@dataclass(slots=True)
class SavedTensor:
    """Tensor of a state.

    ``path`` holds the keys of the nested dicts that lead to the tensor, and ``shape`` is the shape of the whole tensor.
    ``parameter`` is the tensor's name in the model, without those keys and without wrapper prefixes; it is empty if the
    tensor does not belong to the model. ``is_loose`` is true if ranks saved different plain tensors under this name, so
    that each piece may be a part whose place in the tensor no file gives.
    """

    path: tuple[str, ...]
    dtype: str
    shape: Shape
    pieces: list[SavedPiece] = field(default_factory=list)
    parameter: str = ""
    is_loose: bool = False

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
        """Returns whether any piece is only a part of the tensor."""
        return any(piece.shape != self.shape for piece in self.pieces)


@dataclass(slots=True)
class SavedFile:
    """A file that was read, with its path relative to the checkpoint's directory.

    ``ranks`` and ``world_sizes`` come from the tensors in the file. If the tensors do not name a rank, the file's
    original name may name the rank.
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
    """Tensors that were saved together.

    ``values`` holds the numbers, strings and None stored next to them, by path and rank. ``is_incomplete`` is true if
    files of the state are missing. ``tells_layout`` is false if the state is in rank files with only plain tensors.
    ``is_loose`` is true if the tensors may be parts, since no file tells how they were divided. ``unread`` maps the
    path of everything else, such as a quantized tensor, to its file and a description of its kind.

    The remaining fields are set after everything was read: ``roles`` of all tensors and unread entries; ``head``, the
    keys that lead to the model, or None without a model; ``candidates``, parts that may each be the model; and
    ``left_out``, the other parts with their numbers of tensors.
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
    tells_layout: bool = True
    is_loose: bool = False
    left_out: dict[str, int] = field(default_factory=dict)

    def select(self, role: StateRole) -> Iterator[SavedTensor]:
        return (tensor for path, tensor in self.tensors.items() if self.roles[path] == role)

    def get_saved_name(self, tensor: SavedTensor) -> str:
        """Returns the saved name of a model tensor, without the keys that lead to the model."""
        return ".".join(tensor.path[len(self.head or ()) :])

    def judge_keys(self, path: tuple[str, ...]) -> StateRole:
        """Returns the role of a tensor, judged only by its keys. ``model`` means that it may belong to a model."""
        name, first = ".".join(path), "".join(path[:1])
        is_flat = len(path) == 1 and _FLAT_OPTIMIZER.match(name)
        is_of_alone = first == "state" and len(path) > 2 and self.has_groups
        at = next((at for at, key in enumerate(path[:-1]) if _OPTIMIZER_KEY.fullmatch(key)), None)
        # Training loops and schedulers also store an optimizer's step count under such a key.
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
        """Returns whether the tensors are in the order of ``state_dict()``, as they are in files of torch.save.

        DCP's metadata and safetensors do not keep this order.
        """
        is_of_dicts = self.arrangement in (Arrangement.RANK_FILES, Arrangement.WHOLE)
        return bool(self.files) and is_of_dicts and not self.is_safetensors

    @property
    def has_groups(self) -> bool:
        """Returns whether the state is only an optimizer's, because its top level has ``param_groups``."""
        return any(path[0] == "param_groups" for path, _ in self.values if path)


def parse_optimizer_slot(tensor: SavedTensor) -> tuple[str, str] | None:
    """Returns the parameter and the slot, such as ``exp_avg``, that the tensor's name gives; None for other tensors."""
    found = _OPTIMIZER_STATE.search(tensor.name)
    return (found["parameter"], found["slot"]) if found else None


@dataclass(slots=True)
class SavedCheckpoint:
    """Contents of a checkpoint, which is a directory or a single file.

    ``settings`` are the JSON files by path. ``values_beside`` are numbers and strings from files that hold no model or
    optimizer, such as a scheduler's, by file and path. ``symptoms`` are problems found while reading, and ``unchecked``
    lists what was not examined and why. ``part`` is the part that the user chose as the model. ``is_one_file`` is true
    if a single file was given, although its directory may hold other files of the checkpoint.
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
        """Finds the JSON object called ``name`` near a state; empty if there is none.

        The state's directory, its parent directory, and the subdirectory ``huggingface`` of both are searched.
        """
        here = pathlib.PurePath(directory)
        for place in (here, here / "huggingface", here.parent, here.parent / "huggingface"):
            if isinstance(found := self.settings.get(str(place / name)), dict):
                return found
        return {}


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The model in a checkpoint: its tensors by name, and the states they come from."""

    tensors: dict[str, SavedTensor]
    states: list[State]

    def select_parameters(self, buffers: Collection[str] = ()) -> dict[str, SavedTensor]:
        """Returns the floating-point tensors that are not known to be buffers.

        In sharded files, tensors that are not sharded are buffers, since FSDP shards only parameters. ``buffers`` names
        further buffers, by whole names or by the last parts of names.
        """
        is_of_ranks = any(state.arrangement is not Arrangement.WHOLE for state in self.states)
        are_divided = is_of_ranks and any(tensor.is_divided for tensor in self.tensors.values())
        is_by_ranks = all(state.arrangement is Arrangement.RANK_FILES for state in self.states)
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if is_floating_point(tensor.dtype)
            and tensor.last_name not in BUFFERS
            and not {name, tensor.last_name} & set(buffers)
            # DCP stores a tensor with one row as a single chunk, whether or not it was sharded.
            and (tensor.is_divided or not are_divided or (not is_by_ranks and tensor.shape[:1] in ((), (1,))))
        }


def choose_model(checkpoint: SavedCheckpoint) -> SavedModel:
    """Chooses the model's tensors, or all tensors if the checkpoint contains no model.

    If the model is stored in several forms, safetensors are preferred, then other files of whole tensors, then shards.

    Raises BadFile if two states of the same form have the same names, if several parts may be the model, if the chosen
    part does not exist, or if no file tells how the tensors were divided among the ranks.
    """
    model = SavedModel({}, [])
    for state in sorted(checkpoint.states, key=_order_state):
        if state.is_loose and state.arrangement is Arrangement.RANK_FILES and any(True for _ in state.select("model")):
            raise BadFile(
                f"{state.label}: holds each rank's part as a plain tensor, and does not say how the whole tensors were "
                "divided"
            )
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


def parse_file_rank(path: str) -> int | None:
    """Returns the rank in the name of a rank's file; None if the name has none."""
    found = RANK_FILE.fullmatch(pathlib.PurePath(path).name)
    return int(found["rank"] or found["number"]) if found else None


def name_for_rank(name: str, rank: int) -> str:
    """Returns the name of the file of ``rank``, derived from the name of another rank's file."""
    found = RANK_FILE.fullmatch(name)
    assert found is not None
    begin, end = found.span("rank" if found["rank"] else "number")
    return f"{name[:begin]}{rank}{name[end:]}"
