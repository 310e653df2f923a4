"""Reads the states of distributed checkpoints (DCP): the items of .metadata, and the places of their bytes."""

from __future__ import annotations

import functools
import pathlib
from collections import defaultdict

from fsdp_doctor.checkpoints import dcp
from fsdp_doctor.checkpoints.file_reader import FileReader, join_path
from fsdp_doctor.checkpoints.files import BadFile, NotRead, OpenFile
from fsdp_doctor.checkpoints.pickles import RefusedPickle
from fsdp_doctor.checkpoints.record import Arrangement, SavedFile, SavedPiece, SavedTensor, State
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.text import join_some


def read_dcp(reader: FileReader, directory: str, names: set[str]) -> None:
    state = reader.add_state(Arrangement.DCP, directory, "dcp")
    files = sorted(name for name in names if dcp.METADATA.fullmatch(name))
    if not files and not reader.checkpoint.is_one_file:
        what = "there is no .metadata" + (", only .metadata.tmp" if ".metadata.tmp" in names else "")
        reader.note(Trouble.METADATA, f"{what}: the save did not end, or the file is lost", directory)
    items: dict[str, list[dcp.Item]] = defaultdict(list)
    is_known = bool(files)
    for name in files:
        path = join_path(directory, name)
        metadata = reader.read(path, lambda file, _: dcp.read_metadata(file), Trouble.METADATA)
        is_known = is_known and metadata is not None
        for fqn in metadata.homeless if metadata is not None else ():
            reader.note(Trouble.GAP, "the metadata does not say where the tensor's bytes are", path, fqn)
        for item in metadata.items if metadata is not None else ():
            items[item.file].append(item)
    for name, of_file in sorted(items.items()):
        path = join_path(directory, name)
        state.files.append(path)
        if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute():
            reader.note(Trouble.METADATA, f"the metadata names a file outside the directory: {name}", directory)
        elif not (reader.checkpoint.root / path).exists():
            state.is_incomplete = True
            what = f"the metadata names this file, but it is missing; of its {len(of_file)} items: "
            reader.note(
                Trouble.MISSING_FILE,
                what + join_some([item.name for item in of_file], 3),
                path,
                rank=dcp.parse_rank(path),
            )
        else:
            reader.read(path, functools.partial(_read_items, reader, state, of_file))
            continue
        for item in of_file:
            _add_item(state, item, None)
    if ("state_dict",) in {path[:1] for path in state.tensors} and not {"meta.pt"} & names:
        what = "Lightning wrote the tensors' names to this file, but it is missing"
        reader.note(Trouble.MISSING_FILE, what, join_path(directory, "meta.pt"))
    unnamed = sorted(name for name in names if name.endswith(".distcp") and name not in items)
    if is_known and unnamed:
        reader.note(Trouble.LEFTOVER, "the metadata does not name this file", join_path(directory, join_some(unnamed)))


def _read_items(reader: FileReader, state: State, items: list[dcp.Item], file: OpenFile, saved: SavedFile) -> None:
    header = dcp.read_safetensors_header(file)
    path = saved.path
    if header is not None:
        reader.note_trailing_bytes(header, file)
    if packed := [item for item in items if item.packing]:
        packing = ", ".join(packed[0].packing)
        reader.note(Trouble.NOT_READ, f"{len(packed)} of its items are packed ({packing}), which is not read", path)
    end = 0
    for item in sorted(items, key=lambda item: item.begin):
        contents = None
        if header is None and item.begin < end:
            reader.note(Trouble.OVERLAP, "two items use the same bytes", path, item.name)
        end = max(end, item.begin + item.nbytes)
        try:
            contents = dcp.read_item(file, path, item, header)
        except RefusedPickle as error:
            reader.note(Trouble.PICKLE, error.what, path, item.name)
        except NotRead as error:
            state.unread[item.path] = path, error.what
            continue
        except dcp.FormError as error:
            reader.note(Trouble.SIZE, error.what, path, item.name, dcp.parse_rank(path))
        except BadFile as error:
            reader.note(Trouble.FILE, error.what, path, item.name, dcp.parse_rank(path))
        if contents is not None:
            saved.members += contents.members
            saved.has_checksums |= contents.has_checksums
            for keys, value in contents.values.items():
                state.values[(*item.path, *keys), dcp.parse_rank(path)] = value
            for keys, kind in contents.unread.items():
                state.unread[(*item.path, *keys)] = path, kind
        if contents is None or not contents.unread:
            _add_item(state, item, contents.piece if contents is not None else None)


def _add_item(state: State, item: dcp.Item, piece: SavedPiece | None) -> None:
    if item.dtype is not None:
        tensor = state.tensors.setdefault(item.path, SavedTensor(item.path, item.dtype, item.shape))
        path = join_path(state.directory, item.file)
        lost = SavedPiece(path, -1, item.lengths, item.offsets, dcp.compute_strides(item.lengths), dcp.parse_rank(path))
        tensor.pieces.append(piece or lost)
