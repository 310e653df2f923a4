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

# Of memory for parts that are not read where they lie.
_MOST_EXTRA_BYTES = 64 << 20


class OwnParts:
    def __init__(self, copies: HostCopies, streams: Streams) -> None:
        self._rank = dist.get_rank()
        self._copies = copies
        self._streams = streams
        self._extra_bytes = 0

    def write(self, target: Target, value: Value) -> None:
        """Begins to; it is done after ``finish``. What is read from files is only noted down until then."""
        part = target.layout.part(target.shape, self._rank)
        source = portion(value, target.layout, part, target.dtype)
        destination = Destination(target)
        if isinstance(value, torch.Tensor):
            # After what has made it.
            self._streams.begin_loading()
        self._copies.copy(source, destination.memory)
        self._extra_bytes += source.extra_bytes
        if self._extra_bytes > _MOST_EXTRA_BYTES:
            self.finish()
        if not destination.is_shard:
            self.finish()
            destination.complete()

    def finish(self) -> None:
        # After what the shards' memory was used for before.
        self._streams.begin_loading()
        self._copies.finish()
        self._extra_bytes = 0
