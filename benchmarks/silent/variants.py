"""The clean programs: each program without an error, under other settings."""

from __future__ import annotations

from typing import Any

import torch

from . import programs
from .programs import Program

_UNEVEN = {"width": 15, "inner": 21, "vocabulary": 37}
# By name, what a program has under these settings.
_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "uneven": _UNEVEN,
    "uneven-tied": {**_UNEVEN, "tied": True},
    "experts": {"experts": 4},
    "bfloat16": {"dtype": torch.bfloat16},
    "computes-in-bfloat16": {"precision": torch.bfloat16},
    "keeps-unsharded": {"reshard": False},
}
_BASES: dict[type[Program], tuple[str, ...]] = {
    programs.Sync: tuple(_SETTINGS),
    programs.FusedSync: ("plain", "tied", "experts", "bfloat16", "computes-in-bfloat16", "keeps-unsharded"),
    programs.MergedSync: ("plain", "uneven", "computes-in-bfloat16", "keeps-unsharded"),
    programs.BaseSync: ("plain", "uneven"),
    programs.Load: tuple(_SETTINGS),
    programs.CheckedLoad: tuple(_SETTINGS),
    programs.ExpertGroups: ("experts",),
    programs.Guarded: tuple(_SETTINGS),
    programs.AsyncSave: tuple(_SETTINGS),
    programs.Save: ("plain", "tied", "uneven", "experts", "bfloat16", "computes-in-bfloat16", "keeps-unsharded"),
    programs.DictionaryOfOptions: ("plain", "uneven", "experts", "bfloat16", "computes-in-bfloat16"),
    programs.SaveAdapter: ("plain", "uneven", "bfloat16", "computes-in-bfloat16"),
    programs.SaveExperts: ("experts",),
}
CLEAN_PROGRAMS: dict[str, type[Program]] = {
    f"{base.__name__}-{name}": type(f"{base.__name__}-{name}", (base,), dict(_SETTINGS[name]))
    for base, names in _BASES.items()
    for name in names
}
