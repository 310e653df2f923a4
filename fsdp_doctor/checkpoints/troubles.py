"""Kinds of damage that a checkpoint can have: how severe each is, how it affects a load, and what to do."""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, NamedTuple, TypeAlias

PAGE = "https://fsdp-doctor.github.io/fsdp-doctor/commands/checkpoint-verify/#formats"
TroubleSeverity: TypeAlias = Literal["damage", "warning", "refused"]


@unique
class TroubleRemedy(Enum):
    """Remedies as they are printed. PATH is replaced by the path that was judged."""

    RESTORE = "restore the file from a copy, or take an older checkpoint"
    RESTORE_LOST = (
        "restore the file that had the tensor, and the index: an index without the tensor would hide the loss"
    )
    SAVE_AGAIN = "save again from the job, or take an older checkpoint"
    SAVE_FULL = "save again from the job, with a full state dict instead of local shards"
    SAVE_DECODED = (
        "save again with each weight multiplied by its scale, or restore the quantization_config of config.json"
    )
    SAVE_PLAIN = "let the program that saved the checkpoint save whole, plain tensors"
    ONE_SAVE = "take all files of the directory from one save"
    CUT_OFF = "save the file again, or cut off the bytes after the last tensor"
    RENAME = "give each file the name of the rank whose tensors it holds"
    REMOVE = "remove the file, if nothing needs it and no save is under way"
    SAVE_ENDS = (
        "wait for the save that is under way, or save again: a save removes or moves back the files that another "
        "save left"
    )
    REMOVE_OLDER = "remove the files of the older save"
    WRITE_INDEX = "write the index again from the headers of the files, which have all its tensors"
    CONVERT = "fsdp-doctor checkpoint convert PATH NEW --to hf writes the names without the prefix"
    CONVERT_RANKS = "fsdp-doctor checkpoint convert on the directory with the files of all ranks merges them"
    CONFIG = (
        "use the config.json of this model; if this config.json is right, the weights are incomplete: save them again"
    )
    TIE = "set tie_word_embeddings to false in config.json, if the two weights should differ; otherwise save again"
    COPY = "copy the file from the model; that of an adapter from the job that trained it"
    LOOK = "check whether this is intended; there is nothing to restore"
    COMPARE = "find out which copy is right; this restores nothing"
    REFERENCE = "repair the damaged checkpoint, or name another reference"
    DISTRUST = (
        "if you trust its author, load it with torch.load(FILE, weights_only=False), and save the state dict alone; "
        "until then, this restores nothing"
    )
    READABLE = "make the file readable, and run this command again"
    OTHER_FORM = "save the file in a form that is read, or remove it if nothing needs it, and run this command again"
    WAIT = "run this command again when nothing writes to the file"
    NAME_ANOTHER = f"name a directory or file of a known format: {PAGE}"
    ITS_TOOL = "run the tool that is named, and give its output to this command"


class Kind(NamedTuple):
    """Properties of a kind of damage.

    The severity ``refused`` means that the checkpoint cannot be judged. ``load`` describes the effect on a load.
    ``hint`` names a reason why the state may be intended, or adds a fact about the remedy.
    """

    severity: TroubleSeverity
    load: str
    remedy: TroubleRemedy
    hint: str = ""


@unique
class Trouble(Enum):
    """Kinds of damage. Their values must differ, because equal values would make two members the same."""

    FILE = Kind("damage", "a load of this file fails", TroubleRemedy.RESTORE)
    CHECKSUM = Kind(
        "damage", "torch.load never compares the checksum and returns the wrong bytes", TroubleRemedy.RESTORE
    )
    NO_DATA = Kind("damage", "a load returns zeros: the file was saved under skip_data()", TroubleRemedy.SAVE_AGAIN)
    TRAILING_BYTES = Kind("damage", "safetensors refuses the file", TroubleRemedy.CUT_OFF)
    MISSING_FILE = Kind(
        "damage", "a load fails, or leaves these tensors at their initial values", TroubleRemedy.RESTORE
    )
    MISSING_RANK = Kind("damage", "a load on this rank fails; a merge omits its rows", TroubleRemedy.RESTORE)
    FOREIGN_RANK = Kind("damage", "a load uses another rank's rows here, without a message", TroubleRemedy.RENAME)
    COPIED_RANK = Kind("damage", "a load has one rank's rows twice, without a message", TroubleRemedy.RESTORE)
    WORLD_SIZE = Kind("damage", "a merge reads too few or too many files", TroubleRemedy.ONE_SAVE)
    LEFTOVER = Kind("warning", "readers that look for names do not use this file", TroubleRemedy.REMOVE)
    METADATA = Kind(
        "damage",
        "DCP does not find the checkpoint",
        TroubleRemedy.RESTORE,
        "the other files do not list their tensors",
    )
    GAP = Kind("damage", "the elements keep the old contents of the memory", TroubleRemedy.SAVE_AGAIN)
    OVERLAP = Kind("damage", "the order of reading decides which values the elements get", TroubleRemedy.SAVE_AGAIN)
    SIZE = Kind("damage", "a load reads these bytes as another dtype or shape, or fails", TroubleRemedy.ONE_SAVE)
    RANKS_DISAGREE = Kind("damage", "a merge uses the first rank's value", TroubleRemedy.ONE_SAVE)
    REPLICAS_DIFFER = Kind(
        "warning", "a merge uses one rank's values", TroubleRemedy.LOOK, "BatchNorm's statistics may differ"
    )
    LOOSE = Kind(
        "warning",
        "the ranks that saved them can load them; nothing can join them",
        TroubleRemedy.LOOK,
        "other numbers of ranks need a full state dict, or DTensors",
    )
    INDEX = Kind("damage", "from_pretrained fails, or omits tensors without a message", TroubleRemedy.WRITE_INDEX)
    LOST_TENSOR = Kind("damage", "from_pretrained initializes the tensor at random", TroubleRemedy.RESTORE_LOST)
    TOTAL_SIZE = Kind("warning", "nothing reads this value", TroubleRemedy.WRITE_INDEX)
    TWICE = Kind("damage", "the file that is read last decides", TroubleRemedy.REMOVE_OLDER)
    NONFINITE = Kind(
        "damage", "a load returns these values, and the model's outputs become NaN", TroubleRemedy.SAVE_AGAIN
    )
    INFINITE = Kind(
        "warning", "a load returns these values, too", TroubleRemedy.LOOK, "masks contain -inf, weights do not"
    )
    ZERO_MATRIX = Kind("damage", "a load returns zeros, and this layer computes nothing", TroubleRemedy.SAVE_AGAIN)
    ZERO_LAST = Kind(
        "warning",
        "a load returns zeros",
        TroubleRemedy.LOOK,
        "before training, the last matrix of a small MLP may be zero",
    )
    ZERO_RANK = Kind("damage", "a load returns zeros for one rank's part", TroubleRemedy.SAVE_AGAIN)
    ZERO_ROWS = Kind(
        "warning", "a load returns zeros", TroubleRemedy.LOOK, "padding of a vocabulary and pruned rows are zero"
    )
    ZERO_BLOCK = Kind("damage", "a load returns zeros for bytes that were never written", TroubleRemedy.RESTORE)
    HUGE = Kind(
        "damage", "a load returns these values, and the model's outputs become infinite", TroubleRemedy.SAVE_AGAIN
    )
    MAGNITUDE = Kind(
        "damage",
        "a load returns values of another order of magnitude than in similar tensors",
        TroubleRemedy.SAVE_AGAIN,
    )
    OTHER_BITS = Kind("damage", "a load reads these bytes as the wrong dtype", TroubleRemedy.SAVE_AGAIN)
    CODES = Kind("damage", "a load takes the codes for the weights, and drops their scales", TroubleRemedy.SAVE_DECODED)
    SCALES = Kind("damage", "a load fails, or multiplies the codes by initial values", TroubleRemedy.SAVE_AGAIN)
    CONSTANT = Kind("damage", "a load returns one value for the whole matrix", TroubleRemedy.SAVE_AGAIN)
    ZERO_COLUMNS = Kind("damage", "a load returns zeros for these columns", TroubleRemedy.SAVE_AGAIN)
    PADDED_COLUMNS = Kind(
        "warning", "a load returns zeros", TroubleRemedy.LOOK, "padded and pruned widths have zero columns"
    )
    EQUAL_ROWS = Kind("damage", "a load returns the same rows several times", TroubleRemedy.SAVE_AGAIN)
    COPIED_ROWS = Kind("damage", "a load returns one rank's rows twice", TroubleRemedy.SAVE_AGAIN)
    COPIED_TENSOR = Kind("damage", "a load returns one tensor's values for both", TroubleRemedy.SAVE_AGAIN)
    MOMENTS = Kind(
        "damage", "Adam's next step with these moments is NaN, or many times too large", TroubleRemedy.SAVE_AGAIN
    )
    VARIANCE = Kind(
        "damage", "a load returns these values, and the norm's outputs become NaN", TroubleRemedy.SAVE_AGAIN
    )
    STATISTICS = Kind(
        "damage",
        "a strict load fails, and any other load leaves the norm with its initial statistics",
        TroubleRemedy.SAVE_AGAIN,
    )
    GATES = Kind("damage", "a load of the cell fails", TroubleRemedy.SAVE_AGAIN)
    STALE_COPY = Kind("damage", "the copy that is read last decides", TroubleRemedy.SAVE_AGAIN)
    MASTER = Kind("damage", "a resume's first step replaces the weights by these values", TroubleRemedy.SAVE_AGAIN)
    PART_OF_AVERAGE = Kind(
        "damage", "a load returns the model's weights instead of this part of their average", TroubleRemedy.SAVE_AGAIN
    )
    AVERAGE = Kind("damage", "a load of the average fails", TroubleRemedy.SAVE_AGAIN)
    EQUAL_AVERAGE = Kind(
        "warning",
        "a load returns the model's weights instead of their average",
        TroubleRemedy.LOOK,
        "averaging may begin late",
    )
    EQUAL_LAYERS = Kind(
        "warning",
        "a load returns the same weights for these layers",
        TroubleRemedy.LOOK,
        "normal after a model was deepened",
    )
    EQUAL_EXPERTS = Kind(
        "warning", "a load returns the same weights for all experts", TroubleRemedy.LOOK, "after upcycling"
    )
    EXPERTS = Kind(
        "damage",
        "the other experts keep their initial values",
        TroubleRemedy.SAVE_AGAIN,
        "with the experts of all ranks",
    )
    LORA_ZERO = Kind("damage", "the adapter changes nothing in this module", TroubleRemedy.SAVE_AGAIN)
    LORA_START = Kind(
        "warning", "the adapter changes nothing", TroubleRemedy.LOOK, "an adapter is like this before the first step"
    )
    FROZEN_BASE = Kind(
        "warning", "peft needs only the adapters", TroubleRemedy.LOOK, "a checkpoint may be meant to stand alone"
    )
    LORA_PAIR = Kind("damage", "peft leaves the other half at its initial values", TroubleRemedy.SAVE_AGAIN)
    PREFIX = Kind(
        "damage", "from_pretrained finds none of these names and initializes the weights", TroubleRemedy.CONVERT
    )
    WRAPPED = Kind("warning", "only a model with the same wrappers finds the names", TroubleRemedy.CONVERT)
    FLAT = Kind("damage", "a load fails, or omits the weights", TroubleRemedy.SAVE_FULL)
    SHAPE = Kind("damage", "from_pretrained fails, or initializes the tensor", TroubleRemedy.CONFIG)
    PRUNED = Kind(
        "warning", "from_pretrained fails with this config.json", TroubleRemedy.CONFIG, "all layers are alike"
    )
    UNUSUAL = Kind(
        "warning", "the model class may differ here: its layers are not known to fsdp-doctor", TroubleRemedy.LOOK
    )
    EXTRA_LAYERS = Kind("damage", "from_pretrained omits these layers, with only a warning", TroubleRemedy.CONFIG)
    TOKENS = Kind(
        "warning",
        "a text with such a token ends in an index error",
        TroubleRemedy.LOOK,
        "tokens that no text has do not matter",
    )
    PADDED = Kind(
        "warning", "from_pretrained needs ignore_mismatched_sizes, or the padding removed", TroubleRemedy.LOOK
    )
    MISSING_TENSOR = Kind(
        "damage", "from_pretrained initializes the tensor at random, with only a warning", TroubleRemedy.SAVE_AGAIN
    )
    TIED = Kind("damage", "from_pretrained ties the two weights, and drops the values of one", TroubleRemedy.TIE)
    NO_MODEL = Kind("damage", "a resume finds no weights", TroubleRemedy.RESTORE)
    NO_MODEL_HERE = Kind("warning", "a resume must take the weights from another place", TroubleRemedy.LOOK)
    OTHER_MODEL = Kind(
        "damage", "from_pretrained drops and initializes weights, with only a warning", TroubleRemedy.CONFIG
    )
    ADAPTER_PART = Kind(
        "damage", "peft leaves the adapter of this module at its initial values", TroubleRemedy.SAVE_AGAIN
    )
    NO_TARGET = Kind(
        "warning",
        "peft creates this module with initial values",
        TroubleRemedy.LOOK,
        "a list may name modules that no layer has",
    )
    OTHER_OPTIMIZER = Kind("damage", "the optimizer's load or its next step fails", TroubleRemedy.ONE_SAVE)
    SETTING = Kind("damage", "the next step fails, or makes the weights NaN", TroubleRemedy.RESTORE)
    RANDOM_STATE = Kind("damage", "torch.set_rng_state refuses this state", TroubleRemedy.RESTORE)
    NO_RANDOM_STATE = Kind("warning", "a resume draws other random numbers", TroubleRemedy.LOOK)
    OPTIMIZER = Kind("damage", "the optimizer starts again from zero for these parameters", TroubleRemedy.SAVE_AGAIN)
    NO_OPTIMIZER = Kind("warning", "the optimizer starts again from zero", TroubleRemedy.LOOK)
    STEPS = Kind("damage", "the ranks continue from different steps", TroubleRemedy.ONE_SAVE)
    STEPS_CONTRADICT = Kind("damage", "a resume continues from parts of different steps", TroubleRemedy.ONE_SAVE)
    TORN_STEP = Kind("damage", "a resume continues from a step that was made in part", TroubleRemedy.SAVE_AGAIN)
    STEPS_DIFFER = Kind(
        "warning",
        "a resume continues from one of the two counts",
        TroubleRemedy.LOOK,
        "a scheduler may count processes, or epochs",
    )
    STEPS_VARY = Kind(
        "warning", "Adam's bias correction differs between parameters", TroubleRemedy.LOOK, "experts skip steps"
    )
    PICKLED_SHARDS = Kind("damage", "from_pretrained cannot use shards", TroubleRemedy.CONVERT_RANKS)
    DTYPES = Kind(
        "warning", "a load returns the tensor in this dtype", TroubleRemedy.LOOK, "norms and routers are often float32"
    )
    UNFINISHED = Kind("warning", "no load uses this file", TroubleRemedy.SAVE_ENDS)
    SETTINGS = Kind("warning", "from_pretrained does not load without this file", TroubleRemedy.COPY)
    STEP_NAME = Kind("warning", "a resume continues from the step in the file", TroubleRemedy.LOOK)
    SETTINGS_DAMAGED = Kind("damage", "the load that needs this file fails", TroubleRemedy.RESTORE)
    DIFFERS = Kind("damage", "a load returns other weights than the reference", TroubleRemedy.COMPARE)
    ROUNDED = Kind(
        "warning",
        "a load returns the reference's weights in this dtype",
        TroubleRemedy.LOOK,
        "a merger rounds to bfloat16",
    )
    UNTRAINED = Kind("damage", "a load returns the base model", TroubleRemedy.SAVE_AGAIN, "with adapters merged")
    PARTLY_UNTRAINED = Kind(
        "warning", "a load returns the base model's weights here", TroubleRemedy.LOOK, "frozen layers are equal"
    )
    UNCOMPARED = Kind("refused", "unknown", TroubleRemedy.REFERENCE)
    PICKLE = Kind("refused", "a load without weights_only runs code", TroubleRemedy.DISTRUST)
    UNREAD = Kind("refused", "unknown", TroubleRemedy.READABLE)
    FORM = Kind("refused", "unknown", TroubleRemedy.OTHER_FORM)
    NOT_READ = Kind("refused", "unknown", TroubleRemedy.SAVE_PLAIN)
    CHANGED = Kind("refused", "a load may mix two saves", TroubleRemedy.WAIT)
    OTHER_FORMAT = Kind("refused", "torch and transformers do not load it", TroubleRemedy.ITS_TOOL)
    UNKNOWN = Kind("refused", "unknown", TroubleRemedy.NAME_ANOTHER)


class Symptom(NamedTuple):
    """One problem. ``what`` omits the file and the tensor; ``rows`` are the first row and the row after the last."""

    trouble: Trouble
    what: str
    file: str = ""
    tensor: str = ""
    rows: tuple[int, int] | None = None
    rank: int | None = None
