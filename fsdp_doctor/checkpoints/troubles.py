"""The kinds of trouble that a checkpoint can have: how bad each is, what a load makes of it, and what to do."""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, NamedTuple, TypeAlias

TroubleSeverity: TypeAlias = Literal["damage", "warning", "refused"]

_RESTORE = "restore the file from a copy, or take an older checkpoint"
_SAVE_AGAIN = "save again from the job, or take an older checkpoint"
_LOOK = "look whether this is meant"


class Kind(NamedTuple):
    """severity: ``refused`` is what keeps the checkpoint from being judged."""

    severity: TroubleSeverity
    load: str
    remedy: str


@unique
class Trouble(Enum):
    """The values are unique, since each names its member in JSON by the member's name."""

    FILE = Kind("damage", "a load of this file fails", _RESTORE)
    CHECKSUM = Kind("damage", "torch.load never compares the checksum and returns the wrong bytes", _RESTORE)
    NO_DATA = Kind("damage", "a load returns zeros: the file was saved under skip_data()", _SAVE_AGAIN)
    TRAILING_BYTES = Kind("damage", "safetensors refuses the file", "save the file again, or cut off what follows")
    MISSING_FILE = Kind("damage", "a load fails, or leaves these tensors as they were initialized", _RESTORE)
    MISSING_RANK = Kind("damage", "a load of this rank fails; a merge leaves its rows out", _RESTORE)
    FOREIGN_RANK = Kind("damage", "a load puts another rank's rows there, without a message", "give each file its name")
    COPIED_RANK = Kind("damage", "a load has one rank's rows twice, without a message", _RESTORE)
    WORLD_SIZE = Kind("damage", "a merge reads too few or too many files", "keep the files of one save only")
    LEFTOVER = Kind("warning", "nothing that reads by name takes it", "remove it, if nothing needs it")
    METADATA = Kind("damage", "DCP does not find the checkpoint", "take an older checkpoint: this save never ended")
    GAP = Kind("damage", "the elements keep whatever the memory held before", _SAVE_AGAIN)
    OVERLAP = Kind("damage", "the order of reading decides which values the elements get", _SAVE_AGAIN)
    SIZE = Kind("damage", "a load reads these bytes as another dtype or shape", _RESTORE)
    RANKS_DISAGREE = Kind("damage", "a merge takes what the first rank says", "use files of one save only")
    REPLICAS_DIFFER = Kind("warning", "a merge takes one rank's values", _LOOK + ": BatchNorm's statistics may differ")
    INDEX = Kind("damage", "from_pretrained fails, or leaves tensors out without a message", "write the index anew")
    TOTAL_SIZE = Kind("warning", "nothing reads it", "write the index anew")
    TWICE = Kind("damage", "the file that is read last decides", "remove the files of the older save")
    NONFINITE = Kind("damage", "a load returns it, and the model's outputs become NaN", "take an older checkpoint")
    INFINITE = Kind("warning", "a load returns it", _LOOK + ": masks are of -inf, weights are not")
    ZERO_MATRIX = Kind("damage", "a load returns zeros, and this layer computes nothing", _SAVE_AGAIN)
    ZERO_RANK = Kind("damage", "a load returns zeros for what one rank held", _SAVE_AGAIN)
    ZERO_ROWS = Kind("warning", "a load returns zeros", _LOOK + ": padding of a vocabulary is zero")
    ZERO_BLOCK = Kind("damage", "a load returns zeros where bytes were never written", _RESTORE)
    EQUAL_EXPERTS = Kind("warning", "a load returns the same weights for all experts", _LOOK + ": after upcycling")
    EXPERTS = Kind("damage", "the other experts stay as they were initialized", "save the experts of all ranks")
    LORA_ZERO = Kind("damage", "the adapter changes nothing there", "save the adapter again from the job")
    LORA_START = Kind(
        "warning", "the adapter changes nothing", _LOOK + ": an adapter is like this before the first step"
    )
    LORA_PAIR = Kind("damage", "peft leaves the other half as it was initialized", "save the adapter again")
    PREFIX = Kind("damage", "from_pretrained finds none of these names and initializes the weights", "rename them")
    WRAPPED = Kind("warning", "only a model that is wrapped in the same way finds the names", "strip the prefix")
    FLAT = Kind("damage", "a load fails, or leaves the weights out", "save with a full state dict, not local shards")
    SHAPE = Kind("damage", "from_pretrained fails, or initializes the tensor", "use the config.json of this model")
    PADDED = Kind("warning", "from_pretrained needs ignore_mismatched_sizes, or the padding removed", _LOOK)
    MISSING_TENSOR = Kind("damage", "from_pretrained initializes it at random, with a warning only", _SAVE_AGAIN)
    TIED = Kind("damage", "from_pretrained ties the two, and drops the values of one", "set tie_word_embeddings right")
    OPTIMIZER = Kind("damage", "the optimizer starts anew for these parameters", _SAVE_AGAIN)
    NO_OPTIMIZER = Kind("warning", "the optimizer starts anew", _LOOK)
    STEPS = Kind("damage", "the ranks go on from different steps", "use files of one save only")
    STEPS_VARY = Kind("warning", "Adam's bias correction differs between parameters", _LOOK + ": experts skip steps")
    PICKLED_SHARDS = Kind("damage", "from_pretrained cannot use shards", "merge the ranks' files first")
    DTYPES = Kind("warning", "a load returns it", _LOOK + ": norms and routers are often float32")
    UNFINISHED = Kind("warning", "nothing reads it", "wait for the save that is under way, or remove what it left")
    SETTINGS = Kind("warning", "from_pretrained does not load without it", "copy it from the model")
    STEP_NAME = Kind("warning", "a resume counts from the step inside", _LOOK)
    SETTINGS_DAMAGED = Kind("damage", "the load that needs this file fails", _RESTORE)
    DIFFERS = Kind("damage", "a load returns other weights than the reference has", "find out which of them is right")
    UNTRAINED = Kind("damage", "a load returns the base model", "save the trained weights, with adapters merged")
    PARTLY_UNTRAINED = Kind("warning", "a load returns the base's weights there", _LOOK + ": frozen layers are equal")
    UNCOMPARED = Kind("refused", "unknown", "repair what is damaged, or name another reference")
    PICKLE = Kind("refused", "a load without weights_only runs code", "open it only if you trust who wrote it")
    UNREAD = Kind("refused", "unknown", "make it readable, and run this again")
    NOT_READ = Kind("refused", "unknown", "let the program that saved it save whole, plain tensors")
    CHANGED = Kind("refused", "a load may mix two saves", "run this again when nothing writes to it")
    UNKNOWN = Kind("refused", "unknown", "name a directory or file of a known format")


class Symptom(NamedTuple):
    """One thing that is wrong. what: without the file and the tensor. rows: the first, and after the last."""

    trouble: Trouble
    what: str
    file: str = ""
    tensor: str = ""
    rows: tuple[int, int] | None = None
    rank: int | None = None
