"""The consumers of the entries that a method yields: the values of the axis ``consumer``.

A consumer pulls the entries and yields a result for each: on rank 0 the tensor that the receiver has, elsewhere the
entry. Its results are then verified in the same way as the entries of a method.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.case.methods.lookup import MethodArguments, MethodFunction
from fsdp_doctor.case.receiver import start_receiver
from fsdp_doctor.case.yielded import iterate_entries
from fsdp_doctor.engines.packed_bucket import PackedBucket, packed_buckets, read_bucket
from fsdp_doctor.fsdp import private
from fsdp_doctor.matrix.axes import Consumer
from fsdp_doctor.verdict.records import ProblemKind

_Entries: TypeAlias = Iterator[tuple[str, Any]]
_Note: TypeAlias = Callable[[ProblemKind, str], None]

# Less than the largest tensor of the built-in models, and more than most.
_BUFFER_BYTES = 128 << 10
_ENTRIES_BEFORE_THE_END = 3
_SECONDS_OF_A_SLOW_RECEIVER = 0.005


class ConsumerError(RuntimeError):
    """A planted exception, for a sender that fails while it handles an entry."""


def consume(consumer: Consumer, function: MethodFunction, given: MethodArguments, note: _Note) -> Any:
    """Calls the method, and passes its result to the consumer. note: for a race that was detected."""
    pull = functools.partial(function, given)
    match consumer:
        case Consumer.ALONE:
            return pull()
        case Consumer.SECOND_GROUP:
            return _send_each(iterate_entries(pull()), 0.0)
        case Consumer.SLOW:
            return _send_each(iterate_entries(pull()), _SECONDS_OF_A_SLOW_RECEIVER)
        case Consumer.PACKED:
            return _send_packed(pull, given, note)
        case Consumer.STEP_IN_FLIGHT:
            return _send_packed(pull, given, note, before=functools.partial(_write_weights, given))
        case Consumer.COLOCATED:
            return _send_colocated(iterate_entries(pull()), given)
        case Consumer.KEEPS_VIEWS:
            return iter(list(iterate_entries(pull())))
        case Consumer.IN_PLACE:
            return _overwrite(iterate_entries(pull()))
        case Consumer.STOPS:
            return _stop(pull, given)
        case Consumer.RAISES:
            return _raise(pull, given)
        case _:
            assert_never(consumer)


def _sends() -> bool:
    return dist.get_rank() == 0


def _send_each(entries: _Entries, seconds: float) -> _Entries:
    devices = {}
    for name, tensor in entries:
        if _sends():
            devices[name] = tensor.device
            start_receiver().send({name: tensor.detach().cpu()}, seconds)
        else:
            yield name, tensor
        del tensor
    yield from _take_received(devices)


def _take_received(devices: dict[str, torch.device]) -> _Entries:
    """Yields the receiver's tensors, each on the device of the tensor that was sent; nothing on a rank that sends
    nothing.
    """
    if _sends():
        for name, tensor in start_receiver().take().items():
            yield name, tensor.to(devices[name])


def _send_packed(
    pull: Callable[[], Any], given: MethodArguments, note: _Note, before: Callable[[], None] = lambda: None
) -> _Entries:
    """Each of two buffers has a stream, under which entries are pulled and packed, and which is waited for separately.
    The other consumers pull on the stream on which they are called.
    """
    if not _sends():
        before()
        yield from iterate_entries(pull())
        return
    devices: dict[str, torch.device] = {}
    with _note_races(given.device, note):
        before()
        buckets = packed_buckets(_note_devices(iterate_entries(pull()), devices), _BUFFER_BYTES)
        slots: list[tuple[Any, PackedBucket | None]] = [(_make_stream(given.device), None) for _ in range(2)]
        for number in itertools.count():
            stream, sent = slots[number % 2]
            _finish_slot(stream, sent)
            with _enter_stream(stream):
                bucket = next(buckets, None)
                if bucket is not None:
                    host = torch.empty(bucket.buffer.shape, dtype=torch.uint8, pin_memory=stream is not None)
                    bucket = PackedBucket(host.copy_(bucket.buffer, non_blocking=True), bucket.index)
            slots[number % 2] = stream, bucket
            if bucket is None:
                break
        for stream, sent in slots:
            _finish_slot(stream, sent)
    yield from _take_received(devices)


def _note_devices(entries: _Entries, devices: dict[str, torch.device]) -> _Entries:
    for name, tensor in entries:
        devices[name] = tensor.device
        yield name, tensor
        del tensor


def _finish_slot(stream: Any, sent: PackedBucket | None) -> None:
    if stream is not None:
        stream.synchronize()
    if sent is not None:
        start_receiver().send_bucket(sent)


def _make_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device) if device.type != "cpu" else None


def _enter_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    context: contextlib.AbstractContextManager[Any] = (
        torch.get_device_module(stream.device).stream(stream) if stream is not None else contextlib.nullcontext()
    )
    return context


@contextlib.contextmanager
def _note_races(device: torch.device, note: _Note) -> Iterator[None]:
    """The emulated device alone detects races."""
    if device.type != "emulated":
        yield
        return
    emulated = torch.get_device_module(device)
    races: list[str] = []
    with emulated.race_detection():
        yield
        emulated.synchronize()
        races = emulated.data_races()
    if races:
        note("race", f"{len(races)} races, the first: {races[0]}")


@torch.no_grad()
def _write_weights(given: MethodArguments) -> None:
    """Imitates the end of a step: writes every weight with the same bits, by kernels for which nothing waits."""
    for parameter in given.model.parameters():
        local = private.read_local_tensor(parameter).detach()
        local.copy_(local.clone())


def _send_colocated(entries: _Entries, given: MethodArguments) -> _Entries:
    devices: dict[str, torch.device] = {}
    buffer: torch.Tensor | None = None
    for bucket in packed_buckets(_note_devices(entries, devices), _BUFFER_BYTES):
        if buffer is None or len(buffer) < len(bucket.buffer):
            buffer = torch.empty_like(bucket.buffer)
        shared = buffer[: len(bucket.buffer)].copy_(bucket.buffer)
        if given.device.type != "cpu":
            torch.get_device_module(given.device).current_stream(given.device).synchronize()
        if _sends():
            start_receiver().send_bucket(PackedBucket(shared.cpu(), bucket.index))
        dist.barrier(given.control)
        if not _sends():
            for name, tensor in read_bucket(shared, bucket.index):
                yield name, tensor.clone()
    yield from _take_received(devices)


def _overwrite(entries: _Entries) -> _Entries:
    for name, tensor in entries:
        received = tensor.detach().clone()
        with torch.no_grad():
            tensor.detach().zero_()
        del tensor
        yield name, received
        del received


def _stop(pull: Callable[[], Any], given: MethodArguments) -> _Entries:
    result = pull()
    if _sends():
        entries = itertools.islice(iterate_entries(result), _ENTRIES_BEFORE_THE_END)
        for _ in entries:
            pass
        del entries, result
    else:
        _pull_until_told(result)
        del result
    dist.barrier(given.control)
    yield from iterate_entries(pull())


def _raise(pull: Callable[[], Any], given: MethodArguments) -> _Entries:
    """The handler's collective is over the model's group. Who offers ``with`` is closed before."""
    result = pull()
    try:
        with result if hasattr(result, "__exit__") else contextlib.nullcontext():
            if _sends():
                for place, _ in enumerate(iterate_entries(result)):
                    if place == _ENTRIES_BEFORE_THE_END:
                        raise ConsumerError("planted while an entry is handled")
            else:
                _pull_until_told(result)
    except ConsumerError:
        dist.all_reduce(torch.zeros(1, device=given.device))
    else:
        dist.all_reduce(torch.zeros(1, device=given.device))
    del result
    yield from iterate_entries(pull())


def _pull_until_told(result: Any) -> None:
    """Pulls all entries, or stops at the RuntimeError by which a method reports that rank 0 has left."""
    with contextlib.suppress(RuntimeError):
        for _ in iterate_entries(result):
            pass
