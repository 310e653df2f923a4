"""Finds problems in the devices of a model's tensors; ``model_findings`` finds problems in the model itself.

``bad``      torch fails or gives wrong values when it next uses the model, in a training step or an extraction
``hazard``   failure depends on the next call, or on something that no single rank can see without waiting
``note``     nothing is wrong, but the state limits which calls may come next

A model that a framework offloaded by hand is a note under FSDP2, because torch can read its shards on the host. Under
FSDP1 it is bad, because every call fails except the framework's own load. The remedy of a finding is a text for the
caller; this module repairs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.examination.facts import Facts, TensorFacts, TensorState, count_left_by_copy, is_same_device
from fsdp_doctor.text import format_count

Severity = Literal["bad", "hazard", "note"]
_SHOWN_NAMES = 3
_FLAT = "flat parameter"
_READS_ALL = "full_tensors() also reads the module as it is now."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know about the model.

    names: the names of the affected tensors.
    entry: the id of the entry in the catalogue of known failures; empty if there is none.
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


def join_few(names: Sequence[str], noun: str = "parameter") -> str:
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    return f"{format_count(len(names), noun)} ({shown})"


def find_in_places(facts: Facts) -> Iterator[Finding]:
    for function in _ALL:
        yield from function(facts)


def check_not_fsdp(facts: Facts) -> Iterator[Finding]:
    if not facts.units:
        what = "fully_shard or FullyShardedDataParallel was applied to none of its modules"
        yield Finding(kind="not-fsdp", severity="note", sentence=f"The {facts.wrapper} is not an FSDP model: {what}.")


def check_half_moved(facts: Facts) -> Iterator[Finding]:
    # FSDP2 brings a shard back under a pinning policy (``reset_sharded_param``); the DTensor around it stays moved.
    names, state = _choose(facts, lambda state: state.kind == "fsdp2" and _is_half_moved(state))
    if state is not None:
        yield Finding(
            kind="half-moved",
            severity="bad",
            sentence=f"{join_few(names)} reporting {state.wrapper_device}, but with the local shard on "
            f"{state.device}; the module was moved under CPUOffloadPolicy, and the move changed the DTensors "
            "but not their shards.",
            names=names,
            entry="fsdp2-pinned-policy-half-moved",
            remedy=_describe_way_home(facts, 'model.to("cpu"), then each buffer back to the device')
            + f"; {_READS_ALL}",
        )
    names, state = _choose(facts, lambda state: state.kind == "fsdp1" and _is_half_moved(state))
    if state is not None:
        yield Finding(
            kind="half-moved",
            severity="bad",
            sentence=f"{join_few(names, _FLAT)} reporting {state.wrapper_device}, but with the shard on "
            f"{state.device}; the module was moved, but not the local shards that FSDP1 keeps next to flat "
            "parameters.",
            names=names,
            entry="fsdp1-moved-with-policy-offload" if state.policy else "fsdp1-manual-offload-then-state-dict",
            remedy=_describe_way_home(facts, 'model.to("cpu"), then each buffer back to the device') + "."
            if state.policy
            else f"model.to({str(state.device)!r}); with use_orig_params=True then optimizer.zero_grad(), because "
            "model.to() restores dropped gradients. Offload FSDP1 by its flat parameters.",
        )


def check_policy_shards(facts: Facts) -> Iterator[Finding]:
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
            sentence=f"{join_few(names)} on {state.device}, under a CPU offload that expects its shards on the CPU.",
            names=names,
            entry=entry,
            remedy=_describe_way_home(facts, 'model.to("cpu"), then each buffer back to the device')
            + f"; {_READS_ALL}",
        )


def check_fsdp1_away(facts: Facts) -> Iterator[Finding]:
    names, state = _choose(facts, lambda state: state.kind == "fsdp1" and _is_away(state) and not _is_half_moved(state))
    if state is not None and state.unit is not None:
        yield Finding(
            kind="fsdp1-away",
            severity="bad",
            sentence=f"{join_few(names, _FLAT)} on {state.device}, so that every unshard on "
            f"{state.unit.compute_device} fails its assertion (forward, state_dict).",
            names=names,
            entry="fsdp1-manual-offload-then-state-dict",
            remedy=f"before using the model, load it with the counterpart of its offload; {_READS_ALL}",
        )


def check_fsdp2_away(facts: Facts) -> Iterator[Finding]:
    """Finds FSDP2 shards off their compute device: a note if all were moved to the CPU by hand, otherwise bad."""
    names, state = _choose(facts, lambda state: state.kind == "fsdp2" and _is_away(state) and not _is_half_moved(state))
    at_home, _ = _choose(facts, lambda state: state.kind == "fsdp2" and not state.policy and not _is_away(state))
    if names and at_home:
        yield Finding(
            kind="partly-moved",
            severity="bad",
            sentence=f"{join_few(names)} not on {facts.compute_device}, unlike {len(at_home)} other parameters.",
            names=names,
            remedy=_describe_way_home(facts, "move the whole model, or the tensors that were left behind") + ".",
        )
    elif state is not None and state.device.type != "cpu":
        yield Finding(
            kind="elsewhere",
            severity="bad",
            sentence=f"{join_few(names)} on {state.device}, but the model computes on {facts.compute_device}.",
            names=names,
            remedy=_describe_way_home(facts, f"model.to({str(facts.compute_device)!r})") + ".",
        )
    elif names:
        buffers = [row.name for row in _list_buffers_away(facts)]
        also = f", and {join_few(buffers, 'buffer')}" if buffers else ""
        yield Finding(
            kind="offloaded",
            severity="note",
            sentence=f"{join_few(names)}{also} offloaded by hand, off {facts.compute_device}.",
            names=names,
            remedy=_describe_way_home(facts, f"model.to({str(facts.compute_device)!r})") + ", before the next step.",
        )


def check_plain_parameters(facts: Facts) -> Iterator[Finding]:
    names, _ = _choose(facts, lambda state: state.unit is None and not _is_on(state, facts))
    if names and _is_at_work(facts):
        yield Finding(
            kind="ignored-away",
            severity="hazard",
            sentence=f"{join_few(names)} not managed by FSDP, and not on the compute device {facts.compute_device}.",
            names=names,
            remedy=(
                "move the parameters to the compute device, unless their module must compute on their present device."
            ),
        )


def check_buffers(facts: Facts) -> Iterator[Finding]:
    """Finds buffers off the compute device, where ``to_empty(device="cpu")`` or ``to("cpu")`` has put them.

    An offload policy brings only parameters to the device. FSDP1 moves the buffers itself at its lazy initialization,
    so an FSDP1 model has no such finding before its first forward.
    """
    names = tuple(row.name for row in _list_buffers_away(facts))
    fsdp1_moves_them = all(unit.strategy == "fsdp1" and not unit.initialized for unit in facts.units)
    if names and _is_at_work(facts) and not fsdp1_moves_them:
        yield Finding(
            kind="buffers-left-behind",
            severity="bad",
            sentence=f"{join_few(names, 'buffer')} not on the compute device {facts.compute_device}.",
            names=names,
            entry="fsdp2-buffers-left-on-cpu" if facts.units[0].strategy == "fsdp2" else "",
            remedy="for buffer in model.buffers(): buffer.data = buffer.data.to(device)",
        )


def check_optimizer_devices(facts: Facts) -> Iterator[Finding]:
    """Finds optimizer state on another device than its parameter.

    Tensors without dimensions, such as ``step``, are skipped: torch's optimizers accept them on the CPU, too.
    """
    apart = [group for group in facts.optimizer if not group.scalar and not is_same_device(group.device, group.home)]
    if apart:
        names = tuple(dict.fromkeys(name for group in apart for name in group.names))
        entries = ", ".join(dict.fromkeys(group.entry for group in apart))
        yield Finding(
            kind="optimizer-elsewhere",
            severity="bad",
            sentence=f"Optimizer state ({entries}) on {apart[0].device}, but this rank's part of {join_few(names)} on "
            f"{apart[0].home}: the next optimizer step fails.",
            names=names,
            entry="optim-on-wrong-device-after-offload",
            remedy="move the state to its parameter's device before optimizer.step().",
        )


def check_uneven_after_nonblocking(facts: Facts) -> Iterator[Finding]:
    """Finds uneven FSDP2 shards that were offloaded by hand, perhaps by a non-blocking copy.

    After a move to the host, FSDP2 immediately pads a shorter shard, and so may read it before the copy has arrived.
    The padded shard is then in pageable memory, so only the other shards, which are pinned, show traces of a
    non-blocking copy.
    """

    def is_by_hand(state: TensorState) -> bool:
        return state.kind == "fsdp2" and not state.policy and state.device.type == "cpu"

    names, _ = _choose(facts, lambda state: is_by_hand(state) and state.even is False)
    pinned, _ = _choose(facts, lambda state: is_by_hand(state) and bool(state.pinned))
    if names and pinned and _has_device(facts):
        yield Finding(
            kind="uneven-nonblocking",
            severity="hazard",
            sentence=f"{join_few(names)} sharded unevenly, and offloaded to pinned memory, perhaps by a non-blocking "
            "copy; a rank with a shorter shard has padded it on the host at once, perhaps before the copy "
            "arrived.",
            names=names,
            entry="nonblocking-offload-uneven-shards",
            remedy='offload with model.to("cpu"), which blocks.',
        )


def check_outstanding_copy(facts: Facts) -> Iterator[Finding]:
    count = count_left_by_copy((facts.by_state, facts.buffers_by_state), facts.optimizer)
    if not count or not _has_device(facts):
        return
    stream = f"the current stream of {facts.compute_device}"
    known = {
        False: f"{stream} has work left, so a copy may be under way, and",
        True: f"{stream} is idle, so the copies issued on it are done;",
        None: f"{stream} cannot be queried, and",
    }[facts.stream_idle]
    yield Finding(
        kind="copy-outstanding",
        severity="note" if facts.stream_idle else "hazard",
        sentence=f"{format_count(count, 'tensor')} in pinned host memory without an offload policy, as after a "
        f"non-blocking copy; {known} only a wait could show whether a copy on another stream is under way.",
        entry="non-blocking-d2h-read-too-early",
        remedy="call torch.accelerator.synchronize() before the host reads the tensors.",
    )


def check_backend_for_cpu(facts: Facts) -> Iterator[Finding]:
    names, state = _choose(
        facts,
        lambda state: state.device.type == "cpu" and state.mesh is not None and state.mesh.carries_cpu is False,
    )
    if state is not None and state.mesh is not None:
        kind = state.mesh.device_type
        yield Finding(
            kind="no-backend-for-cpu",
            severity="hazard",
            sentence=f"{join_few(names)} on the CPU, but in a process group with only a backend for {kind}; "
            "collectives on the CPU tensors fail (full_tensor, a full state dict, the norm of the "
            "gradients).",
            names=names,
            entry="full-tensor-cpu-shard-nccl-only",
            remedy=(
                f"call init_process_group with a backend for each device (cpu:gloo,{kind}:...); full_tensors() "
                "needs no CPU backend."
            ),
        )


_ALL: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_not_fsdp,
    check_half_moved,
    check_policy_shards,
    check_fsdp1_away,
    check_fsdp2_away,
    check_plain_parameters,
    check_buffers,
    check_optimizer_devices,
    check_uneven_after_nonblocking,
    check_outstanding_copy,
    check_backend_for_cpu,
)


def _describe_way_home(facts: Facts, usual: str) -> str:
    """Describes how to move a model back to the devices on which its units train.

    Returns ``usual``, unless only some FSDP2 units use CPUOffloadPolicy: moving such a model as a whole would put the
    other units on the wrong device.
    """
    if len({unit.policy for unit in facts.units if unit.strategy == "fsdp2"}) < 2:
        return usual
    return (
        'model.to("cpu"), then for each FSDP module, outer ones first, module.to("cpu") under CPUOffloadPolicy and '
        "module.to(device) without it, then each buffer to the device"
    )


def _is_half_moved(state: TensorState) -> bool:
    return not is_same_device(state.wrapper_device, state.device)


def _is_away(state: TensorState) -> bool:
    """Returns whether the tensor is off its unit's compute device without an offload policy."""
    unit = state.unit
    if unit is None or unit.policy or state.device.type == "meta":
        return False
    return not is_same_device(state.device, unit.compute_device)


def _is_on(state: TensorState, facts: Facts) -> bool:
    """Returns whether the tensor is on the compute device.

    If the units compute on several devices, any device of the same type will do.
    """
    if facts.compute_device is None or state.device.type == "meta":
        return True
    if any(unit.compute_device != facts.compute_device for unit in facts.units):
        return state.device.type == facts.compute_device.type
    return is_same_device(state.device, facts.compute_device)


def _is_at_work(facts: Facts) -> bool:
    """Returns whether some shards are ready for a forward: on their compute device, or under an offload policy."""
    return any(state.unit is not None and not _is_away(state) for state in facts.by_state)


def _has_device(facts: Facts) -> bool:
    return facts.compute_device is not None and facts.compute_device.type != "cpu"


def _list_buffers_away(facts: Facts) -> list[TensorFacts]:
    return [row for state, rows in facts.buffers_by_state.items() if not _is_on(state, facts) for row in rows]


def _choose(facts: Facts, is_chosen: Callable[[TensorState], bool]) -> tuple[tuple[str, ...], TensorState | None]:
    """Returns the first names of the parameters whose state ``is_chosen`` accepts, and the first such state."""
    states = [state for state in facts.by_state if is_chosen(state)]
    names = tuple(row.name for state in states for row in facts.by_state[state] if not row.tied_to)
    return names, states[0] if states else None
