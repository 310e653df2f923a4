"""Compares two lists of tensor names in a log, and finds the prefix of a wrapper in which they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# What wrappers put into the names of a model's tensors.
_WRAPPERS = {
    "_fsdp_wrapped_module.": "FSDP1",
    "_orig_mod.": "torch.compile",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "module.": "DistributedDataParallel or a wrapper of a framework",
    "base_model.model.": "peft",
    "model.": "a base model",
}
_LIST = re.compile(r"[\[{(](?P<names>\s?['\"][\w.]+['\"](?:,\s?['\"][\w.]+['\"]){0,4000},?(?:\s?\.\.\.)?\s?)[\]})]?")
_QUOTED = re.compile(r"['\"]([\w.]+)['\"]")
_OF_LOAD = re.compile(r'(?P<kind>Missing|Unexpected) key\(s\) in state_dict: (?P<names>"[^"\s]+"(?:, "[^"\s]+")*)')


def find_keys(text: str) -> list[list[str]]:
    """Finds the lists of dotted names in a line."""
    lists = [_QUOTED.findall(match["names"]) for match in _LIST.finditer(text)]
    return [names for names in lists if sum("." in name for name in names) * 2 >= len(names)]


def read_load_keys(text: str) -> tuple[str, str] | None:
    """Compares the missing with the unexpected keys in a message of load_state_dict.

    Returns the same as ``compare_keys``; None for any other message.
    """
    lists = {match["kind"]: _QUOTED.findall(match["names"]) for match in _OF_LOAD.finditer(text)}
    if "Missing" not in lists or "Unexpected" not in lists:
        return None
    return compare_keys(lists["Missing"], lists["Unexpected"], "the model", "the checkpoint")


def compare_keys(
    names: Sequence[str], others: Sequence[str], first: str = "the first list", second: str = "the second list"
) -> tuple[str, str] | None:
    """Compares two lists of names; returns the contradiction and the deciding step, or None if the lists are unrelated.

    first, second: the owners of the names, for the sentence.
    """
    for left, right, owner in ((others, names, second), (names, others, first)):
        if piece := _find_added(left, right):
            of_whom = next((wrapper for word, wrapper in _WRAPPERS.items() if word in piece), "")
            wrapper = f", which {of_whom} adds" if of_whom else ""
            clash = f"the names of {owner} have the prefix {piece}{wrapper}: {left[0]}"
            return clash, (
                "Remove the prefix on the side that has it, or take the state dict from the module inside the wrapper. "
                "`fsdp-doctor checkpoint verify DIRECTORY` lists the names in the checkpoint."
            )
    return None


def _find_added(longer: Sequence[str], shorter: Sequence[str]) -> str:
    """Finds the piece whose removal turns most of the longer names into shorter names; empty if there is none."""
    known = set(shorter)
    pieces: Counter[str] = Counter()
    for name in longer:
        if inside := next((word for word in _WRAPPERS if word in name and name.replace(word, "") in known), ""):
            pieces[inside] += 1
            continue
        parts = name.split(".")
        rest = next((".".join(parts[at:]) for at in range(1, len(parts)) if ".".join(parts[at:]) in known), "")
        if rest:
            pieces[name.removesuffix(rest)] += 1
    piece, count = pieces.most_common(1)[0] if pieces else ("", 0)
    return piece if 2 * count >= min(len(longer), len(shorter)) else ""
