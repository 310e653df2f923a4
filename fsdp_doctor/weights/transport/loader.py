"""Brings pieces of shards into device memory, from the host or the device, and casts and merges them on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.host_copies import HostCopies, InMemory
from fsdp_doctor.weights.transport.streams import Streams

_HALF_BYTES = 12 << 20
CAST_BYTES = 2 * _HALF_BYTES
_ALIGNMENT = 64


@dataclass(slots=True, eq=False)
class Piece:
    """Part of a shard, 1-D, with its place.

    target: 1-D memory on the device, in the dtype that is gathered.
    source: the part in the shard, of the same length, on any device.
    name: the name of the tensor to which the part belongs.
    start: the index of the part's first element in the flattened tensor.
    """

    target: torch.Tensor
    source: torch.Tensor
    name: str
    start: int


class _Copies:
    """Copies that are made in one stream."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.nbytes = 0

    def add(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.targets += targets
        self.sources += sources
        self.nbytes += sum(source.nbytes for source in sources)


class CastBuffer:
    """Device memory in two halves for pieces to be cast or merged: one half is loaded while the other is cast.

    turn: the number of the half that comes next.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._halves: list[torch.Tensor] = []
        self._cast: list[Any] = [None, None]
        self.turn = 0

    def reserve_half(self, turn: int) -> torch.Tensor:
        """Returns the next half. Later loads on the loading stream ``turn`` wait until the half's earlier contents were
        cast.
        """
        if not self._halves:
            self._halves = [torch.empty(_HALF_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
            self._streams.begin_loading()
        self._streams.load_after(self._cast[self.turn], turn)
        return self._halves[self.turn]

    def note_cast(self) -> None:
        """Notes that the cast of the current half was launched, and switches to the other half."""
        self._cast[self.turn] = self._streams.cast()
        self.turn = 1 - self.turn


class Loader:
    """Loader of one bucket's pieces: call ``begin``, then ``finish``."""

    def __init__(self, device: torch.device, streams: Streams, cast_buffer: CastBuffer, copies: HostCopies) -> None:
        self._device = device
        self._streams = streams
        self._cast_buffer = cast_buffer
        self._copies = copies
        self._to_cast: list[Piece] = []
        self._launched: tuple[_Copies, ...] = ()
        # Targets that are yet to be loaded.
        self._missing: list[torch.Tensor] = []
        self._submitted = 0
        self.is_reading = False

    def begin(
        self,
        pieces: Iterable[Piece],
        merged: Collection[str],
        copies: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = (),
    ) -> None:
        """Launches the copies that can be launched now, after all work in the caller's stream.

        Does not wait for the device. Threads begin to read pageable memory. The sources are kept as long as the loader;
        a shard that is not contiguous is first copied on the caller's stream.

        merged: the tensors to which deltas will be added.
        copies: (targets, sources) of the same shapes and dtypes, all on the device.
        """
        turns = _Copies(), _Copies()
        pageable: list[Piece] = []
        for targets, sources in copies:
            turns[0].add(targets, sources)
        pieces = list(pieces)
        self._missing = [*turns[0].targets, *(piece.target for piece in pieces)]
        for piece in pieces:
            on_host = piece.source.device != self._device
            if piece.name in merged or (on_host and piece.source.dtype != piece.target.dtype):
                self._to_cast.append(piece)
            elif on_host and _is_pageable(piece.source):
                pageable.append(piece)
            else:
                fewer = turns[1] if on_host and turns[1].nbytes < turns[0].nbytes else turns[0]
                fewer.add([piece.target], [piece.source])
        self._streams.begin_loading()
        self._launched = turns
        for turn, launched in enumerate(turns):
            if launched.targets:
                with self._streams.use_loading_stream(turn):
                    private.copy_all(launched.targets, launched.sources, non_blocking=True)
        self._missing = [piece.target for piece in (*pageable, *self._to_cast)]
        for piece in pageable:
            self._copy(piece.target, piece.source)
        self.is_reading = bool(pageable)
        if pageable:
            self._submitted = self._copies.submit()

    def finish(self, deltas: Mapping[str, list[Delta]]) -> None:
        """Launches the loads, casts and merges of the remaining pieces. When the streams have done them, all targets
        are filled.

        deltas: the deltas to add to each tensor, with unsharded factors on the device.
        """
        self._copies.flush(self._submitted)
        self._missing = [piece.target for piece in self._to_cast]
        batch: list[Piece] = []
        batch_bytes = 0
        for piece in (part for whole in self._to_cast for part in _split(whole)):
            nbytes = _pad(piece.source.nbytes)
            if batch_bytes + nbytes > _HALF_BYTES:
                self._cast_batch(batch, deltas)
                batch, batch_bytes = [], 0
            batch.append(piece)
            batch_bytes += nbytes
        self._cast_batch(batch, deltas)
        self._missing = []

    def spoil(self) -> None:
        """Writes NaN or 0 into the targets that were not loaded, after ``begin`` or ``finish`` has failed.

        It needs no memory.
        """
        with self._streams.use_casting_stream():
            for target in self._missing:
                target.fill_(torch.nan if target.is_floating_point() or target.is_complex() else 0)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.copy(InMemory(source.view(torch.uint8)), target.view(torch.uint8))

    def _cast_batch(self, pieces: list[Piece], deltas: Mapping[str, list[Delta]]) -> None:
        if not pieces:
            return
        pageable = [_is_pageable(piece.source) for piece in pieces]
        # What threads read is loaded in turn 0.
        turn = 0 if any(pageable) else self._cast_buffer.turn
        memory = self._cast_buffer.reserve_half(turn)
        sizes = [_pad(piece.source.nbytes) for piece in pieces]
        loaded = [
            part[: piece.source.nbytes].view(piece.source.dtype)
            for part, piece in zip(memory[: sum(sizes)].split(sizes), pieces, strict=True)
        ]
        for target, piece, is_pageable in zip(loaded, pieces, pageable, strict=True):
            if is_pageable:
                self._copy(target, piece.source)
        if any(pageable):
            self._copies.flush()
        copied = [index for index, is_pageable in enumerate(pageable) if not is_pageable]
        with self._streams.use_loading_stream(turn):
            private.copy_all([loaded[i] for i in copied], [pieces[i].source for i in copied], non_blocking=True)
        with self._streams.use_casting_stream():
            merged = [
                _merge(values, piece, deltas) if piece.name in deltas else values
                for values, piece in zip(loaded, pieces, strict=True)
            ]
            private.copy_all([piece.target for piece in pieces], merged, non_blocking=True)
        self._cast_buffer.note_cast()


def _merge(values: torch.Tensor, piece: Piece, deltas: Mapping[str, list[Delta]]) -> torch.Tensor:
    for delta in deltas[piece.name]:
        values = values + delta.compute_part(piece.start, values.numel())
    return values


def _is_pageable(source: torch.Tensor) -> bool:
    return source.device.type == "cpu" and source.numel() > 0 and not source.is_pinned()


def _split(piece: Piece) -> Iterable[Piece]:
    longest = _HALF_BYTES // piece.source.element_size()
    if piece.source.numel() <= longest:
        return [piece]
    return [
        Piece(target, source, piece.name, piece.start + index * longest)
        for index, (target, source) in enumerate(
            zip(piece.target.split(longest), piece.source.split(longest), strict=True)
        )
    ]


def _pad(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
