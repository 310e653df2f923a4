"""Saves in the background on two ranks into a directory, and ends at a given point of the save."""

from __future__ import annotations

import os
import pathlib
import resource
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_NEVER = threading.Event()


class Store(dcp.FileSystemWriter):
    """A store that accepts no more data after the point ``end``, and reports when it has reached it."""

    def __init__(self, directory: pathlib.Path, end: str) -> None:
        super().__init__(directory)
        self._end = end
        self.reached = threading.Event()

    def write_data(self, *plan: Any) -> Any:
        self._stop_at("before the files")
        written = super().write_data(*plan)
        self._stop_at("before the metadata")
        return written

    def _stop_at(self, place: str) -> None:
        if place == self._end:
            self.reached.set()
            _NEVER.wait()


def main(directory: pathlib.Path, end: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    store = Store(directory, end)
    if end == "the store is full":
        # Python ignores SIGXFSZ, so that a write beyond the limit fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    saving: Any = dcp.async_save(get_model_state_dict(model), storage_writer=store)
    if end == "the store is full":
        os._exit(0 if isinstance(saving.exception(), dcp.api.CheckpointException) else 1)
    if end == "waited for":
        saving.result()
    else:
        store.reached.wait()
    # Ends like a job that is killed: without waiting for threads or for the interpreter's exit.
    os._exit(0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
