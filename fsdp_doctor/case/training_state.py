"""What an extraction must leave alone: the model and the optimizer against themselves, before and after.

Local to a rank, no collective; local shards are read as they lie, half-moved ones too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.case.reference import Reference, batches
from fsdp_doctor.case.verification import bits, first_names
from fsdp_doctor.fsdp import fsdp1, fsdp2, private
from fsdp_doctor.verdict.records import Problem

StateDigest = dict[str, tuple[str, ...]]
_OPTIMIZER = "optimizer state "


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDigest:
    """Shards, buffers and their placements; which tensors are parameters, which of them train and have
    gradients; the optimizer's state and whether it still holds the model's parameters; train or eval.
    """
    wrappers = dict(_wrappers(model, optimizer))
    locals_ = {name: local for name, (_, local) in wrappers.items()}
    # With use_orig_params zero_grad() clears the original parameters' gradients, and the flat parameter
    # keeps its own until the next unshard, an extraction's or a forward's, drops it.
    stale = {f"{prefix}_flat_param" for prefix, handle in fsdp1.units(model) if private.keeps_originals(handle)}
    state: StateDigest = {}
    for (name, (wrapper, local)), digest in zip(wrappers.items(), _digests(list(locals_.values())), strict=True):
        placements = wrapper.placements if isinstance(wrapper, DTensor) else ()
        place = (str(wrapper.device), str(local.device), str(local.dtype), str(tuple(local.shape)), str(placements))
        role = (str(id(wrapper)), str(wrapper.requires_grad), str(name in stale or wrapper.grad is None))
        # Of buffers and of the optimizer's state only what is in them counts: whoever moves them makes new tensors.
        state[name] = (*place, digest, *(role if isinstance(wrapper, nn.Parameter) else ()))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    state["parameters of the optimizer"] = (str(held),)
    state["training mode"] = (str([module.training for module in model.modules()]),)
    return state


def changes(before: StateDigest, after: StateDigest) -> tuple[Problem, ...]:
    """A problem if the extraction changed what the next training step starts from."""
    changed = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    if not changed:
        return ()
    many = f"{len(changed)} of {len(before)} parts of the training state"
    return (Problem(kind="poisoned", detail=f"the extraction changed {many}: {first_names(changed)}"),)


def lost_weights(model: nn.Module, truth: Reference) -> list[str]:
    """The parameters and buffers whose local shard on this rank is not what the reference says.

    The caller has synchronized with the device.
    """
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for prefix, handle in fsdp1.units(model):
        expected = truth.flat[prefix]
        pairs[f"{prefix}_flat_param"] = (private.flat_shard(handle)[: expected.numel()], expected)
    for name, tensor in fsdp2.entries(model):
        if name in truth.local:
            pairs[name] = (fsdp2.local_tensor(tensor).detach(), truth.local[name])
    now = _digests([actual for actual, _ in pairs.values()])
    then = _digests([expected for _, expected in pairs.values()])
    return [name for name, a, b in zip(pairs, now, then, strict=True) if a != b]


def _wrappers(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """(name, (the tensor that the model or the optimizer holds, this rank's part of it))."""
    for prefix, handle in fsdp1.units(model):
        yield f"{prefix}_flat_param", (handle.flat_param, private.flat_shard(handle))
    for name, tensor in fsdp2.entries(model):
        yield name, (tensor, fsdp2.local_tensor(tensor))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{_OPTIMIZER}{index}.{key}", (value, fsdp2.local_tensor(value))


def _digests(tensors: list[torch.Tensor]) -> list[str]:
    """A digest of each tensor's bits. Tensors of one device come to the host together: one copy, not hundreds."""
    digests = [""] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        sizes = [tensors[index].numel() * tensors[index].element_size() for index in here]
        for begin, end in batches(sizes):
            on_host = torch.cat([bits(tensors[index].detach()) for index in here[begin:end]]).cpu()
            for index, data in zip(here[begin:end], on_host.split(sizes[begin:end]), strict=True):
                digests[index] = hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
    return digests
