"""Where rank 0 alone has the full tensors: it sends each rank the bytes of its own part, bucket by bucket.

While one bucket is on its way the next is read. A bucket has a lane for each rank that is sent something; a tensor
that is longer than what is left of the lanes goes on in the next bucket. Rank 0's own part goes where it belongs at
once. Ranks that hold the same part get it from one another.

Between the ranks' agreement to a bucket and its collectives nothing may fail on one rank alone, so all memory that
these take is taken before: rank 0 says how long a lane is, and each rank has room for what it gets of two buckets,
or of one if there are no more, before the first comes. What fails on one rank after its collectives is told at the
next agreement.
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

from fsdp_doctor.extract.host_copies import HostCopies, Portion
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.fsdp import private
from fsdp_doctor.load.destinations import Destination
from fsdp_doctor.load.given import Value
from fsdp_doctor.load.layouts import Layout
from fsdp_doctor.load.own_parts import OwnParts
from fsdp_doctor.load.portions import portion
from fsdp_doctor.load.targets import LoadedModel, Target

_ALIGNMENT = 64
# Fewer bytes at the end of a lane are left empty rather than filled with a part of a tensor.
_LEAST_PIECE = 1 << 16
_MOST_PENDING = 2


@dataclass(frozen=True)
class _Piece:
    """Of each rank's part of one tensor, the bytes from ``start`` on, at most ``length``."""

    place: int
    start: int
    length: int


@dataclass
class _Memory:
    """What one bucket takes of this rank's device: where it is received, and on rank 0 what is sent.

    received: what comes from rank 0, passed: what comes from another that has the same part. joined: the lanes one
    after another, where there are several.
    """

    received: torch.Tensor
    passed: torch.Tensor
    lanes: torch.Tensor
    joined: torch.Tensor


@dataclass
class _Bucket:
    """lanes: by rank, its bytes; used: how many are filled."""

    lanes: dict[int, torch.Tensor]
    lane_bytes: int
    used: dict[int, int]
    memory: _Memory
    pieces: list[_Piece] = field(default_factory=list)

    def room(self) -> int:
        return self.lane_bytes - max(self.used.values(), default=0)


@dataclass
class _Pending:
    """What was launched, and the memory that the device uses until ``done``."""

    done: Any
    memory: _Memory


class FromFirstRank:
    """agree: returns what rank 0 says with the next bucket, once every rank has come to it."""

    def __init__(
        self,
        model: LoadedModel,
        targets: Sequence[Target],
        bucket_bytes: int,
        agree: Callable[[str], str],
        copies: HostCopies,
        streams: Streams,
    ) -> None:
        self._model, self._targets, self._agree = model, targets, agree
        self._copies, self._streams = copies, streams
        self._rank = dist.get_rank()
        self._group = model.group
        self._ranks = dist.get_process_group_ranks(model.group)
        self._bucket_bytes = bucket_bytes
        self._kinds = collections.Counter((t.layout, t.shape, t.dtype.itemsize) for t in targets)
        self._receivers = self._receiving_ranks() if self._rank == model.first else []
        self._nothing = self._empty(0)
        self._free: list[_Memory] = []
        self._pending: collections.deque[_Pending] = collections.deque()
        self._destinations: dict[int, Destination] = {}

    def prepare(self) -> None:
        """Takes the memory for all buckets. Every rank must call it, and agree that all others could."""
        lane_bytes, count = json.loads(self._agree(json.dumps(self._lane_bytes())))
        self._free = [self._memory(lane_bytes) for _ in range(count)]

    def send(self, items: Iterable[tuple[int, Value]]) -> None:
        """On rank 0: (place of the target, full tensor)."""
        own = OwnParts(self._copies, self._streams)
        bucket = self._new_bucket()
        for place, value in items:
            target = self._targets[place]
            if not target.layout.replicas:
                own.write(target, value)
            parts = self._parts(target, value)
            longest = max((part.nbytes for part in parts.values()), default=0)
            start = 0
            # One piece at least: a rank whose part is empty has to know that it has come.
            while start < longest or not start:
                if bucket.room() < min(longest - start, _LEAST_PIECE):
                    self._launch(bucket)
                    bucket = self._new_bucket()
                piece = _Piece(place, start, max(bucket.room(), 1))
                self._load(bucket, piece, parts)
                start += piece.length
        if bucket.pieces:
            self._launch(bucket)

    def receive(self, wrote: Callable[[int], None]) -> str:
        """On the other ranks, until rank 0 has sent all; returns what it says then. wrote: told how many tensors."""
        while (word := self._agree("")).startswith("["):
            pieces = [_Piece(*piece) for piece in json.loads(word)]
            self._transfer(pieces, self._room(), self._nothing)
            wrote(sum(not piece.start for piece in pieces))
        return word

    def finish(self) -> None:
        while self._pending:
            self._retire()

    def _receiving_ranks(self) -> list[int]:
        """Those that get anything from rank 0, which may be itself."""
        found = dict.fromkeys(
            rank
            for layout in {id(target.layout): target.layout for target in self._targets}.values()
            for rank in layout.owners
            if layout.replicas or rank != self._rank
        )
        return [rank for rank in self._ranks if rank in found]

    def _parts(self, target: Target, value: Value) -> dict[int, Portion]:
        layout = target.layout
        return {
            rank: portion(value, layout, layout.part(target.shape, rank), target.dtype)
            for rank in layout.owners
            if layout.replicas or rank != self._rank
        }

    def _lane_bytes(self) -> tuple[int, int]:
        """(how long a lane is, in how many buckets at once), as rank 0 says."""
        lanes = len(self._receivers)
        # Several lanes are joined before they are sent, and what rank 0 sends to itself it receives.
        copies = 1 + (lanes > 1) + (self._rank in self._receivers)
        lane_bytes = self._bucket_bytes // (copies * max(lanes, 1)) // _ALIGNMENT * _ALIGNMENT
        longest = max(map(self._bytes_for, self._receivers), default=0)
        return max(min(lane_bytes, longest), _ALIGNMENT), 1 if longest <= lane_bytes else _MOST_PENDING

    def _bytes_for(self, rank: int) -> int:
        """What a lane would have to hold for all of a rank's parts."""
        return sum(
            count * _aligned(layout.part(shape, rank).shape.numel() * itemsize)
            for (layout, shape, itemsize), count in self._kinds.items()
            if rank in layout.owners and (layout.replicas or rank != self._rank)
        )

    def _memory(self, lane_bytes: int) -> _Memory:
        layouts = [target.layout for target in self._targets]
        is_sent = any(self._rank in layout.owners and self._is_sent(layout) for layout in layouts)
        # At most a lane of each of those from which it gets what is passed on.
        num_passed = len({layout.owners for layout in layouts if self._rank not in layout.owners})
        lanes = len(self._receivers)
        return _Memory(
            received=self._empty(lane_bytes * is_sent),
            passed=self._empty(lane_bytes * num_passed),
            lanes=self._empty(lane_bytes * lanes).view(lanes, -1) if lanes else self._nothing,
            joined=self._empty(lane_bytes * lanes * (lanes > 1)),
        )

    def _new_bucket(self) -> _Bucket:
        memory = self._room()
        lanes = dict(zip(self._receivers, memory.lanes, strict=True))
        return _Bucket(lanes, memory.lanes.shape[-1], dict.fromkeys(self._receivers, 0), memory)

    def _load(self, bucket: _Bucket, piece: _Piece, parts: dict[int, Portion]) -> None:
        # The memory is the caller's stream's, and so is what the values were made by.
        self._streams.begin_loading()
        for rank, part in parts.items():
            if (nbytes := min(part.nbytes - piece.start, piece.length)) > 0:
                begin = bucket.used[rank]
                self._copies.copy(part, bucket.lanes[rank][begin : begin + nbytes], piece.start)
                bucket.used[rank] = begin + _aligned(nbytes)
        bucket.pieces.append(piece)

    def _launch(self, bucket: _Bucket) -> None:
        self._copies.flush()
        lanes = [lane[: bucket.used[rank]] for rank, lane in bucket.lanes.items()]
        with self._streams.gathering():
            joined = bucket.memory.joined[: sum(bucket.used.values())]
            outgoing = torch.cat(lanes, out=joined) if len(lanes) > 1 else lanes[0]
        self._agree(json.dumps([[piece.place, piece.start, piece.length] for piece in bucket.pieces]))
        self._transfer(bucket.pieces, bucket.memory, outgoing, bucket.used)

    def _transfer(
        self,
        pieces: Sequence[_Piece],
        memory: _Memory,
        outgoing: torch.Tensor,
        used: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """All ranks at once: what rank 0 has in its lanes goes to where it belongs."""
        sizes = {piece: self._nbytes(piece) for piece in pieces if self._is_sent(self._layout(piece))}
        own = [piece for piece, nbytes in sizes.items() if nbytes or not piece.start]
        sent = [piece for piece in own if self._rank in self._layout(piece).owners]
        passed = [piece for piece in own if self._rank not in self._layout(piece).owners]
        places = _places(memory.received, sent, sizes) | _places(memory.passed, passed, sizes)
        incoming = sum(_aligned(sizes[piece]) for piece in sent)
        self._streams.begin_loading()
        with self._streams.gathering():
            dist.all_to_all_single(
                memory.received[:incoming],
                outgoing,
                [incoming if rank == self._model.first else 0 for rank in self._ranks],
                [used.get(rank, 0) for rank in self._ranks],
                group=self._group,
            )
            for piece in own:
                for replicas in self._layout(piece).replicas if sizes[piece] else ():
                    dist.broadcast(places[piece], replicas.source, group=replicas.group or self._group)
        self._pending.append(_Pending(self._streams.gathered(), memory))
        self._put(places)

    def _put(self, places: Mapping[_Piece, torch.Tensor]) -> None:
        """What has come goes to where it belongs; a shard may only now be given memory."""
        targets = [self._destination(piece).memory[piece.start :][: part.numel()] for piece, part in places.items()]
        self._streams.begin_loading()
        with self._streams.gathering():
            private.copy_all(targets, list(places.values()), non_blocking=True)
        self._pending[-1].done = self._streams.gathered()
        self._complete(places)

    def _layout(self, piece: _Piece) -> Layout:
        return self._targets[piece.place].layout

    def _is_sent(self, layout: Layout) -> bool:
        """Whether this rank gets its part in buckets: all but what rank 0 has put where it belongs already."""
        return bool(layout.replicas) or self._rank != self._model.first

    def _destination(self, piece: _Piece) -> Destination:
        if piece.place not in self._destinations:
            self._destinations[piece.place] = Destination(self._targets[piece.place])
        return self._destinations[piece.place]

    def _complete(self, own: Iterable[_Piece]) -> None:
        for piece in own:
            if piece.start + piece.length >= self._part_bytes(piece):
                destination = self._destinations.pop(piece.place, None)
                if destination is not None and not destination.is_shard:
                    self.finish()
                    destination.complete()

    def _part_bytes(self, piece: _Piece) -> int:
        target = self._targets[piece.place]
        return target.layout.part(target.shape, self._rank).shape.numel() * target.dtype.itemsize

    def _nbytes(self, piece: _Piece) -> int:
        """Of this rank's part."""
        return max(min(self._part_bytes(piece) - piece.start, piece.length), 0)

    def _room(self) -> _Memory:
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
        return torch.empty(nbytes, dtype=torch.uint8, device=self._model.device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(memory: torch.Tensor, pieces: Sequence[_Piece], sizes: Mapping[_Piece, int]) -> dict[_Piece, torch.Tensor]:
    """Where each lies in what has come."""
    lengths = [_aligned(sizes[piece]) for piece in pieces]
    parts = memory[: sum(lengths)].split(lengths) if lengths else ()
    return {piece: part[: sizes[piece]] for piece, part in zip(pieces, parts, strict=True)}
