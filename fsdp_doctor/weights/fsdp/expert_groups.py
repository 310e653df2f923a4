"""Experts that were divided over groups of ranks before FSDP sharded them: one name means different experts on each.

The caller names the mesh along which the experts are divided, because no attribute of the model shows it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.decorators import disable_autograd
from fsdp_doctor.weights.fsdp.reader import ModelContents, ModelTensor
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides

Experts: TypeAlias = DeviceMesh | Mapping[str, DeviceMesh]
"""Mesh along which experts are divided, of one dim (``mesh["ep"]``), for all parameters below a module ``experts``; or
such meshes by fnmatch patterns of the parameters' names."""
ExpertMeshes: TypeAlias = tuple[tuple[str, DeviceMesh], ...]

_PATTERNS = ("experts.*", "*.experts.*")


def list_expert_meshes(experts: Experts | None) -> ExpertMeshes:
    """Lists ``experts`` as pairs of a pattern of parameter names and a mesh.

    Raises TypeError for a wrong type, and ValueError for a mesh of several dims.
    """
    if experts is None:
        return ()
    pairs = tuple(experts.items() if isinstance(experts, Mapping) else ((pattern, experts) for pattern in _PATTERNS))
    for pattern, mesh in pairs:
        if not isinstance(pattern, str) or not isinstance(mesh, DeviceMesh):
            raise TypeError(f"experts must be a DeviceMesh, or a mapping of patterns to DeviceMeshes, not {experts!r}")
        if mesh.ndim != 1:
            raise ValueError(
                f'experts: {mesh} has {mesh.ndim} dims: pass the dim that divides the experts, as mesh["ep"]'
            )
    return pairs


@disable_autograd
def place_experts(contents: ModelContents, experts: ExpertMeshes) -> ModelContents:
    """Sets ``placed`` of each parameter that matches ``experts`` to a tensor of all experts; returns ``contents``.

    Any rank may call it alone. Raises ValueError if no parameter matches. Also raises ValueError for a parameter that
    is in an FSDP1 unit or belongs to one numbered expert, and for a parameter that is already sharded along the
    experts' mesh, or over a group of ranks that is not a slice of the root mesh.
    """
    if not experts:
        return contents
    # Each is used for many parameters.
    ordered = {id(mesh): _put_first(mesh) for _, mesh in experts}
    matched = False
    for parameter in contents.parameters:
        if (mesh := _find_mesh(parameter.names, experts)) is not None:
            parameter.placed = _place(parameter, mesh, ordered[id(mesh)])
            matched = True
    for unit in contents.fsdp1_units:
        if flat := [names[0] for names in unit.names if _find_mesh(names, experts) is not None]:
            raise ValueError(
                f"experts: {flat[0]} is in an FSDP1 unit, and FSDP1 units are not gathered as parts of a larger tensor"
            )
    if not matched:
        raise ValueError(f"experts: no parameter is called {' or '.join(pattern for pattern, _ in experts)}")
    return contents


def _find_mesh(names: Sequence[str], experts: ExpertMeshes) -> DeviceMesh | None:
    matching = (mesh for pattern, mesh in experts if any(fnmatch.fnmatchcase(name, pattern) for name in names))
    return next(matching, None)


def _put_first(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the root mesh of ``mesh`` with the dim of ``mesh`` first, since experts are divided before FSDP shards
    them.

    The result has the same process groups.
    """
    root = private.find_root_mesh(mesh)
    dim = next(dim for dim in range(root.ndim) if root.get_group(dim) is mesh.get_group())
    if dim == 0:
        return root
    order = [dim, *(other for other in range(root.ndim) if other != dim)]
    names = root.mesh_dim_names or ()
    return DeviceMesh.from_group(
        [root.get_group(other) for other in order],
        root.device_type,
        root.mesh.permute(order).contiguous(),
        mesh_dim_names=tuple(names[other] for other in order),
    )


def _place(parameter: ModelTensor, mesh: DeviceMesh, ordered: DeviceMesh) -> DTensor:
    """Makes a DTensor without elements that stands for all experts; ``parameter`` is a part of it.

    ordered: the root mesh with the dim of ``mesh`` first, from ``_put_first``.
    """
    tensor, name = parameter.tensor, parameter.names[0]
    if re.search(r"(^|\.)experts\.\d+\.", name):
        raise ValueError(
            f"experts: {name} belongs to one expert, and each group of ranks numbers its experts from 0: no mesh "
            "shows which expert this is. Fuse the experts, or number them over all groups"
        )
    placements: list[Placement] = [Shard(0), *(Replicate() for _ in range(ordered.ndim - 1))]
    if isinstance(tensor, DTensor):
        extended = extend_mesh(tensor.device_mesh, tensor.placements, [ordered])
        if extended is None or not isinstance(extended[1][0], Replicate):
            ranks, along = tensor.device_mesh.mesh.tolist(), mesh.mesh.tolist()
            of_all = private.find_root_mesh(mesh).mesh.tolist()
            raise ValueError(
                f"experts: {name} is sharded over the ranks {ranks}, but experts that are divided over the "
                f"ranks {along} must be sharded over a slice along the other dims of {of_all}: if FSDP shards the "
                "experts over the given dim, pass the other dim; if the experts are already one DTensor, leave out "
                "`experts`"
            )
        placements[1:] = extended[1][1:]
    local = private.read_local_tensor(tensor)
    shape = torch.Size((tensor.shape[0] * mesh.size(), *tensor.shape[1:])) if tensor.ndim else tensor.shape
    return DTensor.from_local(
        torch.empty(local.shape, dtype=tensor.dtype, device="meta"),
        ordered,
        placements,
        run_check=False,
        shape=shape,
        stride=compute_row_major_strides(shape),
    )


def extend_mesh(
    mesh: DeviceMesh, placements: Sequence[Placement], meshes: Sequence[DeviceMesh]
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Returns the first of ``meshes`` that is ``mesh`` or has ``mesh`` as a submesh, and the tensor's placements on it.

    Returns None if there is no such mesh. The tensor is replicated over the dims that ``mesh`` lacks, because each
    neighbour along these dims has a submesh with the same shards.
    """
    for whole in meshes:
        here = whole.get_coordinate() or [0] * whole.ndim
        for dims in itertools.combinations(range(whole.ndim), mesh.ndim):
            index = tuple(slice(None) if dim in dims else here[dim] for dim in range(whole.ndim))
            if torch.equal(whole.mesh[index], mesh.mesh):
                of_dim = dict(zip(dims, placements, strict=True))
                return whole, tuple(of_dim.get(dim, Replicate()) for dim in range(whole.ndim))
    return None
