"""Brings pieces of shards into device memory: from the host or from the device, cast and merged on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.lora import Delta
from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.fsdp import private

_HALF_BYTES = 32 << 20
CAST_BYTES = 2 * _HALF_BYTES
_ALIGNMENT = 64


@dataclass(slots=True, eq=False)
class Piece:
    """A 1-D part of a shard and its place.

    target: 1-D on the device, in the dtype that is gathered. source: as long, wherever the shard lies.
    name, start: of which tensor it is a part, and its first element in the flattened tensor.
    """

    target: torch.Tensor
    source: torch.Tensor
    name: str
    start: int


class CastBuffer:
    """Device memory for pieces that are yet to be cast or merged.

    There are two halves: one is loaded while the other is cast.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._halves: list[torch.Tensor] = []
        self._cast: list[Any] = [None, None]
        self._turn = 0

    def half(self) -> torch.Tensor:
        """Bytes that may be loaded; what was in them has been cast by then."""
        if not self._halves:
            self._halves = [torch.empty(_HALF_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._streams.load_after(self._cast[self._turn])
        return self._halves[self._turn]

    def done(self) -> None:
        """The half's cast is under way."""
        self._cast[self._turn] = self._streams.cast()
        self._turn = 1 - self._turn


class Loader:
    """deltas: what is to be added to which tensor, its adapters unsharded and on the device."""

    def __init__(
        self, device: torch.device, streams: Streams, cast_buffer: CastBuffer, deltas: Mapping[str, list[Delta]]
    ) -> None:
        self._device = device
        self._streams = streams
        self._cast_buffer = cast_buffer
        self._deltas = deltas

    def load(self, pieces: Iterable[Piece]) -> None:
        """Fills every target. Nothing waits for the device; sources in pageable memory hold up the host."""
        here: list[Piece] = []
        from_host: list[Piece] = []
        to_cast: list[Piece] = []
        for piece in pieces:
            on_host = piece.source.device != self._device
            if piece.name in self._deltas or (on_host and piece.source.dtype != piece.target.dtype):
                to_cast.append(piece)
            else:
                (from_host if on_host else here).append(piece)
        with self._streams.loading():
            for batch in (from_host, here):
                private.copy_all(
                    [piece.target for piece in batch], [piece.source for piece in batch], non_blocking=True
                )
        self._load_and_cast(to_cast)

    def _load_and_cast(self, pieces: list[Piece]) -> None:
        batch: list[Piece] = []
        held = 0
        for piece in (part for whole in pieces for part in _split(whole)):
            nbytes = _padded(piece.source.nbytes)
            if held + nbytes > _HALF_BYTES:
                self._cast_batch(batch)
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
        self._cast_batch(batch)

    def _cast_batch(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        memory = self._cast_buffer.half()
        sizes = [_padded(piece.source.nbytes) for piece in pieces]
        loaded = [
            part[: piece.source.nbytes].view(piece.source.dtype)
            for part, piece in zip(memory[: sum(sizes)].split(sizes), pieces, strict=True)
        ]
        with self._streams.loading():
            private.copy_all(loaded, [piece.source for piece in pieces], non_blocking=True)
        with self._streams.casting():
            merged = [
                self._merged(values, piece) if piece.name in self._deltas else values
                for values, piece in zip(loaded, pieces, strict=True)
            ]
            private.copy_all([piece.target for piece in pieces], merged, non_blocking=True)
        self._cast_buffer.done()

    def _merged(self, values: torch.Tensor, piece: Piece) -> torch.Tensor:
        for delta in self._deltas[piece.name]:
            values = values + delta.part(piece.start, values.numel())
        return values


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


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
