"""What becomes of the gradients of the next backward; the severities are those of findings.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_doctor.examination.facts import Facts
from fsdp_doctor.examination.finding import Finding, few


def unsynchronized(facts: Facts) -> Iterator[Finding]:
    """Right for every backward of an accumulation but the last: which one comes next, no attribute says."""
    if names := facts.gradients.unsynchronized:
        yield Finding(
            kind="gradients-unsynchronized",
            severity="hazard",
            sentence=f"With gradient synchronization off: {few(names)}; the next backward leaves their gradients on "
            "their rank, and an optimizer step after it does not train them, or trains each rank apart.",
            names=names,
            remedy="set_requires_gradient_sync(True) before an accumulation's last backward; FSDP1: end no_sync().",
        )
    if names := facts.gradients.unreplicated:
        yield Finding(
            kind="gradients-unreplicated",
            severity="hazard",
            sentence=f"With the all-reduce over the replicas off: {few(names)}; the next backward reduces their "
            "gradients within a shard group alone.",
            names=names,
            remedy="set_requires_all_reduce(True) before the last backward of an accumulation.",
        )


def open_ended(facts: Facts) -> Iterator[Finding]:
    if names := facts.gradients.open_ended:
        yield Finding(
            kind="backward-open-ended",
            severity="hazard",
            sentence=f"Told that the next backward is not the last one: {few(names)}; it does not wait for what it has "
            "reduced, which an optimizer step after it would use.",
            names=names,
            remedy="set_is_last_backward(True) before the last backward of an accumulation.",
        )


def divided(facts: Facts) -> Iterator[Finding]:
    """A loss that is a sum over tokens has its gradients summed, and not averaged, on purpose."""
    for divisor, names in facts.gradients.divided:
        yield Finding(
            kind="gradients-divided",
            severity="note",
            sentence=f"With gradients divided by {divisor}, and not by the number of ranks: {few(names)}; "
            "set_gradient_divide_factor was called, and it stays until it is called again.",
            names=names,
        )


def unmanaged(facts: Facts) -> Iterator[Finding]:
    """What fully_shard was not given, what it was told to ignore, and what was registered after it."""
    names = tuple(name for name in facts.gradients.unmanaged if name not in facts.load.replaced)
    if names:
        yield Finding(
            kind="gradients-unmanaged",
            severity="hazard",
            sentence=f"Trained, and not sharded by FSDP, which reduces only the gradients of its own: {few(names)}; "
            "unless the job reduces these itself, each rank trains another copy.",
            names=names,
            remedy="give the module that owns them to fully_shard, too, or all-reduce their gradients.",
        )


def mixed(facts: Facts) -> Iterator[Finding]:
    if names := facts.gradients.mixed:
        yield Finding(
            kind="mixed-dtypes",
            severity="bad",
            sentence=f"Of several dtypes and trained in one unit of FSDP2, which takes one: {few(names)}; the first "
            "forward fails (FSDP expects uniform original parameter dtype).",
            names=names,
            entry="fsdp2-unit-of-several-dtypes",
            remedy="cast them to one dtype, or give the module with the other dtype to fully_shard by itself.",
        )


GRADIENT_FINDINGS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    mixed,
    unsynchronized,
    open_ended,
    unmanaged,
    divided,
)
