"""Functions that end, block or overload the process that runs them. Each fails on one rank alone."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MEBIBYTE = 1 << 20


def healthy(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """A method that works, to stand between those that do not."""
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor()


healthy_1 = healthy_2 = healthy_3 = healthy_4 = healthy_5 = healthy_6 = healthy
healthy_7 = healthy_8 = healthy_9 = healthy_10 = healthy_11 = healthy_12 = healthy


def _wait_for_the_other_rank() -> None:
    dist.all_reduce(torch.zeros(1))


def rank_1_raises_while_rank_0_waits(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("planted on rank 1")
    _wait_for_the_other_rank()


def rank_0_raises_while_rank_1_waits(model: nn.Module) -> Any:
    if dist.get_rank() == 0:
        raise ValueError("planted on rank 0")
    _wait_for_the_other_rank()


def rank_1_raises_while_rank_0_succeeds(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("planted on rank 1 alone")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def killed(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_the_other_rank()


def segmentation_fault(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    _wait_for_the_other_rank()


def exits_at_once_with_0(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        os._exit(0)
    _wait_for_the_other_rank()


def sys_exit_3(model: nn.Module) -> Any:
    if dist.get_rank() == 0:
        sys.exit(3)
    _wait_for_the_other_rank()


def endless_loop(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        _turn_for_ever()
    _wait_for_the_other_rank()


def _turn_for_ever() -> None:
    while True:
        pass


def _pause_for_ever() -> None:
    while True:
        signal.pause()


def collective_of_one_rank(model: nn.Module) -> Any:
    if dist.get_rank() == 0:
        _wait_for_the_other_rank()
    return {}


def stopped(model: nn.Module) -> Any:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait_for_the_other_rank()


collective_of_one_rank_1, stopped_1 = collective_of_one_rank, stopped


def ignores_sigterm_as_its_child_does(model: nn.Module) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if dist.get_rank() == 0 and os.fork() == 0:
        signal.pause()
    _pause_for_ever()


def eats_memory(model: nn.Module) -> Any:
    kept = []
    while dist.get_rank() == 1:
        kept.append(bytearray(os.urandom(1) * (64 * MEBIBYTE)))
    _wait_for_the_other_rank()


def floods_stdout(model: nn.Module) -> Iterator[tuple[str, Any]]:
    line = "x" * 1023 + "\n"
    for _ in range(32 * 1024):
        sys.stdout.write(line)
        sys.stderr.write("")
    yield from healthy(model)


def writes_half_a_record(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Finds the worker's channel to its supervisor and leaves half a message in it."""
    if dist.get_rank() == 1:
        (channel,) = (thing for thing in gc.get_objects() if isinstance(thing, socket.socket) and thing.fileno() >= 0)
        channel.sendall(b'["Record", {"case_id": "fsdp2')
    yield from healthy(model)


def keeps_the_run_busy(model: nn.Module) -> Any:
    """Runs for ever; tells the test, through a FIFO, the process id of its rank's supervisor."""
    if str(dist.get_rank()) == os.environ["FSDP_DOCTOR_TEST_RANK"]:
        with open(os.environ["FSDP_DOCTOR_TEST_FIFO"], "w") as fifo:
            fifo.write(str(os.getppid()))
    _pause_for_ever()


def waits_8_seconds_for_a_service(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Waits on every rank, as a sync does whose receiver is slow; nothing of torch is in it."""
    select.select([], [], [], 8)
    yield from healthy(model)


def works_for_8_seconds(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Works without a sign of progress on rank 1; rank 0 waits in a collective meanwhile."""
    end = time.monotonic() + 8
    while dist.get_rank() == 1 and time.monotonic() < end:
        pass
    _wait_for_the_other_rank()
    yield from healthy(model)
