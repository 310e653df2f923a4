"""What a path yields, entry by entry: what it is, where it lies, and its data on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Partial, Placement

from fsdp_doctor.extract import LocalShard, ShardPlace
from fsdp_doctor.extract.dtypes import dtype_name
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.shards import HeldPart, held_part

YieldedForm: TypeAlias = Literal["tensor", "dtensor", "sharded tensor", "local shard", "info", "other"]


@dataclass(frozen=True, kw_only=True)
class YieldedEntry:
    """One yielded entry, read: what it is, where it lies, and its data on the host.

    shape: of the whole tensor. data: of a sharded entry, this rank's part; None of what is no tensor.
    type_name: of what is neither a tensor nor its shape and dtype.
    local_device, mesh, placements: of a DTensor, where its local part lies, the ranks of its mesh, and its placements.
    own_part, num_elements: of a ShardedTensor, which part this rank's shard is, and the elements of all shards.
    place: of a local shard.
    """

    name: str
    form: YieldedForm
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    data: torch.Tensor | None = None
    type_name: str = ""
    local_device: torch.device | None = None
    mesh: torch.Tensor | None = None
    placements: tuple[Placement, ...] = ()
    own_part: HeldPart | None = None
    num_elements: int = 0
    place: ShardPlace | None = None

    @property
    def is_sharded(self) -> bool:
        return self.form in ("dtensor", "sharded tensor")

    @property
    def form_in_words(self) -> str:
        return self.type_name or self.form

    @property
    def kind(self) -> str:
        """Form, dtype and kind of device: what two runs on different devices must have in common."""
        place = self.device.type
        if self.local_device is not None and self.local_device.type != place:
            place += f" with its local part on {self.local_device.type}"
        return f"{self.form_in_words} {dtype_name(self.dtype)} {place}"

    def why_no_shard(self, shard_group_of_one: bool = False) -> str:
        """Why the parts of a sharded entry are not those of one tensor; empty if they are.

        shard_group_of_one: whether a rank's part is the whole, which may also be said by replicating it.
        """
        if any(isinstance(placement, Partial) for placement in self.placements):
            return f"placed as {_in_words(self.placements)}, so what a rank holds is a summand and not a shard"
        if self.mesh is not None:
            whole = shard_group_of_one or self.mesh.numel() == 1
            divided = whole or any(map(private.num_interleaved, self.placements))
        else:
            divided = self.num_elements == self.shape.numel()
        return "" if divided else "its shards do not make up the whole tensor once"

    def part(self, rank: int) -> HeldPart:
        """Which part of the tensor the rank's data is. Raises LayoutError for placements that are not understood."""
        if self.mesh is not None:
            return held_part(rank, self.shape, self.mesh, self.placements)
        return self.own_part or HeldPart.of_slices(tuple(slice(0, 0) for _ in self.shape))


def read(name: str, value: Any) -> YieldedEntry:
    """Looks at one entry and brings its data to the host. An exception here is the path's."""
    if isinstance(value, LocalShard):
        return _read_local_shard(name, value)
    if isinstance(value, tuple):
        shape, dtype = value
        return YieldedEntry(name=name, form="info", shape=shape, dtype=dtype, device=torch.device("meta"))
    if isinstance(value, DTensor):
        local = private.local_tensor(value)
        return YieldedEntry(
            name=name,
            form="dtensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=_on_host(local),
            local_device=local.device,
            mesh=value.device_mesh.mesh,
            placements=tuple(value.placements),
        )
    if private.is_sharded_tensor(value):
        return _read_sharded_tensor(name, value)
    if isinstance(value, torch.Tensor):
        return YieldedEntry(
            name=name,
            form="tensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=_on_host(value),
        )
    return YieldedEntry(
        name=name,
        form="other",
        type_name=type(value).__name__,
        shape=torch.Size(),
        dtype=torch.uint8,
        device=torch.device("meta"),
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its data; None on the meta device, where there is none."""
    return None if tensor.is_meta else tensor.detach().cpu()


def _read_local_shard(name: str, shard: LocalShard) -> YieldedEntry:
    return YieldedEntry(
        name=name,
        form="local shard",
        shape=shard.shape,
        dtype=shard.tensor.dtype,
        device=shard.tensor.device,
        data=_on_host(shard.tensor),
        place=shard.place,
    )


def _read_sharded_tensor(name: str, value: Any) -> YieldedEntry:
    shards = value.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    own_part = None
    if shards:
        metadata = shards[0].metadata
        begins_and_sizes = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        own_part = HeldPart.of_slices(tuple(slice(begin, begin + size) for begin, size in begins_and_sizes))
    return YieldedEntry(
        name=name,
        form="sharded tensor",
        shape=value.size(),
        dtype=value.dtype,
        device=local.device,
        data=_on_host(local),
        own_part=own_part,
        num_elements=sum(math.prod(shard.shard_sizes) for shard in value.metadata().shards_metadata),
    )


def is_on_host(value: Any) -> bool:
    """Whether it is a tensor whose data, or this rank's part of it, lies in host memory."""
    return isinstance(value, torch.Tensor) and private.local_tensor(value).device.type == "cpu"


def entries_of(result: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a path returned: a mapping, or anything that yields pairs.

    An entry is let go before the next one is asked for, so that what is streamed is not held twice.
    """
    if isinstance(result, Mapping):
        result = result.items()
    if not isinstance(result, Iterable):
        raise TypeError(f"a path returns a mapping or yields (name, tensor), not {type(result).__name__}")
    yield from map(_pair, result)


def _pair(item: Any) -> tuple[str, Any]:
    name, value = item
    if not isinstance(name, str):
        raise TypeError(f"a path yields (name, tensor) with a str for a name, not {type(name).__name__}")
    return name, value


def _in_words(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(repr, placements))
