"""Reads safetensors shards, each of which holds some rows of the tensors, as HuggingFaceStorageWriter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_doctor.checkpoints import dcp
from fsdp_doctor.checkpoints.file_reader import FileReader, join_path
from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.record import Arrangement, SavedPiece, SavedTensor
from fsdp_doctor.checkpoints.safetensors_files import Header, parse_json
from fsdp_doctor.checkpoints.troubles import Trouble

SHARD = re.compile(r"shard-(?P<rank>\d+)-.+\.safetensors")


def read_shards(
    reader: FileReader, directory: str, shards: Mapping[str, int | None], headers: Mapping[str, Header]
) -> None:
    """Adds the state that safetensors shards form. The shards do not say how many shards there are."""
    state = reader.add_state(Arrangement.SHARDED_SAFETENSORS, directory, "shards")
    state.files = [join_path(directory, name) for name in shards]
    reader.checkpoint.unchecked.append(
        f"{directory}: nothing in the shards says how many ranks there were; the last ones may be missing"
    )
    numbers = {number for number in shards.values() if number is not None}
    for number in sorted(set(range(1, max(numbers, default=0))) - numbers):
        state.is_incomplete = True
        lost = join_path(directory, re.sub(r"^shard-\d+", f"shard-{number:05}", next(iter(shards))))
        reader.note(Trouble.MISSING_RANK, f"the file of shard {number} is missing", lost, rank=number - 1)
    for ending in {name.partition("-model-")[2] for name in shards}:
        of_file = {name: number for name, number in shards.items() if name.endswith(f"-model-{ending}")}
        shapes = [entry.shape for name in of_file.keys() & headers for entry in headers[name].tensors.values()]
        has_rows_for_all = max((shape[0] for shape in shapes if shape), default=0) >= len(numbers)
        for number in sorted(numbers - set(of_file.values())) if has_rows_for_all else ():
            lost = join_path(directory, f"shard-{number:05}-model-{ending}")
            reader.note(
                Trouble.MISSING_RANK,
                "this shard's file is missing, but another shard's file exists",
                lost,
                rank=number - 1,
            )
            state.is_incomplete = True
    for name, shard in shards.items():
        path, header = join_path(directory, name), headers.get(name)
        if header is None:
            continue
        try:
            offsets = read_offsets(header)
            if offsets.keys() < header.tensors.keys():
                raise BadFile(f"lacks {min(header.tensors.keys() - offsets.keys())}")
        except BadFile as error:
            reader.note(
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
                reader.note(
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
            reader.note(Trouble.COPIED_RANK, f"{copied} has the same rows, but DCP never writes rows twice", path)


def read_offsets(header: Header) -> dict[str, tuple[int, ...]]:
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
