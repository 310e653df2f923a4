"""What a test can know of the rank that it runs on."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """The default process group has been made, of all ranks, with a backend for the CPU and one for the device.

    device: the current one; ``cpu`` where there is no other. control: a gloo group of all ranks for what the test
    itself has to exchange. scratch: a directory that is there, of this test alone and the same on every rank;
    ``tmp_path`` is each rank's own.
    """

    # What differs between ranks is not shown, so that a failure which they share reads the same on all of them.
    rank: int = field(repr=False)
    world_size: int
    device: torch.device = field(repr=False)
    control: dist.ProcessGroup = field(repr=False)
    scratch: pathlib.Path = field(repr=False)

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh; of one dimension over all ranks where no shape is given. Every rank must call it."""
        return init_device_mesh(self.device.type, shape or (self.world_size,), mesh_dim_names=names)

    def barrier(self) -> None:
        """Returns when every rank has called it. Over gloo; what a device still has to do is not waited for."""
        dist.barrier(group=self.control)
