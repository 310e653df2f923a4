"""What a load has left that it should not; the severities are those of findings.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_doctor.examination.facts import Facts
from fsdp_doctor.examination.finding import Finding, few


def on_meta(facts: Facts) -> Iterator[Finding]:
    """A load that copies in place writes nothing to meta, and no load brings a buffer that no state dict has."""
    parameters = tuple(row.name for row in facts.parameters if row.state.device.type == "meta" and not row.tied_to)
    buffers = tuple(row.name for row in facts.buffers if row.state.device.type == "meta" and not row.tied_to)
    if parameters:
        also = f", and {few(buffers, 'buffer')}" if buffers else ""
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"On the meta device, without values: {few(parameters)}{also}.",
            names=parameters + buffers,
            entry="in-place-load-into-meta",
            remedy="model.to_empty(device=...), the CPU under CPUOffloadPolicy, then load the weights.",
        )
    elif buffers:
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"On the meta device, without values, where the parameters are not: {few(buffers, 'buffer')}.",
            names=buffers,
            entry="meta-buffers-stay-on-meta",
            remedy="compute them again on the device; the load does not bring a buffer that no state dict has.",
        )


def not_in_the_optimizer(facts: Facts) -> Iterator[Finding]:
    """Several optimizers may share a model's parameters, and one may hold masters that a framework copies back."""
    held, unheld = facts.load.held, facts.load.unheld
    if unheld and not held and not facts.load.holds_masters:
        yield Finding(
            kind="optimizer-holds-none",
            severity="bad",
            sentence=f"The optimizer holds none of the parameters that train, {few(unheld)}: its steps change nothing; "
            "it was made before the parameters that the model has now.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )
    elif unheld and held:
        yield Finding(
            kind="optimizer-holds-some",
            severity="hazard",
            sentence=f"The optimizer holds {len(held)} of {len(held) + len(unheld)} parameters that train, and not "
            f"{few(unheld)}: unless another optimizer does, nothing trains them.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )


def rounded_moments(facts: Facts) -> Iterator[Finding]:
    if names := facts.load.rounded:
        yield Finding(
            kind="moments-rounded",
            severity="hazard",
            sentence=f"Optimizer state ({', '.join(facts.load.rounded_entries)}) in a dtype of fewer bits than its "
            f"parameter's: {few(names)}; unless the optimizer keeps it so, a load has rounded it.",
            names=names,
            entry="moments-take-the-parameters-dtype",
            remedy="load the state while the parameters have their own dtype; load_optimizer_state() keeps it.",
        )


def replaced(facts: Facts) -> Iterator[Finding]:
    if names := facts.load.replaced:
        yield Finding(
            kind="replaced",
            severity="bad",
            sentence="Assigned or swapped after the first forward, while FSDP2 goes on gathering what was there "
            f"before: {few(names)}; the next forward does not use what the module has now.",
            names=names,
            remedy="copy the values into the parameter that FSDP2 has, or tie and assign before fully_shard.",
        )


def recast(facts: Facts) -> Iterator[Finding]:
    if names := facts.load.recast:
        yield Finding(
            kind="recast",
            severity="bad",
            sentence=f"Cast after the first forward, while FSDP2 takes them to be as they were: {few(names)}; the next "
            "forward or backward fails over the dtype.",
            names=names,
            remedy="cast back, and cast before the first forward or compute in another dtype by MixedPrecisionPolicy.",
        )


def second_memories(facts: Facts) -> Iterator[Finding]:
    """torch gathers ``FlatParameter.data`` in full precision, casts ``_local_shard`` under mixed precision, and returns
    to ``_local_shard`` at each reshard."""
    if names := facts.load.second_memories:
        yield Finding(
            kind="second-memory",
            severity="hazard",
            sentence="With a local shard in other memory than the flat parameter, as model.cpu() and model.to(device), "
            f"or lazy initialization under CPUOffload leave it: {few(names, 'unit')}. A state dict reads the flat "
            "parameter, a forward under mixed precision the local shard, and each forward ends with the local shard: "
            "what optimizer.step() writes to the flat parameter now is lost there.",
            names=names,
            remedy="with FullyShardedDataParallel.summon_full_params(model): pass, on every rank, before the forward.",
        )


def stray_pieces(facts: Facts) -> Iterator[Finding]:
    if names := facts.load.stray_pieces:
        yield Finding(
            kind="stray-piece",
            severity="bad",
            sentence=f"Tied to a parameter of another FSDP1 unit before it was wrapped: {few(names)}; only that unit "
            "gathers it, and here the module has this rank's piece of it.",
            names=names,
            remedy="put the modules that share the parameter into one FSDP1 unit.",
        )


def untied(facts: Facts) -> Iterator[Finding]:
    """transformers does not tie where a checkpoint has two tensors, whatever the configuration says."""
    if pairs := facts.load.untied:
        yield Finding(
            kind="untied",
            severity="hazard",
            sentence=f"Tied by the configuration (tie_word_embeddings), and two tensors: "
            f"{'; '.join(' and '.join(pair) for pair in pairs)}; they train apart from here on.",
            names=tuple(name for pair in pairs for name in pair),
            entry="load-from-meta-unties",
            remedy="model.tie_weights() after the load, before the optimizer is made.",
        )


LOAD_FINDINGS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    on_meta,
    not_in_the_optimizer,
    rounded_moments,
    untied,
    replaced,
    recast,
    second_memories,
    stray_pieces,
)
