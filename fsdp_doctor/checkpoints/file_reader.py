"""Opens the files of a checkpoint, and notes the files that cannot be read. The readers of all formats use it."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from typing import TypeVar

from fsdp_doctor.checkpoints.files import BadFile, NotRead, OpenFile
from fsdp_doctor.checkpoints.marker import MarkedFile
from fsdp_doctor.checkpoints.pickles import RefusedPickle
from fsdp_doctor.checkpoints.record import RANK_FILE, Arrangement, SavedCheckpoint, SavedFile, State
from fsdp_doctor.checkpoints.safetensors_files import Header
from fsdp_doctor.checkpoints.torch_files import TorchTensors, find_tensors, read_torch_file
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

_T = TypeVar("_T")
# Files that are not needed to load the weights. If the pickle of such a file contains arbitrary classes, only the
# file's checksums are read.
ANY_CLASSES = re.compile(
    r"(training_args|scheduler.*|rng_state.*|scaler|meta|.*dataloader.*)\.(bin|pt|pth)|random_states_\d+\.pkl"
)
# Troubles that are not reported when only one file was given, since they are about several files.
_OF_SEVERAL_FILES = (Trouble.MISSING_FILE, Trouble.MISSING_RANK, Trouble.INDEX, Trouble.LOST_TENSOR)


class FileReader:
    """Opens files of a checkpoint and records their problems as symptoms instead of raising them."""

    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._torch_files: dict[str, TorchTensors | None] = {}
        self.marked: dict[str, MarkedFile] = {}

    def note(self, trouble: Trouble, what: str, file: str = "", tensor: str = "", rank: int | None = None) -> None:
        if not (self.checkpoint.is_one_file and trouble in _OF_SEVERAL_FILES):
            self.checkpoint.symptoms.append(Symptom(trouble, what, file, tensor, rank=rank))

    def make_relative(self, path: str) -> str:
        return os.path.relpath(path, self.checkpoint.root)

    def read(
        self, path: str, reader: Callable[[OpenFile, SavedFile], _T], trouble: Trouble = Trouble.FILE
    ) -> _T | None:
        """Opens a file and returns the result of ``reader``. If either fails, notes a symptom and returns None."""
        try:
            with OpenFile(self.checkpoint.root / path) as file:
                saved = self.checkpoint.files.setdefault(path, SavedFile(path, file.size, version=file.version))
                return reader(file, saved)
        except RefusedPickle as error:
            self.note(Trouble.PICKLE, error.what, path)
        except NotRead as error:
            self.note(Trouble.FORM, error.what, path)
        except BadFile as error:
            self.note(trouble, error.what, path, error.tensor)
        except OSError as error:
            self.note(Trouble.UNREAD, f"cannot be read: {error.strerror or error}", path)
        return None

    def add_state(self, arrangement: Arrangement, directory: str, label: str) -> State:
        state = State(arrangement, directory, label)
        self.checkpoint.states.append(state)
        return state

    def read_torch(self, path: str, rank: int | None) -> TorchTensors | None:
        """Returns the tensors and values of a torch.save file; None if they cannot be read or are not needed. Repeated
        calls read the file only once.
        """

        def read(file: OpenFile, saved: SavedFile) -> TorchTensors | None:
            contents = read_torch_file(file)
            saved.members, saved.has_checksums = contents.members, contents.has_checksums
            if (saved_as := RANK_FILE.fullmatch(f"{contents.root}.pt")) and saved_as["rank"]:
                saved.ranks = {int(saved_as["rank"])}
            if contents.lacks_data:
                self.note(Trouble.NO_DATA, "the file's tensors have no data", path)
            if ANY_CLASSES.fullmatch(pathlib.PurePath(path).name):
                beside = find_tensors(path, contents, rank) if contents.refusal is None else None
                if beside is not None:
                    self.checkpoint.values_beside[path] = beside.values
                if beside is None or beside.unread:
                    self.checkpoint.unchecked.append(f"{path}: the classes in it were not read")
                return None
            if contents.refusal is not None:
                raise contents.refusal
            found = find_tensors(path, contents, rank)
            saved.ranks, saved.world_sizes = found.ranks or saved.ranks, found.world_sizes
            return found

        if path not in self._torch_files:
            self._torch_files[path] = self.read(path, read)
        return self._torch_files[path]

    def note_trailing_bytes(self, header: Header, file: OpenFile) -> None:
        if header.end < file.size:
            path = self.make_relative(str(file.path))
            self.note(Trouble.TRAILING_BYTES, f"{file.size - header.end} bytes follow the last tensor", path)


def join_path(directory: str, name: str) -> str:
    return name if directory == "." else f"{directory}/{name}"
