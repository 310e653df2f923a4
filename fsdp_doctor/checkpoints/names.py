"""Strips the prefixes of wrappers and adapters from tensor names, and matches the names of two checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

# FSDP1, activation checkpointing and torch.compile put these into the names of the modules they wrap. Private modules
# of torch have constants for the first two (FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE), but none for _orig_mod.
WRAPPER_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(map(re.escape, WRAPPER_NAMES))})")

# The usual names of embeddings and heads.
EMBEDDING = re.compile(r"(?:^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|lm_head|embed_out)\.weight$")

_PEFT_ROOT = "base_model.model."
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")


def strip_wrappers(name: str) -> str:
    """Strips the prefixes that FSDP1, activation checkpointing and torch.compile add to names."""
    return _WRAPPERS.sub("", name)


def strip_adapters(name: str) -> str:
    """Returns the name that a base weight had in the model before peft wrapped it."""
    # Adapters for several parameters of one module are nested, so base_layer may occur repeatedly.
    return _BASE_LAYERS.sub(".", name.removeprefix(_PEFT_ROOT))


def strip_prefixes(names: Collection[str]) -> dict[str, str]:
    """Maps each name to the same name without wrapper prefixes, and without ``module.`` if all names start with it.

    If two names would become equal, all names stay unchanged.
    """
    bare = {name: strip_wrappers(name) for name in names}
    if bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: stripped.removeprefix("module.") for name, stripped in bare.items()}
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}


class MatchedNames(NamedTuple):
    """Names of both sides, each mapped to its common form, and notes on the prefixes stripped from each side."""

    left: dict[str, str]
    right: dict[str, str]
    notes: list[str]


def match_names(
    left: Collection[str],
    right: Collection[str],
    strip: Iterable[str] = (),
    called: tuple[str, str] = ("left", "right"),
) -> MatchedNames:
    """Maps both sides' names to common forms: strips the requested prefixes, and others if more names then match."""
    sides = [{name: name for name in side} for side in (left, right)]
    notes: list[str] = []

    def try_to(side: int, changed: dict[str, str], what: str, *, asked: bool = False) -> None:
        is_unique = len(set(changed.values())) == len(changed)
        common = set(sides[1 - side].values())
        if is_unique and (asked or _count(changed, common) > _count(sides[side], common)):
            if changed != sides[side]:
                notes.append(f"the names of {called[side]} are compared without {what}")
            sides[side] = changed

    for prefix in strip:
        for side in (0, 1):
            stripped = {name: form.removeprefix(prefix) for name, form in sides[side].items()}
            try_to(side, stripped, f"the prefix {prefix}", asked=True)
    for side in (0, 1):
        bare = {name: strip_wrappers(form) for name, form in sides[side].items()}
        try_to(side, bare, "the prefixes of wrappers", asked=_have_common_form(bare, sides[1 - side]))
    for side in (0, 1):
        if prefix := _find_prefix(sides[side].values(), sides[1 - side].values()):
            stripped = {name: form.removeprefix(prefix) for name, form in sides[side].items()}
            try_to(side, stripped, f"the prefix {prefix}")
    return MatchedNames(sides[0], sides[1], notes)


def _count(names: dict[str, str], common: set[str]) -> int:
    return sum(form in common for form in names.values())


def _have_common_form(bare: dict[str, str], other: dict[str, str]) -> bool:
    """Returns whether some names match without the wrapper prefixes of ``other``, and without a prefix of one side."""
    forms = {strip_wrappers(form) for form in other.values()}
    return bool(_count(bare, forms) or _find_prefix(bare.values(), forms) or _find_prefix(forms, bare.values()))


def _find_prefix(names: Collection[str], others: Collection[str]) -> str:
    """Finds the prefix without which the largest number of names match the other side; empty if none match."""
    suffixes = set(others)
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        for at in range(1, min(len(parts), 6)):
            if ".".join(parts[at:]) in suffixes:
                found[".".join(parts[:at]) + "."] += 1
    return found.most_common(1)[0][0] if found else ""
