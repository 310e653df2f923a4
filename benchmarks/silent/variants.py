"""The clean programs: each program without an error, under other settings."""

from __future__ import annotations

from typing import Any

import torch

from . import loads, saves, syncs
from .program import Program
from .unseen import loads as unseen_loads, merges as unseen_merges, saves as unseen_saves
from .unseen.program import Unseen

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
    syncs.Sync: tuple(_SETTINGS),
    syncs.FusedSync: ("plain", "tied", "experts", "bfloat16", "computes-in-bfloat16", "keeps-unsharded"),
    syncs.MergedSync: ("plain", "uneven", "computes-in-bfloat16", "keeps-unsharded"),
    syncs.BaseSync: ("plain", "uneven"),
    loads.Load: tuple(_SETTINGS),
    loads.CheckedLoad: tuple(_SETTINGS),
    saves.ExpertGroups: ("experts",),
    syncs.Guarded: tuple(_SETTINGS),
    saves.AsyncSave: tuple(_SETTINGS),
    saves.Save: ("plain", "tied", "uneven", "experts", "bfloat16", "computes-in-bfloat16", "keeps-unsharded"),
    saves.DictionaryOfOptions: ("plain", "uneven", "experts", "bfloat16", "computes-in-bfloat16"),
    saves.SaveAdapter: ("plain", "uneven", "bfloat16", "computes-in-bfloat16"),
    saves.SaveExperts: ("experts",),
}
_UNSEEN: tuple[type[Unseen], ...] = (
    *(unseen_merges.LoraSyncAfterMergeExit, unseen_merges.Fp8MergeWithoutScale),
    *(unseen_loads.EpRank0Broadcast, unseen_loads.PpStageLocalNames, unseen_loads.SwigluSwizzleUnderFsdp2),
    *(unseen_saves.Fsdp2AdapterRank0Slice, unseen_saves.ExpertBiasStaleReference, unseen_saves.TiedHeadOmitted),
)
CLEAN_PROGRAMS: dict[str, type[Program]] = {
    f"{base.__name__}-{name}": type(f"{base.__name__}-{name}", (base,), dict(_SETTINGS[name]))
    for base, names in _BASES.items()
    for name in names
} | {f"{each.__name__}-mended": type(f"{each.__name__}-mended", (each,), {"mended": True}) for each in _UNSEEN}
