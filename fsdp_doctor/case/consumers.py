"""Consumers of the (name, tensor) entries that a method yields: one for each value of the axis ``consumer``.

A consumer pulls the entries and yields a result for each: on rank 0 the tensor that the receiver got, on other ranks
the entry itself. These results are verified like the entries of a method.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import importlib.util
import itertools
import operator
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import psutil
import torch
import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.case.methods.lookup import MethodArguments, MethodFunction
from fsdp_doctor.case.receiver import ReceiverGoneError, SentBucket, TensorHeader, start_receiver
from fsdp_doctor.case.yielded import iterate_entries
from fsdp_doctor.matrix.axes import Consumer
from fsdp_doctor.verdict.records import ProblemKind
from fsdp_doctor.weights.engines.packed_bucket import packed_buckets, read_bucket
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.host_copies import view_as_bytes

_Entries: TypeAlias = Iterator[tuple[str, Any]]
_Note: TypeAlias = Callable[[ProblemKind, str], None]

# Less than the largest tensor of the built-in models, and more than most.
_BUFFER_BYTES = 128 << 10
_NUM_BUFFERS = 2
_ENTRIES_BEFORE_THE_END = 3
_SECONDS_OF_A_SLOW_RECEIVER = 0.005
# A resource leaks if it grows in each of these calls except the first.
_CALLS = 7
# The resources that are read after each call, and by how much each may grow.
_NOISE = {
    "bytes of device memory": 0,
    "bytes of reserved device memory": 0,
    # Without torch's flight recorder, calls that keep nothing differ by up to a quarter of this limit.
    "bytes of host memory": 16 << 10,
    "open descriptors": 0,
    "threads": 0,
    "streams": 0,
}


class ConsumerError(RuntimeError):
    """Error that fsdp-doctor raises on purpose, to imitate a sender that fails while it handles an entry."""


def consume(consumer: Consumer, function: MethodFunction, given: MethodArguments, note: _Note) -> Any:
    """Calls the method through a consumer. Returns the entries to verify.

    note: a function that is called with each problem that is found while the entries are consumed.
    """
    pull = functools.partial(function, given)
    match consumer:
        case Consumer.ALONE:
            return pull()
        case Consumer.SECOND_GROUP:
            return _send_each(iterate_entries(pull()), note)
        case Consumer.SLOW:
            return _send_each(iterate_entries(pull()), note, _SECONDS_OF_A_SLOW_RECEIVER)
        case Consumer.PACKED:
            return _send_packed(pull, given, note)
        case Consumer.STEP_IN_FLIGHT:
            return _send_packed(pull, given, note, before=functools.partial(write_weights, given))
        case Consumer.COLOCATED:
            return _send_colocated(iterate_entries(pull()), given, note)
        case Consumer.SHARED_DEVICE:
            return _send_over_devices(pull, given, note)
        case Consumer.KEEPS_VIEWS:
            return iter(list(iterate_entries(pull())))
        case Consumer.IN_PLACE:
            return _overwrite(iterate_entries(pull()))
        case Consumer.LAZY:
            return _read_after_another_call(pull)
        case Consumer.REPEATED:
            return _call_repeatedly(pull, given, note)
        case Consumer.STOPS:
            return _stop(pull, given)
        case Consumer.RAISES:
            return _fail(pull, given, note, _raise)
        case Consumer.DIES:
            return _fail(pull, given, note, _end_receiver)
        case _:
            assert_never(consumer)


def prepare_consumer(consumer: Consumer) -> None:
    """Starts the receiver on rank 0 if the consumer needs it. The start takes seconds, so it comes before the training
    state is recorded.
    """
    if consumer.needs_sender and _sends():
        start_receiver()


def _sends() -> bool:
    return dist.get_rank() == 0


class _Delivery:
    """Delivery of one weight sync by rank 0: the sent tensors, and the tensors that the receiver has at the end."""

    def __init__(self, note: _Note) -> None:
        self._note = note
        self._devices: dict[str, torch.device] = {}
        if _sends():
            # What a sync that failed has left.
            start_receiver().take()

    def watch(self, entries: _Entries) -> _Entries:
        for name, tensor in entries:
            self._devices[name] = tensor.device
            yield name, tensor
            del tensor

    def send(self, bucket: SentBucket) -> None:
        self.check(start_receiver().send(bucket))

    def check(self, refusal: str) -> None:
        if refusal:
            self._note("wrong", f"the receiver refuses what is sent: {refusal}")

    def take(self) -> _Entries:
        """Yields the receiver's tensors, each on the device of the sent tensor; yields nothing on other ranks."""
        if _sends():
            for name, tensor in start_receiver().take().items():
                yield name, tensor.to(self._devices[name])


def _make_bucket(tensors: Iterable[tuple[str, torch.Tensor]], seconds: float = 0.0) -> SentBucket:
    on_host = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
    headers = [TensorHeader(name, tensor.shape, tensor.dtype) for name, tensor in on_host]
    return SentBucket(torch.cat([view_as_bytes(tensor) for _, tensor in on_host]), headers, seconds)


def _send_each(entries: _Entries, note: _Note, seconds: float = 0.0) -> _Entries:
    delivery = _Delivery(note)
    for name, tensor in delivery.watch(entries):
        if _sends():
            delivery.send(_make_bucket([(name, tensor)], seconds))
        else:
            yield name, tensor
        del tensor
    yield from delivery.take()


def _send_packed(
    pull: Callable[[], Any],
    given: MethodArguments,
    note: _Note,
    *,
    before: Callable[[], None] = lambda: None,
) -> _Entries:
    """Sends packed buffers from rank 0; the other ranks only pull their entries, on the current stream."""
    if not _sends():
        before()
        yield from iterate_entries(pull())
        return
    delivery = _Delivery(note)
    wire = _Wire(delivery.send)
    before()
    entries = wire.watch(delivery.watch(iterate_entries(pull())))
    _find_packed_sender(given.device)(entries, wire, 0, operator.itemgetter(1), _BUFFER_BYTES)
    wire.finish()
    yield from delivery.take()


class _Wire:
    """Channel of a packed sender. A buffer goes to the receiver once the sender has waited for the buffer's stream."""

    def __init__(self, send: Callable[[SentBucket], None]) -> None:
        self._send = send
        self._pulled: list[TensorHeader] = []
        self._in_flight: collections.deque[SentBucket] = collections.deque()

    def watch(self, entries: _Entries) -> _Entries:
        for name, tensor in entries:
            self._pulled.append(TensorHeader(name, tensor.shape, tensor.dtype))
            yield name, tensor
            del tensor

    def broadcast(self, buffer: torch.Tensor, src: int) -> None:
        """Queues a buffer that holds all entries pulled since the previous call. Replaces the broadcast over NCCL.

        If two buffers are already queued, the older one is sent first: the sender has waited for its stream.
        """
        del src
        if len(self._in_flight) == _NUM_BUFFERS:
            self._send(self._in_flight.popleft())
        host = torch.empty(buffer.shape, dtype=torch.uint8, pin_memory=buffer.device.type != "cpu")
        self._in_flight.append(SentBucket(host.copy_(buffer, non_blocking=True), self._pulled))
        self._pulled = []

    def finish(self) -> None:
        while self._in_flight:
            self._send(self._in_flight.popleft())


def _find_packed_sender(device: torch.device) -> Callable[..., None]:
    """Returns vLLM's packed sender if vLLM is installed and there is an accelerator, otherwise fsdp-doctor's own."""
    vllm = importlib.util.find_spec("vllm")
    if device.type == "cpu" or vllm is None or not vllm.submodule_search_locations:
        return functools.partial(_send_buffers, device)
    return _load_vllms_sender(device.type, pathlib.Path(next(iter(vllm.submodule_search_locations))))


@functools.cache
def _load_vllms_sender(device_type: str, package: pathlib.Path) -> Callable[..., None]:
    """Returns vLLM's packed sender. Loads only the sender's file, because importing the package loads kernels.

    The file is loaded only once, because it keeps its streams.
    """
    file = package / "distributed" / "weight_transfer" / "packed_tensor.py"
    spec = importlib.util.spec_from_file_location("vllm_packed_tensor", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look for their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module)["torch"] = _TorchOfDevice(device_type)
    sender: Callable[..., None] = module.packed_nccl_broadcast_producer
    return sender


class _TorchOfDevice:
    """Stand-in for the torch module in a file that knows only CUDA: its ``cuda`` is another device's module."""

    def __init__(self, device_type: str) -> None:
        self.cuda = torch.get_device_module(device_type)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _send_buffers(device: torch.device, entries: _Entries, wire: _Wire, src: int, read: Any, most_bytes: int) -> None:
    """Sends packed buffers like vLLM: each of two buffers has a stream, on which its entries are pulled and packed."""
    module = torch.get_device_module(device)
    streams = [module.Stream(device) if device.type != "cpu" else None for _ in range(_NUM_BUFFERS)]
    for stream in itertools.cycle(streams):
        _synchronize(stream)
        with module.stream(stream) if stream is not None else contextlib.nullcontext():
            pieces: list[torch.Tensor] = []
            while sum(map(len, pieces)) <= most_bytes and (entry := next(entries, None)) is not None:
                pieces.append(view_as_bytes(read(entry).detach().contiguous()))
            if not pieces:
                break
            wire.broadcast(torch.cat(pieces), src)
    for stream in streams:
        _synchronize(stream)


def _synchronize(stream: Any) -> None:
    if stream is not None:
        stream.synchronize()


@torch.no_grad()
def write_weights(given: MethodArguments) -> None:
    """Imitates the end of a step: rewrites every weight with the same bits, without a wait for the kernels."""
    for parameter in given.model.parameters():
        local = private.read_local_tensor(parameter).detach()
        local.copy_(local.clone())


def _send_colocated(entries: _Entries, given: MethodArguments, note: _Note) -> _Entries:
    delivery = _Delivery(note)
    buffer: torch.Tensor | None = None
    for bucket in packed_buckets(delivery.watch(entries), _BUFFER_BYTES):
        if buffer is None or len(buffer) < len(bucket.buffer):
            buffer = torch.empty_like(bucket.buffer)
        shared = buffer[: len(bucket.buffer)].copy_(bucket.buffer)
        if given.device.type != "cpu":
            torch.get_device_module(given.device).current_stream(given.device).synchronize()
        if _sends():
            delivery.send(_make_bucket(read_bucket(shared, bucket.index)))
        dist.barrier(given.control)
        if not _sends():
            for name, tensor in read_bucket(shared, bucket.index):
                yield name, tensor.clone()
    yield from delivery.take()


def _send_over_devices(pull: Callable[[], Any], given: MethodArguments, note: _Note) -> _Entries:
    """Broadcasts each entry to a receiver on rank 1's device.

    The order of the launches is checked, so that a deadlock is reported and does not hang.
    """
    assert given.scratch is not None
    directory = given.scratch.with_name(f"{given.scratch.name}-launches")
    emulated = torch.get_device_module(given.device)
    delivery = _Delivery(note)
    with emulated.note_launch_order(directory):
        for name, tensor in delivery.watch(iterate_entries(pull())):
            if _sends():
                sent = tensor.detach().to(given.device).contiguous()
                delivery.check(start_receiver().broadcast(name, sent, 1, directory))
                del sent
            else:
                yield name, tensor
            del tensor
    dist.barrier(given.control)
    if cycle := emulated.find_order_cycle(directory):
        note("order", cycle)
    yield from delivery.take()


def _overwrite(entries: _Entries) -> _Entries:
    for name, tensor in entries:
        received = tensor.detach().clone()
        with torch.no_grad():
            tensor.detach().zero_()
        del tensor
        yield name, received
        del received


def _read_after_another_call(pull: Callable[[], Any]) -> _Entries:
    """Calls the method twice, overwrites the entries of the second call, and then yields the entries of the first.

    The entries of the two calls must share no memory.
    """
    first = pull()
    collections.deque(_overwrite(iterate_entries(pull())), maxlen=0)
    yield from iterate_entries(first)


def _call_repeatedly(pull: Callable[[], Any], given: MethodArguments, note: _Note) -> _Entries:
    readings: list[dict[str, int]] = []
    for _ in range(_CALLS):
        collections.deque(iterate_entries(pull()), maxlen=0)
        readings.append(_read_resources(given.device, len(readings)))
    for resource, noise in _NOISE.items():
        growth = min(after[resource] - before[resource] for before, after in itertools.pairwise(readings[1:]))
        if growth > noise:
            note("leak", f"{resource} grow by {growth} with each call")
    yield from iterate_entries(pull())


def _read_resources(device: torch.device, num_read: int) -> dict[str, int]:
    """Reads the amounts of resources that the process uses.

    num_read: the number of earlier readings. Each reading makes a stream, which is not counted.
    """
    gc.collect()
    process = psutil.Process()
    read = dict.fromkeys(_NOISE, 0)
    read["bytes of host memory"] = _read_host_bytes(process)
    read["open descriptors"] = process.num_fds()
    read["threads"] = process.num_threads()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        read["bytes of device memory"] = module.memory_allocated(device)
        read["bytes of reserved device memory"] = module.memory_reserved(device)
    if device.type == "emulated":
        # They are numbered as they are made.
        read["streams"] = module.Stream(device).stream_id - num_read
    return read


def _read_host_bytes(process: psutil.Process) -> int:
    """Returns the bytes that malloc has in use, or the resident memory of the process if the C library does not count
    them.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return int(process.memory_info().rss)
    libc.mallinfo2.restype = _MallocCounts
    counts = libc.mallinfo2().counts
    return int(counts[4] + counts[7])


class _MallocCounts(ctypes.Structure):
    """Struct ``mallinfo2`` of glibc: the fifth count is mapped memory, the eighth is other memory in use."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


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


def _fail(pull: Callable[[], Any], given: MethodArguments, note: _Note, fail: Callable[[], None]) -> _Entries:
    """Makes rank 0 fail after a few entries. All ranks then call a collective of the default group, while rank 0 still
    handles the error. Finally the method is called again.

    A result that is a context manager is closed before the collective.
    """
    result = pull()
    try:
        with result if hasattr(result, "__exit__") else contextlib.nullcontext():
            if _sends():
                for place, _ in enumerate(iterate_entries(result)):
                    if place == _ENTRIES_BEFORE_THE_END:
                        fail()
            else:
                _pull_until_told(result)
    except (ConsumerError, ReceiverGoneError):
        dist.all_reduce(torch.zeros(1, device=given.device))
    else:
        dist.all_reduce(torch.zeros(1, device=given.device))
    del result
    yield from _send_each(iterate_entries(pull()), note)


def _raise() -> None:
    raise ConsumerError("planted while an entry is handled")


def _end_receiver() -> None:
    receiver = start_receiver()
    receiver.end()
    receiver.take()


def _pull_until_told(result: Any) -> None:
    """Pulls entries to the end or to a RuntimeError.

    A method may raise RuntimeError to report that rank 0 has stopped pulling.
    """
    with contextlib.suppress(RuntimeError):
        for _ in iterate_entries(result):
            pass
