"""Reads the two sizes in an assertion of an engine's weight loader, and finds the arithmetic that relates them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_LOADED = re.compile(
    r"Attempted to load weight \((?:torch\.Size\()?\[(?P<loaded>[\d, ]{0,80})\]\)* ?into parameter "
    r"\((?:torch\.Size\()?\[(?P<own>[\d, ]{0,80})\]"
)
# Words of a load into an engine that has had weights before.
_LATER_LOAD = re.compile(
    r"(?i)\brefit\w*|\bupdate_(?:\w{1,30}_)?(?:weights?|params|parameters)\w*|\bmove_model_to_\w+"
    r"|\bload_dtensor_weights|\b(?:re-?load|sync(?:hroniz)?)\w*[ _](?:the )?(?:weights?|params|parameters|model)\b"
    r"|\bweights?[ _](?:syncs?|updates?|transfers?)\b|\b(?:second|third|next|later|every|each) (?:load|sync|refit)\b"
)
_COUNTED = re.compile(
    r"(?i)(?<![\w.])(?P<before>\d{1,4}) (?:\w{1,20} )?(?:shards?|ranks|gpus|processes|workers|pieces|parts|files)\b"
    r"|\b(?:shards?|ranks|gpus|processes|world[ _]size)\b\D{0,16}(?P<after>\d{1,4})\b"
)
# Greatest number of ranks, of which a size can be a multiple.
_RANKS = 512
_MAX_LISTED = 3
_REPACKED = (
    "The log names {}. If the engine had loaded its weights before, does the weight have another layout than at its "
    "first load, because it was repacked for a kernel (experts, quantized weights)? Then use the engine's own reload "
    "of a whole layer, as `fsdp_doctor.engines` does."
)
_WHICH = (
    "Which weight is it, and which of the two sizes is right? `fsdp-doctor checkpoint verify DIRECTORY` compares the "
    "checkpoint's shapes with its config.json: does the engine have the same config?"
)


def read_loaded_sizes(text: str, told: str, shown: str) -> tuple[str, str] | None:
    """Returns the contradiction and the deciding step for an assertion on the size of a loaded weight; else None.

    told: the sentences of the log, which may count the shards.
    shown: the frames of the traceback with their lines of code.
    """
    if (match := _LOADED.search(text)) is None:
        return None
    loaded, own = ([int(size) for size in re.findall(r"\d+", match[name])] for name in ("loaded", "own"))
    clash = f"a weight loader refuses the sizes: the loaded weight has {loaded}, and the parameter has {own}"
    later = _LATER_LOAD.search(f"{shown}\n{told}")
    repacked = _REPACKED.format(later[0]) if later else ""
    if loaded and 0 in loaded:
        return f"{clash}; the loaded weight is empty", (
            "Was it read from a sharded model without a gather? Outside the gather a rank may hold none of it: send "
            "`param.full_tensor()` under FSDP2, or read it within `summon_full_params` (FSDP1) or DeepSpeed's "
            "`GatheredParameters`."
        )
    if len(loaded) == len(own) and sum(a != b for a, b in zip(loaded, own, strict=True)) == 1:
        a, b = next(pair for pair in zip(loaded, own, strict=True) if pair[0] != pair[1])
        if found := _relate(a, b, _count_shards(told)):
            is_padded = b < a < 2 * b
            return f"{clash}; {found[0]}", found[1] if is_padded else f"{found[1]} {repacked}".strip()
    elif math.prod(loaded) == math.prod(own) > 1:
        flat = " (it is flat)" if len(loaded) == 1 else ""
        found = (
            f"both have {math.prod(own)} elements, in another shape{flat}",
            "Is the loaded weight FSDP1's flat parameter, or transposed? Take the whole weights with their own shapes: "
            "`get_model_state_dict(..., full_state_dict=True)`.",
        )
        return f"{clash}; {found[0]}", f"{found[1]} {repacked}".strip()
    elif loaded[1:] == [1] and 2 * loaded[0] == math.prod(own):
        return f"{clash}; it has half the elements in one column, as bitsandbytes packs two 4-bit values in a byte", (
            "Is the loaded weight quantized, and the engine's model not? Dequantize it before it is sent or saved, or "
            "start the engine with the same quantization."
        )
    return clash, f"{repacked} {_WHICH}".strip()


def _relate(a: int, b: int, counts: Sequence[int]) -> tuple[str, str] | None:
    """Finds the arithmetic that relates a loaded weight's size (a) to the parameter's size (b) in one dimension.

    Returns the contradiction and the deciding step; None if no arithmetic relates the sizes.

    counts: the numbers of shards that the log names.
    """
    if b and a > b and (padded := _explain_padding(a, b, counts)):
        return padded, (
            "Did a merge join the ranks' shards without cutting the padding of the last one? Compare the merged "
            "weight's size with the model's config, and merge again with a release that cuts each weight to its whole "
            "size. Or is the dimension a vocabulary that one side pads?"
        )
    if a and b > a and b % a == 0 and b // a <= _RANKS:
        times = b // a
        return f"{times} times {a} are {b}", (
            f"Is the loaded weight the shard of one of {times} ranks, which nothing gathered (`full_tensor()`) before "
            f"it was sent or saved? Or does the parameter join {times} weights, of which this is one?"
        )
    if b and a > b and a % b == 0 and a // b <= _RANKS:
        times = a // b
        return f"{times} times {b} are {a}", (
            f"Has the engine {times} ranks of tensor parallelism? Then a loader that takes the rank's own part of the "
            "weight is missing on this parameter. Or did a merge join the same shard several times?"
        )
    return None


def _explain_padding(a: int, b: int, counts: Sequence[int]) -> str:
    """Explains size a as size b with the padding of its shards to equal sizes; empty if no number of shards fits."""
    if a % b == 0:
        return ""
    fitting = [number for number in range(2, _RANKS + 1) if a % number == 0 and number > a - b]
    if not fitting:
        return ""
    if number := next((number for number in counts if number in fitting), 0):
        return (
            f"{number} shards of {a // number} rows are {a} rows, and {b} is no multiple of {number}: a merge that "
            f"keeps the padding of the shards gives {a}"
        )
    listed = ", ".join(map(str, fitting[:_MAX_LISTED])) + (", ..." if len(fitting) > _MAX_LISTED else "")
    return (
        f"{a} is {a - b} more than {b}: a merge that keeps the padding of the shards would give it for {listed} shards"
    )


def _count_shards(told: str) -> list[int]:
    return [int(match["before"] or match["after"]) for match in _COUNTED.finditer(told)]
