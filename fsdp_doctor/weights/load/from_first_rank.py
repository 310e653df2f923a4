"""Load for which only rank 0 has the full tensors: rank 0 sends each rank the bytes of its part, bucket by bucket.

While one bucket is sent, the next is read. A bucket has a lane for each rank that receives anything; a tensor that does
not fit into the rest of the lanes continues in the next bucket. Rank 0 writes its own part directly. Ranks that hold
the same part pass it on to each other.

After the ranks have agreed to a bucket, and until its collectives are launched, nothing may fail on only one rank. All
memory for the buckets is therefore allocated in advance: rank 0 announces the length of a lane, and before the first
bucket each rank allocates the memory of two buckets, or of a single bucket if this is enough. An error on a rank after
the collectives reaches the other ranks at the next agreement.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.load.layouts import Layout
from fsdp_doctor.weights.load.portions import Destination, LocalParts, make_portion
from fsdp_doctor.weights.load.source import Value
from fsdp_doctor.weights.load.targets import ModelPlace, Target
from fsdp_doctor.weights.transport.host_copies import HostCopies, Portion
from fsdp_doctor.weights.transport.streams import Streams

_ALIGNMENT = 64
# Fewer bytes at the end of a lane are left empty rather than filled with a part of a tensor.
_LEAST_PIECE = 1 << 16
_MOST_PENDING = 2


@dataclass(frozen=True)
class _Piece:
    """Piece of the target number ``index``: at most ``length`` bytes of each rank's part, from the byte
    ``start`` on.
    """

    index: int
    start: int
    length: int


@dataclass
class _Memory:
    """Device memory of one bucket.

    received: bytes from rank 0.
    passed: bytes from another rank that has the same part.
    lanes: on rank 0, the bytes for each rank.
    joined: on rank 0, all lanes one after another, if there are several.
    """

    received: torch.Tensor
    passed: torch.Tensor
    lanes: dict[int, torch.Tensor]
    joined: torch.Tensor


@dataclass
class _Bucket:
    """Bucket that rank 0 fills.

    used: the number of bytes in each rank's lane.
    """

    memory: _Memory
    used: dict[int, int]
    pieces: list[_Piece] = field(default_factory=list)


@dataclass
class _Pending:
    """Launched bucket, whose memory the device uses until the event ``done``."""

    done: Any
    memory: _Memory


class FromFirstRank:
    """Transfer of full tensors from rank 0 into the shards of all ranks.

    agree: a function that waits until every rank has reached the next bucket, and returns rank 0's argument.
    """

    def __init__(
        self,
        place: ModelPlace,
        targets: Sequence[Target],
        bucket_bytes: int,
        agree: Callable[[str], str],
        copies: HostCopies,
        streams: Streams,
    ) -> None:
        self._targets, self._agree = targets, agree
        self._copies, self._streams = copies, streams
        self._bucket_bytes = bucket_bytes
        self._device, self._group, self._first = place.device, place.group, place.first
        self._rank = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(self._group)
        self._receivers = self._list_receiving_ranks() if self._rank == self._first else []
        self._lane_bytes = 0
        self._nothing = self._empty(0)
        self._free: list[_Memory] = []
        self._pending: collections.deque[_Pending] = collections.deque()
        self._destinations: dict[int, Destination] = {}

    def prepare(self) -> None:
        """Allocates the memory of all buckets.

        Every rank must call it; afterwards the ranks must agree that no rank has failed.
        """
        self._lane_bytes, count = json.loads(self._agree(json.dumps(self._plan_lanes())))
        self._free = [self._allocate() for _ in range(count)]

    def send(self, values: Iterable[tuple[int, Value]]) -> None:
        """Sends each tensor's parts to the ranks that hold them. Only rank 0 calls it.

        values: pairs of the index of a target and its full tensor.
        """
        own_parts = LocalParts(self._copies, self._streams)
        bucket = self._make_bucket()
        for index, value in values:
            target = self._targets[index]
            if not target.layout.replicas:
                own_parts.write(target, value)
            parts = {
                rank: make_portion(value, target.layout, target.layout.compute_part(target.shape, rank), target.dtype)
                for rank in target.layout.owners
                if target.layout.replicas or rank != self._rank
            }
            longest = max((part.nbytes for part in parts.values()), default=0)
            start = 0
            # At least one piece: a rank whose part is empty has to count the tensor.
            while start < longest or not start:
                if self._count_room(bucket) < min(longest - start, _LEAST_PIECE):
                    self._launch(bucket)
                    bucket = self._make_bucket()
                piece = _Piece(index, start, max(self._count_room(bucket), 1))
                self._fill(bucket, piece, parts)
                start += piece.length
        if bucket.pieces:
            self._launch(bucket)

    def receive(self, count_written: Callable[[int], None]) -> str:
        """Receives buckets until rank 0 has sent everything, and returns rank 0's last message. All ranks but rank 0
        call it.
        """
        while (word := self._agree("")).startswith("["):
            pieces = [_Piece(*piece) for piece in json.loads(word)]
            self._transfer(pieces, self._take_memory(), self._nothing)
            count_written(sum(not piece.start for piece in pieces))
        return word

    def close(self) -> None:
        """Waits until every bucket has been written."""
        while self._pending:
            self._retire()

    def _list_receiving_ranks(self) -> list[int]:
        """Lists the ranks to which rank 0 sends anything, which may include rank 0."""
        layouts = {id(target.layout): target.layout for target in self._targets}.values()
        receivers = {r for layout in layouts for r in layout.owners if layout.replicas or r != self._rank}
        return [rank for rank in self._ranks if rank in receivers]

    def _plan_lanes(self) -> tuple[int, int]:
        """Returns (bytes of a lane, number of buckets at once). Only rank 0's result is used."""
        lanes = len(self._receivers)
        # Several lanes are joined before they are sent, and rank 0 also receives its own lane.
        copies = 1 + (lanes > 1) + (self._rank in self._receivers)
        lane_bytes = self._bucket_bytes // (copies * max(lanes, 1)) // _ALIGNMENT * _ALIGNMENT
        alike = collections.Counter((t.layout, t.shape, t.dtype.itemsize) for t in self._targets)
        in_all = dict.fromkeys(self._receivers, 0)
        for (layout, shape, itemsize), count in alike.items():
            for rank in set(layout.owners) & in_all.keys():
                if layout.replicas or rank != self._rank:
                    in_all[rank] += count * _align(layout.compute_part(shape, rank).shape.numel() * itemsize)
        longest = max(in_all.values(), default=0)
        return max(min(lane_bytes, longest), _ALIGNMENT), 1 if longest <= lane_bytes else _MOST_PENDING

    def _allocate(self) -> _Memory:
        layouts = [target.layout for target in self._targets]
        is_sent = any(self._rank in layout.owners and self._is_sent(layout) for layout in layouts)
        # At most a lane from each group of owners that passes on to this rank.
        num_passed = len({layout.owners for layout in layouts if self._rank not in layout.owners})
        num_lanes = len(self._receivers)
        lanes = self._empty(self._lane_bytes * num_lanes).split(self._lane_bytes)
        return _Memory(
            received=self._empty(self._lane_bytes * is_sent),
            passed=self._empty(self._lane_bytes * num_passed),
            lanes=dict(zip(self._receivers, lanes, strict=False)),
            joined=self._empty(self._lane_bytes * num_lanes * (num_lanes > 1)),
        )

    def _make_bucket(self) -> _Bucket:
        return _Bucket(self._take_memory(), dict.fromkeys(self._receivers, 0))

    def _count_room(self, bucket: _Bucket) -> int:
        return (self._lane_bytes if bucket.used else 0) - max(bucket.used.values(), default=0)

    def _fill(self, bucket: _Bucket, piece: _Piece, parts: dict[int, Portion]) -> None:
        # After what the caller's stream does with the memory, and makes the values with.
        self._streams.begin_loading()
        for rank, part in parts.items():
            if (nbytes := min(part.nbytes - piece.start, piece.length)) > 0:
                begin = bucket.used[rank]
                self._copies.copy(part, bucket.memory.lanes[rank][begin : begin + nbytes], piece.start)
                bucket.used[rank] = begin + _align(nbytes)
        bucket.pieces.append(piece)

    def _launch(self, bucket: _Bucket) -> None:
        self._copies.flush()
        lanes = [lane[: bucket.used[rank]] for rank, lane in bucket.memory.lanes.items()]
        with self._streams.use_gathering_stream():
            if len(lanes) > 1:
                outgoing = torch.cat(lanes, out=bucket.memory.joined[: sum(bucket.used.values())])
            else:
                outgoing = lanes[0] if lanes else self._nothing
        self._agree(json.dumps([[piece.index, piece.start, piece.length] for piece in bucket.pieces]))
        self._transfer(bucket.pieces, bucket.memory, outgoing, bucket.used)

    def _transfer(
        self,
        pieces: Sequence[_Piece],
        memory: _Memory,
        outgoing: torch.Tensor,
        used: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Moves the bytes in rank 0's lanes to the ranks to which they belong. All ranks must call it together."""
        # The bytes of this rank's part that are in each piece.
        sizes = {
            piece: max(min(self._count_part_bytes(piece) - piece.start, piece.length), 0)
            for piece in pieces
            if self._is_sent(self._choose_layout(piece))
        }
        mine = [piece for piece, nbytes in sizes.items() if nbytes or not piece.start]
        sent = [piece for piece in mine if self._rank in self._choose_layout(piece).owners]
        passed = [piece for piece in mine if self._rank not in self._choose_layout(piece).owners]
        arrived = _divide(memory.received, sent, sizes) | _divide(memory.passed, passed, sizes)
        incoming = sum(_align(sizes[piece]) for piece in sent)
        self._streams.begin_loading()
        with self._streams.use_gathering_stream():
            dist.all_to_all_single(
                memory.received[:incoming],
                outgoing,
                [incoming if rank == self._first else 0 for rank in self._ranks],
                [used.get(rank, 0) for rank in self._ranks],
                group=self._group,
            )
            for piece in mine:
                for replicas in self._choose_layout(piece).replicas if sizes[piece] else ():
                    dist.broadcast(arrived[piece], replicas.source, group=replicas.group or self._group)
        self._pending.append(_Pending(self._streams.record_gathering(), memory))
        self._write(arrived)

    def _write(self, arrived: Mapping[_Piece, torch.Tensor]) -> None:
        """Copies the received bytes into the shards; a shard on the meta device is given memory only now."""
        targets = [
            self._choose_destination(piece).memory[piece.start :][: part.numel()] for piece, part in arrived.items()
        ]
        self._streams.begin_loading()
        with self._streams.use_gathering_stream():
            private.copy_all(targets, list(arrived.values()), non_blocking=True)
        self._pending[-1].done = self._streams.record_gathering()
        for piece in arrived:
            if piece.start + piece.length >= self._count_part_bytes(piece):
                destination = self._destinations.pop(piece.index)
                if not destination.is_shard:
                    self.close()
                    destination.complete()

    def _choose_layout(self, piece: _Piece) -> Layout:
        return self._targets[piece.index].layout

    def _is_sent(self, layout: Layout) -> bool:
        """Returns whether this rank gets its part through buckets.

        Rank 0 writes its own part directly unless it passes the part on to others.
        """
        return bool(layout.replicas) or self._rank != self._first

    def _choose_destination(self, piece: _Piece) -> Destination:
        if piece.index not in self._destinations:
            self._destinations[piece.index] = Destination(self._targets[piece.index])
        return self._destinations[piece.index]

    def _count_part_bytes(self, piece: _Piece) -> int:
        target = self._targets[piece.index]
        return target.layout.compute_part(target.shape, self._rank).shape.numel() * target.dtype.itemsize

    def _take_memory(self) -> _Memory:
        while not self._free:
            self._retire()
        return self._free.pop()

    def _retire(self) -> None:
        pending = self._pending.popleft()
        if pending.done is not None:
            pending.done.synchronize()
            self._streams.wait(pending.done)
        self._free.append(pending.memory)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _divide(memory: torch.Tensor, pieces: Sequence[_Piece], sizes: Mapping[_Piece, int]) -> dict[_Piece, torch.Tensor]:
    """Returns, for each piece, the part of ``memory`` in which its bytes have arrived."""
    lengths = [_align(sizes[piece]) for piece in pieces]
    parts = memory[: sum(lengths)].split(lengths) if lengths else ()
    return {piece: part[: sizes[piece]] for piece, part in zip(pieces, parts, strict=True)}
