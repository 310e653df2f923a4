"""``save_optimizer_state``: a file of torch.save with full tensors, into which each rank writes its own rows.

1. Each rank states which state it has. The first rank compares the statements, and makes the whole file in its final
    size, without the bytes of tensors.
2. Every rank reads the position of each tensor from the file, and writes its rows there.
3. The first rank writes the checksums that torch has left out, and gives the file its name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.checkpoints.files import OpenFile, make_path
from fsdp_doctor.checkpoints.record import Member
from fsdp_doctor.checkpoints.torch_files import find_tensors, read_torch_file
from fsdp_doctor.weights.extract.local import ShardPlace
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.expert_groups import Experts, list_expert_meshes, place_experts
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.load.agreement import announce_early_errors
from fsdp_doctor.weights.load.layouts import InFlatParameter, Whole
from fsdp_doctor.weights.load.optimizer_matching import OptimizerParameter, ParameterPart, StateForm, list_parameters
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.targets import compare_groups, find_place
from fsdp_doctor.weights.save.directory import SaveDirectory, SaveError
from fsdp_doctor.weights.save.optimizer_outline import (
    REMEDY,
    SavedEntries,
    SavedEntry,
    list_values,
    make_outline,
    merge_outlines,
    read_options,
)
from fsdp_doctor.weights.save.ranks import RankPlace, collect_sums, leave_sums, open_save
from fsdp_doctor.weights.save.writing import TensorInFile, Turn, Writer
from fsdp_doctor.weights.transport.agreement import ComparedPlan
from fsdp_doctor.weights.transport.rank_groups import describe_conflicts
from fsdp_doctor.weights.transport.streams import wait_for_device

_FILE = "optimizer.pt"
_OF_UNSHARDED = (
    "on one rank, save with torch.save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
    "optimizer) returns, which has the same form"
)
_MERGED = "rank-all.outline"
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_CENTRAL_BYTES = 46


@run_for_model
@disable_autograd
def save_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str],
    *,
    experts: Experts | None = None,
    overwrite: bool = False,
) -> None:
    """Saves the full state of a sharded model's optimizer as ``optimizer.pt``, next to the weights or alone.

    Every rank of the model's mesh must call it with the same arguments. As in :func:`save_full_tensors`, nothing is
    gathered; if a rank raises or dies, every rank raises, and the directory stays as it was.

    The file has torch.save's format and the content that ``get_optimizer_state_dict`` returns for
    ``full_state_dict=True``. ``torch.load(file, mmap=True, weights_only=True)`` is a source for
    :func:`load_optimizer_state` on every rank, and for torch's ``set_optimizer_state_dict``. The file has checksums of
    the values in the ranks' memory, with which ``fsdp-doctor checkpoint verify`` compares the file.

    The shape of a tensor shows which part of it a rank has, and the ranks compare this before anything is written. The
    part is the rank's shard; the whole tensor, which must be the same on each rank that has it and is saved once; or a
    single value, which must be the same on all ranks. Options of the param groups that are tensors, such as a learning
    rate or betas, are saved as numbers.

    model, optimizer, experts: see :func:`load_optimizer_state`; any optimizer. Tensors keep their dtypes.
    overwrite: whether to replace an ``optimizer.pt``; refused if other ranks of this job have saved it; see
        :func:`save_full_tensors`.

    Raises SaveError in the cases of :func:`save_full_tensors`; for a model that is not sharded; for an optimizer whose
    parameters are not the model's; for ranks whose state differs in more than its shards; and for state of another
    kind, which the error names: factored moments, 8-bit codes and their scales, lists, and state that belongs to no
    parameter. Raises ValueError for an empty ``directory``.
    """
    with announce_early_errors(model):
        path = make_path(directory)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        contents = place_experts(reader.read(model), list_expert_meshes(experts))
        try:
            model_place = find_place(contents, otherwise=_OF_UNSHARDED)
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
        wait_for_device(model_place.device)
        try:
            options = read_options(optimizer)
            outline = make_outline(optimizer, parameters, is_alone=len(place.ranks) == 1)
        except LoadError as error:
            raise SaveError(f"{error}; {REMEDY}") from None
        agreement.proceed()
        if place.is_first:
            saving.prepare(re.compile(re.escape(_FILE)), overwrite=overwrite)
        saving.join(agreement.proceed(saving.partial.name))
        saving.add(f"rank-{place.rank}.outline", pickle.dumps(outline))
        agreement.proceed()
        agreement.watch = saving.find_dead_rank
        if place.is_first:
            # Of ranks of this process group.
            outlines = {r: pickle.loads((saving.partial / f"rank-{r}.outline").read_bytes()) for r in place.ranks}
            merged = merge_outlines(outlines)
            _make_file(saving, merged, options, parameters)
            saving.add(_MERGED, pickle.dumps(merged))
        agreement.proceed()
        entries: SavedEntries = pickle.loads((saving.partial / _MERGED).read_bytes())
        file = saving.partial / _FILE
        with OpenFile(file) as opened:
            found = {tensor.path: tensor for tensor in find_tensors(_FILE, read_torch_file(opened), None).tensors}
        targets = {
            path: TensorInFile(".".join(path), 0, tensor.pieces[0].begin, tensor.shape, getattr(torch, tensor.dtype))
            for path, tensor in found.items()
        }
        with contextlib.closing(Writer([file], model_place.device)) as writer:
            for part, key, value in list_values(optimizer, parameters):
                entry = entries[part.names[0]][key]
                if isinstance(value, torch.Tensor):
                    target = targets["state", part.names[0], key]
                    writer.write(target, *_find_place(part, value, entry, place))
            writer.finish()
        leave_sums(saving, place.rank, writer)
        agreement.proceed()
        saving.complete()
        if place.is_first:
            num_bytes = {target.name: target.nbytes for target in targets.values()}
            sums = collect_sums(saving, place.ranks, num_bytes)
            _write_checksums(file, {t.begin: sums[t.name] for t in targets.values() if t.nbytes})
            saving.commit([_FILE], [])
        agreement.proceed()
        if place.is_first:
            saving.clear()
        agreement.proceed()


def _make_file(
    saving: SaveDirectory,
    entries: SavedEntries,
    options: Sequence[Mapping[str, Any]],
    parameters: Sequence[OptimizerParameter],
) -> None:
    shapes = {part.names[0]: part.shape for parameter in parameters for part in parameter.parts}

    def make_value(name: str, entry: SavedEntry) -> Any:
        if entry.form is StateForm.SINGLE:
            return entry.value
        return torch.empty(shapes[name], dtype=entry.dtype, device="cpu")

    state = {
        name: {key: make_value(name, entry) for key, entry in entries[name].items()}
        for name in shapes
        if name in entries
    }
    groups = [
        {"params": [p.names[0] for each in parameters if each.group == number for p in each.parts], **group}
        for number, group in enumerate(options)
    ]
    with torch.serialization.skip_data():
        torch.save({"state": state, "param_groups": groups}, saving.partial / _FILE)
    saving.allocate(_FILE, (saving.partial / _FILE).stat().st_size)


def _find_place(
    part: ParameterPart, value: torch.Tensor, entry: SavedEntry, place: RankPlace
) -> tuple[torch.Tensor, ShardPlace, Turn]:
    """Returns (this rank's elements, their place in the whole tensor, the chunks of them that this rank writes)."""
    if entry.form is not StateForm.SHARD:
        local = private.read_local_tensor(value)
        whole = ShardPlace(numel=local.numel(), offset=0, stride=compute_row_major_strides(local.shape))
        return local, whole, Turn(int(entry.writer != place.rank), 1)
    local, layout, of_rank = part.view_part(value), part.layout, part.layout.compute_part(part.shape, place.rank)
    if isinstance(layout, InFlatParameter):
        ((run,),) = of_rank.runs
        in_flat = ShardPlace(numel=len(run), offset=run.start, stride=layout.stride)
        # Of replicas the first one writes.
        return local, in_flat, Turn(max((dist.get_rank(each.group) for each in layout.replicas), default=0), 1)
    stride = compute_row_major_strides(part.shape)
    in_blocks = ShardPlace(numel=local.numel(), offset=None, stride=stride, part=of_rank)
    if isinstance(layout, Whole):
        return local, in_blocks, Turn(place.index, 1)
    alike = [rank for rank in place.ranks if layout.compute_part(part.shape, rank) == of_rank]
    return local, in_blocks, Turn(alike.index(place.rank), len(alike))


def _write_checksums(path: pathlib.Path, sums: Mapping[int, int]) -> None:
    """Writes checksums into a zip file: behind each member that ``sums`` lists, and into the zip's directory.

    sums: the CRC-32 of each member, by the offset of the member's first byte.
    """
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
