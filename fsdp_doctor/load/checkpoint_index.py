"""The index of a checkpoint that has several files, as transformers writes it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from fsdp_doctor.errors import some
from fsdp_doctor.load.outcome import LoadError


def read_index(directory: pathlib.Path, suffix: str) -> dict[str, str]:
    """The file of each tensor, by its name in the directory; empty without an index, and with several.

    suffix: of the files, such as ``safetensors``. Raises LoadError where that is no index, or names files elsewhere;
    OSError if it cannot be read.
    """
    indexes = sorted(directory.glob(f"*.{suffix}.index.json"))
    if len(indexes) != 1:
        return {}
    # A pipe might never be read to its end.
    if not indexes[0].is_file():
        raise LoadError(f"{indexes[0]} is no file")
    try:
        text = indexes[0].read_text(encoding="utf-8")
        weight_map = json.loads(text, object_pairs_hook=_without_duplicates)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{indexes[0]} is no index of a checkpoint: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise LoadError(f"{indexes[0]} is no index of a checkpoint: its weight_map maps no names to files")
    if outside := sorted({name or '""' for name in weight_map.values() if not _is_file_here(name)}):
        raise LoadError(f"{indexes[0]} names files outside of its directory: {some(outside)}")
    return weight_map


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _is_file_here(name: str) -> bool:
    return name not in ("", "..") and pathlib.PurePath(name).name == name
