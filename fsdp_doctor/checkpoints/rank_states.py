"""Reads states that are stored in one file per rank, and finds the files of torch.save in a directory."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Mapping

from fsdp_doctor.checkpoints.file_reader import ANY_CLASSES, FileReader, join_path
from fsdp_doctor.checkpoints.plain_parts import find_loose_tensors
from fsdp_doctor.checkpoints.record import RANK_FILE, Arrangement, SavedTensor, State, name_for_rank
from fsdp_doctor.checkpoints.troubles import Trouble
from fsdp_doctor.checkpoints.whole_states import WHOLE, read_whole
from fsdp_doctor.text import join_some


def read_torch_files(reader: FileReader, directory: str, names: set[str]) -> None:
    by_label: dict[str, dict[str, tuple[int, int | None]]] = defaultdict(dict)
    whole: list[str] = []
    for name in sorted(names):
        found = RANK_FILE.fullmatch(name)
        if ANY_CLASSES.fullmatch(name):
            reader.read_torch(join_path(directory, name), None)
        elif found is None and (match := WHOLE.fullmatch(name)) is not None:
            whole += [name] if match["suffix"] != "safetensors" else []
        elif found is None:
            whole += [name] if _is_torch_file(reader, directory, name) else []
        else:
            rank, world = int(found["rank"] or found["number"]), found["world"] or found["of"]
            by_label[found["label"] or found["item"]][name] = rank, int(world) if world else None
    for label, files in by_label.items():
        if not _read_rank_files(reader, directory, label, files):
            whole += files
    read_whole(reader, directory, sorted(whole), names)


def _is_torch_file(reader: FileReader, directory: str, name: str) -> bool:
    """Returns whether torch.save wrote a file whose name does not show this, such as a file from
    ``Trainer.save_checkpoint("last")``.
    """
    path = reader.checkpoint.root / directory / name
    if not (reader.checkpoint.is_one_file or "." not in name) or not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(each.endswith("/data.pkl") for each in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _read_rank_files(reader: FileReader, directory: str, label: str, files: dict[str, tuple[int, int | None]]) -> bool:
    """Reads files that are named by rank, and returns whether they are parts of one state.

    A name such as ``model_3.pt`` proves nothing: it counts as rank 3's part only if the file's contents say so.
    """
    world = _choose_world_size(reader, directory, label, files)
    chosen = {name: rank for name, (rank, of) in files.items() if of == world or of is None}
    read = {name: reader.read_torch(join_path(directory, name), rank) for name, rank in chosen.items()}
    saved = {name: reader.checkpoint.files.get(join_path(directory, name)) for name in chosen}
    if not any("_rank" in name for name in chosen) and not any(file.ranks for file in saved.values() if file):
        return False
    state = reader.add_state(Arrangement.RANK_FILES, directory, label)
    state.files = [join_path(directory, name) for name in chosen]
    state.tells_layout = any(file.world_sizes for file in saved.values() if file)
    inside = max((size for file in saved.values() if file for size in file.world_sizes), default=None)
    if world is not None and inside is not None and world % inside:
        reader.note(
            Trouble.WORLD_SIZE,
            f"the file name says {world} ranks, but the tensors in the file say {inside}",
            join_path(directory, label),
        )
    expected = world or inside or max(chosen.values()) + 1
    for rank in sorted(set(range(expected)) - set(chosen.values())):
        state.is_incomplete = True
        lost = join_path(directory, name_for_rank(next(iter(chosen)), rank))
        reader.note(Trouble.MISSING_RANK, f"this file of {expected} ranks' files is missing", lost, rank=rank)
    for name, found in read.items():
        for tensor in found.tensors if found else ():
            _merge(reader, state, tensor, chosen[name])
        for path, plain in found.values.items() if found else ():
            state.values[path, chosen[name]] = plain
        for path, kind in found.unread.items() if found else ():
            state.unread[path] = join_path(directory, name), kind
    find_loose_tensors(reader.checkpoint, state, is_of_one_rank=expected == 1)
    return True


def _merge(reader: FileReader, state: State, tensor: SavedTensor, rank: int) -> None:
    """Adds a rank's tensor to the state.

    Plain tensors of several ranks whose shapes differ in one dim are kept as possible parts of one tensor. Any other
    difference in shape or dtype is reported.
    """
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
        reader.note(Trouble.RANKS_DISAGREE, what, tensor.file, tensor.name, rank)


def _choose_world_size(
    reader: FileReader, directory: str, label: str, files: Mapping[str, tuple[int, int | None]]
) -> int | None:
    """Chooses the number of ranks from the files' names.

    If the names give several numbers, the number in fsdp_config.json is used. Without it, the largest number for which
    no rank is missing is used.
    """
    ranks: dict[int, set[int]] = defaultdict(set)
    for rank, of in files.values():
        if of is not None:
            ranks[of].add(rank)
    if not ranks:
        return None
    said = reader.checkpoint.find_setting(directory, "fsdp_config.json").get("world_size")
    if isinstance(said, int) and said not in ranks:
        reader.note(
            Trouble.WORLD_SIZE,
            f"fsdp_config.json says {said} ranks, but the file names say "
            f"{join_some([str(size) for size in sorted(ranks)])}",
            join_path(directory, label),
        )
    whole = [size for size, of in sorted(ranks.items()) if of >= set(range(size))]
    chosen = said if said in ranks else (whole or sorted(ranks))[-1]
    if others := [name for name, (_, of) in files.items() if of not in (chosen, None)]:
        reader.note(
            Trouble.LEFTOVER,
            f"the files are from another number of ranks than {chosen}",
            join_path(directory, join_some(others)),
        )
    return chosen
