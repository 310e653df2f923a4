"""A receiver of weights: a separate process, with which rank 0 shares a second process group.

``python -m fsdp_doctor.case.receiver PORT`` is the receiver. It keeps the tensors that arrive, by name, and returns
them on request, so that the received weights are verified and not the sent ones. It ends with the process that started
it.
"""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.engines.packed_bucket import PackedBucket, read_bucket

_TIMEOUT = datetime.timedelta(minutes=5)
_SENDER, _RECEIVER = 0, 1


@dataclass(frozen=True)
class _Message:
    """weights: by name, on the host. seconds: that the receiver takes for it. asks: for all that has arrived."""

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    asks: bool = False


class _Group:
    def __init__(self, store: dist.Store, rank: int) -> None:
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


class Receiver:
    """The end of rank 0. ``send`` returns when the receiver has the weights, and has copied them."""

    def __init__(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        command = [sys.executable, "-m", "fsdp_doctor.case.receiver", str(store.port)]
        # Its end is that of this process, whose end of the pipe is closed then.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._group = _Group(store, _SENDER)

    def send(self, weights: Mapping[str, torch.Tensor], seconds: float = 0.0) -> None:
        self._group.send(_Message(weights, seconds), _SENDER)
        self._group.receive(_RECEIVER)

    def send_bucket(self, bucket: PackedBucket) -> None:
        """bucket: on the host."""
        self.send(dict(read_bucket(bucket.buffer, bucket.index)))

    def take(self) -> dict[str, torch.Tensor]:
        """All that has arrived since the last time."""
        self._group.send(_Message(asks=True), _SENDER)
        weights: dict[str, torch.Tensor] = self._group.receive(_RECEIVER)
        return weights


@functools.cache
def start_receiver() -> Receiver:
    """The receiver of this process, which lives as long."""
    return Receiver()


def _main() -> None:
    threading.Thread(target=_end_with_sender, daemon=True).start()
    torch.set_num_threads(1)
    group = _Group(dist.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=_TIMEOUT), _RECEIVER)
    held: dict[str, torch.Tensor] = {}
    while True:
        message: _Message = group.receive(_SENDER)
        time.sleep(message.seconds)
        held |= {name: tensor.clone() for name, tensor in message.weights.items()}
        group.send(held if message.asks else None, _RECEIVER)
        if message.asks:
            held = {}


def _end_with_sender() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    # Pickled by the module's name, as the sender knows it.
    from fsdp_doctor.case import receiver

    receiver._main()
