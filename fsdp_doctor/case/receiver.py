"""Receiver of weights: a separate process with which rank 0 shares a second process group.

``python -m fsdp_doctor.case.receiver PORT`` runs the receiver. It keeps the tensors that arrive, by name, and returns
them on request, so that the received weights are verified instead of the sent ones. It refuses a tensor that arrives
twice, and a bucket with a missing part. It ends with the process that started it.
"""

from __future__ import annotations

import collections
import datetime
import functools
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice

_TIMEOUT = datetime.timedelta(minutes=5)
_SENDER, _RECEIVER = 0, 1
# How long a receiver on another rank's device lets that rank go first, and how often.
_PATIENCE_SECONDS, _TIMES_PATIENT = 1.0, 2
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class TensorHeader:
    """Facts about a tensor that a receiver needs in addition to its bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class SentBucket:
    """Bucket of tensors as rank 0 sends it to the receiver.

    buffer: the tensors one after the other, as a 1-D uint8 tensor on the host.
    seconds: the time that the receiver waits before it answers.
    """

    buffer: torch.Tensor
    headers: Sequence[TensorHeader]
    seconds: float = 0.0


@dataclass(frozen=True)
class _Broadcast:
    """Request to receive one tensor through a broadcast between emulated devices.

    index: the index of the receiver's device.
    directory: the directory in which the order of launches is noted.
    """

    header: TensorHeader
    index: int
    directory: pathlib.Path


_Request: TypeAlias = Literal["take", "end"]
_Message: TypeAlias = SentBucket | _Broadcast | _Request


class ReceiverGoneError(RuntimeError):
    """Error for a receiver that has ended."""


class _Group:
    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)

    def send(self, value: Any, source: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._group.broadcast(torch.tensor([len(content)]), source).wait()
        self._group.broadcast(content, source).wait()

    def receive(self, source: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._group.broadcast(length, source).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        self._group.broadcast(content, source).wait()
        return pickle.loads(content.numpy().tobytes())

    @functools.cached_property
    def on_device(self) -> Any:
        """Process group of the same two processes over the current emulated devices."""
        return torch.get_device_module("emulated").make_backend(
            dist.PrefixStore("device", self._store), self._rank, 2, _TIMEOUT
        )


class Receiver:
    """Rank 0's end of the connection to the receiver.

    ``send`` and ``broadcast`` wait for the receiver's answer, and return the reason for a refusal or an empty string.
    ``send`` and ``take`` raise ReceiverGoneError if the receiver has ended.
    """

    def __init__(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        command = [sys.executable, "-m", "fsdp_doctor.case.receiver", str(store.port)]
        # Its end is that of this process, whose end of the pipe is closed then.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._group = _Group(store, _SENDER)

    def send(self, bucket: SentBucket) -> str:
        return str(self._ask(bucket))

    def broadcast(self, name: str, tensor: torch.Tensor, index: int, directory: pathlib.Path) -> str:
        """Broadcasts a tensor, contiguous and on an emulated device, to the receiver; see ``_Broadcast``."""
        self._group.send(_Broadcast(TensorHeader(name, tensor.shape, tensor.dtype), index, directory), _SENDER)
        self._group.on_device.broadcast(tensor, _SENDER).wait()
        return str(self._group.receive(_RECEIVER))

    def take(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that have arrived since the last call, by name."""
        weights: dict[str, torch.Tensor] = self._ask("take")
        return weights

    def end(self) -> None:
        """Ends the receiver without an answer; the next :func:`start_receiver` starts a new receiver."""
        self._group.send("end", _SENDER)
        self._process.communicate()
        start_receiver.cache_clear()

    def _ask(self, message: _Message) -> Any:
        try:
            self._group.send(message, _SENDER)
            return self._group.receive(_RECEIVER)
        except RuntimeError as error:
            raise ReceiverGoneError(f"the receiver of the weights has ended: {error}") from error


@functools.cache
def start_receiver() -> Receiver:
    """Returns the receiver of this process. Starts it if none is running."""
    return Receiver()


class _Arrivals:
    def __init__(self, group: _Group) -> None:
        self._group = group
        self.weights: dict[str, torch.Tensor] = {}
        self.num_broadcasts = 0

    def keep(self, bucket: SentBucket) -> str:
        """Keeps the tensors of a bucket. Returns the reason if the bucket is refused; empty otherwise."""
        sizes = [header.nbytes for header in bucket.headers]
        if len(bucket.buffer) != sum(sizes):
            return f"{len(bucket.buffer)} of {sum(sizes)} bytes of a bucket arrived"
        names = [*self.weights, *(header.name for header in bucket.headers)]
        if again := [name for name, times in collections.Counter(names).items() if times > 1]:
            return f"came twice: {again[0]}"
        for header, piece in zip(bucket.headers, bucket.buffer.split(sizes), strict=True):
            self.weights[header.name] = piece.clone().view(header.dtype).view(header.shape)
        return ""

    def receive(self, message: _Broadcast) -> str:
        """Joins the broadcast, if possible after the rank on the same device has launched its collective. Returns the
        reason if the tensor is refused; empty otherwise.
        """
        header = message.header
        devices.load(RunDevice(type="emulated"), "emulated")
        torch.accelerator.set_device_index(message.index)
        tensor = torch.empty(header.shape, dtype=header.dtype, device="emulated")
        group = self._group.on_device
        if self.num_broadcasts < _TIMES_PATIENT:
            file = message.directory / str(message.index)
            before, end = _size_of(file), time.monotonic() + _PATIENCE_SECONDS
            while _size_of(file) == before and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        self.num_broadcasts += 1
        with torch.get_device_module("emulated").note_launch_order(message.directory):
            work = group.broadcast(tensor, _SENDER)
        work.wait()
        return self.keep(SentBucket(tensor.cpu().view(-1).view(torch.uint8), [header]))


def _size_of(file: pathlib.Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _main() -> None:
    threading.Thread(target=_end_with_sender, daemon=True).start()
    torch.set_num_threads(1)
    group = _Group(dist.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=_TIMEOUT), _RECEIVER)
    arrivals = _Arrivals(group)
    while True:
        message: _Message = group.receive(_SENDER)
        match message:
            case SentBucket():
                time.sleep(message.seconds)
                group.send(arrivals.keep(message), _RECEIVER)
            case _Broadcast():
                group.send(arrivals.receive(message), _RECEIVER)
            case "take":
                group.send(arrivals.weights, _RECEIVER)
                arrivals = _Arrivals(group)
            case "end":
                os._exit(0)
            case _:
                assert_never(message)


def _end_with_sender() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    # Pickled by the module's name, as the sender knows it.
    from fsdp_doctor.case import receiver

    receiver._main()
