"""Where this rank has, or can read, the full tensors itself: its own part is copied from there, and nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_doctor.extract.host_copies import HostCopies
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.load.destinations import Destination
from fsdp_doctor.load.given import Value
from fsdp_doctor.load.portions import portion
from fsdp_doctor.load.targets import Target


class OwnParts:
    def __init__(self, copies: HostCopies, streams: Streams) -> None:
        self._rank = dist.get_rank()
        self._copies = copies
        self._streams = streams

    @torch.no_grad()
    def write(self, target: Target, value: Value) -> None:
        """Begins to; it is done once the copies are finished."""
        part = target.layout.part(target.shape, self._rank)
        source = portion(value, target.layout, part, target.dtype)
        destination = Destination(target)
        # After what has made the value, and what the memory was used for before.
        self._streams.begin_loading()
        self._copies.copy(source, destination.memory)
        if not destination.is_shard:
            self._copies.finish()
            destination.complete()
