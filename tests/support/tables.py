"""Keys of a TOML table that its records do not have, which msgspec would pass over."""

from __future__ import annotations

from typing import Any

import msgspec

from support.places import ROOT


def unread_keys(file: str, kind: Any) -> list[str]:
    """The keys of a table of the package that are lost when it is read as ``kind``."""
    data = msgspec.toml.decode((ROOT / "fsdp_doctor" / file).read_bytes())
    return _missing(data, msgspec.to_builtins(msgspec.convert(data, type=kind)))


def _missing(written: Any, read: Any) -> list[str]:
    match written:
        case dict():
            lost = [key for key in written if key not in read]
            return lost + [name for key in written.keys() & read.keys() for name in _missing(written[key], read[key])]
        case list():
            return [name for each, other in zip(written, read, strict=True) for name in _missing(each, other)]
        case _:
            return []
