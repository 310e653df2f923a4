"""Finds problems that a load, a changed gradient setting or an offload has left in a model.

Only attributes are read: nothing is changed or communicated, no tensor's values are read, and nothing waits for a
device.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_never

from fsdp_doctor.checkpoints.names import strip_wrappers
from fsdp_doctor.examination.facts import Facts
from fsdp_doctor.examination.findings import Finding, join_few
from fsdp_doctor.examination.live_memory import count_device_bytes, list_storages
from fsdp_doctor.examination.memory_records import round_to_power_of_two
from fsdp_doctor.text import format_bytes, format_count
from fsdp_doctor.weights.extract.plan import list_differing_buffers
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.reader import ModelContents
from fsdp_doctor.weights.transport.rank_groups import read_groups

_CLOSE_STEP = (
    "model.zero_grad(), then model.reset_iter_state(), which does not clear the gradients that were not reduced."
    if hasattr(FSDPModule, "reset_iter_state")
    else "load_full_tensors() from a checkpoint, which closes the step; torch has reset_iter_state() from 2.13 on."
)
# Memory that is too small to be mentioned.
_LEAST_BYTES = 1 << 20


def find_after_load(
    model: nn.Module, contents: ModelContents, facts: Facts, optimizer: torch.optim.Optimizer | None
) -> Iterator[Finding]:
    yield from _check_meta(contents, facts)
    if differing := list_differing_buffers(model):
        yield Finding(
            kind="buffers-differ",
            severity="hazard",
            sentence=f"{join_few(differing, 'buffer')} with different values on some ranks when an extraction or a "
            "save last compared them; a saved or collected model has the values of one rank.",
            names=differing,
            remedy="broadcast or all-reduce the buffers before the save; full_state_dict() compares them again.",
        )
    if optimizer is not None:
        yield from _check_optimizer_parameters(contents, optimizer)
        yield from _check_moment_dtypes(contents, optimizer)
        yield from _check_step_counters(contents, optimizer)
        yield from _check_unmade_state(contents, optimizer)
    yield from _check_changed_parameters(model, contents)
    if dist.is_initialized() and (unknown := tuple(read_groups(contents).find_unknown())):
        yield Finding(
            kind="experts-hidden",
            severity="hazard",
            sentence=f"{join_few(unknown)} sharded over some of the model's ranks; the other ranks may have other "
            "tensors under the same names, such as experts that were divided before FSDP sharded them.",
            names=unknown,
            entry="hidden-experts-taken-for-all",
            remedy="pass the mesh along which they are divided, as in full_tensors(model, experts=mesh['ep']).",
        )


def find_unreadable(contents: ModelContents) -> Iterator[Finding]:
    """Finds parameters whose memory does not contain their values, such as quantized parameters.

    Such parameters are a hazard and not bad, because a QLoRA model has them on purpose and can train.
    """
    names_of: dict[str, list[str]] = {}
    for name, form in contents.find_unreadable().items():
        names_of.setdefault(form, []).append(name)
    for form, names in names_of.items():
        yield Finding(
            kind="unreadable",
            severity="hazard",
            sentence=f"{join_few(names, 'tensor')} with memory that does not contain their values ({form}); code that "
            "gathers, casts, saves or loads their bytes, such as torch's full state dict, does not get the "
            "weights.",
            names=tuple(names),
            remedy='use full_tensors(model, lora="adapter") for the adapters; for the weights, dequantize before the '
            "model is sharded.",
        )


def _check_meta(contents: ModelContents, facts: Facts) -> Iterator[Finding]:
    """Finds parameters and buffers that are still on the meta device.

    A load that copies in place leaves them there, and no load restores a non-persistent buffer.
    """
    parameters = tuple(row.name for row in facts.parameters if row.state.device.type == "meta" and not row.tied_to)
    buffers = tuple(row.name for row in facts.buffers if row.state.device.type == "meta" and not row.tied_to)
    transient = [buffer.names[0] for buffer in contents.transient_buffers]
    if parameters:
        also = f", and {join_few(buffers, 'buffer')}" if buffers else ""
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"{join_few(parameters)}{also} on the meta device, without values.",
            names=parameters + buffers,
            entry="in-place-load-into-meta",
            remedy="model.to_empty(device=...), on the CPU under CPUOffloadPolicy; then load the weights"
            + (
                ", and with them the buffers that no checkpoint has and that to_empty() leaves without values: "
                f"load_full_tensors(..., buffers={{...}}) of {join_few(transient, 'buffer')}."
                if transient
                else "."
            ),
        )
    elif buffers:
        yield Finding(
            kind="meta",
            severity="bad",
            sentence=f"{join_few(buffers, 'buffer')} on the meta device, without values, unlike the parameters.",
            names=buffers,
            entry="meta-buffers-stay-on-meta",
            remedy="compute the buffers again on the device; a load does not restore a buffer that no state dict has.",
        )


def _check_optimizer_parameters(contents: ModelContents, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Finds trainable parameters that the optimizer does not hold.

    If the optimizer holds some of the parameters, the finding is a hazard, since another optimizer may hold the rest.
    If it holds none, but tensors of higher precision, there is no finding, since these may be master weights that a
    framework copies back.
    """
    in_groups = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = list(_list_trainable(contents))
    known = {id(parameter) for _, parameter in parameters}
    trained = {name: id(parameter) in in_groups for name, parameter in parameters if parameter.requires_grad}
    unheld = tuple(name for name, is_held in trained.items() if not is_held)
    num_held = len(trained) - len(unheld)
    others = [parameter for key, parameter in in_groups.items() if key not in known]
    holds_masters = bool(others) and min(map(_count_bits, others)) > max(
        (_count_bits(p) for _, p in parameters), default=0
    )
    if unheld and not num_held and not holds_masters:
        yield Finding(
            kind="optimizer-holds-none",
            severity="bad",
            sentence=f"The optimizer holds none of the parameters that train, {join_few(unheld)}, so its steps change "
            "nothing: it was made before the model's present parameters.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )
    elif unheld and num_held:
        yield Finding(
            kind="optimizer-holds-some",
            severity="hazard",
            sentence=f"The optimizer holds {num_held} of {len(trained)} parameters that train, but not "
            f"{join_few(unheld)}: unless another optimizer holds them, nothing trains them.",
            names=unheld,
            entry="assign-leaves-the-optimizer-behind",
            remedy="make the optimizer after the load, or load in place.",
        )


def _check_moment_dtypes(contents: ModelContents, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    rounded = list(_find_rounded(optimizer, {id(parameter): name for name, parameter in _list_trainable(contents)}))
    if rounded:
        names = tuple(dict.fromkeys(name for name, _ in rounded))
        entries = ", ".join(dict.fromkeys(entry for _, entry in rounded))
        yield Finding(
            kind="moments-rounded",
            severity="hazard",
            sentence=f"Optimizer state ({entries}) of {join_few(names)} in a dtype with fewer bits than the "
            "parameter's; unless the optimizer uses this dtype, a load has rounded the state.",
            names=names,
            entry="moments-take-the-parameters-dtype",
            remedy="load the state while the parameters have their own dtype; load_optimizer_state() keeps it.",
        )


def _check_step_counters(contents: ModelContents, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Finds step counters on the device, where code that moves the whole optimizer state, such as verl's load, leaves
    them.
    """
    names = {id(parameter): name for name, parameter in _list_trainable(contents)}
    waits = tuple(
        names[id(parameter)]
        for group in optimizer.param_groups
        # Adam and its kin, unless their kernels read the counter themselves.
        if "capturable" in group and not (group["capturable"] or group.get("fused"))
        for parameter in group["params"]
        if id(parameter) in names
        and isinstance(step := optimizer.state.get(parameter, {}).get("step"), torch.Tensor)
        and step.device.type not in ("cpu", "meta")
    )
    if waits:
        yield Finding(
            kind="counters-on-device",
            severity="note",
            sentence=f"The step counters of {join_few(waits)} are on the device, although the optimizer is neither "
            "fused nor capturable; its step reads every counter on the host, and waits for the device each "
            "time.",
            names=waits,
            remedy="for state in optimizer.state.values(): state['step'] = state['step'].cpu()",
        )


def _check_unmade_state(contents: ModelContents, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Finds half-moved parameters without optimizer state, for which creating the state raises.

    A half-moved parameter reports another device than its storage has, so ``zeros_like(parameter.data)`` raises.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = tuple(
        name
        for name, parameter in _list_trainable(contents)
        if id(parameter) in trained
        and not optimizer.state.get(parameter)
        and private.read_local_tensor(parameter).device.type != parameter.device.type
    )
    if names:
        yield Finding(
            kind="state-cannot-be-made",
            severity="bad",
            sentence=f"{join_few(names)} half-moved, and without state in the optimizer; an optimizer that makes its "
            "state from parameter.data, at once or in its first step, raises.",
            names=names,
            remedy='model.to("cpu"), then each buffer back to the device, and only then make the optimizer and step.',
        )


def _check_changed_parameters(model: nn.Module, contents: ModelContents) -> Iterator[Finding]:
    if untied := list(_find_untied(model, contents)):
        # transformers does not tie where a checkpoint has two tensors, whatever the configuration says.
        yield Finding(
            kind="untied",
            severity="hazard",
            sentence=f"{'; '.join(' and '.join(pair) for pair in untied)}: tied by the configuration "
            "(tie_word_embeddings), but two tensors, which train independently from now on.",
            names=tuple(name for pair in untied for name in pair),
            entry="load-from-meta-unties",
            remedy="model.tie_weights() after the load, before the first forward and before the optimizer is made."
            if _list_tied_places(model, contents) >= {name for pair in untied for name in pair}
            else "build the model again, tie the weights before sharding, and load: FSDP has two tensors, and "
            "model.tie_weights() cannot join them.",
        )
    if replaced := _find_replaced(model, contents):
        yield Finding(
            kind="replaced",
            severity="bad",
            sentence=f"{join_few(replaced)} assigned or swapped after the first forward, while FSDP2 still gathers "
            "the former parameters; the next forward does not use the module's present parameters.",
            names=replaced,
            remedy="call module.unshard() and module.reshard() of the FSDP module to restore FSDP2's parameter, and "
            "copy the values into this parameter. Tie before fully_shard.",
        )
    moved = [parameter for unit in contents.fsdp2_units for parameter, _ in unit.moved]
    if memory_replaced := _list_names(contents, moved):
        yield Finding(
            kind="memory-replaced",
            severity="bad",
            sentence=f"{join_few(memory_replaced)} with other memory than FSDP2 gathers, for example because of "
            "torch.utils.swap_tensors() after the first forward; forwards use the former values, but "
            "optimizer.step() changes the present values.",
            names=memory_replaced,
            remedy="call model.load_state_dict(model.state_dict()), in which FSDP2 finds the new memory.",
        )
    if recast := _list_names(contents, [parameter for unit in contents.fsdp2_units for parameter in unit.recast]):
        yield Finding(
            kind="recast",
            severity="bad",
            sentence=f"{join_few(recast)} cast after the first forward, while FSDP2 expects the former dtype; the "
            "next forward or backward fails because of the dtype.",
            names=recast,
            remedy=(
                "cast the parameters back; cast before the first forward, or compute in another dtype with "
                "MixedPrecisionPolicy."
            ),
        )
    if second_memories := tuple(_find_second_memories(contents)):
        # torch gathers ``FlatParameter.data`` in full precision, casts ``_local_shard`` under mixed precision, and
        # resets ``FlatParameter.data`` to ``_local_shard`` at each reshard.
        yield Finding(
            kind="second-memory",
            severity="hazard",
            sentence=f"{join_few(second_memories, 'unit')} with a local shard in other memory than the flat "
            "parameter, for example after model.cpu() and model.to(device), or after lazy initialization "
            "under CPUOffload. A state dict reads the flat parameter; a forward under mixed precision reads "
            "the local shard, and each forward ends with the local shard. Values that optimizer.step() "
            "writes to the flat parameter now are lost in the next forward.",
            names=second_memories,
            remedy=(
                "run `with FullyShardedDataParallel.summon_full_params(model): pass` on every rank before the forward."
            ),
        )
    if restored := tuple(_find_restored_gradients(contents)):
        yield Finding(
            kind="gradients-back",
            severity="hazard",
            sentence=f"{join_few(restored)} with gradients, and moved by model.to(), which restores gradients that "
            "zero_grad() has dropped; the next backward adds to these gradients.",
            names=restored,
            entry="fsdp1-move-brings-gradients-back",
            remedy="call optimizer.zero_grad() before the next backward, unless an accumulation is under way.",
        )
    if contents.ambiguous:
        yield Finding(
            kind="ambiguous-names",
            severity="hazard",
            sentence="Several tensors have one name without the wrappers' words: "
            f"{join_few(contents.ambiguous, 'name')}; code that uses such names, such as a load into the "
            "unwrapped model, gets only one of the tensors.",
            names=contents.ambiguous,
            remedy="rename the modules: no module may have a name that a wrapper uses for its inner module.",
        )
    if contents.extra_states:
        yield Finding(
            kind="extra-state",
            severity="note",
            sentence=f"{join_few(contents.extra_states, 'entry')} with state that is not a tensor (get_extra_state); "
            "a state dict has this state, but full_tensors(), save_full_tensors() and load_full_tensors() "
            "omit it.",
            names=contents.extra_states,
            remedy="save the result of get_extra_state(), and pass it to set_extra_state() after a load.",
        )
    if contents.stray_pieces:
        yield Finding(
            kind="stray-piece",
            severity="bad",
            sentence=f"{join_few(contents.stray_pieces)} tied to a parameter of another FSDP1 unit before wrapping; "
            "only the other unit gathers it, and the module here has only this rank's piece.",
            names=contents.stray_pieces,
            remedy="put the modules that share the parameter into one FSDP1 unit.",
        )


def find_in_gradients(model: nn.Module, contents: ModelContents) -> Iterator[Finding]:
    """Finds gradients, and settings of the gradient reduction, that make the next training step fail or go wrong.

    A switch for gradient accumulation is wrong only in the last backward of an accumulation, and no attribute shows
    which backward is the last, so the switch is a hazard. Another divisor of the gradients is a note, because gradients
    may be summed on purpose, for a loss that is a sum over tokens.
    """
    if mixed := tuple(_find_mixed(contents)):
        yield Finding(
            kind="mixed-dtypes",
            severity="bad",
            sentence=f"{join_few(mixed)} of several dtypes and trained in one unit of FSDP2, which accepts only one "
            "dtype; the first forward fails (FSDP expects uniform original parameter dtype).",
            names=mixed,
            entry="fsdp2-unit-of-several-dtypes",
            remedy=(
                "cast the parameters to one dtype, or apply fully_shard separately to the module with the other dtype."
            ),
        )
    names_of: dict[int, list[str]] = {}
    for parameter in contents.parameters:
        if parameter.unit is not None and isinstance(parameter.tensor, DTensor):
            names_of.setdefault(id(parameter.unit), []).append(parameter.names[0])
    reduced = [(names_of.get(id(unit), []), unit.switches) for unit in contents.fsdp2_units]
    reduced += [([f"{unit.prefix}flat_param"], unit.switches) for unit in contents.fsdp1_units]
    divided: dict[str, list[str]] = {}
    # The gradients of experts on some ranks come from the tokens of all ranks of the largest unit.
    num_ranks = max((switches.num_ranks for _, switches in reduced), default=1)
    for names, switches in reduced:
        if switches.divided_by not in (None, str(switches.num_ranks), str(num_ranks)):
            divided.setdefault(switches.divided_by, []).extend(names)
    if unsynchronized := tuple(name for names, switches in reduced if not switches.synchronizes for name in names):
        yield Finding(
            kind="gradients-unsynchronized",
            severity="hazard",
            sentence=f"{join_few(unsynchronized)} with gradient synchronization off; the next backward does not "
            "reduce their gradients, and an optimizer step after it does not train them, or trains each "
            "rank separately.",
            names=unsynchronized,
            remedy=(
                "call set_requires_gradient_sync(True) before an accumulation's last backward; with FSDP1, end "
                "no_sync()."
            ),
        )
    synchronized = [(names, switches) for names, switches in reduced if switches.synchronizes]
    if unreplicated := tuple(name for names, switches in synchronized if not switches.all_reduces for name in names):
        yield Finding(
            kind="gradients-unreplicated",
            severity="hazard",
            sentence=f"{join_few(unreplicated)} with the all-reduce over the replicas off; the next backward reduces "
            "their gradients only within a shard group.",
            names=unreplicated,
            remedy="call set_requires_all_reduce(True) before the last backward of an accumulation.",
        )
    if open_ended := tuple(name for names, switches in reduced if not switches.ends for name in names):
        yield Finding(
            kind="backward-open-ended",
            severity="hazard",
            sentence=f"{join_few(open_ended)} with the next backward declared not to be the last; it ends without "
            "waiting for the reduction of the gradients, so an optimizer step after it may use unreduced gradients.",
            names=open_ended,
            remedy="call set_is_last_backward(True) before the last backward of an accumulation.",
        )
    if unfinished := tuple(_find_unfinished(model, contents)):
        yield Finding(
            kind="gradients-unfinished",
            severity="hazard",
            sentence=f"{join_few(unfinished, 'flat parameter')} under CPUOffload below a root without it; FSDP1 does "
            "not wait for their gradients on the way to the host, which an optimizer step reads too early.",
            names=unfinished,
            entry="fsdp1-partly-offloaded-gradients-unfinished",
            remedy="torch.accelerator.synchronize() between backward and optimizer.step(); or CPUOffload for the root.",
        )
    replaced = _find_replaced(model, contents)
    if unmanaged := tuple(name for name in _find_unmanaged(model, contents) if name not in replaced):
        yield Finding(
            kind="gradients-unmanaged",
            severity="hazard",
            sentence=f"{join_few(unmanaged)} trained, but not sharded by FSDP, which reduces only gradients of "
            "sharded parameters; unless the job reduces these gradients itself, each rank trains a "
            "different copy.",
            names=unmanaged,
            remedy="also apply fully_shard to the module that owns the parameters, or all-reduce their gradients.",
        )
    for divisor, names in divided.items():
        yield Finding(
            kind="gradients-divided",
            severity="note",
            sentence=f"{join_few(names)} with gradients divided by {divisor}, not by the number of ranks; "
            "set_gradient_divide_factor was called, and its factor stays until the next call.",
            names=tuple(names),
        )


def find_in_step(contents: ModelContents, facts: Facts) -> Iterator[Finding]:
    if lost := tuple(contents.lost_shards):
        yield Finding(
            kind="shard-lost",
            severity="bad",
            sentence=f"{join_few(lost, 'flat parameter')} moved while unsharded, for example by a manual offload "
            "after a step that raised; the shards are lost.",
            names=lost,
            entry="fsdp1-offload-replaces-unsharded-shards",
            remedy="build and wrap the model again, and load a checkpoint.",
        )
    is_fsdp2 = bool(contents.fsdp2_units)
    match facts.open_step:
        case "backward" if is_fsdp2:
            yield Finding(
                kind="step-open",
                severity="bad",
                sentence="A backward has begun but not ended, for example because it raised: FSDP2 reduces no "
                "gradients in later backwards, so no step trains, and a forward after torch's load computes with the "
                "weights from before the load.",
                entry="fsdp2-step-broken-off",
                remedy=_CLOSE_STEP,
            )
        case "backward":
            yield Finding(
                kind="step-open",
                severity="bad",
                sentence="A backward has begun but not ended, for example because it raised: FSDP1 cannot recover, and "
                "later steps fail or have wrong gradients.",
                entry="fsdp1-step-broken-off",
                remedy="build and wrap the model again and load a checkpoint; save_full_tensors() reads the weights in "
                "this state.",
            )
        case "forward" if is_fsdp2:
            yield Finding(
                kind="step-open",
                severity="hazard",
                sentence="A forward has begun but not ended, for example because it raised: forwards after torch's "
                "load compute with the weights from before the load, until a backward has ended.",
                entry="fsdp2-step-broken-off",
                remedy=_CLOSE_STEP,
            )
        case "forward":
            yield Finding(
                kind="step-open",
                severity="hazard",
                sentence="A forward has begun but not ended, for example because it raised: FSDP1's state dicts fail "
                "until the next forward has ended, and under an offload the next step uses the gradients of "
                "the previous step.",
                entry="fsdp1-step-broken-off",
                remedy="run a forward and a backward, and drop their gradients with optimizer.zero_grad(); "
                "load_full_tensors() also closes the step.",
            )
        case None:
            yield from _check_pending_gathers(contents)
        case _:
            assert_never(facts.open_step)


def _check_pending_gathers(contents: ModelContents) -> Iterator[Finding]:
    pending = {id(unit) for unit in contents.fsdp2_units if unit.has_pending_gather}
    if names := tuple(tensor.names[0] for tensor in contents.parameters if id(tensor.unit) in pending):
        yield Finding(
            kind="gather-pending",
            severity="hazard",
            sentence=f"{join_few(names)} with a gather that was launched ahead and not used by a forward; after a "
            "load by torch the next forward uses the weights that were gathered before the load.",
            names=names,
            entry="fsdp2-pending-gather-outlives-a-load",
            remedy="call module.unshard() and module.reshard() of their FSDP modules before the load; "
            "load_full_tensors() drops such gathers.",
        )


def find_in_memory(contents: ModelContents, facts: Facts) -> Iterator[Finding]:
    gradients = list(_find_gradients_left(contents))
    if nbytes := _count_device_bytes(gradient for _, gradient in gradients):
        names = tuple(name for name, _ in gradients)
        yield Finding(
            kind="gradients-kept",
            severity="hazard",
            sentence=f"{join_few(names)} with gradients on the device ({format_bytes(nbytes)}), but shards that were "
            "offloaded by hand.",
            names=names,
            remedy="optimizer.zero_grad() before the offload"
            + (
                "; with use_orig_params=True it leaves the flat gradients: also set module._handle.flat_param.grad = "
                "None for each FSDP module."
                if any(unit.keeps_originals for unit in contents.fsdp1_units)
                else "."
            ),
        )
    views = [(name, view) for name, view in _find_views_of_former_memory(contents) if _count_device_bytes([view])]
    if views:
        names = tuple(dict.fromkeys(name for name, _ in views))
        nbytes = _count_device_bytes(view for _, view in views)
        yield Finding(
            kind="offload-frees-nothing",
            severity="hazard",
            sentence=f"{join_few(names)} moved, but their former memory ({format_bytes(nbytes)} of the device) stays "
            "until the next forward, because FSDP1 keeps views of it; these parameters are not sharded, and "
            "have the compute dtype.",
            names=names,
            entry="fsdp1-no-shard-offload-frees-nothing",
            remedy="shard over at least two ranks, or use float32 parameters with mixed precision.",
        )
    unsharded = [(name, tensor) for name, tensor in _find_unsharded(contents) if _count_device_bytes([tensor])]
    num_sharded = sum(p.unit is not None for p in contents.parameters) + len(contents.fsdp1_units)
    if num_sharded and len(unsharded) == num_sharded:
        names = tuple(name for name, _ in unsharded)
        nbytes = _count_device_bytes(tensor for _, tensor in unsharded)
        yield Finding(
            kind="unsharded-copy",
            severity="note",
            sentence=f"{join_few(names)} unsharded on the device in addition to the shards, {format_bytes(nbytes)} in "
            "all; the cause is a forward without a backward, or reshard_after_forward=False.",
            names=names,
            remedy="call module.reshard() of each FSDP module; the next forward unshards it again.",
        )
    for number, nbytes in _find_copies(contents):
        yield Finding(
            kind="state-dict-held",
            severity="note",
            sentence=f"{format_count(number, 'tensor')} with {format_bytes(nbytes)} of device memory in a dictionary "
            "with the model's names, in addition to the model; the dictionary lives as long as something "
            "refers to it.",
            remedy="delete the dictionary after reading it, or read full_tensors(), which holds one tensor at a time.",
        )
    # CUDA's allocator of pinned memory takes a power of two for each tensor.
    sizes = [
        math.prod(row.local_shape) * state.dtype.itemsize
        for state, rows in facts.by_state.items()
        for row in rows
        if state.pinned and not row.tied_to
    ]
    pinned, taken = sum(sizes), sum(map(round_to_power_of_two, sizes))
    if taken - pinned >= max(_LEAST_BYTES, pinned // 2):
        yield Finding(
            kind="pinned-twice",
            severity="note",
            sentence=f"Pinned on the host: {format_bytes(pinned)} of shards, for which the allocator of pinned memory "
            f"takes {format_bytes(taken)}, the next power of two for each shard, and never frees it.",
            entry="pinned-host-memory-doubles",
            remedy="use CPUOffloadPolicy(pin_memory=False), if host memory is short.",
        )


def _find_replaced(model: nn.Module, contents: ModelContents) -> tuple[str, ...]:
    """Lists the names under which a module has another parameter than FSDP2 gathers."""
    names: list[str] = []
    if places := [place for unit in contents.fsdp2_units for place in unit.replaced]:
        prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        names += [strip_wrappers(prefixes[id(module)] + name) for module, name in places]
    return tuple(names)


def _list_tied_places(model: nn.Module, contents: ModelContents) -> set[str]:
    """Lists the names of parameters that FSDP2 itself treats as tied.

    Before the first forward the modules may still have separate parameters under these names.
    """
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    places = [place for unit in contents.fsdp2_units for tied in unit.tied_places for place in tied]
    return {strip_wrappers(prefixes[id(module)] + name) for module, name in places}


def _find_second_memories(contents: ModelContents) -> Iterator[str]:
    """Lists FSDP1 units whose flat parameter and local shard have separate memory on one device.

    If the two are on different devices, the unit is half-moved, for which there is another finding.
    """
    for unit in contents.fsdp1_units:
        memories = unit.memories
        if len(memories) > 1 and memories[0].device == memories[1].device:
            yield unit.flat_name


def _find_restored_gradients(contents: ModelContents) -> Iterator[str]:
    """Lists original parameters of FSDP1 units whose gradients a move has restored.

    ``FullyShardedDataParallel._apply`` sets the gradients of the original parameters to views of the flat gradient.
    After the next forward, restored gradients cannot be distinguished from accumulated gradients.
    """
    for unit in contents.fsdp1_units:
        if unit.keeps_originals and len(unit.memories) > 1:
            yield from (
                names[0] for names, tensor in zip(unit.names, unit.originals, strict=True) if tensor.grad is not None
            )


def _list_names(contents: ModelContents, parameters: list[nn.Parameter]) -> tuple[str, ...]:
    wanted = set(map(id, parameters))
    return tuple(tensor.names[0] for tensor in contents.parameters if id(tensor.tensor) in wanted)


def _list_trainable(contents: ModelContents) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the tensor of each parameter that an optimizer created now would hold."""
    yield from ((tensor.names[0], tensor.tensor) for tensor in contents.parameters)
    for unit in contents.fsdp1_units:
        if unit.keeps_originals:
            yield from ((names[0], tensor) for names, tensor in zip(unit.names, unit.originals, strict=True))
        else:
            yield f"{unit.prefix}flat_param", unit.flat_parameter


def _find_rounded(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names:
            continue
        for entry, value in entries.items():
            is_moment = isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()
            if is_moment and _count_bits(value) < _count_bits(parameter):
                yield names[id(parameter)], entry


def _count_bits(tensor: torch.Tensor) -> int:
    """Returns the number of bits of a floating-point dtype; 0 for any other dtype."""
    return torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else 0


def _find_untied(model: nn.Module, contents: ModelContents) -> Iterator[tuple[str, str]]:
    first_name = {name: names[0] for names in contents.list_all_names() for name in names}
    for prefix, module in model.named_modules():
        root = strip_wrappers(f"{prefix}." if prefix else "")
        for name, tied_to in _read_configured_ties(module).items():
            pair = root + name, root + tied_to
            if first_name.keys() >= set(pair) and first_name[pair[0]] != first_name[pair[1]]:
                yield pair


def _read_configured_ties(module: nn.Module) -> Mapping[str, str]:
    """Maps the name of each tied weight of a transformers model to the name of the weight to which it is tied.

    Before transformers 5, tied weights are always tied to the input embedding.
    """
    # The class's attribute, because FullyShardedDataParallel returns the attributes of the module that it wraps.
    tied = getattr(type(module), "_tied_weights_keys", None) or {}
    if not tied or not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        return {}
    if isinstance(tied, Mapping):
        return tied
    get_embedding: Any = getattr(module, "get_input_embeddings", None)
    embedding = get_embedding() if get_embedding is not None else None
    names = [name for name, child in module.named_modules() if child is embedding]
    return {name: f"{strip_wrappers(names[0])}.weight" for name in tied} if names else {}


def _find_unmanaged(model: nn.Module, contents: ModelContents) -> Iterator[str]:
    is_over_several_ranks = any(unit.group.size() > 1 for unit in contents.fsdp1_units) or any(
        p.unit is not None and isinstance(p.tensor, DTensor) and p.tensor.device_mesh.size() > 1
        for p in contents.parameters
    )
    # DDP around the model reduces their gradients.
    if is_over_several_ranks and not isinstance(model, DistributedDataParallel):
        for parameter in contents.parameters:
            if parameter.tensor.requires_grad and not isinstance(parameter.tensor, DTensor):
                yield parameter.names[0]


def _find_unfinished(model: nn.Module, contents: ModelContents) -> Iterator[str]:
    """Finds FSDP1 units with CPU offload below a root without it.

    At the end of a backward, torch checks the offload setting of the root only.
    """
    known: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, FullyShardedDataParallel) or module in known:
            continue
        known.update(below := FullyShardedDataParallel.fsdp_modules(module))
        if not module.cpu_offload.offload_params:
            yield from (unit.flat_name for unit in contents.fsdp1_units if unit.offloads and unit.module in below)


def _find_mixed(contents: ModelContents) -> Iterator[str]:
    names = {id(parameter.tensor): parameter.names[0] for parameter in contents.parameters}
    for unit in contents.fsdp2_units:
        for parameters in [] if unit.is_initialized else unit.trained_together:
            if len({parameter.dtype for parameter in parameters}) > 1:
                yield from (names[id(parameter)] for parameter in parameters if id(parameter) in names)


def _find_unsharded(contents: ModelContents) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((p.names[0], p.shown) for p in contents.parameters if p.shown is not p.tensor)
    for unit in contents.fsdp1_units:
        flat = unit.flat_parameter.detach()
        if unit.is_sharded and flat.shape != unit.memories[0].shape:
            yield unit.flat_name, flat


def _find_gradients_left(contents: ModelContents) -> Iterator[tuple[str, torch.Tensor]]:
    """Lists the gradients of shards that were offloaded by hand."""
    for parameter in contents.parameters:
        by_hand = parameter.unit is not None and not parameter.unit.offloads
        if by_hand and parameter.tensor.grad is not None and private.read_local_tensor(parameter.tensor).is_cpu:
            yield parameter.names[0], parameter.tensor.grad
    for unit in contents.fsdp1_units:
        if not unit.offloads and unit.memories[0].is_cpu:
            yield from ((unit.flat_name, owner.grad) for owner in unit.optimized if owner.grad is not None)


def _find_views_of_former_memory(contents: ModelContents) -> Iterator[tuple[str, torch.Tensor]]:
    """Lists views of memory that an FSDP1 unit no longer uses.

    In a unit that is not sharded, the modules' parameters are views that do not move with the flat parameter.
    """
    for unit in contents.fsdp1_units:
        if not unit.is_sharded and not unit.offloads:
            present = {id(storage) for storage in list_storages(unit.flat_parameter.detach())}
            for view in unit.views:
                if present.isdisjoint(map(id, list_storages(view))):
                    yield unit.flat_name, view


def _find_copies(contents: ModelContents) -> Iterator[tuple[int, int]]:
    """Finds state dicts of this model that keep device memory; yields the number of tensors and of bytes for each.

    A state dict is recognized by its dotted keys, which the dictionaries of modules do not have.
    """
    names = [names[0] for names in contents.list_all_names() if "." in names[0]]
    known = {id(storage) for tensor in _list_tensors(contents) for storage in list_storages(tensor)}
    for dictionary in gc.get_objects():
        if type(dictionary) not in (dict, OrderedDict) or len(dictionary) <= 1:
            continue
        if names and names[0] in dictionary and 2 * sum(name in dictionary for name in names) > len(names):
            tensors = [value for value in dictionary.values() if isinstance(value, torch.Tensor)]
            others = [tensor for tensor in tensors if known.isdisjoint(map(id, list_storages(tensor)))]
            if nbytes := _count_device_bytes(others):
                yield len(others), nbytes


def _list_tensors(contents: ModelContents) -> Iterator[torch.Tensor]:
    for tensor in (*contents.parameters, *contents.buffers, *contents.transient_buffers):
        yield from (tensor.tensor, tensor.shown)
    for unit in contents.fsdp1_units:
        yield from (*unit.memories, unit.flat_parameter.detach(), *unit.shown.values())


def _count_device_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Counts the device memory of the tensors in bytes, each storage once."""
    unique = {id(storage): storage for tensor in tensors for storage in list_storages(tensor)}
    return sum(count_device_bytes(storage) for storage in unique.values() if storage.device.type != "cpu")
