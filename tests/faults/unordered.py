"""Extractions that hand a tensor out before it is written, or change or free it afterwards; and the same done right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor import promises

Entries = Iterator[tuple[str, torch.Tensor]]


def _gather(model: nn.Module) -> Entries:
    """Gathers tensor by tensor on the stream of the call, each into memory of its own."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _streams(device: torch.device) -> tuple[Any, Any, Any]:
    """The device's module, its current stream and a new one."""
    module = torch.get_device_module(device)
    return module, module.current_stream(device), module.Stream(device)


# A side stream that nobody waits for.


def copies_on_a_side_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        tensor.record_stream(side)
        yield name, copy


def returns_copies_of_a_side_stream(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    return dict(copies_on_a_side_stream(model, device))


def waits_after_the_entry_was_read(model: nn.Module, device: torch.device) -> Entries:
    """Allocates on the stream of the call, and writes on the side stream."""
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        result = torch.empty_like(tensor)
        side.wait_stream(home)
        with module.stream(side):
            result.copy_(tensor)
        yield name, result
        home.wait_stream(side)


def gathers_on_a_side_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    side.wait_stream(home)
    for name, tensor in model.state_dict().items():
        with module.stream(side):
            whole = tensor.full_tensor()
        yield name, whole


def copies_before_the_gather_ends(model: nn.Module, device: torch.device) -> Entries:
    """The side stream does not wait for the gather, and the stream of the call waits for the side stream."""
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        with module.stream(side):
            copy = tensor.clone()
        home.wait_stream(side)
        yield name, copy


def records_the_event_too_early(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            done = side.record_event()
            copy = tensor.clone()
        tensor.record_stream(side)
        home.wait_event(done)
        yield name, copy


def waits_for_another_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    other = module.Stream(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        tensor.record_stream(side)
        home.wait_stream(other)
        yield name, copy


def prefetches_and_waits_for_the_entry_before(model: nn.Module, device: torch.device) -> Entries:
    """A pipeline of two that is off by one entry."""
    module, home, side = _streams(device)
    before = side.record_event()
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        tensor.record_stream(side)
        home.wait_event(before)
        before = side.record_event()
        yield name, copy


def yields_views_of_a_bucket_that_fills(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    whole = dict(_gather(model))
    bucket = torch.empty(sum(tensor.numel() for tensor in whole.values()), device=device)
    side.wait_stream(home)
    start, views = 0, {}
    with module.stream(side):
        for name, tensor in whole.items():
            views[name] = bucket[start : start + tensor.numel()].view(tensor.shape)
            views[name].copy_(tensor)
            start += tensor.numel()
    yield from views.items()
    home.wait_stream(side)


def frees_what_the_side_stream_reads(model: nn.Module, device: torch.device) -> Entries:
    """Records no stream: the memory of one gather is given to the next while the side stream copies from it."""
    module, home, side = _streams(device)
    copies = {}
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copies[name] = tensor.clone()
        del tensor
    home.wait_stream(side)
    yield from copies.items()


def does_not_wait_for_a_collective(model: nn.Module, device: torch.device) -> Entries:
    pending = []
    for name, tensor in _gather(model):
        pending.append(dist.broadcast(tensor, src=0, async_op=True))
        yield name, tensor
    for work in pending:
        work.wait()


def waits_for_the_wrong_stream_of_two(model: nn.Module, device: torch.device) -> Entries:
    """Uses two side streams in turn, and waits for only one of them."""
    module, home, side = _streams(device)
    sides = [side, module.Stream(device)]
    for number, (name, tensor) in enumerate(_gather(model)):
        own = sides[number % 2]
        own.wait_stream(home)
        with module.stream(own):
            copy = tensor.clone()
        tensor.record_stream(own)
        home.wait_stream(sides[0])
        yield name, copy


@promises(dtype="any")
def casts_on_a_side_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            cast = tensor.to(torch.bfloat16)
        tensor.record_stream(side)
        yield name, cast


# Pinned memory of the host.


@promises(device="cpu")
def reads_pinned_memory_too_early(model: nn.Module) -> Entries:
    for name, tensor in _gather(model):
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        yield name, pinned.clone()


@promises(device="cpu")
def yields_pinned_memory_too_early(model: nn.Module) -> Entries:
    for name, tensor in _gather(model):
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        yield name, pinned.copy_(tensor, non_blocking=True)


@promises(device="cpu")
def waits_for_the_stream_that_copies_nothing(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        home.synchronize()
        yield name, pinned


def refills_a_pinned_buffer_under_way(model: nn.Module, device: torch.device) -> Entries:
    """Sends each tensor through one buffer of the host, and writes to it while the last copy still reads it."""
    on_host = {name: tensor.cpu() for name, tensor in _gather(model)}
    pinned = torch.empty(max(tensor.numel() for tensor in on_host.values()), pin_memory=True)
    for name, tensor in on_host.items():
        yield name, pinned[: tensor.numel()].view(tensor.shape).copy_(tensor).to(device, non_blocking=True)


# Memory that is not the receiver's to keep.


def reuses_one_buffer(model: nn.Module, device: torch.device) -> Entries:
    largest = max(tensor.numel() for tensor in model.state_dict().values())
    buffer = torch.empty(largest, device=device)
    for name, tensor in _gather(model):
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def reuses_two_buffers_in_turn(model: nn.Module, device: torch.device) -> Entries:
    largest = max(tensor.numel() for tensor in model.state_dict().values())
    buffers = torch.empty(2, largest, device=device)
    for number, (name, tensor) in enumerate(_gather(model)):
        yield name, buffers[number % 2][: tensor.numel()].view(tensor.shape).copy_(tensor)


def zeroes_its_buffer_at_the_end(model: nn.Module) -> Entries:
    whole = dict(_gather(model))
    try:
        yield from whole.items()
    finally:
        for tensor in whole.values():
            tensor.zero_()


def scales_what_it_has_yielded(model: nn.Module) -> Entries:
    for name, tensor in _gather(model):
        yield name, tensor
        tensor.mul_(0.5)


def frees_what_it_has_yielded(model: nn.Module) -> Entries:
    for name, tensor in _gather(model):
        yield name, tensor
        tensor.untyped_storage().resize_(0)


@promises(device="cpu")
def reuses_one_buffer_of_the_host(model: nn.Module) -> Entries:
    largest = max(tensor.numel() for tensor in model.state_dict().values())
    buffer = torch.empty(largest, pin_memory=True)
    for name, tensor in _gather(model):
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _units(model: nn.Module) -> Iterator[tuple[Any, list[tuple[str, nn.Parameter]]]]:
    """Each FSDP2 module, unsharded, with the names and parameters that no module below it shards."""
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    taken: set[str] = set()
    for prefix, module in reversed(units):
        module.unshard()
        named = [
            (f"{prefix}.{name}".removeprefix("."), parameter)
            for name, parameter in module.named_parameters()
            if f"{prefix}.{name}".removeprefix(".") not in taken
        ]
        taken |= {name for name, _ in named}
        yield module, named
        module.reshard()


@promises(dtype="compute")
def yields_fsdps_unsharded_memory(model: nn.Module) -> Entries:
    for _, named in _units(model):
        for name, parameter in named:
            yield name, parameter.detach()


@promises(dtype="compute")
def returns_fsdps_unsharded_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(yields_fsdps_unsharded_memory(model))


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def yields_the_unsharded_flat_parameter(model: nn.Module) -> Entries:
    """FSDP1's views, of which the memory is freed when the context ends."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            yield _clean(name), parameter.detach()


# The same, done right.


def waits_for_the_side_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        tensor.record_stream(side)
        home.wait_stream(side)
        copy.record_stream(home)
        yield name, copy


def waits_for_an_event(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
            done = side.record_event()
        tensor.record_stream(side)
        home.wait_event(done)
        copy.record_stream(home)
        yield name, copy


def waits_on_the_host_for_the_side_stream(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        side.synchronize()
        yield name, copy
        home.synchronize()


def waits_for_the_whole_device(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    module, home, side = _streams(device)
    copies = {}
    side.wait_stream(home)
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copies[name] = tensor.clone()
        tensor.record_stream(side)
    module.synchronize(device)
    return copies


def gathers_on_a_side_stream_and_waits(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    for name, tensor in model.state_dict().items():
        side.wait_stream(home)
        with module.stream(side):
            whole = tensor.full_tensor()
        home.wait_stream(side)
        whole.record_stream(home)
        yield name, whole


def prefetches_and_waits_for_its_own_entry(model: nn.Module, device: torch.device) -> Entries:
    module, home, side = _streams(device)
    ahead: list[tuple[str, torch.Tensor, Any]] = []
    for name, tensor in _gather(model):
        side.wait_stream(home)
        with module.stream(side):
            copy = tensor.clone()
        tensor.record_stream(side)
        ahead.append((name, copy, side.record_event()))
        if len(ahead) == 2:
            yield from _handed_out(ahead.pop(0), home)
    yield from _handed_out(ahead.pop(0), home)


def _handed_out(entry: tuple[str, torch.Tensor, Any], home: Any) -> Entries:
    name, copy, done = entry
    home.wait_event(done)
    copy.record_stream(home)
    yield name, copy


def waits_for_a_collective(model: nn.Module) -> Entries:
    for name, tensor in _gather(model):
        work = dist.broadcast(tensor, src=0, async_op=True)
        assert work is not None
        work.wait()
        yield name, tensor


def yields_what_waits_by_itself(model: nn.Module) -> Entries:
    """torch's tensor of a pending collective waits when it is read."""
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        replicated = [Replicate()] * tensor.device_mesh.ndim
        yield name, tensor.redistribute(placements=replicated, async_op=True).to_local()


@promises(device="cpu")
def waits_for_pinned_memory(model: nn.Module, device: torch.device) -> Entries:
    _, home, _ = _streams(device)
    for name, tensor in _gather(model):
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        home.record_event().synchronize()
        yield name, pinned


def refills_a_pinned_buffer_that_was_read(model: nn.Module, device: torch.device) -> Entries:
    _, home, _ = _streams(device)
    on_host = {name: tensor.cpu() for name, tensor in _gather(model)}
    pinned = torch.empty(max(tensor.numel() for tensor in on_host.values()), pin_memory=True)
    for name, tensor in on_host.items():
        yield name, pinned[: tensor.numel()].view(tensor.shape).copy_(tensor).to(device, non_blocking=True)
        home.synchronize()


@promises(keeps=False)
def reuses_one_buffer_and_says_so(model: nn.Module, device: torch.device) -> Entries:
    return reuses_one_buffer(model, device)


@promises(keeps=False)
def scales_what_it_has_yielded_and_says_so(model: nn.Module) -> Entries:
    return scales_what_it_has_yielded(model)


@promises(keeps=False, dtype="compute")
def yields_fsdps_unsharded_memory_and_says_so(model: nn.Module) -> Entries:
    return yields_fsdps_unsharded_memory(model)


@promises(dtype="compute")
def copies_fsdps_unsharded_memory(model: nn.Module) -> Entries:
    for name, tensor in yields_fsdps_unsharded_memory(model):
        yield name, tensor.clone()


def yields_views_of_a_full_bucket(model: nn.Module, device: torch.device) -> Entries:
    whole = dict(_gather(model))
    bucket = torch.cat([tensor.flatten() for tensor in whole.values()])
    start = 0
    for name, tensor in whole.items():
        yield name, bucket[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def copies_the_unsharded_flat_parameter(model: nn.Module) -> Entries:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            yield _clean(name), parameter.detach().clone()
