"""Brings pieces of shards into device memory: from the host or from the device, cast and merged on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.lora import Delta
from fsdp_doctor.extract.streams import Streams

_STAGING_BYTES = 64 << 20
_ALIGNMENT = 64


@dataclass(slots=True, eq=False)
class Piece:
    """A 1-D part of a shard and its place.

    target: 1-D on the device, in the dtype that is sent. source: as long, wherever the shard lies.
    name, start: of which tensor it is a part, and its first element in the flattened tensor.
    """

    target: torch.Tensor
    source: torch.Tensor
    name: str
    start: int


class Staging:
    """Device memory in which pieces lie that are yet to be cast or merged.

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
            self._halves = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._streams.load_after(self._cast[self._turn])
        return self._halves[self._turn]

    def done(self) -> None:
        """The half's cast is under way."""
        self._cast[self._turn] = self._streams.cast()
        self._turn = 1 - self._turn


class Loader:
    """deltas: what is to be added to which tensor, its adapters unsharded and on the device."""

    def __init__(
        self, device: torch.device, streams: Streams, staging: Staging, deltas: Mapping[str, list[Delta]]
    ) -> None:
        self._device = device
        self._streams = streams
        self._staging = staging
        self._deltas = deltas

    def load(self, pieces: Iterable[Piece]) -> None:
        """Fills every target. Nothing waits for the device; sources in pageable memory hold up the host."""
        here: list[Piece] = []
        from_host: list[Piece] = []
        staged: list[Piece] = []
        for piece in pieces:
            on_host = piece.source.device != self._device
            if piece.name in self._deltas or (on_host and piece.source.dtype != piece.target.dtype):
                staged.append(piece)
            else:
                (from_host if on_host else here).append(piece)
        with self._streams.loading():
            for batch in (from_host, here):
                _copy([piece.target for piece in batch], [piece.source for piece in batch])
        self._load_staged(staged)

    def _load_staged(self, pieces: list[Piece]) -> None:
        batch: list[Piece] = []
        held = 0
        for piece in (part for whole in pieces for part in _split(whole)):
            nbytes = _padded(piece.source.nbytes)
            if held + nbytes > _STAGING_BYTES:
                self._through_staging(batch)
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
        self._through_staging(batch)

    def _through_staging(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        memory = self._staging.half()
        sizes = [_padded(piece.source.nbytes) for piece in pieces]
        staged = [
            part[: piece.source.nbytes].view(piece.source.dtype)
            for part, piece in zip(memory[: sum(sizes)].split(sizes), pieces, strict=True)
        ]
        with self._streams.loading():
            _copy(staged, [piece.source for piece in pieces])
        with self._streams.casting():
            merged = [
                self._merged(values, piece) if piece.name in self._deltas else values
                for values, piece in zip(staged, pieces, strict=True)
            ]
            _copy([piece.target for piece in pieces], merged)
        self._staging.done()

    def _merged(self, values: torch.Tensor, piece: Piece) -> torch.Tensor:
        for delta in self._deltas[piece.name]:
            values = values + delta.part(piece.start, values.numel())
        return values


def _split(piece: Piece) -> Iterable[Piece]:
    longest = _STAGING_BYTES // piece.source.element_size()
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


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
