"""Reads the metadata of all checkpoints in a directory: finds the formats of its files, and their states."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec

from fsdp_doctor.checkpoints import dcp
from fsdp_doctor.checkpoints.dcp_states import read_dcp
from fsdp_doctor.checkpoints.file_reader import FileReader, join_path
from fsdp_doctor.checkpoints.files import BadFile, OpenFile
from fsdp_doctor.checkpoints.formats import KNOWN_FORMATS, OTHER_FORMATS, find_other_format
from fsdp_doctor.checkpoints.marker import MARKER, PARTIAL, Marker
from fsdp_doctor.checkpoints.parts import assign_roles
from fsdp_doctor.checkpoints.plain_parts import find_loose_files
from fsdp_doctor.checkpoints.rank_states import read_torch_files
from fsdp_doctor.checkpoints.record import SavedCheckpoint, SavedFile, State
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.checkpoints.whole_states import read_safetensors
from fsdp_doctor.text import join_some

_MOST_DEPTH = 5
_MOST_FILES = 250_000
_LONGEST_JSON = 50_000_000
# Names of files that macOS writes next to others on a foreign file system, or into an archive.
_ATTRIBUTES = "._"


def read_checkpoint(path: pathlib.Path, part: str | None = None) -> SavedCheckpoint:
    """Reads the metadata of every state in a directory and its subdirectories, or of a single file.

    No tensor data is read. Problems are recorded as symptoms instead of being raised.

    ``part`` chooses the part of the file that is treated as the model: the keys that lead to the part, or only the last
    key, such as ``ema``.
    """
    is_one_file = not path.is_dir() and not dcp.METADATA.fullmatch(path.name)
    found = SavedCheckpoint(path if path.is_dir() else path.parent, is_one_file)
    found.part = part
    reading = _Reading(found)
    if path.is_dir():
        for directory, names in reading.walk():
            reading.read_directory(directory, names)
    else:
        reading.read_directory(".", {path.name})
    if is_one_file:
        found.unchecked.append("the files next to it")
    for state in found.states:
        assign_roles(state, found.find_setting(state.directory, "config.json"), part)
        reading.note_unread(state)
        if state.candidates:
            what = (
                f"whether the model is sound: the model may be {' or '.join(state.candidates)}; choose one with --part"
            )
            found.unchecked.append(f"{pathlib.PurePath(state.directory, state.label)}: {what}")
    reading.note_copies()
    find_loose_files(found)
    has_read = any(file.members for file in found.files.values()) or any(state.values for state in found.states)
    if not has_read and all(symptom.trouble.value.severity == "warning" for symptom in found.symptoms):
        what = (
            f"{path} contains no file of a known format; looked for: {KNOWN_FORMATS}, and the formats that are not read"
        )
        reading.note(Trouble.UNKNOWN, f"{what} ({', '.join(each.name for each in OTHER_FORMATS)})")
    return found


class _Reading(FileReader):
    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        super().__init__(checkpoint)
        self._copies: list[tuple[str, str]] = []

    def note_unread(self, state: State) -> None:
        """Reports the parts of a model or an optimizer that are in a form this program does not read."""
        beside = {path[:-1] for path in state.tensors}
        for path, (file, kind) in state.unread.items():
            name = ".".join(path)
            # NumPy arrays count as weights only if they are stored next to other weights.
            is_array = kind.endswith("of numpy") and path[:-1] not in beside
            if state.roles[path] == "other" or is_array:
                self.checkpoint.unchecked.append(f"{file}: {name} is {kind}, which is not read")
            else:
                self.note(Trouble.NOT_READ, f"the tensor is {kind}, which is not read", file, name)

    def walk(self) -> Iterator[tuple[str, set[str]]]:
        """Yields each directory and the names of its files.

        Hidden directories are skipped, and unfinished saves are reported. Links to directories are not followed, since
        they may lead outside the checkpoint or form a cycle.
        """
        count = 0

        def note_unreadable(error: OSError) -> None:
            self.note(Trouble.UNREAD, f"cannot be read: {error.strerror}", self.make_relative(str(error.filename)))

        for directory, below, names in os.walk(self.checkpoint.root, onerror=note_unreadable):
            relative = self.make_relative(directory)
            depth = len(pathlib.PurePath(relative).parts)
            for name in below:
                if name.startswith(PARTIAL):
                    what = "a save is under way, or an unfinished save left this file"
                    self.note(Trouble.UNFINISHED, what, join_path(relative, name))
            below[:] = sorted(name for name in below if depth < _MOST_DEPTH and not name.startswith("."))
            if unfinished := [name for name in below if name.startswith("tmp_")]:
                below[:] = [name for name in below if name not in unfinished]
                self.note(Trouble.UNFINISHED, "an unfinished save left this file", join_some(unfinished))
            count += len(names)
            if count > _MOST_FILES:
                self.note(Trouble.UNKNOWN, f"the directory has more than {_MOST_FILES} files, and is not a checkpoint")
                return
            yield relative, set(names)

    def read_directory(self, directory: str, names: set[str]) -> None:
        if attributes := sorted(name for name in names if name.startswith(_ATTRIBUTES)):
            names = names.difference(attributes)
            what = "macOS keeps attributes of other files in them"
            self.checkpoint.unchecked.append(f"{join_path(directory, join_some(attributes))}: {what}")
        for name in sorted(names):
            if name.endswith(".json") and not name.endswith(".index.json"):
                self._read_settings(join_path(directory, name))
        if self._pass_over_other_format(directory, names):
            return
        self._read_marker(directory, names)
        if any(dcp.METADATA.fullmatch(name) or name.endswith(".distcp") for name in names):
            read_dcp(self, directory, names)
        elif ".metadata.tmp" in names:
            self.note(Trouble.METADATA, "there is only .metadata.tmp: the save did not end", directory)
        read_torch_files(self, directory, names)
        read_safetensors(self, directory, names)
        known = {*self.checkpoint.files, *self.checkpoint.settings}
        others = sorted(
            name for name in names if join_path(directory, name) not in known and not name.endswith(".json")
        )
        if others and any(state.directory == directory for state in self.checkpoint.states):
            self.checkpoint.unchecked.append(f"{join_path(directory, join_some(others))}: of no known format")

    def _pass_over_other_format(self, directory: str, names: set[str]) -> bool:
        """Returns whether another program wrote the directory in a format that is not read.

        Files in such a format that lie next to readable files are noted.
        """
        settings = self.checkpoint.settings.get(join_path(directory, "metadata.json"))
        root = pathlib.PurePath(os.path.abspath(self.checkpoint.root)).name
        *above, here = (root, *pathlib.PurePath(directory).parts)
        found = find_other_format((*above, here), names, settings if isinstance(settings, dict) else {})
        if found is None:
            return False
        if found.owns(above):
            return True  # already reported for the directory above
        others = found.list_files(names)
        file = join_path(directory, join_some(others, 2)) if others else directory
        if found.is_copy:
            self._copies.append((f"these are files of {found.name}, which are not read: {found.tool}", file))
            names.difference_update(others)
            return found.owns((here,)) or self._pass_over_other_format(directory, names)
        self.note(Trouble.OTHER_FORMAT, f"this is a checkpoint of {found.name}, which is not read: {found.tool}", file)
        return True

    def note_copies(self) -> None:
        """Reports models in formats that are not read.

        If the checkpoint also has the model in a format that is read, the models in other formats are listed as
        unchecked; otherwise they are an error.
        """
        has_model = any(state.tensors for state in self.checkpoint.states)
        for what, file in self._copies:
            if has_model:
                self.checkpoint.unchecked.append(f"{file}: {what}")
            else:
                self.note(Trouble.OTHER_FORMAT, what, file)

    def _read_settings(self, path: str) -> None:
        def read(file: OpenFile, _: SavedFile) -> Any:
            if file.size > _LONGEST_JSON:
                self.checkpoint.unchecked.append(f"{path}: a JSON file of {file.size} bytes was not read")
                return None
            try:
                return json.loads(file.read(0, file.size))
            except (ValueError, RecursionError):
                raise BadFile("is not JSON") from None

        self.checkpoint.settings[path] = self.read(path, read, Trouble.SETTINGS_DAMAGED)
        self.checkpoint.files.pop(path, None)  # absent if the file could not be opened

    def _read_marker(self, directory: str, names: set[str]) -> None:
        """Reads the marker file, which a save writes last and which holds the checksums of the other files."""
        path = join_path(directory, MARKER)
        if self.checkpoint.settings.get(path) is None:
            return
        try:
            marker = msgspec.convert(self.checkpoint.settings[path], Marker)
        except msgspec.ValidationError as error:
            self.note(Trouble.SETTINGS_DAMAGED, f"is not a marker of a save: {error}", path)
            return
        self.marked |= {join_path(directory, name): file for name, file in marker.files.items()}
        for name in sorted(marker.files.keys() - names):
            self.note(Trouble.MISSING_FILE, "the save wrote this file, but it is missing", join_path(directory, name))
