"""Findings: what the facts of a model mean, one function for each subject.

``bad``      torch fails, or gives other values, when it next uses the model: in a training step or an extraction
``hazard``   it depends on what is called next, or on something that no single rank can see without waiting
``note``     nothing is wrong, but it limits what may come next

So a model that a framework offloaded by hand is not bad under FSDP2, whose shards torch reads where they are, and bad
under FSDP1, on which every call but the framework's own load fails. A remedy is for the caller: nothing is done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fsdp_doctor.examination.facts import Facts, TensorFacts, TensorState, count_left_by_copy, same_device
from fsdp_doctor.ledgers.ledger import power_of_two
from fsdp_doctor.report.layout import bytes_text, counted

Severity = Literal["bad", "hazard", "note"]
_SHOWN_NAMES = 3
_FLAT = "flat parameter"
_UNDO_MOVE = 'model.to("cpu"), then each buffer back to the device; full_tensors() reads the module as it is.'
# Memory that is too small to be mentioned.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know about the model.

    names: of the tensors that it is about. entry: the id of the catalogue's entry, empty if there is none.
    """

    kind: str
    severity: Severity
    sentence: str
    names: tuple[str, ...] = field(default=(), repr=False)
    entry: str = ""
    remedy: str = ""

    @property
    def bad(self) -> bool:
        return self.severity == "bad"


def find(facts: Facts) -> tuple[Finding, ...]:
    """All findings, the bad ones first."""
    findings = [finding for function in _ALL for finding in function(facts)]
    return tuple(sorted(findings, key=lambda finding: ("bad", "hazard", "note").index(finding.severity)))


def not_fsdp(facts: Facts) -> Iterator[Finding]:
    if not facts.units:
        what = "no module of it was given to fully_shard or FullyShardedDataParallel"
        yield Finding(kind="not-fsdp", severity="note", sentence=f"The {facts.wrapper} is not an FSDP model: {what}.")


def on_meta(facts: Facts) -> Iterator[Finding]:
    """A load that copies in place writes nothing to meta, and no load brings a buffer that no state dict has."""
    parameters = tuple(row.name for row in facts.parameters if row.state.device.type == "meta" and not row.tied_to)
    buffers = tuple(row.name for row in facts.buffers if row.state.device.type == "meta" and not row.tied_to)
    if parameters:
        also = f", and {_few(buffers, 'buffer')}" if buffers else ""
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"On the meta device, without values: {_few(parameters)}{also}.",
            names=parameters + buffers,
            entry="in-place-load-into-meta",
            remedy="model.to_empty(device=...), the CPU under CPUOffloadPolicy, then load the weights.",
        )
    elif buffers:
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"On the meta device, without values, unlike the parameters: {_few(buffers, 'buffer')}.",
            names=buffers,
            entry="meta-buffers-stay-on-meta",
            remedy="compute them again on the device; a load brings no buffer that no state dict has.",
        )


def not_in_the_optimizer(facts: Facts) -> Iterator[Finding]:
    """Several optimizers may share a model's parameters, and one may hold masters that a framework copies back."""
    held, unheld = facts.load.held, facts.load.unheld
    if unheld and not held and not facts.load.holds_masters:
        yield Finding(
            kind="optimizer-holds-none",
            severity="bad",
            sentence=f"The optimizer holds none of the parameters that train, {_few(unheld)}, so its steps change "
            "nothing: it was made before the parameters that the model has now.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )
    elif unheld and held:
        yield Finding(
            kind="optimizer-holds-some",
            severity="hazard",
            sentence=f"The optimizer holds {len(held)} of {len(held) + len(unheld)} parameters that train, and not "
            f"{_few(unheld)}: unless another optimizer does, nothing trains them.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )


def changed_by_a_load(facts: Facts) -> Iterator[Finding]:
    load = facts.load
    if load.rounded:
        yield Finding(
            kind="moments-rounded",
            severity="hazard",
            sentence=f"Optimizer state ({', '.join(load.rounded_entries)}) in a dtype of fewer bits than its "
            f"parameter's: {_few(load.rounded)}; unless the optimizer keeps it so, a load has rounded it.",
            names=load.rounded,
            entry="moments-take-the-parameters-dtype",
            remedy="load the state while the parameters have their own dtype; load_optimizer_state() keeps it.",
        )
    if load.untied:
        # transformers does not tie where a checkpoint has two tensors, whatever the configuration says.
        yield Finding(
            kind="untied",
            severity="hazard",
            sentence=f"Tied by the configuration (tie_word_embeddings), and two tensors: "
            f"{'; '.join(' and '.join(pair) for pair in load.untied)}; they train apart from here on.",
            names=tuple(name for pair in load.untied for name in pair),
            entry="load-from-meta-unties",
            remedy="model.tie_weights() after the load, before the optimizer is made.",
        )
    if load.replaced:
        yield Finding(
            kind="replaced",
            severity="bad",
            sentence="Assigned or swapped after the first forward, while FSDP2 continues to gather the former ones: "
            f"{_few(load.replaced)}; the next forward does not use what the module has now.",
            names=load.replaced,
            remedy="copy the values into the parameter that FSDP2 has, or tie and assign before fully_shard.",
        )
    if load.recast:
        yield Finding(
            kind="recast",
            severity="bad",
            sentence=f"Cast after the first forward, while FSDP2 expects the former dtype: {_few(load.recast)}; the "
            "next forward or backward fails because of the dtype.",
            names=load.recast,
            remedy="cast back, and cast before the first forward or compute in another dtype by MixedPrecisionPolicy.",
        )
    if load.second_memories:
        # torch gathers ``FlatParameter.data`` in full precision, casts ``_local_shard`` under mixed precision, and
        # returns to ``_local_shard`` at each reshard.
        yield Finding(
            kind="second-memory",
            severity="hazard",
            sentence="With a local shard in other memory than the flat parameter, as model.cpu() and model.to(device), "
            f"or lazy initialization under CPUOffload leave it: {_few(load.second_memories, 'unit')}. A state dict "
            "reads the flat parameter, a forward under mixed precision the local shard, and each forward ends with the "
            "local shard: what optimizer.step() writes to the flat parameter now is lost there.",
            names=load.second_memories,
            remedy="with FullyShardedDataParallel.summon_full_params(model): pass, on every rank, before the forward.",
        )
    if load.stray_pieces:
        yield Finding(
            kind="stray-piece",
            severity="bad",
            sentence=f"Tied to a parameter of another FSDP1 unit before it was wrapped: {_few(load.stray_pieces)}; "
            "that unit alone gathers it, and the module has this rank's piece of it.",
            names=load.stray_pieces,
            remedy="put the modules that share the parameter into one FSDP1 unit.",
        )


def half_moved(facts: Facts) -> Iterator[Finding]:
    # FSDP2 brings a shard back under a pinning policy (``reset_sharded_param``); the DTensor around it stays moved.
    names, state = _choose(facts, lambda state: state.kind == "fsdp2" and _is_half_moved(state))
    if state is not None:
        yield Finding(
            kind="half-moved",
            severity="bad",
            sentence=f"Reporting {state.wrapper_device} with the local shard on {state.device}: {_few(names)}; "
            "the module was moved under CPUOffloadPolicy, which moved the DTensors and not their shards.",
            names=names,
            entry="fsdp2-pinned-policy-half-moved",
            remedy=_UNDO_MOVE,
        )
    names, state = _choose(facts, lambda state: state.kind == "fsdp1" and _is_half_moved(state))
    if state is not None:
        yield Finding(
            kind="half-moved",
            severity="bad",
            sentence=f"Reporting {state.wrapper_device} with the shard on {state.device}: {_few(names, _FLAT)}; "
            "the module was moved, which did not move the local shards that FSDP1 keeps beside flat parameters.",
            names=names,
            entry="fsdp1-moved-with-policy-offload" if state.policy else "fsdp1-manual-offload-then-state-dict",
            remedy=f"model.to({str(state.device)!r}); FSDP1 is offloaded and loaded by its flat parameters.",
        )


def policy_shards_off_cpu(facts: Facts) -> Iterator[Finding]:
    names, state = _choose(
        facts,
        lambda state: state.policy and state.device.type not in ("cpu", "meta") and not _is_half_moved(state),
    )
    if state is not None and state.unit is not None:
        entry = "fsdp2-unpinned-policy-moved-then-trained"
        if state.kind == "fsdp1":
            entry = "fsdp1-moved-with-policy-offload"
        elif not state.unit.initialized:
            entry = "fsdp2-params-not-on-cpu-at-lazy-init"
        yield Finding(
            kind="policy-shards-off-cpu",
            severity="bad",
            sentence=f"On {state.device}, under a CPU offload that expects its shards on the CPU: {_few(names)}.",
            names=names,
            entry=entry,
            remedy=_UNDO_MOVE,
        )


def fsdp1_away(facts: Facts) -> Iterator[Finding]:
    names, state = _choose(facts, lambda state: state.kind == "fsdp1" and _is_away(state) and not _is_half_moved(state))
    if state is not None and state.unit is not None:
        yield Finding(
            kind="fsdp1-away",
            severity="bad",
            sentence=f"On {state.device}, where every unshard onto {state.unit.compute_device} asserts (forward, "
            f"state_dict): {_few(names, _FLAT)}.",
            names=names,
            entry="fsdp1-manual-offload-then-state-dict",
            remedy="load the model with what offloaded it before it is used; full_tensors() reads it as it is.",
        )


def fsdp2_away(facts: Facts) -> Iterator[Finding]:
    """All of FSDP2's shards away from the device is an offload by hand; some of them is a broken one."""
    names, state = _choose(facts, lambda state: state.kind == "fsdp2" and _is_away(state) and not _is_half_moved(state))
    at_home, _ = _choose(facts, lambda state: state.kind == "fsdp2" and not state.policy and not _is_away(state))
    if names and at_home:
        yield Finding(
            kind="partly-moved",
            severity="bad",
            sentence=f"Not on {facts.compute_device}, where others ({len(at_home)}) are: {_few(names)}.",
            names=names,
            remedy="move the whole model, or what was left behind.",
        )
    elif state is not None and state.device.type != "cpu":
        yield Finding(
            kind="elsewhere",
            severity="bad",
            sentence=f"On {state.device}, and not on {facts.compute_device}, where the model computes: {_few(names)}.",
            names=names,
            remedy=f"model.to({str(facts.compute_device)!r}).",
        )
    elif names:
        buffers = [row.name for row in _buffers_away(facts)]
        also = f", and {_few(buffers, 'buffer')}" if buffers else ""
        yield Finding(
            kind="offloaded",
            severity="note",
            sentence=f"Offloaded by hand, off {facts.compute_device}: {_few(names)}{also}.",
            names=names,
            remedy=f"model.to({str(facts.compute_device)!r}) before the next training step.",
        )


def plain_parameters_away(facts: Facts) -> Iterator[Finding]:
    names, _ = _choose(facts, lambda state: state.unit is None and not _is_on(state, facts))
    if names and _is_at_work(facts):
        yield Finding(
            kind="ignored-away",
            severity="hazard",
            sentence=f"Not managed by FSDP, and not on {facts.compute_device}, where it computes: {_few(names)}.",
            names=names,
            remedy="move them there, unless their module is meant to compute where they are.",
        )


def buffers_left_behind(facts: Facts) -> Iterator[Finding]:
    """A policy moves parameters alone; ``to_empty(device="cpu")`` and ``to("cpu")`` move the buffers too.

    FSDP1 moves the buffers itself at its lazy initialization, so that before it there is no finding.
    """
    names = tuple(row.name for row in _buffers_away(facts))
    fsdp1_moves_them = all(unit.strategy == "fsdp1" and not unit.initialized for unit in facts.units)
    if names and _is_at_work(facts) and not fsdp1_moves_them:
        yield Finding(
            kind="buffers-left-behind",
            severity="bad",
            sentence=f"Not on {facts.compute_device}, where the model computes: {_few(names, 'buffer')}.",
            names=names,
            entry="fsdp2-buffers-left-on-cpu" if facts.units[0].strategy == "fsdp2" else "",
            remedy="for buffer in model.buffers(): buffer.data = buffer.data.to(device)",
        )


def optimizer_elsewhere(facts: Facts) -> Iterator[Finding]:
    """``step`` has no dimensions: torch's optimizers keep it on the CPU or beside the parameter, and take either."""
    apart = [group for group in facts.optimizer if not group.scalar and not same_device(group.device, group.home)]
    if apart:
        names = tuple(dict.fromkeys(name for group in apart for name in group.names))
        entries = ", ".join(dict.fromkeys(group.entry for group in apart))
        yield Finding(
            kind="optimizer-elsewhere",
            severity="bad",
            sentence=f"Optimizer state ({entries}) on {apart[0].device}, and on {apart[0].home} this rank's part of "
            f"{_few(names)}: the next optimizer step fails.",
            names=names,
            entry="optim-on-wrong-device-after-offload",
            remedy="move the state to where its parameter lies before optimizer.step().",
        )


def uneven_after_nonblocking(facts: Facts) -> Iterator[Finding]:
    """FSDP2 pads a shard that is shorter than another rank's as soon as it was moved: on the host, a read too early.

    What it padded is in pageable memory again, so the evidence is the pinned memory of the other shards.
    """

    def is_by_hand(state: TensorState) -> bool:
        return state.kind == "fsdp2" and not state.policy and state.device.type == "cpu"

    names, _ = _choose(facts, lambda state: is_by_hand(state) and state.even is False)
    pinned, _ = _choose(facts, lambda state: is_by_hand(state) and bool(state.pinned))
    if names and pinned and _has_device(facts):
        yield Finding(
            kind="uneven-nonblocking",
            severity="hazard",
            sentence=f"Sharded unevenly, and offloaded to pinned memory as a non-blocking copy does: {_few(names)}; "
            "a rank with a shorter shard has padded it on the host at once, perhaps before it arrived.",
            names=names,
            entry="nonblocking-offload-uneven-shards",
            remedy='offload with model.to("cpu"), which blocks.',
        )


def copy_outstanding(facts: Facts) -> Iterator[Finding]:
    count = count_left_by_copy((facts.by_state, facts.buffers_by_state), facts.optimizer)
    if not count or not _has_device(facts):
        return
    stream = f"the current stream of {facts.compute_device}"
    known = {
        False: f"{stream} has work left, so one may be under way, and",
        True: f"{stream} is idle, so those that were issued on it are done;",
        None: f"{stream} cannot be asked, and",
    }[facts.stream_idle]
    yield Finding(
        kind="copy-outstanding",
        severity="note" if facts.stream_idle else "hazard",
        sentence=f"In pinned host memory by no policy, as a non-blocking copy leaves it: {counted(count, 'tensor')}; "
        f"{known} whether one on another stream is under way cannot be known without waiting.",
        entry="non-blocking-d2h-read-too-early",
        remedy="torch.accelerator.synchronize() before the host reads them.",
    )


def no_backend_for_cpu(facts: Facts) -> Iterator[Finding]:
    names, state = _choose(
        facts,
        lambda state: state.device.type == "cpu" and state.mesh is not None and state.mesh.carries_cpu is False,
    )
    if state is not None and state.mesh is not None:
        kind = state.mesh.device_type
        yield Finding(
            kind="no-backend-for-cpu",
            severity="hazard",
            sentence=f"On the CPU, in a process group with a backend for {kind} alone: {_few(names)}; whatever "
            "communicates them where they lie fails (full_tensor, a full state dict, the norm of the gradients).",
            names=names,
            entry="full-tensor-cpu-shard-nccl-only",
            remedy=f"init_process_group with a backend for each (cpu:gloo,{kind}:...); full_tensors() needs no other.",
        )


def gradients(facts: Facts) -> Iterator[Finding]:
    """No attribute says whether the next backward is the last of an accumulation, for which these switches are wrong.

    A loss that is a sum over tokens has its gradients summed, and not averaged, on purpose.
    """
    gradients = facts.gradients
    if gradients.mixed:
        yield Finding(
            kind="mixed-dtypes",
            severity="bad",
            sentence=f"Of several dtypes and trained in one unit of FSDP2, which takes one: {_few(gradients.mixed)}; "
            "the first forward fails (FSDP expects uniform original parameter dtype).",
            names=gradients.mixed,
            entry="fsdp2-unit-of-several-dtypes",
            remedy="cast them to one dtype, or give the module with the other dtype to fully_shard by itself.",
        )
    if gradients.unsynchronized:
        yield Finding(
            kind="gradients-unsynchronized",
            severity="hazard",
            sentence=f"With gradient synchronization off: {_few(gradients.unsynchronized)}; the next backward leaves "
            "their gradients on their rank, and an optimizer step after it does not train them, or trains each rank "
            "apart.",
            names=gradients.unsynchronized,
            remedy="set_requires_gradient_sync(True) before an accumulation's last backward; FSDP1: end no_sync().",
        )
    if gradients.unreplicated:
        yield Finding(
            kind="gradients-unreplicated",
            severity="hazard",
            sentence=f"With the all-reduce over the replicas off: {_few(gradients.unreplicated)}; the next backward "
            "reduces their gradients within a shard group alone.",
            names=gradients.unreplicated,
            remedy="set_requires_all_reduce(True) before the last backward of an accumulation.",
        )
    if gradients.open_ended:
        yield Finding(
            kind="backward-open-ended",
            severity="hazard",
            sentence=f"With the next backward declared not to be the last: {_few(gradients.open_ended)}; it does not "
            "wait for the reduced gradients, which an optimizer step after it would use.",
            names=gradients.open_ended,
            remedy="set_is_last_backward(True) before the last backward of an accumulation.",
        )
    if unmanaged := tuple(name for name in gradients.unmanaged if name not in facts.load.replaced):
        yield Finding(
            kind="gradients-unmanaged",
            severity="hazard",
            sentence=f"Trained, and not sharded by FSDP, which reduces the gradients of sharded ones: "
            f"{_few(unmanaged)}; unless the job reduces these itself, each rank trains another copy.",
            names=unmanaged,
            remedy="give the module that owns them to fully_shard, too, or all-reduce their gradients.",
        )
    for divisor, names in gradients.divided:
        yield Finding(
            kind="gradients-divided",
            severity="note",
            sentence=f"With gradients divided by {divisor}, and not by the number of ranks: {_few(names)}; "
            "set_gradient_divide_factor was called, and it stays until it is called again.",
            names=names,
        )


def kept_memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.gradient_bytes:
        yield Finding(
            kind="gradients-kept",
            severity="hazard",
            sentence=f"With gradients on the device ({bytes_text(memory.gradient_bytes)}) and shards that were "
            f"offloaded by hand: {_few(memory.gradients)}.",
            names=memory.gradients,
            remedy="optimizer.zero_grad() before the offload, or offload the gradients too.",
        )
    if memory.former:
        yield Finding(
            kind="offload-frees-nothing",
            severity="hazard",
            sentence=f"Moved, while their former memory ({bytes_text(memory.former_bytes)} of the device) stays until "
            f"the next forward, because the modules' parameters are views of it: {_few(memory.former)}; they are "
            "not sharded, and have the dtype of the computation.",
            names=memory.former,
            entry="fsdp1-no-shard-offload-frees-nothing",
            remedy="use_orig_params=True, shards over at least two ranks, or float32 parameters with mixed precision.",
        )
    if memory.all_unsharded:
        yield Finding(
            kind="unsharded-copy",
            severity="note",
            sentence=f"Unsharded on the device beside the shards, {bytes_text(memory.unsharded_bytes)} in all: "
            f"{_few(memory.unsharded)}; a forward without a backward leaves them, or reshard_after_forward=False.",
            names=memory.unsharded,
            remedy="module.reshard() of each FSDP module; it is undone in the next forward.",
        )
    for number, nbytes in memory.copies:
        yield Finding(
            kind="state-dict-held",
            severity="note",
            sentence=f"In a dictionary with the model's names, beside the model: {counted(number, 'tensor')} with "
            f"{bytes_text(nbytes)} of device memory; it lives as long as something refers to it.",
            remedy="del it when it has been read, or read full_tensors(), which holds one tensor at a time.",
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


_ALL: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    not_fsdp,
    on_meta,
    not_in_the_optimizer,
    changed_by_a_load,
    half_moved,
    policy_shards_off_cpu,
    fsdp1_away,
    fsdp2_away,
    plain_parameters_away,
    buffers_left_behind,
    optimizer_elsewhere,
    uneven_after_nonblocking,
    copy_outstanding,
    no_backend_for_cpu,
    gradients,
    kept_memory,
    pinned_twice,
)


def _few(names: Sequence[str], noun: str = "parameter") -> str:
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    return f"{counted(len(names), noun)} ({shown})"


def _is_half_moved(state: TensorState) -> bool:
    return not same_device(state.wrapper_device, state.device)


def _is_away(state: TensorState) -> bool:
    """Whether it is off its compute device without an offload policy."""
    unit = state.unit
    return unit is not None and not unit.policy and not _is_at(state, unit.compute_device)


def _is_at(state: TensorState, device: torch.device) -> bool:
    return state.device.type == "meta" or same_device(state.device, device)


def _is_on(state: TensorState, facts: Facts) -> bool:
    """Whether it is on the model's device, or on one of the kind where the units compute on several."""
    if facts.compute_device is None or state.device.type == "meta":
        return True
    if any(unit.compute_device != facts.compute_device for unit in facts.units):
        return state.device.type == facts.compute_device.type
    return same_device(state.device, facts.compute_device)


def _is_at_work(facts: Facts) -> bool:
    """Whether some shards are where a forward needs them: on the device, or anywhere under a policy."""
    return any(state.unit is not None and not _is_away(state) for state in facts.by_state)


def _has_device(facts: Facts) -> bool:
    return facts.compute_device is not None and facts.compute_device.type != "cpu"


def _buffers_away(facts: Facts) -> list[TensorFacts]:
    return [row for state, rows in facts.buffers_by_state.items() if not _is_on(state, facts) for row in rows]


def _choose(facts: Facts, is_chosen: Callable[[TensorState], bool]) -> tuple[tuple[str, ...], TensorState | None]:
    """(the first names of the parameters in chosen states, the first chosen state)."""
    states = [state for state in facts.by_state if is_chosen(state)]
    names = tuple(row.name for state in states for row in facts.by_state[state] if not row.tied_to)
    return names, states[0] if states else None
