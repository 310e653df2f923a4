"""``save_optimizer_state``: a file of torch.save with full tensors, into which each rank writes its own rows.

1. each rank says what state it has; the first makes the file of all that, without a byte of a tensor, and gives it room
2. every rank reads from the file where each tensor lies, and writes its rows there
3. the first writes the checksums where torch has left them out, and gives the file its name
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.checkpoints.files import OpenFile
from fsdp_doctor.checkpoints.record import Member
from fsdp_doctor.checkpoints.torch_files import find_tensors, read_torch_file
from fsdp_doctor.extract.agreement import ComparedPlan
from fsdp_doctor.extract.local import ShardPlace
from fsdp_doctor.extract.rank_groups import describe_conflicts
from fsdp_doctor.extract.streams import wait_for_device
from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.decorators import disable_autograd
from fsdp_doctor.fsdp.expert_groups import Experts, list_expert_meshes, place_experts
from fsdp_doctor.fsdp.shards import compute_row_major_strides
from fsdp_doctor.load.agreement import announce_early_errors
from fsdp_doctor.load.layouts import InFlatParameter, Whole
from fsdp_doctor.load.optimizer_matching import OptimizerParameter, ParameterPart, list_parameters
from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.targets import compare_groups, find_place
from fsdp_doctor.save.directory import SaveDirectory, SaveError
from fsdp_doctor.save.ranks import RankPlace, collect_sums, leave_sums, open_save
from fsdp_doctor.save.writing import TensorInFile, Turn, Writer

_FILE = "optimizer.pt"
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_CENTRAL_BYTES = 46


@disable_autograd
def save_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    experts: Experts | None = None,
    overwrite: bool = False,
) -> None:
    """Saves the full state of a sharded model's optimizer as ``optimizer.pt``, beside the weights or alone.

    Every rank of the model's mesh must call it, with the same arguments; as :func:`save_full_tensors`, nothing is
    gathered, and an error or the death of a rank is an error on all and leaves the directory as it was.

    The file is one of torch.save, of what ``get_optimizer_state_dict`` returns with ``full_state_dict=True``:
    ``torch.load(file, mmap=True, weights_only=True)`` is a source for :func:`load_optimizer_state` on every rank, and
    for torch's ``set_optimizer_state_dict``. The checksums in it are those of what the ranks had in memory, and
    ``fsdp-doctor checkpoint verify`` compares them.

    model, optimizer, experts: as of :func:`load_optimizer_state`. Tensors keep their dtypes.
    overwrite: an ``optimizer.pt`` that is there is replaced.

    Raises SaveError as :func:`save_full_tensors`; also for a model that is not sharded, and for an optimizer of
    parameters that are not the model's.
    """
    path = pathlib.Path(directory)
    with announce_early_errors(model):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        contents = place_experts(reader.read(model), list_expert_meshes(experts))
        try:
            model_place = find_place(contents)
            parameters = list_parameters(contents, model_place, optimizer)
        except LoadError as error:
            raise SaveError(str(error)) from None
    place = RankPlace.find(contents)
    with open_save(path, place) as (agreement, saving):
        lines = [f"to {path} {overwrite=}"] + [
            f"{' = '.join(part.names)}: {list(part.shape)} {part.layout} in group {parameter.group}"
            for parameter in parameters
            for part in parameter.parts
        ]
        comparison = compare_groups(contents, model_place)
        agreement.expect(lambda: ComparedPlan(lines), comparison)
        agreement.proceed()
        if comparison.conflicts:
            raise SaveError(describe_conflicts(comparison.conflicts))
        if place.is_first:
            saving.prepare(re.compile(re.escape(_FILE)), overwrite=overwrite)
        saving.join(agreement.proceed(saving.partial.name))
        torch.save(_outline(optimizer, parameters), saving.partial / f"rank-{place.rank}.outline")
        agreement.proceed()
        agreement.watch = saving.find_dead_rank
        singles = _make_file(saving, optimizer, parameters, place) if place.is_first else {}
        agreement.proceed()
        wait_for_device(model_place.device)
        file = saving.partial / _FILE
        with OpenFile(file) as opened:
            found = {tensor.path: tensor for tensor in find_tensors(_FILE, read_torch_file(opened), None).tensors}
        targets = {
            path: TensorInFile(".".join(path), 0, tensor.pieces[0].begin, tensor.shape, getattr(torch, tensor.dtype))
            for path, tensor in found.items()
        }
        with contextlib.closing(Writer([file], model_place.device)) as writer:
            for part, key, value in _list_values(optimizer, parameters):
                target = targets.get(("state", part.names[0], key))
                if target is not None and target.shape:
                    writer.write(target, *_find_place(part, value, target.shape, place))
            for in_file, single in singles.items():
                writer.write(targets[in_file], single, ShardPlace(numel=1, offset=0, stride=()), Turn(0, 1))
            writer.finish()
        leave_sums(saving, place.rank, writer)
        agreement.proceed()
        if place.is_first:
            num_bytes = {target.name: target.nbytes for target in targets.values()}
            sums = collect_sums(saving, place.ranks, num_bytes)
            _write_checksums(file, {t.begin: sums[t.name] for t in targets.values() if t.nbytes})
            saving.commit([_FILE], [])
        agreement.proceed()


def _list_values(
    optimizer: torch.optim.Optimizer, parameters: list[OptimizerParameter]
) -> Iterator[tuple[ParameterPart, str, Any]]:
    """(parameter, key, this rank's part or the single value) of all that this rank has."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter.parameter, {}).items():
            for part in parameter.parts:
                is_divided = isinstance(value, torch.Tensor) and value.ndim
                yield part, key, part.view_part(value) if is_divided else value


def _outline(optimizer: torch.optim.Optimizer, parameters: list[OptimizerParameter]) -> dict[str, dict[str, Any]]:
    """Describes this rank's state by parameter and key: the dtype of a tensor like the parameter, or the value."""
    outline: dict[str, dict[str, Any]] = {}
    for part, key, value in _list_values(optimizer, parameters):
        single = value.cpu() if isinstance(value, torch.Tensor) and not value.ndim else value
        outline.setdefault(part.names[0], {})[key] = value.dtype if getattr(value, "ndim", 0) else single
    return outline


def _make_file(
    saving: SaveDirectory, optimizer: torch.optim.Optimizer, parameters: list[OptimizerParameter], place: RankPlace
) -> dict[tuple[str, ...], torch.Tensor]:
    """Returns the tensors with one value by their paths in the file.

    The first rank writes them, although it may have no state of a parameter itself.
    """
    outline: dict[str, dict[str, Any]] = {}
    for rank in place.ranks:
        # FSDP1's optimizer has no state of a parameter of which the rank has nothing.
        of_rank = torch.load(saving.partial / f"rank-{rank}.outline", weights_only=True)
        for name, entries in of_rank.items():
            outline.setdefault(name, entries)
    shapes = {part.names[0]: part.shape for parameter in parameters for part in parameter.parts}
    state = {
        name: {
            key: torch.empty(shapes[name], dtype=entry, device="cpu") if isinstance(entry, torch.dtype) else entry
            for key, entry in outline[name].items()
        }
        for name in shapes
        if name in outline
    }
    groups: list[dict[str, Any]] = [
        {
            "params": [p.names[0] for parameter in parameters if parameter.group == number for p in parameter.parts],
            **{key: _to_number(value) for key, value in group.items() if key != "params"},
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    with torch.serialization.skip_data():
        torch.save({"state": state, "param_groups": groups}, saving.partial / _FILE)
    saving.allocate(_FILE, (saving.partial / _FILE).stat().st_size)
    return {
        ("state", name, key): entry
        for name in state
        for key, entry in outline[name].items()
        if isinstance(entry, torch.Tensor)
    }


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _find_place(
    part: ParameterPart, value: torch.Tensor, shape: tuple[int, ...], place: RankPlace
) -> tuple[torch.Tensor, ShardPlace, Turn]:
    """(this rank's elements, where they are in the whole, and whether this rank or another one writes them)."""
    layout, of_rank = part.layout, part.layout.compute_part(part.shape, place.rank)
    if isinstance(layout, InFlatParameter):
        ((run,),) = of_rank.runs
        in_flat = ShardPlace(numel=len(run), offset=run.start, stride=layout.stride)
        # Of replicas the first one writes.
        return value, in_flat, Turn(max((dist.get_rank(each.group) for each in layout.replicas), default=0), 1)
    in_blocks = ShardPlace(numel=value.numel(), offset=None, stride=compute_row_major_strides(shape), part=of_rank)
    if isinstance(layout, Whole):
        return value, in_blocks, Turn(place.index, 1)
    alike = [rank for rank in place.ranks if layout.compute_part(part.shape, rank) == of_rank]
    return value, in_blocks, Turn(alike.index(place.rank), len(alike))


def _write_checksums(path: pathlib.Path, sums: Mapping[int, int]) -> None:
    """Writes the CRC of each member that begins at one of these bytes behind it, and into the directory of the zip."""
    with OpenFile(path) as opened:
        members: list[Member] = read_torch_file(opened).members
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    with path.open("r+b") as file:
        file.seek(begin)
        directory = bytearray(file.read())
        at = 0
        for member in members:
            assert directory[at : at + 4] == _CENTRAL
            if member.begin in sums:
                crc = struct.pack("<I", sums[member.begin])
                directory[at + 16 : at + 20] = crc
                file.seek(member.begin + member.nbytes)
                assert file.read(4) == _DESCRIPTOR
                file.seek(member.begin + member.nbytes + 4)
                file.write(crc)
            at += _CENTRAL_BYTES + sum(struct.unpack_from("<3H", directory, at + 28))
        file.seek(begin)
        file.write(directory)
        file.flush()
        os.fsync(file.fileno())
