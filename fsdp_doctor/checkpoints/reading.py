"""Reads the metadata of all checkpoints in a directory: groups the files by format and locates each tensor's bytes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from fsdp_doctor.checkpoints import dcp
from fsdp_doctor.checkpoints.files import BadFile, NotRead, OpenFile
from fsdp_doctor.checkpoints.formats import KNOWN_FORMATS, OTHER_FORMATS, OTHER_WRITERS, find_other_format
from fsdp_doctor.checkpoints.marker import MARKER, PARTIAL, MarkedFile, Marker
from fsdp_doctor.checkpoints.parts import assign_roles
from fsdp_doctor.checkpoints.pickles import RefusedPickle
from fsdp_doctor.checkpoints.plain_parts import find_loose_files, find_loose_tensors
from fsdp_doctor.checkpoints.record import (
    RANK_FILE,
    Arrangement,
    Member,
    SavedCheckpoint,
    SavedFile,
    SavedPiece,
    SavedTensor,
    State,
    name_for_rank,
)
from fsdp_doctor.checkpoints.safetensors_files import Header, parse_json, read_header, read_weight_map
from fsdp_doctor.checkpoints.torch_files import TorchTensors, find_tensors, read_torch_file
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble
from fsdp_doctor.text import join_some

_T = TypeVar("_T")
_MOST_DEPTH = 5
_MOST_FILES = 250_000
_LONGEST_JSON = 50_000_000
_SHARD = re.compile(r"shard-(?P<rank>\d+)-.+\.safetensors")
_WHOLE = re.compile(
    r"(?P<stem>.+?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.(?P<suffix>safetensors|bin|pt|pth|pth\.tar|ckpt)"
)
# Files that are not needed to load the weights. If the pickle of such a file contains arbitrary classes, only the
# file's checksums are read.
_ANY_CLASSES = re.compile(
    r"(training_args|scheduler.*|rng_state.*|scaler|meta|.*dataloader.*)\.(bin|pt|pth)|random_states_\d+\.pkl"
)
# Names of files that macOS writes next to others on a foreign file system, or into an archive.
_ATTRIBUTES = "._"
# Troubles that are not reported when only one file was given, since they are about several files.
_OF_SEVERAL_FILES = (Trouble.MISSING_FILE, Trouble.MISSING_RANK, Trouble.INDEX, Trouble.LOST_TENSOR)


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


class _Reading:
    def __init__(self, checkpoint: SavedCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._torch_files: dict[str, TorchTensors | None] = {}
        self._marked: dict[str, MarkedFile] = {}
        self._copies: list[tuple[str, str]] = []

    def note(self, trouble: Trouble, what: str, file: str = "", tensor: str = "", rank: int | None = None) -> None:
        if not (self.checkpoint.is_one_file and trouble in _OF_SEVERAL_FILES):
            self.checkpoint.symptoms.append(Symptom(trouble, what, file, tensor, rank=rank))

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

        Links to directories are not followed, since they may lead outside the checkpoint or form a cycle.
        """
        count = 0

        def note_unreadable(error: OSError) -> None:
            self.note(Trouble.UNREAD, f"cannot be read: {error.strerror}", self._make_relative(str(error.filename)))

        for directory, below, names in os.walk(self.checkpoint.root, onerror=note_unreadable):
            relative = self._make_relative(directory)
            depth = len(pathlib.PurePath(relative).parts)
            for name in below:
                if name.startswith(PARTIAL):
                    what = "a save is under way, or an unfinished save left this file"
                    self.note(Trouble.UNFINISHED, what, _join(relative, name))
            below[:] = sorted(name for name in below if depth < _MOST_DEPTH and not name.startswith("."))
            if unfinished := [name for name in below if name.startswith("tmp_")]:
                below[:] = [name for name in below if name not in unfinished]
                self.note(Trouble.UNFINISHED, "an unfinished save left this file", join_some(unfinished))
            count += len(names)
            if count > _MOST_FILES:
                self.note(Trouble.UNKNOWN, f"the directory has more than {_MOST_FILES} files, and is not a checkpoint")
                return
            yield relative, set(names)

    def _make_relative(self, path: str) -> str:
        return os.path.relpath(path, self.checkpoint.root)

    def read_directory(self, directory: str, names: set[str]) -> None:
        if attributes := sorted(name for name in names if name.startswith(_ATTRIBUTES)):
            names = names.difference(attributes)
            what = "macOS keeps attributes of other files in them"
            self.checkpoint.unchecked.append(f"{_join(directory, join_some(attributes))}: {what}")
        for name in sorted(names):
            if name.endswith(".json") and not name.endswith(".index.json"):
                self._read_settings(_join(directory, name))
        if self._pass_over_other_format(directory, names):
            return
        self._read_marker(directory, names)
        if any(dcp.METADATA.fullmatch(name) or name.endswith(".distcp") for name in names):
            self._read_dcp(directory, names)
        elif ".metadata.tmp" in names:
            self.note(Trouble.METADATA, "there is only .metadata.tmp: the save did not end", directory)
        self._read_torch_files(directory, names)
        self._read_safetensors(directory, names)
        known = {*self.checkpoint.files, *self.checkpoint.settings}
        others = sorted(name for name in names if _join(directory, name) not in known and not name.endswith(".json"))
        if others and any(state.directory == directory for state in self.checkpoint.states):
            self.checkpoint.unchecked.append(f"{_join(directory, join_some(others))}: of no known format")

    def _pass_over_other_format(self, directory: str, names: set[str]) -> bool:
        """Returns whether another program wrote the directory in a format that is not read.

        Files in such a format that lie next to readable files are noted.
        """
        settings = self.checkpoint.settings.get(_join(directory, "metadata.json"))
        root = pathlib.PurePath(os.path.abspath(self.checkpoint.root)).name
        *above, here = (root, *pathlib.PurePath(directory).parts)
        found = find_other_format((*above, here), names, settings if isinstance(settings, dict) else {})
        if found is None:
            return False
        if found.owns(above):
            return True  # already reported for the directory above
        others = found.list_files(names)
        file = _join(directory, join_some(others, 2)) if others else directory
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

    # One file

    def _read(
        self, path: str, reader: Callable[[OpenFile, SavedFile], _T], trouble: Trouble = Trouble.FILE
    ) -> _T | None:
        """Returns the reader's result. If the reader raises, notes a symptom and returns None."""
        try:
            with OpenFile(self.checkpoint.root / path) as file:
                saved = self.checkpoint.files.setdefault(path, SavedFile(path, file.size, version=file.version))
                return reader(file, saved)
        except RefusedPickle as error:
            self.note(Trouble.PICKLE, error.what, path)
        except NotRead as error:
            self.note(Trouble.UNREAD, error.what, path)
        except BadFile as error:
            self.note(trouble, error.what, path, error.tensor)
        except OSError as error:
            self.note(Trouble.UNREAD, f"cannot be read: {error.strerror or error}", path)
        return None

    def _read_settings(self, path: str) -> None:
        def read(file: OpenFile, _: SavedFile) -> Any:
            if file.size > _LONGEST_JSON:
                self.checkpoint.unchecked.append(f"{path}: a JSON file of {file.size} bytes was not read")
                return None
            try:
                return json.loads(file.read(0, file.size))
            except (ValueError, RecursionError):
                raise BadFile("is not JSON") from None

        self.checkpoint.settings[path] = self._read(path, read, Trouble.SETTINGS_DAMAGED)
        self.checkpoint.files.pop(path, None)  # absent if the file could not be opened

    def _read_marker(self, directory: str, names: set[str]) -> None:
        """Reads the marker file, which a save writes last and which holds the checksums of the other files."""
        path = _join(directory, MARKER)
        if self.checkpoint.settings.get(path) is None:
            return
        try:
            marker = msgspec.convert(self.checkpoint.settings[path], Marker)
        except msgspec.ValidationError as error:
            self.note(Trouble.SETTINGS_DAMAGED, f"is not a marker of a save: {error}", path)
            return
        self._marked |= {_join(directory, name): file for name, file in marker.files.items()}
        for name in sorted(marker.files.keys() - names):
            self.note(Trouble.MISSING_FILE, "the save wrote this file, but it is missing", _join(directory, name))

    def _add_state(self, arrangement: Arrangement, directory: str, label: str) -> State:
        state = State(arrangement, directory, label)
        self.checkpoint.states.append(state)
        return state

    def _read_torch(self, path: str, rank: int | None) -> TorchTensors | None:
        """Returns the contents of a torch.save file. Repeated calls read the file only once."""

        def read(file: OpenFile, saved: SavedFile) -> TorchTensors | None:
            contents = read_torch_file(file)
            saved.members, saved.has_checksums = contents.members, contents.has_checksums
            if (saved_as := RANK_FILE.fullmatch(f"{contents.root}.pt")) and saved_as["rank"]:
                saved.ranks = {int(saved_as["rank"])}
            if contents.lacks_data:
                self.note(Trouble.NO_DATA, "the file's tensors have no data", path)
            if _ANY_CLASSES.fullmatch(pathlib.PurePath(path).name):
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
            self._torch_files[path] = self._read(path, read)
        return self._torch_files[path]

    # Distributed checkpoints

    def _read_dcp(self, directory: str, names: set[str]) -> None:
        state = self._add_state(Arrangement.DCP, directory, "dcp")
        files = sorted(name for name in names if dcp.METADATA.fullmatch(name))
        if not files and not self.checkpoint.is_one_file:
            what = "there is no .metadata" + (", only .metadata.tmp" if ".metadata.tmp" in names else "")
            self.note(Trouble.METADATA, f"{what}: the save did not end, or the file is lost", directory)
        items: dict[str, list[dcp.Item]] = defaultdict(list)
        is_known = bool(files)
        for name in files:
            path = _join(directory, name)
            metadata = self._read(path, lambda file, _: dcp.read_metadata(file), Trouble.METADATA)
            is_known = is_known and metadata is not None
            for fqn in metadata.homeless if metadata is not None else ():
                self.note(Trouble.GAP, "the metadata does not say where the tensor's bytes are", path, fqn)
            for item in metadata.items if metadata is not None else ():
                items[item.file].append(item)
        for name, of_file in sorted(items.items()):
            path = _join(directory, name)
            state.files.append(path)
            if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute():
                self.note(Trouble.METADATA, f"the metadata names a file outside the directory: {name}", directory)
            elif not (self.checkpoint.root / path).exists():
                state.is_incomplete = True
                what = f"the metadata names this file, but it is missing; of its {len(of_file)} items: "
                self.note(
                    Trouble.MISSING_FILE,
                    what + join_some([item.name for item in of_file], 3),
                    path,
                    rank=dcp.parse_rank(path),
                )
            else:
                self._read(path, functools.partial(self._read_items, state, of_file))
                continue
            for item in of_file:
                _add_item(state, item, None)
        if ("state_dict",) in {path[:1] for path in state.tensors} and not {"meta.pt"} & names:
            what = "Lightning wrote the tensors' names to this file, but it is missing"
            self.note(Trouble.MISSING_FILE, what, _join(directory, "meta.pt"))
        unnamed = sorted(name for name in names if name.endswith(".distcp") and name not in items)
        if is_known and unnamed:
            self.note(Trouble.LEFTOVER, "the metadata does not name this file", _join(directory, join_some(unnamed)))

    def _read_items(self, state: State, items: list[dcp.Item], file: OpenFile, saved: SavedFile) -> None:
        header = dcp.read_safetensors_header(file)
        path = saved.path
        if header is not None:
            self._note_trailing_bytes(header, file)
        if packed := [item for item in items if item.packing]:
            packing = ", ".join(packed[0].packing)
            self.note(Trouble.NOT_READ, f"{len(packed)} of its items are packed ({packing}), which is not read", path)
        end = 0
        for item in sorted(items, key=lambda item: item.begin):
            contents = None
            if header is None and item.begin < end:
                self.note(Trouble.OVERLAP, "two items use the same bytes", path, item.name)
            end = max(end, item.begin + item.nbytes)
            try:
                contents = dcp.read_item(file, path, item, header)
            except RefusedPickle as error:
                self.note(Trouble.PICKLE, error.what, path, item.name)
            except NotRead as error:
                state.unread[item.path] = path, error.what
                continue
            except dcp.FormError as error:
                self.note(Trouble.SIZE, error.what, path, item.name, dcp.parse_rank(path))
            except BadFile as error:
                self.note(Trouble.FILE, error.what, path, item.name, dcp.parse_rank(path))
            if contents is not None:
                saved.members += contents.members
                saved.has_checksums |= contents.has_checksums
                for keys, value in contents.values.items():
                    state.values[(*item.path, *keys), dcp.parse_rank(path)] = value
                for keys, kind in contents.unread.items():
                    state.unread[(*item.path, *keys)] = path, kind
            if contents is None or not contents.unread:
                _add_item(state, item, contents.piece if contents is not None else None)

    # A file of each rank

    def _read_torch_files(self, directory: str, names: set[str]) -> None:
        by_label: dict[str, dict[str, tuple[int, int | None]]] = defaultdict(dict)
        whole: list[str] = []
        for name in sorted(names):
            found = RANK_FILE.fullmatch(name)
            if _ANY_CLASSES.fullmatch(name):
                self._read_torch(_join(directory, name), None)
            elif found is None and (match := _WHOLE.fullmatch(name)) is not None:
                whole += [name] if match["suffix"] != "safetensors" else []
            elif found is None:
                whole += [name] if self._is_torch_file(directory, name) else []
            else:
                rank, world = int(found["rank"] or found["number"]), found["world"] or found["of"]
                by_label[found["label"] or found["item"]][name] = rank, int(world) if world else None
        for label, files in by_label.items():
            if not self._read_rank_files(directory, label, files):
                whole += files
        self._read_whole(directory, sorted(whole), names)

    def _is_torch_file(self, directory: str, name: str) -> bool:
        """Returns whether torch.save wrote a file whose name does not show this, such as a file from
        ``Trainer.save_checkpoint("last")``.
        """
        path = self.checkpoint.root / directory / name
        if not (self.checkpoint.is_one_file or "." not in name) or not path.is_file():
            return False
        try:
            with zipfile.ZipFile(path) as archive:
                return any(each.endswith("/data.pkl") for each in archive.namelist())
        except (OSError, zipfile.BadZipFile):
            return False

    def _read_rank_files(self, directory: str, label: str, files: dict[str, tuple[int, int | None]]) -> bool:
        """Reads files that are named by rank, and returns whether they are parts of one state.

        A name such as ``model_3.pt`` proves nothing: it counts as rank 3's part only if the file's contents say so.
        """
        world = self._choose_world_size(directory, label, files)
        chosen = {name: rank for name, (rank, of) in files.items() if of == world or of is None}
        read = {name: self._read_torch(_join(directory, name), rank) for name, rank in chosen.items()}
        saved = {name: self.checkpoint.files.get(_join(directory, name)) for name in chosen}
        if not any("_rank" in name for name in chosen) and not any(file.ranks for file in saved.values() if file):
            return False
        state = self._add_state(Arrangement.RANK_FILES, directory, label)
        state.files = [_join(directory, name) for name in chosen]
        state.tells_layout = any(file.world_sizes for file in saved.values() if file)
        inside = max((size for file in saved.values() if file for size in file.world_sizes), default=None)
        if world is not None and inside is not None and world % inside:
            self.note(
                Trouble.WORLD_SIZE,
                f"the file name says {world} ranks, but the tensors in the file say {inside}",
                _join(directory, label),
            )
        expected = world or inside or max(chosen.values()) + 1
        for rank in sorted(set(range(expected)) - set(chosen.values())):
            state.is_incomplete = True
            lost = _join(directory, name_for_rank(next(iter(chosen)), rank))
            self.note(Trouble.MISSING_RANK, f"this file of {expected} ranks' files is missing", lost, rank=rank)
        for name, found in read.items():
            for tensor in found.tensors if found else ():
                self._merge(state, tensor, chosen[name])
            for path, plain in found.values.items() if found else ():
                state.values[path, chosen[name]] = plain
            for path, kind in found.unread.items() if found else ():
                state.unread[path] = _join(directory, name), kind
        find_loose_tensors(self.checkpoint, state, is_of_one_rank=expected == 1)
        return True

    def _merge(self, state: State, tensor: SavedTensor, rank: int) -> None:
        """Adds a rank's tensor to the state. Plain tensors whose shapes differ may be parts of one tensor."""
        known = state.tensors.setdefault(tensor.path, SavedTensor(tensor.path, tensor.dtype, tensor.shape))
        may_be_parts = not state.tells_layout and known.dtype == tensor.dtype and len(known.shape) == len(tensor.shape)
        if (known.dtype, known.shape) == (tensor.dtype, tensor.shape):
            known.pieces += tensor.pieces
        elif may_be_parts and sum(one != other for one, other in zip(known.shape, tensor.shape, strict=True)) == 1:
            known.pieces += tensor.pieces
            known.shape = tuple(map(max, known.shape, tensor.shape))
            known.is_loose = True
        elif state.judge_keys(tensor.path) != "other":
            other = f"{known.dtype} {list(known.shape)}"
            what = f"the tensor is {tensor.dtype} {list(tensor.shape)} here, but {other} on another rank"
            self.note(Trouble.RANKS_DISAGREE, what, tensor.file, tensor.name, rank)

    def _choose_world_size(self, directory: str, label: str, files: Mapping[str, tuple[int, int | None]]) -> int | None:
        """Chooses the number of ranks from the files' names.

        If the names give several numbers, the number in fsdp_config.json is used. Without it, a number is used for
        which no rank is missing.
        """
        ranks: dict[int, set[int]] = defaultdict(set)
        for rank, of in files.values():
            if of is not None:
                ranks[of].add(rank)
        if not ranks:
            return None
        said = self.checkpoint.find_setting(directory, "fsdp_config.json").get("world_size")
        if isinstance(said, int) and said not in ranks:
            self.note(
                Trouble.WORLD_SIZE,
                f"fsdp_config.json says {said} ranks, but the file names say "
                f"{join_some([str(size) for size in sorted(ranks)])}",
                _join(directory, label),
            )
        whole = [size for size, of in sorted(ranks.items()) if of >= set(range(size))]
        chosen = said if said in ranks else (whole or sorted(ranks))[-1]
        if others := [name for name, (_, of) in files.items() if of not in (chosen, None)]:
            self.note(
                Trouble.LEFTOVER,
                f"the files are from another number of ranks than {chosen}",
                _join(directory, join_some(others)),
            )
        return chosen

    # Whole tensors

    def _read_whole(self, directory: str, files: list[str], names: Collection[str]) -> None:
        indexes = self._read_indexes(directory, names, "bin")
        for stem, of_stem in _group_by_stem(files, indexes).items():
            contents = {name: self._read_torch(_join(directory, name), None) for name in of_stem}
            state = self._add_state(Arrangement.WHOLE, directory, stem)
            state.files = [_join(directory, name) for name in of_stem]
            for name, value in contents.items():
                path = _join(directory, name)
                if path in self.checkpoint.files and self.checkpoint.files[path].ranks:
                    self.note(Trouble.PICKLED_SHARDS, "the file has one rank's shards, not whole tensors", path)
                for tensor in value.tensors if value else ():
                    self._add_whole(state, tensor, path)
                for keys, plain in value.values.items() if value else ():
                    state.values[keys, None] = plain
                for keys, kind in value.unread.items() if value else ():
                    state.unread[keys] = path, kind
            self._compare_with_index(state, "bin", indexes.get(stem), names)

    def _read_safetensors(self, directory: str, names: set[str]) -> None:
        indexes = self._read_indexes(directory, names, "safetensors")
        headers: dict[str, Header] = {}
        shards: dict[str, int | None] = {}
        files = sorted(name for name in names if name.endswith(".safetensors"))
        for name in files:
            path = _join(directory, name)
            header = self._read(path, self._read_header)
            is_shard = _SHARD.fullmatch(name)
            # The writer also adds offsets to files of whole tensors (without save_distributed). Only offsets other than
            # zero show that the file is a shard.
            if is_shard or (header is not None and any(map(any, _read_offsets(header).values()))):
                shards[name] = int(is_shard["rank"]) if is_shard else None
            if header is not None:
                headers[name] = header
        if shards:
            self._read_shards(directory, shards, headers)
        for stem, of_stem in _group_by_stem([name for name in files if name not in shards], indexes).items():
            state = self._add_state(Arrangement.WHOLE, directory, stem)
            state.files = [_join(directory, name) for name in of_stem]
            for name in of_stem:
                for key, entry in headers[name].tensors.items() if name in headers else ():
                    piece = SavedPiece(
                        _join(directory, name),
                        entry.begin,
                        entry.shape,
                        (0,) * len(entry.shape),
                        dcp.compute_strides(entry.shape),
                    )
                    self._add_whole(state, SavedTensor((key,), entry.dtype, entry.shape, [piece]), piece.file)
            self._compare_with_index(state, "safetensors", indexes.get(stem), names)

    def _read_header(self, file: OpenFile, saved: SavedFile) -> Header:
        header = read_header(file)
        if (writer := OTHER_WRITERS.get(str(header.metadata.get("format")))) is not None:
            raise NotRead(f"was written by {writer}, which uses another layout of the weights")
        _read_offsets(header)
        marked = self._marked.get(saved.path)
        sums = marked.sums if marked is not None else {}
        saved.members = [Member(name, e.begin, e.nbytes, sums.get(name)) for name, e in header.tensors.items()]
        if marked is not None:
            begin = min((entry.begin for entry in header.tensors.values()), default=header.end)
            saved.members.append(Member("the header", 0, begin, marked.header))
            saved.has_checksums = sums.keys() == header.tensors.keys()
            for name in sorted(sums.keys() - header.tensors.keys()):
                self.note(
                    Trouble.LOST_TENSOR, "the save wrote this tensor, but the file does not have it", saved.path, name
                )
        self._note_trailing_bytes(header, file)
        return header

    def _note_trailing_bytes(self, header: Header, file: OpenFile) -> None:
        if header.end < file.size:
            path = self._make_relative(str(file.path))
            self.note(Trouble.TRAILING_BYTES, f"{file.size - header.end} bytes follow the last tensor", path)

    def _add_whole(self, state: State, tensor: SavedTensor, path: str) -> None:
        if (known := state.tensors.setdefault(tensor.path, tensor)) is not tensor:
            self.note(Trouble.TWICE, f"the tensor is also in {known.file}", path, tensor.name)

    def _read_indexes(self, directory: str, names: Collection[str], suffix: str) -> dict[str, dict[str, str]]:
        """Returns the index files: for each index's stem, which file holds each tensor.

        A damaged index is noted, and its map is empty.
        """
        ending, indexes = f".{suffix}.index.json", {}
        for name in sorted(name for name in names if name.endswith(ending)):
            path = _join(directory, name)
            found = self._read(path, lambda file, _: read_weight_map(file.path), Trouble.INDEX)
            self.checkpoint.files.pop(path, None)
            indexes[name.removesuffix(ending)] = found or {}
        return indexes

    def _compare_with_index(
        self, state: State, suffix: str, weight_map: dict[str, str] | None, names: Collection[str]
    ) -> None:
        files = [pathlib.PurePath(file).name for file in state.files]
        counts = {int(found["count"]) for name in files if (found := _WHOLE.fullmatch(name)) and found["count"]}
        for count in counts:
            expected = [f"{state.label}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]
            for name in expected if any(name in names for name in expected) else ():
                if name not in names:
                    state.is_incomplete = True
                    self.note(
                        Trouble.MISSING_FILE, f"this file of {count} files is missing", _join(state.directory, name)
                    )
        if weight_map is None and max(counts, default=1) > 1:
            what = f"there are {len(files)} files, but no {state.label}.{suffix}.index.json that lists their tensors"
            self.note(Trouble.INDEX, what, state.directory)
        if not weight_map:
            return
        path = _join(state.directory, f"{state.label}.{suffix}.index.json")
        where = {tensor.name: tensor.pieces[0].file for tensor in state.tensors.values() if tensor.pieces}
        for file in sorted(set(weight_map.values()) - set(names)):
            lost = [name for name, of in weight_map.items() if of == file and name not in where]
            place = _join(state.directory, file)
            if not lost:
                self.note(
                    Trouble.INDEX, f"the index names {file}, which is missing, but other files have its tensors", path
                )
            elif not any(s.trouble is Trouble.MISSING_FILE and s.file == place for s in self.checkpoint.symptoms):
                what = f"the index lists {len(lost)} tensors of this file that no file has: {join_some(lost, 3)}"
                self.note(Trouble.MISSING_FILE, what, place)
                state.is_incomplete = True
        for name, file in weight_map.items():
            if file in names and _join(state.directory, file) in self.checkpoint.files and name not in where:
                self.note(
                    Trouble.LOST_TENSOR, f"the index says that {file} has the tensor, but no file has it", path, name
                )
            elif name in where and pathlib.PurePath(where[name]).name != file and file in names:
                self.note(
                    Trouble.INDEX, f"the index says that {file} has the tensor, but {where[name]} has it", path, name
                )
        for name in where.keys() - weight_map.keys():
            self.note(Trouble.INDEX, f"the tensor is in {where[name]}, but the index lacks it", path, name)
        self._compare_total_size(state, path)

    def _compare_total_size(self, state: State, path: str) -> None:
        metadata = parse_json((self.checkpoint.root / path).read_bytes()).get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(piece.numel * t.itemsize for t in state.tensors.values() for piece in t.pieces)
        if isinstance(said, int) and said != actual and not state.is_incomplete:
            self.note(Trouble.TOTAL_SIZE, f"total_size is {said}, but the tensors have {actual} bytes", path)

    def _read_shards(self, directory: str, shards: Mapping[str, int | None], headers: Mapping[str, Header]) -> None:
        """Reads safetensors shards that each hold some rows. Nothing in them says how many rows the whole
        tensor has.
        """
        state = self._add_state(Arrangement.SHARDED_SAFETENSORS, directory, "shards")
        state.files = [_join(directory, name) for name in shards]
        self.checkpoint.unchecked.append(
            f"{directory}: nothing in the shards says how many ranks there were; the last ones may be missing"
        )
        numbers = {number for number in shards.values() if number is not None}
        for number in sorted(set(range(1, max(numbers, default=0))) - numbers):
            state.is_incomplete = True
            lost = _join(directory, re.sub(r"^shard-\d+", f"shard-{number:05}", next(iter(shards))))
            self.note(Trouble.MISSING_RANK, f"the file of shard {number} is missing", lost, rank=number - 1)
        for ending in {name.partition("-model-")[2] for name in shards}:
            of_file = {name: number for name, number in shards.items() if name.endswith(f"-model-{ending}")}
            shapes = [entry.shape for name in of_file.keys() & headers for entry in headers[name].tensors.values()]
            has_rows_for_all = max((shape[0] for shape in shapes if shape), default=0) >= len(numbers)
            for number in sorted(numbers - set(of_file.values())) if has_rows_for_all else ():
                lost = _join(directory, f"shard-{number:05}-model-{ending}")
                self.note(
                    Trouble.MISSING_RANK,
                    "this shard's file is missing, but another shard's file exists",
                    lost,
                    rank=number - 1,
                )
                state.is_incomplete = True
        for name, shard in shards.items():
            path, header = _join(directory, name), headers.get(name)
            if header is None:
                continue
            try:
                offsets = _read_offsets(header)
                if offsets.keys() < header.tensors.keys():
                    raise BadFile(f"lacks {min(header.tensors.keys() - offsets.keys())}")
            except BadFile as error:
                self.note(
                    Trouble.FILE,
                    f"the file does not say where its rows belong: its DCP_SHARDING_INFO {error.what}",
                    path,
                )
                continue
            copied = ""
            for key, entry in header.tensors.items():
                rank = shard - 1 if shard is not None else None
                piece = SavedPiece(path, entry.begin, entry.shape, offsets[key], dcp.compute_strides(entry.shape), rank)
                shape = tuple(o + n for o, n in zip(piece.offsets, piece.shape, strict=False))
                tensor = state.tensors.setdefault((key,), SavedTensor((key,), entry.dtype, shape))
                if tensor.dtype != entry.dtype or len(tensor.shape) != len(shape):
                    self.note(
                        Trouble.RANKS_DISAGREE,
                        f"the tensor is {tensor.dtype} {list(tensor.shape)} in another file",
                        path,
                        key,
                    )
                    continue
                tensor.shape = tuple(map(max, tensor.shape, shape))
                copied = next((p.file for p in tensor.pieces if p.offsets == offsets[key] and piece.numel), copied)
                tensor.pieces.append(piece)
            if copied:
                self.note(Trouble.COPIED_RANK, f"{copied} has the same rows, but DCP never writes rows twice", path)


def _read_offsets(header: Header) -> dict[str, tuple[int, ...]]:
    """Reads the offsets of each saved block in its whole tensor, which HuggingFaceStorageWriter stores in the header.

    Returns an empty dict if the header has no offsets, and raises BadFile if they are damaged.
    """
    if "DCP_SHARDING_INFO" not in header.metadata:
        return {}
    try:
        places = parse_json(str(header.metadata["DCP_SHARDING_INFO"]).encode())
        return {key: tuple(map(int, places[key]["saved_offsets"])) for key in header.tensors if key in places}
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(f"is damaged ({type(error).__name__})") from None


def _group_by_stem(files: Iterable[str], indexes: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Groups files that belong together: the files that one index names, and the other files by the common stem of
    their names.
    """
    stems = {file: stem for stem, weight_map in indexes.items() for file in weight_map.values()}
    groups: dict[str, list[str]] = {stem: [] for stem in indexes}
    for name in files:
        found = _WHOLE.fullmatch(name)
        stem = found["stem"] if found is not None and found["suffix"] in ("bin", "safetensors") else name
        groups.setdefault(stems.get(name, stem), []).append(name)
    return groups


def _add_item(state: State, item: dcp.Item, piece: SavedPiece | None) -> None:
    if item.dtype is not None:
        tensor = state.tensors.setdefault(item.path, SavedTensor(item.path, item.dtype, item.shape))
        path = _join(state.directory, item.file)
        lost = SavedPiece(path, -1, item.lengths, item.offsets, dcp.compute_strides(item.lengths), dcp.parse_rank(path))
        tensor.pieces.append(piece or lost)


def _join(directory: str, name: str) -> str:
    return name if directory == "." else f"{directory}/{name}"
