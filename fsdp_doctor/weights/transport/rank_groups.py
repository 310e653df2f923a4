"""Determines whether groups of ranks have the same tensor under a name, or different ones.

A placement covers only the ranks of its mesh. Model ranks outside of the mesh may have copies of the tensor (norms
under tensor parallelism), or different values of the same shape (experts that are divided among the groups). The same
is true of a plain parameter. Names and shapes are the same in both cases, which are distinguished as follows:

- If the mesh is a slice of a larger mesh, by ranks and names, along dims over which another parameter is sharded, FSDP
    has sharded the tensor and this parameter in the same way. The rest of the larger mesh is tensor parallelism, which
    has copies of tensors that it does not divide, or replicas. The groups are taken to have copies.
- Otherwise nothing shows that the groups have copies, even if their meshes are slices of one mesh, since this is also
    true of experts' meshes. Such tensors are refused.
- The values of plain parameters, and of tensors in the first case, are compared: a few elements of each, with a
    tolerance, since copies may have drifted apart by rounding, whereas experts differ widely.

Persistent buffers are whole on every rank, and no FSDP keeps them equal: each rank's own tokens change a router's bias
or the statistics of a batch norm. None of the values is the right one, so buffers that differ are not refused, but
reported.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import pathlib
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from typing_extensions import assert_never

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp.reader import ModelContents

# The number of tensors that are compared at most, spread over all, and of compared elements in each.
_COMPARED_TENSORS, _COMPARED_ELEMENTS = 256, 8
# The largest distance between two copies, relative to the larger norm.
_DRIFT = 1 / 8
# A larger buffer is also compared by a few elements.
_COMPARED_BYTES = 1 << 20
# Where the files lie whose frames are between a warning and the caller's line.
_OWN_FRAMES = (
    str(pathlib.Path(__file__).parents[2]) + os.sep,
    str(pathlib.Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)

Relation = Literal["plain", "copies", "unknown", "buffer"]


class BuffersDiffer(UserWarning):
    """Warning that persistent buffers differ between ranks, so that an extraction or a save has only one rank's
    values.
    """


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a tensor, or of an FSDP1 unit, on this rank; other groups of ranks may have copies of it, or other
    values.

    names: the first name of a tensor; for an FSDP1 unit, the first name of each of its parameters.
    place: the part's index among the model's shards.
    ranks: the ranks that have the tensor together; empty if each rank has all of it.
    relation: ``plain`` or ``buffer`` if each rank has all of it, ``copies`` if the groups have copies, otherwise
        ``unknown``.
    """

    names: tuple[str, ...]
    place: int
    ranks: tuple[int, ...]
    relation: Relation


@dataclass(frozen=True, slots=True)
class Conflict:
    """Groups of ranks that have different tensors under one name."""

    relation: Relation
    groups: tuple[tuple[int, ...], ...]


@dataclass
class RankGroups:
    """Groups of ranks of one model. The object holds no tensor.

    ranks: all ranks of the model, if a mesh has only a part of them; otherwise empty.
    is_settled: whether the ranks have compared their parts since the model was read.
    differing: buffers that differed at the last comparison.
    """

    ranks: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    is_settled: bool = False
    differing: tuple[str, ...] = ()

    def find(self, places: Collection[int]) -> RankGroups:
        return replace(self, parts=[part for part in self.parts if part.place in places])

    def find_unknown(self) -> dict[str, Conflict]:
        """Returns the conflicts that are refused without asking other ranks, by the tensors' names."""
        return {
            name: Conflict("unknown", (part.ranks, tuple(sorted({*self.ranks} - {*part.ranks}))))
            for part in self.parts
            if part.relation == "unknown"
            for name in part.names
        }


def read_groups(contents: ModelContents) -> RankGroups:
    """Reads the groups of a model. Only attributes are read, so any rank may call it alone.

    A model of which nothing is sharded has plain parts, which only a call of several ranks, such as a save, compares.
    """
    on_meshes: dict[int, tuple[DeviceMesh, tuple[int, ...]]] = {}
    for parameter in contents.parameters:
        if isinstance(parameter.placed, DTensor) and id(parameter.placed.device_mesh) not in on_meshes:
            mesh = parameter.placed.device_mesh
            on_meshes[id(mesh)] = mesh, tuple(mesh.mesh.flatten().tolist())
    of_units = [unit.ranks for unit in contents.fsdp1_units]
    everyone = max([*(ranks for _, ranks in on_meshes.values()), *of_units], key=len, default=())
    if len(everyone) == 1:
        return RankGroups(())
    # Of a mesh that overlaps with the largest it is not known which ranks it is together with.
    lacking = {key: (mesh, ranks) for key, (mesh, ranks) in on_meshes.items() if {*ranks} < {*everyone}}
    whole = [t for p in contents.parameters if isinstance(t := p.placed, DTensor) and id(t.device_mesh) not in lacking]
    on_whole = {(id(t.device_mesh), t.placements): (t.device_mesh, t.placements) for t in whole}.values()
    relations: dict[tuple[int, tuple[Placement, ...]], Relation] = {}
    parts = [
        Part(tuple(names[0] for names in unit.names), place, ranks, "unknown")
        for place, (unit, ranks) in enumerate(zip(contents.fsdp1_units, of_units, strict=True))
        if {*ranks} < {*everyone}
    ]
    for place, parameter in enumerate(contents.parameters, len(contents.fsdp1_units)):
        tensor, name = parameter.placed, parameter.names[:1]
        if not isinstance(tensor, DTensor):
            parts.append(Part(name, place, (), "plain"))
        elif id(tensor.device_mesh) in lacking:
            mesh, ranks = lacking[id(tensor.device_mesh)]
            key = id(mesh), tensor.placements
            if key not in relations:
                relations[key] = _relate(mesh, tensor.placements, on_whole)
            parts.append(Part(name, place, () if relations[key] == "plain" else ranks, relations[key]))
    first_place = len(contents.fsdp1_units) + len(contents.parameters)
    parts += [
        Part(buffer.names[:1], place, (), "buffer")
        for place, buffer in enumerate(contents.buffers, first_place)
        if not isinstance(buffer.placed, DTensor)
    ]
    return RankGroups(everyone if any(part.ranks for part in parts) else (), parts)


def _relate(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    on_whole: Collection[tuple[DeviceMesh, tuple[Placement, ...]]],
) -> Relation:
    """Returns the relation between the tensors that several groups of ranks have, each group on a mesh like ``mesh``.

    on_whole: meshes and placements of tensors that are divided over all ranks of the model.
    """
    if all(isinstance(placement, Replicate) for placement in placements):
        return "plain"
    for other, theirs in on_whole:
        sharded = {dim for dim, placement in enumerate(theirs) if not isinstance(placement, Replicate)}
        if any(sharded & {*dims} for dims in _find_dims_of_slice(other, mesh)):
            return "copies"
    return "unknown"


def _find_dims_of_slice(whole: DeviceMesh, mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """Yields each set of dims of ``whole`` along which ``mesh``, by names and ranks, is this rank's slice of
    ``whole``.
    """
    here, names = whole.get_coordinate(), whole.mesh_dim_names or ()
    for count in range(1, whole.ndim):
        for dims in itertools.combinations(range(whole.ndim), count) if here and names else ():
            part = tuple(slice(None) if dim in dims else place for dim, place in enumerate(here or ()))
            is_named_alike = tuple(names[dim] for dim in dims) == mesh.mesh_dim_names
            if is_named_alike and torch.equal(whole.mesh[part].flatten(), mesh.mesh.flatten()):
                yield dims


class Comparison:
    """Comparison of the ranks' parts, for one call.

    shards: this rank's shards, each at the index ``place`` of its part.
    compares: the relations whose values are compared.
    anew: whether to compare again if the ranks have already compared.
    """

    def __init__(
        self,
        groups: RankGroups,
        shards: Sequence[torch.Tensor],
        device: torch.device,
        compares: Collection[Relation] = ("plain", "copies", "buffer"),
        *,
        anew: bool = False,
    ) -> None:
        self._groups, self._shards, self._device, self._anew = groups, shards, device, anew
        compared = [part for part in groups.parts if part.relation in compares]
        self._compared = [part for part in compared if part.relation != "buffer"]
        self._buffers = [part for part in compared if part.relation == "buffer"]
        self._unknown = {part.ranks: part for part in groups.parts if part.relation == "unknown"}
        self.conflicts: dict[str, Conflict] = {}

    @property
    def is_due(self) -> bool:
        """True if there is anything left to compare."""
        is_settled = self._groups.is_settled and not self._anew
        return bool(self._compared or self._buffers or self._unknown) and not is_settled

    def make_statement(self) -> str:
        """Describes this rank's groups and values. Waits for the device, which may still be writing to a shard."""
        compared, buffers = _choose_some(self._compared), _choose_some(self._buffers)
        if (compared or buffers) and self._device.type not in ("cpu", "meta"):
            torch.get_device_module(self._device.type).synchronize(self._device)
        rank = dist.get_rank()
        values = {
            part.names[0]: [part.ranks, part.ranks.index(rank) if part.ranks else 0, elements]
            for part in compared
            if (elements := _sample_values(self._shards[part.place])) is not None
        }
        return json.dumps(
            {
                "unknown": {part.names[0]: ranks for ranks, part in self._unknown.items()},
                "values": values,
                "buffers": {part.names[0]: _digest_buffer(self._shards[part.place]) for part in buffers},
            }
        )

    def draw_conclusion(self, statements: Mapping[int, str]) -> str:
        groups: dict[str, set[tuple[int, ...]]] = {}
        values: dict[str, dict[int, list[Any]]] = {}
        digests: dict[str, dict[int, list[int]]] = {}
        for rank, statement in statements.items():
            stated = json.loads(statement)
            for name, ranks in stated["unknown"].items():
                groups.setdefault(name, set()).add(tuple(ranks))
            for name, value in stated["values"].items():
                values.setdefault(name, {})[rank] = value
            for name, digest in stated["buffers"].items():
                digests.setdefault(name, {}).setdefault(digest, []).append(rank)
        conflicts = {name: ["unknown", sorted(ranks)] for name, ranks in groups.items()}
        conflicts |= {name: ["buffer", [*alike.values()]] for name, alike in digests.items() if len(alike) > 1}
        return json.dumps(
            conflicts | {name: conflict for name, by_rank in values.items() if (conflict := _find_conflict(by_rank))}
        )

    def conclude(self, conclusion: str) -> None:
        """Notes the conclusion that all ranks share, and warns about buffers that differ."""
        items = json.loads(conclusion).items()
        every = {name: Conflict(relation, tuple(map(tuple, groups))) for name, (relation, groups) in items}
        differing = {name: conflict for name, conflict in every.items() if conflict.relation == "buffer"}
        self._groups.differing = tuple(differing)
        if differing:
            warnings.warn(BuffersDiffer(describe_conflicts(differing)), stacklevel=_find_stacklevel())
        stated = {name: conflict for name, conflict in every.items() if name not in differing}
        known = {ranks: stated[part.names[0]] for ranks, part in self._unknown.items() if part.names[0] in stated}
        unknown = [part for part in self._groups.parts if part.relation == "unknown" and part.ranks in known]
        self.conflicts = {name: known[part.ranks] for part in unknown for name in part.names} | stated
        self._groups.is_settled = not self.conflicts


def _find_stacklevel() -> int:
    """Returns the stacklevel with which the calling function warns about the line that called the library.

    Frames of this package, and of the decorators of torch and contextlib, are skipped.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None and (level == 0 or frame.f_code.co_filename.startswith(_OWN_FRAMES)):
        frame, level = frame.f_back, level + 1
    return level


def _choose_some(parts: Sequence[Part]) -> Sequence[Part]:
    return parts[:: -(-len(parts) // _COMPARED_TENSORS) or 1]


def _digest_buffer(buffer: torch.Tensor) -> int:
    """Computes a checksum of a buffer: of all bytes if it is small, otherwise of a few elements."""
    if not buffer.numel():
        return 0
    if buffer.nbytes > _COMPARED_BYTES:
        return zlib.crc32(repr(_sample_values(buffer)).encode())
    host = buffer.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(host.numpy().tobytes())


def _sample_values(shard: torch.Tensor) -> list[float] | None:
    """Returns a few elements, spread over the shard; None if it has no elements, or if they cannot be read."""
    local = shard.detach().reshape(1) if not shard.ndim else shard.detach()
    if local.is_meta or not local.numel() or type(local) is not torch.Tensor:
        return None
    if not (local.is_floating_point() and local.dtype.itemsize > 1):
        local = local.contiguous().flatten().view(torch.uint8)
    last = local.numel() - 1
    spread = [last * place // (_COMPARED_ELEMENTS - 1) for place in range(_COMPARED_ELEMENTS)]
    places = torch.tensor(spread, device="cpu")
    index = torch.unravel_index(places, local.shape)
    with torch.no_grad():
        elements: list[float] = local[tuple(i.to(local.device) for i in index)].float().nan_to_num().tolist()
    return elements


def _find_conflict(values: Mapping[int, list[Any]]) -> list[Any] | None:
    """Returns [relation, groups] if the groups' values of a tensor conflict; None if all groups have copies.

    values: for each rank, its group, its position in the group, and some elements.
    """
    alike: list[tuple[int, list[float], list[int]]] = []
    for rank, (_, place, elements) in values.items():
        known = next((ranks for at, first, ranks in alike if at == place and _are_near(first, elements)), None)
        if known is None:
            alike.append((place, elements, [rank]))
        else:
            known.append(rank)
    if len(alike) == len({place for place, *_ in alike}):
        return None
    groups = sorted({tuple(ranks) for ranks, *_ in values.values()})
    return ["copies", groups] if any(groups) else ["plain", [ranks for *_, ranks in alike]]


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    apart = sum((left - right) ** 2 for left, right in zip(one, other, strict=True))
    return apart <= _DRIFT**2 * max(sum(value**2 for value in one), sum(value**2 for value in other))


def _name_groups(groups: Sequence[Sequence[int]]) -> str:
    """Names groups of ranks, as in ``rank 0 and ranks [1, 2]``."""
    *names, last = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}" for ranks in groups]
    if len(names) < 5:
        return f"{', '.join(names)} and {last}"
    return join_some([*names, last])


def describe_conflicts(conflicts: Mapping[str, Conflict]) -> str:
    """Describes the first conflict in one sentence, and names the others."""
    name, conflict = next(iter(conflicts.items()))
    groups = join_some([str(list(ranks)) for ranks in conflict.groups])
    named = _name_groups(conflict.groups)
    others = f" The same holds for {join_some(list(conflicts)[1:])}." if len(conflicts) > 1 else ""
    match conflict.relation:
        case "unknown":
            return (
                f"{name}: each of the groups of ranks {groups} shards a tensor of this name, and it is unknown "
                "whether the groups have copies of one tensor or different tensors, such as experts that were "
                f"divided before FSDP sharded them.{others} Pass the mesh along which the experts are divided, as "
                "in experts=mesh['ep'], or distribute the tensor over a mesh of all ranks: Shard if the values "
                "differ, Replicate if they are copies."
            )
        case "copies":
            return (
                f"{name}: by the mesh of the model's other parameters the groups of ranks {groups} have copies of "
                f"this tensor, but their values differ.{others} Pass the mesh along which experts are divided, as "
                "in experts=mesh['ep']."
            )
        case "plain":
            return (
                f"{name} is a parameter that is not sharded, and its values differ between {named}.{others} "
                "If the values are experts, pass the mesh along which they are divided, as in experts=mesh['ep']; "
                "if they should be copies, broadcast one."
            )
        case "buffer":
            return (
                f"{name} is a buffer whose values differ between {named}: each rank yields its own values, "
                f"and a saved or collected model has the first rank's.{others} Broadcast or all-reduce such "
                "buffers before, if they should be equal."
            )
        case _:
            assert_never(conflict.relation)
