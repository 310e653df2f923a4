"""This rank's shards, as bytes that copies may fill in any pieces."""

from __future__ import annotations

import torch

from fsdp_doctor.extract.host_copies import flat_bytes
from fsdp_doctor.load.targets import Target


class Destination:
    """Where this rank's part of a tensor goes: the shard itself, or what is copied there when it is complete."""

    def __init__(self, target: Target) -> None:
        self._shard = target.shard()
        self._filled = self._shard
        if not self._shard.is_contiguous():
            self._filled = torch.empty(self._shard.shape, dtype=self._shard.dtype, device=self._shard.device)
        self.memory = flat_bytes(self._filled)

    @property
    def is_shard(self) -> bool:
        return self._filled is self._shard

    def complete(self) -> None:
        """On the stream that has filled it, with the host through with it."""
        if not self.is_shard:
            self._shard.copy_(self._filled)
