"""Helpers for benchmarks with several ranks: a rank's device and process group, and a directory for all ranks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "emulated": "cpu:gloo,emulated:emulated"}


def join_group(device: str) -> None:
    """Sets this rank's device and makes the default process group.

    device: a key of BACKENDS.
    """
    if device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401, which registers the device
    if device != "cpu":
        torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device])


@contextlib.contextmanager
def make_shared_directory(parent: str | None) -> Iterator[pathlib.Path]:
    """Makes a directory for all ranks, which rank 0 removes when all ranks have left the block."""
    name = [tempfile.mkdtemp(dir=parent) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield pathlib.Path(name[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])
