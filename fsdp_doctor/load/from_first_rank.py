"""Where rank 0 alone has the full tensors: it sends each rank the bytes of its own part, bucket by bucket.

While one bucket is on its way the next is read. A bucket has a lane for each rank that is sent something; a tensor
that is longer than what is left of the lanes goes on in the next bucket. Rank 0's own part goes where it belongs at
once. Ranks that hold the same part get it from one another.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
class _Bucket:
    """lanes: by rank, its bytes; used: how many are filled."""

    lanes: dict[int, torch.Tensor]
    lane_bytes: int
    used: dict[int, int]
    pieces: list[_Piece] = field(default_factory=list)

    def room(self) -> int:
        return self.lane_bytes - max(self.used.values(), default=0)


@dataclass
class _Pending:
    """What was launched, and the memory that the device uses until ``done``."""

    done: Any
    memory: list[torch.Tensor]


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
        assert model.group is not None
        self._group = model.group
        self._ranks = dist.get_process_group_ranks(model.group)
        self._bucket_bytes = bucket_bytes
        self._most_bytes = sum(_aligned(target.shape.numel() * target.dtype.itemsize) for target in targets)
        self._pending: collections.deque[_Pending] = collections.deque()
        self._destinations: dict[int, Destination] = {}

    def send(self, items: Iterable[tuple[int, Value]]) -> None:
        """On rank 0: (place of the target, full tensor)."""
        own = OwnParts(self._copies, self._streams)
        receivers = self._receivers()
        bucket = self._new_bucket(receivers)
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
                    bucket = self._new_bucket(receivers)
                piece = _Piece(place, start, max(bucket.room(), 1))
                self._load(bucket, piece, parts)
                start += piece.length
        if bucket.pieces:
            self._launch(bucket)

    def receive(self, wrote: Callable[[int], None]) -> str:
        """On the other ranks, until rank 0 has sent all; returns what it says then. wrote: told how many tensors."""
        while (word := self._agree("")).startswith("["):
            self._make_room()
            pieces = [_Piece(*piece) for piece in json.loads(word)]
            self._transfer(pieces, None)
            wrote(sum(not piece.start for piece in pieces))
        return word

    def finish(self) -> None:
        while self._pending:
            self._retire()

    def _receivers(self) -> list[int]:
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

    def _new_bucket(self, receivers: Sequence[int]) -> _Bucket:
        self._make_room()
        # Several lanes are joined before they are sent, and what rank 0 sends to itself it receives.
        copies = 1 + (len(receivers) > 1) + (self._rank in receivers)
        lane_bytes = self._bucket_bytes // (copies * max(len(receivers), 1)) // _ALIGNMENT * _ALIGNMENT
        lane_bytes = max(min(lane_bytes, self._most_bytes), _ALIGNMENT)
        memory = torch.empty(len(receivers), lane_bytes, dtype=torch.uint8, device=self._model.device)
        return _Bucket(dict(zip(receivers, memory, strict=True)), lane_bytes, dict.fromkeys(receivers, 0))

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
        self._agree(json.dumps([[piece.place, piece.start, piece.length] for piece in bucket.pieces]))
        self._transfer(bucket.pieces, bucket)

    @torch.no_grad()
    def _transfer(self, pieces: Sequence[_Piece], bucket: _Bucket | None) -> None:
        """All ranks at once: what rank 0 has in its lanes goes to where it belongs."""
        sizes = {piece: self._nbytes(piece) for piece in pieces}
        own = [piece for piece in pieces if self._is_sent(piece) and (sizes[piece] or not piece.start)]
        sent = [piece for piece in own if self._rank in self._layout(piece).owners]
        passed = [piece for piece in own if self._rank not in self._layout(piece).owners]
        received, copied = (self._empty(sum(_aligned(sizes[piece]) for piece in some)) for some in (sent, passed))
        places = {
            piece: part[: sizes[piece]]
            for memory, some in ((received, sent), (copied, passed))
            for piece, part in zip(some, memory.split([_aligned(sizes[piece]) for piece in some]), strict=True)
        }
        targets = [self._destination(piece) for piece in own]
        self._streams.begin_loading()
        with self._streams.gathering():
            lanes = [lane[: bucket.used[rank]] for rank, lane in bucket.lanes.items()] if bucket else []
            outgoing = lanes[0] if len(lanes) == 1 else torch.cat(lanes) if lanes else self._empty(0)
            dist.all_to_all_single(
                received,
                outgoing,
                [received.numel() if rank == self._model.first else 0 for rank in self._ranks],
                [bucket.used.get(rank, 0) if bucket else 0 for rank in self._ranks],
                group=self._group,
            )
            for piece in own:
                for group in self._layout(piece).replicas if sizes[piece] else ():
                    dist.broadcast(places[piece], group.source, group=group.group)
            private.copy_all(
                [target.memory[p.start : p.start + sizes[p]] for target, p in zip(targets, own, strict=True)],
                [places[p] for p in own],
                non_blocking=True,
            )
        memory = [*(bucket.lanes.values() if bucket else ()), outgoing, received, copied]
        self._pending.append(_Pending(self._streams.gathered(), memory))
        self._complete(own)

    def _layout(self, piece: _Piece) -> Layout:
        return self._targets[piece.place].layout

    def _is_sent(self, piece: _Piece) -> bool:
        """Whether this rank gets its part in buckets: all but what rank 0 has put where it belongs already."""
        return bool(self._layout(piece).replicas) or self._rank != self._model.first

    def _destination(self, piece: _Piece) -> Destination:
        if piece.place not in self._destinations:
            self._destinations[piece.place] = Destination(self._targets[piece.place])
        return self._destinations[piece.place]

    def _complete(self, own: Sequence[_Piece]) -> None:
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

    def _make_room(self) -> None:
        while len(self._pending) >= _MOST_PENDING:
            self._retire()

    def _retire(self) -> None:
        pending = self._pending.popleft()
        if pending.done is not None:
            pending.done.synchronize()
            self._streams.wait(pending.done)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._model.device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
