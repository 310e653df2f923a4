"""The file that a save writes last: what was saved, and checksums by which it is verified without a reference."""

from __future__ import annotations

import pathlib
from typing import Literal

import msgspec

from fsdp_doctor.checkpoints.files import BadFile, OpenFile

MARKER = "fsdp-doctor.json"
# What a save that is under way has in its directory, or left there when its ranks were killed.
PARTIAL, LOCK = ".fsdp-doctor-save", ".fsdp-doctor-save.lock"


class MarkedFile(msgspec.Struct):
    """CRC-32 of the bytes before the first tensor, and of each tensor by its name."""

    header: int
    sums: dict[str, int]


class Marker(msgspec.Struct, omit_defaults=True):
    """The contents of the marker file. save: an id that differs between any two saves. step: the training step, as it
    was given.
    """

    format: Literal["fsdp-doctor save"]
    version: Literal[1]
    save: str
    num_ranks: int
    files: dict[str, MarkedFile]
    step: int | None = None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_marker(directory: pathlib.Path) -> Marker | None:
    """Reads the marker of a directory; None if there is none. Raises BadFile if the file is not a marker."""
    try:
        with OpenFile(directory / MARKER) as file:
            return msgspec.json.decode(file.read(0, file.size), type=Marker)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFile(f"is not a marker of a save: {error}") from None
