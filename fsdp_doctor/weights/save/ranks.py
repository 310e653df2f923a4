"""Ranks of a save: which take part, which rank writes tensors that several hold, and how the ranks end together."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate
from typing_extensions import assert_never

from fsdp_doctor.checkpoints.sums import LinearCrc, finish_crc
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.expert_groups import extend_mesh
from fsdp_doctor.weights.fsdp.reader import ModelContents
from fsdp_doctor.weights.load.targets import list_meshes
from fsdp_doctor.weights.save.directory import SaveDirectory, SaveError
from fsdp_doctor.weights.save.writing import Turn, Writer
from fsdp_doctor.weights.transport.agreement import Agreement, PlanMismatch, RankLeft, connect
from fsdp_doctor.weights.transport.sources import FlatUnit, Placed, Plain, Rows, Source, list_specs


@contextlib.contextmanager
def open_save(path: pathlib.Path, place: RankPlace) -> Iterator[tuple[Agreement, SaveDirectory]]:
    """Opens a directory to save to.

    An error in the block is reported to the other ranks. Raises SaveError if another rank fails.
    """
    agreement = Agreement(place.ranks, "save", speaker=place.ranks[0])
    store = connect(private.find_default_store()) if dist.is_initialized() else None
    try:
        with (
            contextlib.closing(SaveDirectory(path, place.ranks, place.rank, store)) as saving,
            agreement.announce_leaving(),
        ):
            try:
                yield agreement, saving
            except FileNotFoundError:
                if not saving.partial.exists():
                    # Another rank has left, and has removed it; this raises why.
                    agreement.proceed()
                raise
            agreement.end()
    except (RankLeft, PlanMismatch) as error:
        raise SaveError(str(error)) from None


@dataclass(frozen=True)
class RankPlace:
    """Place of this rank among the ranks of a save: the model's ranks, or all ranks for a model without shards."""

    contents: ModelContents
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def find(cls, contents: ModelContents) -> RankPlace:
        if not dist.is_initialized():
            return cls(contents, (0,), 0)
        return cls(contents, contents.ranks or tuple(range(dist.get_world_size())), dist.get_rank())

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def is_first(self) -> bool:
        return not self.index

    def list_turns(self, sources: Sequence[Source]) -> dict[str, Turn]:
        """Returns which chunks of each tensor this rank writes, by the tensor's first name.

        Raises SaveError if it is unknown which ranks have copies of a tensor.
        """
        on_meshes: dict[tuple[int, tuple[Placement, ...]], Turn] = {}
        turns: dict[str, Turn] = {}
        for source in sources:
            match source:
                case Plain():
                    # Only the first rank writes them: they may differ, as buffers of BatchNorm do.
                    turn = Turn(self.index, 1)
                case FlatUnit():
                    group = self.contents.fsdp1_units[source.place].replica_group
                    turn = Turn(0, 1) if group is None else Turn(dist.get_rank(group), dist.get_world_size(group))
                case Rows() | Placed():
                    key = id(source.mesh), tuple(source.placements)
                    if key not in on_meshes:
                        on_meshes[key] = self._find_turn_on_mesh(source)
                    turn = on_meshes[key]
                case _:
                    assert_never(source)
            turns |= {spec.names[0]: turn for spec in list_specs(source)}
        return turns

    def _find_turn_on_mesh(self, source: Rows | Placed) -> Turn:
        known = [mesh for mesh in list_meshes(self.contents) if mesh.size() == len(self.ranks)]
        mesh, placements = extend_mesh(source.mesh, source.placements, known) or (source.mesh, source.placements)
        if mesh.size() != len(self.ranks):
            raise SaveError(
                f"{source.spec.names[0]} is on a mesh that has only some of the ranks and is not a slice of a mesh of "
                "all ranks, so it is unknown which ranks hold copies"
            )
        here, turn = mesh.get_coordinate() or [0] * mesh.ndim, Turn(0, 1)
        for dim, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                turn = Turn(turn.first * mesh.size(dim) + here[dim], turn.num_ranks * mesh.size(dim))
        return turn


class _RankSums(NamedTuple):
    """Summary of a rank's writes.

    sums: for each tensor, this rank's part of the CRC.
    """

    num_bytes: int
    sums: dict[str, LinearCrc]


def leave_sums(saving: SaveDirectory, rank: int, writer: Writer) -> None:
    """Writes this rank's byte count and sums to a file of the save, from which the first rank collects them."""
    saving.add(f"rank-{rank}.sums", msgspec.json.encode(_RankSums(writer.num_bytes, writer.sums)))


def collect_sums(saving: SaveDirectory, ranks: Sequence[int], num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Returns the CRC-32 of each tensor. Raises SaveError unless the ranks have written as many bytes as the tensors
    have.
    """
    sums, num_written, expected = dict.fromkeys(num_bytes, 0), 0, sum(num_bytes.values())
    for rank in ranks:
        of_rank = msgspec.json.decode((saving.partial / f"rank-{rank}.sums").read_bytes(), type=_RankSums)
        num_written += of_rank.num_bytes
        for name, crc in of_rank.sums.items():
            sums[name] ^= crc
    if num_written != expected:
        raise SaveError(f"the ranks have written {num_written} bytes, but the tensors have {expected}")
    return {name: finish_crc(crc, num_bytes[name]) for name, crc in sums.items()}
