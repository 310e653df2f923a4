"""Whether what several groups of ranks have under one name is one tensor, as far as that can be known.

A placement speaks of the ranks of its mesh alone. Where that mesh has not all ranks of the model, the others may have
copies, as the norms under tensor parallelism, or other values in the same shape: experts of which each group has some.
So it is with a plain parameter. Names and shapes are alike in both; what differs is this:

- A mesh that is a slice of a larger one, by ranks and names, along dims over which another parameter is sharded: FSDP
  has sharded both alike, and the rest of the larger mesh is tensor parallelism, which has copies of what it does not
  divide, or replicas.
- Otherwise nothing says that the groups have copies, not even that their meshes are slices of one: so are those of
  experts. Such tensors are refused.
- Of a plain parameter, and of what the first case takes for copies, values are compared: a few elements of each, since
  copies may have drifted apart by rounding, and experts are nowhere near each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from typing_extensions import assert_never

from fsdp_doctor.errors import some
from fsdp_doctor.fsdp.reader import HeldModel

# Of so many tensors at most, spread over all, so many elements each.
_COMPARED_TENSORS, _COMPARED_ELEMENTS = 256, 8
# How far copies may be apart, in parts of the longer one.
_DRIFT = 1 / 8

Relation = Literal["plain", "copies", "unknown"]


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank has of tensors that other ranks may have otherwise.

    names: of a tensor the first, of an FSDP1 unit each parameter's. place: among the model's shards. ranks: which have
    the tensor together; none where each has all of it.
    """

    names: tuple[str, ...]
    place: int
    ranks: tuple[int, ...]
    relation: Relation


@dataclass(frozen=True, slots=True)
class Conflict:
    """Groups of ranks that have a tensor each, under one name."""

    relation: Relation
    groups: tuple[tuple[int, ...], ...]


@dataclass
class RankGroups:
    """Of one model, with nothing that is a tensor.

    ranks: all of the model's, where a mesh has a part of them; otherwise none. is_settled: whether the ranks have
    compared what they have since the model was read.
    """

    ranks: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    is_settled: bool = False

    def of(self, places: Collection[int]) -> RankGroups:
        """Of the shards at these places."""
        return replace(self, parts=[part for part in self.parts if part.place in places])

    def unknown(self) -> dict[str, Conflict]:
        """What this rank knows to be refused without asking the others."""
        return {
            name: Conflict("unknown", (part.ranks, tuple(sorted({*self.ranks} - {*part.ranks}))))
            for part in self.parts
            if part.relation == "unknown"
            for name in part.names
        }


def read_groups(held: HeldModel) -> RankGroups:
    """Attributes alone are read: any rank may call it."""
    on_meshes: dict[int, tuple[DeviceMesh, tuple[int, ...]]] = {}
    for parameter in held.parameters:
        if isinstance(parameter.tensor, DTensor) and id(parameter.tensor.device_mesh) not in on_meshes:
            mesh = parameter.tensor.device_mesh
            on_meshes[id(mesh)] = mesh, tuple(mesh.mesh.flatten().tolist())
    of_units = [
        tuple(range(dist.get_world_size()))
        if unit.replica_group is not None
        else tuple(dist.get_process_group_ranks(unit.group))
        for unit in held.fsdp1_units
    ]
    everyone = max([*(ranks for _, ranks in on_meshes.values()), *of_units], key=len, default=())
    if len(everyone) < 2:
        return RankGroups(())
    # What overlaps with the largest mesh is on ranks of which it is not known who they are together.
    lacking = {key: (mesh, ranks) for key, (mesh, ranks) in on_meshes.items() if {*ranks} < {*everyone}}
    whole = _Placed(
        t for p in held.parameters if isinstance(t := p.tensor, DTensor) and id(t.device_mesh) not in lacking
    )
    relations: dict[tuple[int, tuple[Placement, ...]], Relation] = {}
    parts = [
        Part(tuple(names[0] for names in unit.names), place, ranks, "unknown")
        for place, (unit, ranks) in enumerate(zip(held.fsdp1_units, of_units, strict=True))
        if {*ranks} < {*everyone}
    ]
    for place, one in enumerate(held.parameters, len(held.fsdp1_units)):
        if not isinstance(one.tensor, DTensor):
            parts.append(Part(one.names[:1], place, (), "plain"))
        elif id(one.tensor.device_mesh) in lacking:
            mesh, ranks = lacking[id(one.tensor.device_mesh)]
            key = id(mesh), one.tensor.placements
            if key not in relations:
                relations[key] = whole.relation(mesh, one.tensor.placements)
            parts.append(Part(one.names[:1], place, () if relations[key] == "plain" else ranks, relations[key]))
    return RankGroups(everyone if any(part.ranks for part in parts) else (), parts)


class _Placed:
    """Meshes and placements of tensors that all ranks of the model have a part of."""

    def __init__(self, tensors: Iterable[DTensor]) -> None:
        self._known = {(id(t.device_mesh), t.placements): t.device_mesh for t in tensors}

    def relation(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> Relation:
        if all(isinstance(placement, Replicate) for placement in placements):
            return "plain"
        for (_, theirs), other in self._known.items():
            sharded = [dim for dim, placement in enumerate(theirs) if not isinstance(placement, Replicate)]
            if any(not {*dims}.isdisjoint(sharded) and _are_one(part, mesh) for dims, part in _slices(other)):
                return "copies"
        return "unknown"


def _slices(mesh: DeviceMesh) -> Iterator[tuple[tuple[int, ...], tuple[tuple[str, ...], torch.Tensor]]]:
    """(dims, their names and the ranks) of every part of a mesh, along some of its dims, that this rank is in."""
    here, names = mesh.get_coordinate(), mesh.mesh_dim_names or ()
    for count in range(1, mesh.ndim):
        for dims in itertools.combinations(range(mesh.ndim), count) if here and names else ():
            part = tuple(slice(None) if dim in dims else place for dim, place in enumerate(here or ()))
            yield dims, (tuple(names[dim] for dim in dims), mesh.mesh[part].flatten())


def _are_one(part: tuple[tuple[str, ...], torch.Tensor], mesh: DeviceMesh) -> bool:
    names, ranks = part
    return names == mesh.mesh_dim_names and torch.equal(ranks, mesh.mesh.flatten())


class Comparison:
    """Of what the ranks have, for one call. shards: this rank's, by their places. compares: which values."""

    def __init__(
        self,
        groups: RankGroups,
        shards: Sequence[torch.Tensor],
        device: torch.device,
        compares: Collection[Relation] = ("plain", "copies"),
    ) -> None:
        self._groups, self._shards, self._device = groups, shards, device
        self._compared = [part for part in groups.parts if part.relation in compares]
        self._unknown = {part.ranks: part for part in groups.parts if part.relation == "unknown"}
        self.conflicts: dict[str, Conflict] = {}

    @property
    def is_due(self) -> bool:
        """Whether there is anything that the ranks have not compared before."""
        return bool(self._compared or self._unknown) and not self._groups.is_settled

    def statement(self) -> str:
        """What this rank has. Waits for its device, where anything may still be on its way to a shard."""
        compared = self._compared[:: -(-len(self._compared) // _COMPARED_TENSORS) or 1]
        if compared and self._device.type not in ("cpu", "meta"):
            torch.get_device_module(self._device.type).synchronize(self._device)
        rank = dist.get_rank()
        values = {
            part.names[0]: [part.ranks, part.ranks.index(rank) if part.ranks else 0, elements]
            for part in compared
            if (elements := _elements(self._shards[part.place])) is not None
        }
        return json.dumps(
            {"unknown": {part.names[0]: ranks for ranks, part in self._unknown.items()}, "values": values}
        )

    def conclusion(self, statements: Mapping[int, str]) -> str:
        """Of all ranks' statements."""
        groups: dict[str, set[tuple[int, ...]]] = {}
        values: dict[str, dict[int, list[Any]]] = {}
        for rank, statement in statements.items():
            said = json.loads(statement)
            for name, ranks in said["unknown"].items():
                groups.setdefault(name, set()).add(tuple(ranks))
            for name, value in said["values"].items():
                values.setdefault(name, {})[rank] = value
        conflicts = {name: ["unknown", sorted(found)] for name, found in groups.items()}
        return json.dumps(conflicts | {name: found for name, said in values.items() if (found := _apart(said))})

    def conclude(self, conclusion: str) -> None:
        """Notes down what all ranks know now."""
        found = json.loads(conclusion).items()
        said = {name: Conflict(relation, tuple(map(tuple, groups))) for name, (relation, groups) in found}
        known = {ranks: said[part.names[0]] for ranks, part in self._unknown.items() if part.names[0] in said}
        unknown = [part for part in self._groups.parts if part.relation == "unknown" and part.ranks in known]
        self.conflicts = {name: known[part.ranks] for part in unknown for name in part.names} | said
        self._groups.is_settled = not self.conflicts


def _elements(shard: torch.Tensor) -> list[float] | None:
    """A few, spread over all; None for what has none, or of which it is not known how its elements are read."""
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
        found: list[float] = local[tuple(one.to(local.device) for one in index)].float().nan_to_num().tolist()
    return found


def _apart(values: Mapping[int, list[Any]]) -> list[Any] | None:
    """values: of each rank, its group, its place there and some elements. None where all have copies."""
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


def refusal(conflicts: Mapping[str, Conflict]) -> str:
    """A sentence about the first of them, with the names of others."""
    name, conflict = next(iter(conflicts.items()))
    groups = some([str(list(ranks)) for ranks in conflict.groups])
    others = f" So it is with {some(list(conflicts)[1:])}." if len(conflicts) > 1 else ""
    match conflict.relation:
        case "unknown":
            return (
                f"{name}: each of the groups of ranks {groups} shards a tensor of this name, and nothing says whether "
                "they have copies of one or other values, as experts that are divided before FSDP shards them."
                f"{others} "
                "Distribute it over a mesh of all ranks: Shard where they have other values, Replicate where copies."
            )
        case "copies":
            return (
                f"{name}: the groups of ranks {groups} are to have copies of it, by the mesh of the model's other "
                f"parameters, and have other values.{others} Distribute experts over a mesh of all ranks."
            )
        case "plain":
            return (
                f"{name} is a parameter that nothing shards, and ranks {groups} have other values of it each.{others} "
                "If these are experts, distribute them over a mesh (DTensor); if they are to be copies, broadcast one."
            )
        case _:
            assert_never(conflict.relation)
