"""What is held that need not be: one function for each kind of finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fsdp_doctor.examination.facts import Facts
from fsdp_doctor.examination.finding import Finding, few
from fsdp_doctor.ledgers.ledger import power_of_two
from fsdp_doctor.report.layout import bytes_text, counted

# Less than this is not worth a word.
_LEAST_BYTES = 1 << 20


def unsharded_copy(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.all_unsharded:
        yield Finding(
            kind="unsharded-copy",
            severity="note",
            sentence=f"Unsharded on the device beside the shards, {bytes_text(memory.unsharded_bytes)} in all: "
            f"{few(memory.unsharded)}; a forward without a backward leaves them, or reshard_after_forward=False.",
            names=memory.unsharded,
            remedy="module.reshard() of each FSDP module; it is undone in the next forward.",
        )


def state_dict_held(facts: Facts) -> Iterator[Finding]:
    for number, nbytes in facts.memory.copies:
        yield Finding(
            kind="state-dict-held",
            severity="note",
            sentence=f"In a dictionary with the model's names, beside the model: {counted(number, 'tensor')} with "
            f"{bytes_text(nbytes)} of device memory; it lives as long as somebody holds it.",
            remedy="del it when it has been read, or read full_tensors(), which holds one tensor at a time.",
        )


def gradients_kept(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.gradient_bytes:
        yield Finding(
            kind="gradients-kept",
            severity="hazard",
            sentence=f"With gradients on the device ({bytes_text(memory.gradient_bytes)}) and shards that were "
            f"offloaded by hand: {few(memory.gradients)}.",
            names=memory.gradients,
            remedy="optimizer.zero_grad() before the offload, or offload the gradients too.",
        )


def offload_frees_nothing(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.former:
        yield Finding(
            kind="offload-frees-nothing",
            severity="hazard",
            sentence=f"Moved, while the memory that they had stays ({bytes_text(memory.former_bytes)} of the device) "
            f"until the next forward, because the modules' parameters are views of it: {few(memory.former)}; they are "
            "not sharded, and have the dtype that is computed in.",
            names=memory.former,
            entry="fsdp1-no-shard-offload-frees-nothing",
            remedy="use_orig_params=True, shards over at least two ranks, or float32 parameters with mixed precision.",
        )


def pinned_twice(facts: Facts) -> Iterator[Finding]:
    """CUDA's allocator of pinned memory takes a power of two for each tensor."""
    sizes = [
        math.prod(row.local_shape) * state.dtype.itemsize
        for state, rows in facts.by_state.items()
        for row in rows
        if state.pinned and not row.tied_to
    ]
    pinned, taken = sum(sizes), sum(map(power_of_two, sizes))
    if taken - pinned >= max(_LEAST_BYTES, pinned // 2):
        yield Finding(
            kind="pinned-twice",
            severity="note",
            sentence=f"Pinned on the host: {bytes_text(pinned)} of shards, for which the allocator of pinned memory "
            f"takes {bytes_text(taken)}, the next power of two for each, and does not give it back.",
            entry="pinned-host-memory-doubles",
            remedy="CPUOffloadPolicy(pin_memory=False), where host memory is short.",
        )


MEMORY_FINDINGS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    gradients_kept,
    offload_frees_nothing,
    unsharded_copy,
    state_dict_held,
    pinned_twice,
)
