"""Reads the states of whole tensors in one or several files, and compares them with their index."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping

from fsdp_doctor.checkpoints import dcp
from fsdp_doctor.checkpoints.file_reader import FileReader, join_path
from fsdp_doctor.checkpoints.files import NotRead, OpenFile
from fsdp_doctor.checkpoints.formats import OTHER_WRITERS
from fsdp_doctor.checkpoints.record import Arrangement, Member, SavedFile, SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.safetensors_files import Header, parse_json, read_header, read_weight_map
from fsdp_doctor.checkpoints.shard_states import SHARD, read_offsets, read_shards
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.text import join_some

WHOLE = re.compile(
    r"(?P<stem>.+?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.(?P<suffix>safetensors|bin|pt|pth|pth\.tar|ckpt)"
)


def read_whole(reader: FileReader, directory: str, files: list[str], names: Collection[str]) -> None:
    indexes = _read_indexes(reader, directory, names, "bin")
    for stem, of_stem in _group_by_stem(files, indexes).items():
        contents = {name: reader.read_torch(join_path(directory, name), None) for name in of_stem}
        state = reader.add_state(Arrangement.WHOLE, directory, stem)
        state.files = [join_path(directory, name) for name in of_stem]
        for name, value in contents.items():
            path = join_path(directory, name)
            if path in reader.checkpoint.files and reader.checkpoint.files[path].ranks:
                reader.note(Trouble.PICKLED_SHARDS, "the file has one rank's shards, not whole tensors", path)
            for tensor in value.tensors if value else ():
                _add_whole(reader, state, tensor, path)
            for keys, plain in value.values.items() if value else ():
                state.values[keys, None] = plain
            for keys, kind in value.unread.items() if value else ():
                state.unread[keys] = path, kind
        _compare_with_index(reader, state, "bin", indexes.get(stem), names)


def read_safetensors(reader: FileReader, directory: str, names: set[str]) -> None:
    indexes = _read_indexes(reader, directory, names, "safetensors")
    headers: dict[str, Header] = {}
    shards: dict[str, int | None] = {}
    files = sorted(name for name in names if name.endswith(".safetensors"))
    for name in files:
        path = join_path(directory, name)
        header = reader.read(path, functools.partial(_read_members, reader))
        is_shard = SHARD.fullmatch(name)
        # The writer also adds offsets to files of whole tensors (without save_distributed). Only offsets other than
        # zero show that the file is a shard.
        if is_shard or (header is not None and any(map(any, read_offsets(header).values()))):
            shards[name] = int(is_shard["rank"]) if is_shard else None
        if header is not None:
            headers[name] = header
    if shards:
        read_shards(reader, directory, shards, headers)
    for stem, of_stem in _group_by_stem([name for name in files if name not in shards], indexes).items():
        state = reader.add_state(Arrangement.WHOLE, directory, stem)
        state.files = [join_path(directory, name) for name in of_stem]
        for name in of_stem:
            for key, entry in headers[name].tensors.items() if name in headers else ():
                piece = SavedPiece(
                    join_path(directory, name),
                    entry.begin,
                    entry.shape,
                    (0,) * len(entry.shape),
                    dcp.compute_strides(entry.shape),
                )
                _add_whole(reader, state, SavedTensor((key,), entry.dtype, entry.shape, [piece]), piece.file)
        _compare_with_index(reader, state, "safetensors", indexes.get(stem), names)


def _read_members(reader: FileReader, file: OpenFile, saved: SavedFile) -> Header:
    header = read_header(file)
    if (writer := OTHER_WRITERS.get(str(header.metadata.get("format")))) is not None:
        raise NotRead(f"was written by {writer}, which uses another layout of the weights")
    read_offsets(header)
    marked = reader.marked.get(saved.path)
    sums = marked.sums if marked is not None else {}
    saved.members = [Member(name, e.begin, e.nbytes, sums.get(name)) for name, e in header.tensors.items()]
    if marked is not None:
        begin = min((entry.begin for entry in header.tensors.values()), default=header.end)
        saved.members.append(Member("the header", 0, begin, marked.header))
        saved.has_checksums = sums.keys() == header.tensors.keys()
        for name in sorted(sums.keys() - header.tensors.keys()):
            reader.note(
                Trouble.LOST_TENSOR, "the save wrote this tensor, but the file does not have it", saved.path, name
            )
    reader.note_trailing_bytes(header, file)
    return header


def _add_whole(reader: FileReader, state: State, tensor: SavedTensor, path: str) -> None:
    if (known := state.tensors.setdefault(tensor.path, tensor)) is not tensor:
        reader.note(Trouble.TWICE, f"the tensor is also in {known.file}", path, tensor.name)


def _read_indexes(reader: FileReader, directory: str, names: Collection[str], suffix: str) -> dict[str, dict[str, str]]:
    """Returns the maps from tensor names to file names in the index files, by the stem of each index file's name.

    A damaged index is noted, and its map is empty.
    """
    ending, indexes = f".{suffix}.index.json", {}
    for name in sorted(name for name in names if name.endswith(ending)):
        path = join_path(directory, name)
        found = reader.read(path, lambda file, _: read_weight_map(file.path), Trouble.INDEX)
        reader.checkpoint.files.pop(path, None)
        indexes[name.removesuffix(ending)] = found or {}
    return indexes


def _compare_with_index(
    reader: FileReader, state: State, suffix: str, weight_map: dict[str, str] | None, names: Collection[str]
) -> None:
    files = [pathlib.PurePath(file).name for file in state.files]
    counts = {int(found["count"]) for name in files if (found := WHOLE.fullmatch(name)) and found["count"]}
    for count in counts:
        expected = [f"{state.label}-{number:05}-of-{count:05}.{suffix}" for number in range(1, count + 1)]
        for name in expected if any(name in names for name in expected) else ():
            if name not in names:
                state.is_incomplete = True
                reader.note(
                    Trouble.MISSING_FILE, f"this file of {count} files is missing", join_path(state.directory, name)
                )
    if weight_map is None and max(counts, default=1) > 1:
        what = f"there are {len(files)} files, but no {state.label}.{suffix}.index.json that lists their tensors"
        reader.note(Trouble.INDEX, what, state.directory)
    if not weight_map:
        return
    path = join_path(state.directory, f"{state.label}.{suffix}.index.json")
    where = {tensor.name: tensor.pieces[0].file for tensor in state.tensors.values() if tensor.pieces}
    for file in sorted(set(weight_map.values()) - set(names)):
        lost = [name for name, of in weight_map.items() if of == file and name not in where]
        place = join_path(state.directory, file)
        if not lost:
            reader.note(
                Trouble.INDEX, f"the index names {file}, which is missing, but other files have its tensors", path
            )
        elif not any(s.trouble is Trouble.MISSING_FILE and s.file == place for s in reader.checkpoint.symptoms):
            what = f"the index lists {len(lost)} tensors of this file that no file has: {join_some(lost, 3)}"
            reader.note(Trouble.MISSING_FILE, what, place)
            state.is_incomplete = True
    for name, file in weight_map.items():
        if file in names and join_path(state.directory, file) in reader.checkpoint.files and name not in where:
            reader.note(
                Trouble.LOST_TENSOR, f"the index says that {file} has the tensor, but no file has it", path, name
            )
        elif name in where and pathlib.PurePath(where[name]).name != file and file in names:
            reader.note(
                Trouble.INDEX, f"the index says that {file} has the tensor, but {where[name]} has it", path, name
            )
    for name in where.keys() - weight_map.keys():
        reader.note(Trouble.INDEX, f"the tensor is in {where[name]}, but the index lacks it", path, name)
    _compare_total_size(reader, state, path)


def _compare_total_size(reader: FileReader, state: State, path: str) -> None:
    metadata = parse_json((reader.checkpoint.root / path).read_bytes()).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(piece.numel * t.itemsize for t in state.tensors.values() for piece in t.pieces)
    if isinstance(said, int) and said != actual and not state.is_incomplete:
        reader.note(Trouble.TOTAL_SIZE, f"total_size is {said}, but the tensors have {actual} bytes", path)


def _group_by_stem(files: Iterable[str], indexes: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Groups files that belong together: the files that one index names, and the other files by the common stem of
    their names.
    """
    stems = {file: stem for stem, weight_map in indexes.items() for file in weight_map.values()}
    groups: dict[str, list[str]] = {stem: [] for stem in indexes}
    for name in files:
        found = WHOLE.fullmatch(name)
        stem = found["stem"] if found is not None and found["suffix"] in ("bin", "safetensors") else name
        groups.setdefault(stems.get(name, stem), []).append(name)
    return groups
