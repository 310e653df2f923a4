"""Each collective of the emulated device gives what its name says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.collectives import completes, input_of, inputs_of_all, unfilled
from support.ranks import this_device, this_rank, world_size
from support.training import (
    all_ranks,
    assert_same,
    on_the_device,
    part_of,
)

_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda all_ranks: all_ranks.sum(0),
    dist.ReduceOp.AVG: lambda all_ranks: all_ranks.sum(0) / world_size(),
    dist.ReduceOp.MAX: lambda all_ranks: all_ranks.amax(0),
    dist.ReduceOp.MIN: lambda all_ranks: all_ranks.amin(0),
    dist.ReduceOp.PRODUCT: lambda all_ranks: all_ranks.prod(0),
}


@on_the_device
def test_all_reduce_reduces() -> None:
    for operation, expected in _REDUCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = input_of(dtype=dtype).to(this_device())
            dist.all_reduce(tensor, operation)
            assert_same(tensor, expected(inputs_of_all()).to(dtype))


@on_the_device
def test_all_reduce_reduces_integers_and_booleans() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensor = input_of(dtype=dtype).to(this_device())
        dist.all_reduce(tensor)
        assert_same(tensor, inputs_of_all().sum(0).to(dtype))
    bits = (1 << input_of(dtype=torch.int64)).to(this_device())
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert_same(bits, functools.reduce(torch.bitwise_or, 1 << inputs_of_all(torch.int64)))
    anyone = torch.tensor([this_rank() == 0, False], device=this_device())
    dist.all_reduce(anyone, dist.ReduceOp.MAX)
    assert_same(anyone, torch.tensor([True, False]))


@on_the_device
def test_a_premultiplied_sum_multiplies_first() -> None:
    for factor in (0.5, torch.tensor([0.5], device=this_device())):
        operation = dist._make_nccl_premul_sum(factor)
        tensor, part = input_of().to(this_device()), unfilled(2)
        dist.all_reduce(tensor, operation)
        assert_same(tensor, inputs_of_all().sum(0) / 2)
        dist.reduce_scatter_tensor(part, input_of(numel=2 * world_size()).to(this_device()), operation)
        assert_same(part, part_of(inputs_of_all(numel=2 * world_size()).sum(0)) / 2)


@on_the_device
def test_broadcast_gives_everyone_what_the_source_has() -> None:
    for source in all_ranks():
        tensor = input_of().to(this_device())
        dist.broadcast(tensor, source)
        assert_same(tensor, input_of(source))


@on_the_device
def test_reduce_reduces_to_one_rank_and_leaves_the_others_alone() -> None:
    for root in all_ranks():
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            tensor = input_of().to(this_device())
            dist.reduce(tensor, root, operation)
            assert_same(tensor, _REDUCTIONS[operation](inputs_of_all()) if this_rank() == root else input_of())


@on_the_device
def test_all_gather_gathers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        outputs = [unfilled(4, dtype=dtype) for _ in all_ranks()]
        dist.all_gather(outputs, input_of(dtype=dtype).to(this_device()))
        assert_same(torch.stack(outputs), inputs_of_all(dtype))


@on_the_device
def test_all_gather_gathers_tensors_of_different_sizes() -> None:
    """NCCL does it, by a broadcast from each rank."""
    outputs = [unfilled(rank + 1) for rank in all_ranks()]
    work = dist.all_gather(
        outputs, input_of(numel=this_rank() + 1).to(this_device()), group=dist.new_group(), async_op=True
    )
    assert completes(work), "it is not complete after 2 seconds"
    for rank, output in enumerate(outputs):
        assert_same(output, input_of(rank, rank + 1))


@on_the_device
def test_all_gather_into_tensor_joins() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = unfilled(4 * world_size(), dtype=dtype)
        dist.all_gather_into_tensor(output, input_of(dtype=dtype).to(this_device()))
        assert_same(output, inputs_of_all(dtype).flatten())


@on_the_device
def test_all_gather_into_tensor_stacks() -> None:
    output = unfilled(world_size(), 4)
    dist.all_gather_into_tensor(output, input_of().to(this_device()))
    assert_same(output, inputs_of_all())
    scalars = unfilled(world_size())
    dist.all_gather_into_tensor(scalars, input_of()[0].to(this_device()))
    assert_same(scalars, inputs_of_all()[:, 0])


@on_the_device
def test_all_gather_into_tensor_gathers_in_place() -> None:
    output = unfilled(4 * world_size())
    own = output.view(world_size(), 4)[this_rank()]
    own.copy_(input_of())
    dist.all_gather_into_tensor(output, own)
    assert_same(output, inputs_of_all().flatten())


@on_the_device
def test_reduce_scatter_reduces_and_deals_out() -> None:
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16):
            own = input_of(numel=2 * world_size(), dtype=dtype).to(this_device())
            expected = part_of(_REDUCTIONS[operation](inputs_of_all(numel=2 * world_size())).to(dtype))
            from_list, from_tensor = unfilled(2, dtype=dtype), unfilled(2, dtype=dtype)
            dist.reduce_scatter(from_list, list(own.chunk(world_size())), operation)
            dist.reduce_scatter_tensor(from_tensor, own, operation)
            assert_same(from_list, expected)
            assert_same(from_tensor, expected)
            assert_same(own, input_of(numel=2 * world_size(), dtype=dtype))


@on_the_device
def test_gather_gathers_to_one_rank() -> None:
    for root in all_ranks():
        outputs = [unfilled(4) for _ in all_ranks()] if this_rank() == root else None
        dist.gather(input_of().to(this_device()), outputs, root)
        if outputs is not None:
            assert_same(torch.stack(outputs), inputs_of_all())


@on_the_device
def test_scatter_deals_out_what_one_rank_has() -> None:
    for root in all_ranks():
        inputs = list((inputs_of_all() + root).to(this_device())) if this_rank() == root else None
        output = unfilled(4)
        dist.scatter(output, inputs, root)
        assert_same(output, input_of() + root)


@on_the_device
def test_all_to_all_single_exchanges_equal_parts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = unfilled(2 * world_size(), dtype=dtype)
        dist.all_to_all_single(output, input_of(numel=2 * world_size(), dtype=dtype).to(this_device()))
        assert_same(output, torch.cat([part_of(input_of(rank, 2 * world_size(), dtype)) for rank in all_ranks()]))


def _sent(source: int, target: int) -> torch.Tensor:
    """Rows of different number for each pair of ranks, none for some."""
    return torch.full(((source + 2 * target) % 3, 2), 10.0 * source + target)


@on_the_device
def test_all_to_all_single_exchanges_parts_of_different_sizes() -> None:
    sent = [_sent(this_rank(), target) for target in all_ranks()]
    received = [_sent(source, this_rank()) for source in all_ranks()]
    output = unfilled(sum(map(len, received)), 2)
    dist.all_to_all_single(output, torch.cat(sent).to(this_device()), [*map(len, received)], [*map(len, sent)])
    assert_same(output, torch.cat(received))


@on_the_device
def test_all_to_all_exchanges_tensors_of_one_size() -> None:
    outputs = [unfilled(2) for _ in all_ranks()]
    dist.all_to_all(
        outputs, [torch.full((2,), 10.0 * this_rank() + target, device=this_device()) for target in all_ranks()]
    )
    assert_same(torch.stack(outputs)[:, 0], torch.tensor([10.0 * source + this_rank() for source in all_ranks()]))


@on_the_device
def test_all_to_all_exchanges_tensors_of_different_sizes() -> None:
    received = [_sent(source, this_rank()) for source in all_ranks()]
    outputs = [unfilled(*tensor.shape) for tensor in received]
    dist.all_to_all(outputs, [_sent(this_rank(), target).to(this_device()) for target in all_ranks()])
    for output, expected in zip(outputs, received, strict=True):
        assert_same(output, expected)


def _neighbours() -> tuple[int, int]:
    return (this_rank() + 1) % world_size(), (this_rank() - 1) % world_size()


@on_the_device
def test_send_and_recv_pass_tensors_round() -> None:
    following, previous = _neighbours()
    output = unfilled(4)
    if this_rank() == 0:
        dist.send(input_of().to(this_device()), following)
        dist.recv(output, previous)
    else:
        dist.recv(output, previous)
        dist.send(input_of().to(this_device()), following)
    assert_same(output, input_of(previous))


@on_the_device
def test_isend_and_irecv_pass_tensors_round() -> None:
    following, previous = _neighbours()
    output = unfilled(4)
    works = [dist.irecv(output, previous), dist.isend(input_of().to(this_device()), following)]
    for work in works:
        work.wait()
        assert work.is_completed()
    assert_same(output, input_of(previous))


@on_the_device
def test_batched_sends_and_receives_pass_tensors_round() -> None:
    following, previous = _neighbours()
    outputs, sent = [unfilled(4), unfilled(4)], [input_of().to(this_device()), -input_of().to(this_device())]
    sends = [dist.P2POp(dist.isend, tensor, following) for tensor in sent]
    receives = [dist.P2POp(dist.irecv, output, previous) for output in outputs]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    assert_same(outputs[0], input_of(previous))
    assert_same(outputs[1], -input_of(previous))
