"""The marker file that a save writes last: what was saved, and checksums that verify it without a reference."""

from __future__ import annotations

import pathlib
from typing import Literal

import msgspec

from fsdp_doctor.checkpoints.files import BadFile, OpenFile

MARKER = "fsdp-doctor.json"
# Names that a save uses in its directory while it runs. They remain if its ranks are killed.
PARTIAL, LOCK = ".fsdp-doctor-save", ".fsdp-doctor-save.lock"


class MarkedFile(msgspec.Struct):
    """Checksums (CRC-32) of a saved file: of the bytes before the first tensor, and of each tensor by name."""

    header: int
    sums: dict[str, int]


class Marker(msgspec.Struct, omit_defaults=True):
    """Contents of the marker file.

    ``save`` is a unique id of the save. ``step`` is the training step that the caller gave.
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
