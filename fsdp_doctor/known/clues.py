"""What a log can say of a run that a message alone does not: that FSDP is in it at all, and how it is set up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

ClueName: TypeAlias = Literal["fsdp", "dtensor", "sharded place", "cpu offload", "unsharded group", "low-bit optimizer"]

# FSDP by name. Programs print their settings, fsdp=[] among them, where there is none.
_FSDP = (
    r"FSDP|FullyShardedDataParallel|fully_shard|_flat_param|fsdp_config\.\w|/fsdp/|/_fsdp_|\bfsdp_\w{1,40}['\"]?\s{0,4}[=:]\s{0,4}['\"]?[Tt]rue"
    r"|\bfsdp2?\b(?!['\"]?\s{0,4}[=:]\s{0,4}['\"]?(?:\[\]|None|null|[Ff]alse|['\",{]))"
)


@dataclass(frozen=True)
class Clue:
    """A fact about the run.

    fact: as a sentence's end, after "that". shown: what says so. hints: literal pieces, one of which is in whatever
    says so elsewhere in the log; none where only the failure itself may say it, by its message or its traceback.
    ask: how to find out where nothing says so.
    """

    fact: str
    shown: re.Pattern[str]
    hints: tuple[str, ...]
    ask: str


CLUES: Mapping[ClueName, Clue] = {
    "fsdp": Clue(
        "the model is under FSDP",
        re.compile(rf"{_FSDP}|fsdp_\w+\.py|DTensor|torch/distributed/_?tensor/"),
        (
            "FSDP",
            "fsdp",
            "FullySharded",
            "fully_shard",
            "flat_param",
            "DTensor",
            "distributed/tensor",
            "distributed/_tensor",
        ),
        "is the model under FSDP (FullyShardedDataParallel or fully_shard)?",
    ),
    "dtensor": Clue(
        "the tensor is a DTensor",
        re.compile(r"DTensor|torch/distributed/_?tensor/|fully_shard|FSDP2|\bfsdp2\b|fsdp_version['\"]?\s*[=:]\s*2"),
        ("DTensor", "distributed/tensor", "distributed/_tensor", "fully_shard", "FSDP2", "fsdp2", "fsdp_version"),
        "is the tensor a DTensor, as every parameter of an FSDP2 model is?",
    ),
    "sharded place": Clue(
        "it was raised where sharded tensors are read, gathered, saved or loaded",
        re.compile(
            r"torch/distributed/(?:_?tensor|fsdp|_composable|checkpoint|_shard)/|torch/distributed/_state_dict_utils"
            r"|DTensor|\.(?:state_dict|full_tensor)\("
            r"|\bin (?:full_tensor|\w*state_dict\w*|summon_full_params|alias_non_inplace_storage|get_per_tensor\w*)\b"
        ),
        (),
        "does the traceback go through a state dict, full_tensor() or a distributed checkpoint?",
    ),
    "cpu offload": Clue(
        "parameters or the optimizer are offloaded to the CPU",
        re.compile(
            r"CPUOffload|(?:offload_params|param_offload|optimizer_offload|offload_policy|cpu_offload)['\"]?\s*[=:]\s*['\"]?[Tt]rue"
            r"|offload_fsdp|load_fsdp_model_to_gpu|offload\w* (?:a \w+ model )?to (?:the )?(?:CPU|RAM)"
        ),
        ("Offload", "offload"),
        "is CPU offload on, by a policy or by hand (param_offload, optimizer_offload)?",
    ),
    "unsharded group": Clue(
        "a parameter is sharded over one rank only (one GPU, fsdp_size=1 or NO_SHARD)",
        re.compile(
            r"NO_SHARD|fsdp_size['\"]?\s*[=:]\s*1\b|nproc[-_]per[-_]node[= ]1\b|num_processes['\"]?[=: ]+1\b"
            r"|\bworld[ _]size['\"]?\s*[=:]\s*1\b|\b[Ss]ingle[- ]GPU\b"
        ),
        ("NO_SHARD", "fsdp_size", "nproc", "num_processes", "world_size", "world size", "ingle GPU", "ingle-GPU"),
        "is it one GPU, fsdp_size=1 or NO_SHARD?",
    ),
    "low-bit optimizer": Clue(
        "the optimizer keeps its state in 8 or 4 bits",
        re.compile(r"8[-_ ]?bit|4[-_ ]?bit|bitsandbytes|\bbnb\b|torchao|[Qq]uantiz"),
        ("8bit", "8-bit", "8_bit", "8 bit", "4bit", "4-bit", "4_bit", "bitsandbytes", "bnb", "torchao", "uantiz"),
        "does the optimizer keep its state in 8 or 4 bits (bitsandbytes, torchao)?",
    ),
}
_TORCH = re.compile(
    r"\b(?:[Pp]y)?[Tt]orch(?: version)?(?: \(GPU\?\))?\s{0,20}(?:==|=|:|\bis\b)?\s{0,20}v?(\d\.\d{1,2}(?:\.\d{1,2})?)\b"
)
# How far around a hint, and how often in one piece, a log is searched for what it may stand for.
_AROUND = 200
_MOST_PLACES = 32


class LogClues:
    """Which facts a log has shown so far, and the version of torch that it names. Feed it the log piece by piece."""

    def __init__(self) -> None:
        self.found: set[ClueName] = set()
        self.torch = ""

    def read(self, text: str) -> None:
        for name, clue in CLUES.items():
            if name not in self.found and _found(clue.shown, clue.hints, text):
                self.found.add(name)
        if not self.torch and (match := _found(_TORCH, ("orch",), text)):
            self.torch = match[1]


def _found(pattern: re.Pattern[str], hints: tuple[str, ...], text: str) -> re.Match[str] | None:
    for hint in hints:
        at = text.find(hint)
        for _ in range(_MOST_PLACES):
            if at < 0:
                break
            if match := pattern.search(text, max(0, at - _AROUND), at + _AROUND):
                return match
            at = text.find(hint, at + _AROUND)
    return None
