"""Kinds of failures by their messages: about FSDP, about something else, or only the consequence of another one."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Names of FSDP, DTensor and sharded checkpoints, in a message or in the place where it was raised.
_FSDP = re.compile(
    r"torch/distributed/(?:fsdp|_composable|_?tensor/|checkpoint/|_shard|_state_dict_utils)|DTensor|FSDP|FullySharded"
    r"|fully_shard|full_tensor|flat_param|_fsdp_|_OptimStateKey|ShardedTensor|summon_full_params"
)
# Failures that are raised wherever the program happens to be, so that the traceback says nothing: a kernel fails later
# than it is launched, and every write to a full disk fails.
_ANYWHERE = re.compile(r"device-side assert|No space left on device|Disk quota exceeded|Read-only file system")
_INNERMOST = 3
_GATHERING = re.compile(r"state_dict|full_tensor|summon_full_params|save_pretrained|save_model|save_checkpoint")


def _load_kinds(table: str) -> dict[str, list[re.Pattern[str]]]:
    tables = tomllib.loads(pathlib.Path(__file__).with_name("message_kinds.toml").read_text(encoding="utf-8"))
    return {name: [re.compile(pattern) for pattern in patterns] for name, patterns in tables[table].items()}


_FOREIGN = _load_kinds("foreign")
_CONSEQUENCES = _load_kinds("consequences")


def names_fsdp(message: str, frames: Sequence[str], *, under_fsdp: bool) -> bool:
    """Whether the message, or the innermost frames, name FSDP, a DTensor or a sharded checkpoint.

    Under FSDP any traceback that goes through a state dict or a gather does.
    """
    if is_raised_anywhere(message):
        return False
    is_named = any(_FSDP.search(text) for text in (message, *frames[-_INNERMOST:]))
    return is_named or (under_fsdp and any(map(gathers, frames)))


def is_raised_anywhere(message: str) -> bool:
    """Whether its traceback shows only where the program happened to be."""
    return _ANYWHERE.search(message) is not None


def gathers(frames: str) -> bool:
    """Whether a traceback goes through a state dict or a gather of a model."""
    return _GATHERING.search(frames) is not None


def name_foreign_kind(message: str) -> str:
    """The thing that failed, as a noun; empty where the message does not say."""
    return _first_kind(_FOREIGN, message)


def name_consequence(message: str) -> str:
    """The failure elsewhere that an exception only follows from; empty where it does not."""
    return _first_kind(_CONSEQUENCES, message)


def _first_kind(kinds: Mapping[str, Sequence[re.Pattern[str]]], message: str) -> str:
    return next((name for name, patterns in kinds.items() if any(p.search(message) for p in patterns)), "")
