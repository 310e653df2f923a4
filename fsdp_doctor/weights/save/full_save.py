"""``save_full_tensors``: one save from its arguments to its report.

1. The ranks compare what they are going to save, and the first rank makes the folder for unfinished files.
2. Every rank computes all files only from names, shapes and dtypes; each rank makes some of them in their final size.
3. Every rank writes its own rows, takes turns at rows that several ranks hold, and waits for the disk.
4. When all ranks have finished, the first rank gives the files their names, then the index, then the marker.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp_doctor.checkpoints.files import BadFile, make_path
from fsdp_doctor.checkpoints.marker import MARKER, MarkedFile, Marker
from fsdp_doctor.checkpoints.safetensors_files import HubFile, make_index, plan_hub_files
from fsdp_doctor.checkpoints.sums import crc32
from fsdp_doctor.weights.extract.full import ExtractionComparison
from fsdp_doctor.weights.extract.local import (
    ShardRequest,
    divide_shard,
    gather_deltas,
    load_shards,
    request_shards,
    start_factor_stream,
)
from fsdp_doctor.weights.extract.plan import Arguments, describe_plan
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd, run_for_model
from fsdp_doctor.weights.fsdp.dtypes import name_dtype
from fsdp_doctor.weights.fsdp.expert_groups import Experts, list_expert_meshes, place_experts
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors
from fsdp_doctor.weights.load.agreement import announce_early_errors
from fsdp_doctor.weights.names.hub_names import Names, find_original_class, find_pretrained
from fsdp_doctor.weights.save.directory import WEIGHTS, SaveDirectory, SaveError
from fsdp_doctor.weights.save.ranks import RankPlace, collect_sums, leave_sums, open_save
from fsdp_doctor.weights.save.writing import MOST_THREADS, TensorInFile, Writer
from fsdp_doctor.weights.transport.agreement import ComparedPlan
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.host_copies import count_threads
from fsdp_doctor.weights.transport.sources import Source, TensorSpec, list_specs
from fsdp_doctor.weights.transport.streams import wait_for_device

# The habit of the Hub.
LARGEST_FILE = 5_000_000_000
# The number of files that a rank writes at a time. Writes into one file wait for each other, so ranks should mostly
# write to different files.
_FILES_FOR_A_RANK = 4
_SMALLEST_FILE = 128 << 20
# Device memory of a bucket of weights into which adapters are merged.
_BUCKET_BYTES = 64 << 20
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """Result of a save, the same on every rank except for ``num_written``.

    files: the names of the weight files.
    num_bytes: the number of bytes that all ranks wrote.
    num_written: the number of bytes that this rank wrote.
    differing_buffers: persistent buffers whose values differ between the ranks; the files have one rank's values.
    extra_states: names of the results of the model's ``get_extra_state`` methods, which are not tensors and are not
        saved.
    """

    files: tuple[str, ...]
    num_bytes: int
    num_written: int
    differing_buffers: tuple[str, ...] = ()
    extra_states: tuple[str, ...] = ()


@run_for_model
@disable_autograd
def save_full_tensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    names: Names = "hub",
    dtype: torch.dtype | None = None,
    keep_dtype: Collection[str] = (),
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
    step: int | None = None,
    largest_file: int = LARGEST_FILE,
    overwrite: bool = False,
) -> SaveReport:
    """Saves a model in the Hub's format, which ``from_pretrained``, vLLM and :func:`load_full_tensors` read.

    Every rank of the model's mesh must call it with the same arguments; for a model that is not sharded, every rank of
    the default group. The directory must be in a file system that all ranks share. No tensor is gathered: each rank
    writes its own rows at their places in the files. Under HSDP the replicas divide the rows between them, and the
    first rank writes the tensors that are whole on all ranks, such as buffers. LoRA adapters are merged, out of place.
    No step may run during the save. When the call returns, everything is on the disk, on every rank.

    The save is all or nothing. The files are in a hidden folder of the directory until the last byte of the last rank
    is on the disk. After that, the weight files get their names, then the index, and last the marker
    ``fsdp-doctor.json``. The marker has checksums of the tensors in each rank's memory, with which ``fsdp-doctor
    checkpoint verify`` compares the files. If a rank raises or dies, every rank raises, and the directory stays as it
    was. While the files get their names, the former checkpoint is in a second hidden folder. An error at that moment
    moves the former checkpoint back, leaves the complete new files in their folder, and says where both are. If a
    process dies at that moment, the next save moves the former checkpoint back.

    Device memory: 16 MiB if shards on the device are cast. If adapters are merged: all adapters and, in addition, two
    buckets of 64 MiB (or one bucket and the largest shard, if the shard is larger than a bucket). If a part with a name
    of the Hub does not lie in one piece in the shard: a copy of the part. Host memory: 56 MiB, pinned if shards are on
    an accelerator.

    model: see :func:`full_tensors`; on any device, under any offload.
    names, dtype, keep_dtype, experts, tensors: see :func:`full_tensors`; ``names`` has another default. A tied tensor
        is saved under its first name, and under each name that the config of transformers does not tie.
    step: the training step; it is written into the marker.
    largest_file: the size of a file, in bytes; only a single larger tensor makes a larger file. More files are made if
        ranks that write to one file would have to wait for each other.
    overwrite: whether to replace the weights in the directory. The old files are removed when the new files are
        complete and have their names; other files stay. A save is refused if other ranks of this job, such as a critic
        or a pipeline stage, have saved into the directory since the process group was made, and their files still
        exist. Two models on the same ranks, or two jobs, cannot be told apart from one model that is saved again: give
        each model a separate directory.

    Raises SaveError on every rank: for a directory that already has weights (unless ``overwrite``), has weights of
    other ranks of the job, is in use by another save, cannot be made, is not the same for all ranks, or has too little
    room (checked before any tensor is written); for parameters that are whole on each rank, but differ between the
    ranks (a few elements are compared); for tensors that safetensors cannot store; if files cannot be given their
    names; and if another rank fails, with the number of this rank. Any other OSError, before the files get their names,
    is raised unchanged on the rank where it occurs. Warns BuffersDiffer at each save if buffers differ between the
    ranks. Raises ValueError for an empty ``directory``. Other errors: see :func:`full_tensors`.
    """
    with announce_early_errors(model):
        path = make_path(directory)
        if largest_file <= 0:
            raise ValueError(f"largest_file must be positive, not {largest_file}")
        arguments = Arguments.check(
            dtype=dtype, keep_dtype=keep_dtype, bucket_bytes=_BUCKET_BYTES, names=names, experts=experts
        )
        request = request_shards(model, arguments, tensors)
        contents = place_experts(reader.read(model), list_expert_meshes(experts))
        place = RankPlace.find(contents)
        plan = _make_plan(model, request, largest_file, len(place.ranks))
    with open_save(path, place) as (agreement, saving):
        settings = f"to {path} {dtype=} {largest_file=} {overwrite=} {step=} {request.plan.names}"
        lines = describe_plan(request.sources, request.dtypes, settings, request.adapters)
        comparison = ExtractionComparison(request.plan.groups, request.shards, request.device, anew=True)
        agreement.expect(lambda: ComparedPlan(lines), comparison)
        agreement.proceed()
        deltas = gather_deltas(request, start_factor_stream(request))
        if place.is_first:
            saving.prepare(WEIGHTS, overwrite=overwrite)
        saving.join(agreement.proceed(saving.partial.name))
        agreement.proceed()
        agreement.watch = saving.find_dead_rank
        with ThreadPoolExecutor(count_threads(MOST_THREADS)) as threads:
            mine = plan.files[place.index :: len(place.ranks)]
            list(threads.map(lambda file: saving.allocate(file.name, file.nbytes, file.header), mine))
        agreement.proceed()
        wait_for_device(request.device)
        with contextlib.closing(Writer([saving.partial / file.name for file in plan.files], request.device)) as writer:
            _write_shards(writer, plan, request, deltas, place)
            writer.finish()
        leave_sums(saving, place.rank, writer)
        agreement.proceed()
        saving.complete()
        if place.is_first:
            marker = _make_marker(saving, plan, place.ranks, step)
            _write_config(model, plan, saving.partial)
            last = [MARKER]
            if len(plan.files) > 1:
                saving.add(_INDEX, make_index(plan.files))
                last = [_INDEX, MARKER]
            saving.add(MARKER, marker.to_json())
            saving.commit([file.name for file in plan.files], last)
        agreement.proceed()
        if place.is_first:
            saving.clear()
        agreement.proceed()
        num_bytes = sum(file.nbytes for file in plan.files)
        files = tuple(file.name for file in plan.files)
        return SaveReport(
            files=files,
            num_bytes=num_bytes,
            num_written=writer.num_bytes,
            differing_buffers=request.plan.groups.differing,
            extra_states=contents.extra_states,
        )


@dataclass(frozen=True)
class _Plan:
    """Plan of a save.

    tensors: the tensors by their names in the files.
    saved_names: by the first name of each tensor, all its names in the files.
    """

    files: list[HubFile]
    tensors: dict[str, TensorInFile]
    saved_names: dict[str, tuple[str, ...]]


def _make_plan(model: nn.Module, request: ShardRequest, largest_file: int, num_ranks: int) -> _Plan:
    """Plans the files. Raises SaveError for tensors or names that safetensors cannot store."""
    ties = getattr(find_pretrained(model), "all_tied_weights_keys", None)
    tensors: dict[str, tuple[torch.dtype, TensorSpec]] = {}
    saved_names: dict[str, tuple[str, ...]] = {}
    for source in request.sources:
        for spec in list_specs(source):
            for part, _ in request.plan.names.list_parts(spec):
                # What config.json does not tie is loaded under each of its names.
                free = tuple(name for name in part.names if ties is not None and name not in ties)
                saved_names[part.names[0]] = free or part.names[:1]
                tensors |= {name: (request.dtypes.choose(spec), part) for name in free or part.names[:1]}
    total = sum(part.numel * dtype.itemsize for dtype, part in tensors.values())
    num_files = max(-(-total // largest_file), min(_FILES_FOR_A_RANK * num_ranks, total // _SMALLEST_FILE), 1)
    try:
        files = plan_hub_files(
            ((name, name_dtype(dtype), tuple(part.shape)) for name, (dtype, part) in tensors.items()),
            -(-total // num_files),
        )
    except BadFile as error:
        raise SaveError(f"the model cannot be saved as safetensors: {error}") from None
    in_files = {
        name: TensorInFile(name, number, begin, tuple(tensors[name][1].shape), tensors[name][0])
        for number, file in enumerate(files)
        for name, begin in file.begins.items()
    }
    return _Plan(files, in_files, saved_names)


def _write_shards(
    writer: Writer, plan: _Plan, request: ShardRequest, deltas: Mapping[str, list[Delta]], place: RankPlace
) -> None:
    """Writes this rank's parts to several files in turns; each rank begins with different files."""
    list_parts, turns = request.plan.names.list_parts, place.list_turns(request.sources)
    first = place.index * len(plan.files) // len(place.ranks)

    def choose_time(source: Source) -> tuple[int, float]:
        name = list_parts(list_specs(source)[0])[0][0].names[0]
        tensor = plan.tensors[plan.saved_names[name][0]]
        files_before = (tensor.number - first) % len(plan.files)
        return files_before // _FILES_FOR_A_RANK, tensor.begin / plan.files[tensor.number].nbytes

    ordered = replace(request, sources=sorted(request.sources, key=choose_time))
    with contextlib.closing(load_shards(ordered, deltas, shows="unmerged")) as shards:
        for shard in shards:
            turn = turns[shard.spec.names[0]]
            for part in divide_shard(request.plan.names, shard):
                for name in plan.saved_names[part.spec.names[0]]:
                    writer.write(plan.tensors[name], part.tensor, part.place, turn)
                del part
            if shard.is_copy:
                writer.begin_all()
            del shard


def _make_marker(saving: SaveDirectory, plan: _Plan, ranks: Sequence[int], step: int | None) -> Marker:
    sums = collect_sums(saving, ranks, {name: tensor.nbytes for name, tensor in plan.tensors.items()})
    files = {
        file.name: MarkedFile(crc32(file.header), {name: sums[name] for name in file.begins}) for file in plan.files
    }
    return Marker("fsdp-doctor save", 1, uuid.uuid4().hex, len(ranks), files, step)


def _write_config(model: nn.Module, plan: _Plan, directory: pathlib.Path) -> None:
    """Writes the files that ``from_pretrained`` needs in addition to the weights, if the model is one of transformers.

    The configuration's dtype is taken from the weight files, because after a step that raised the modules may show
    another dtype, or none.
    """
    if (pretrained := find_pretrained(model)) is None:
        return
    config = copy.copy(pretrained.config)
    config.architectures = [find_original_class(pretrained).__name__]
    floating = (tensor.dtype for tensor in plan.tensors.values() if tensor.dtype.is_floating_point)
    if (dtype := next(floating, None)) is not None:
        config.dtype = name_dtype(dtype)
    config.save_pretrained(directory)
    if pretrained.can_generate() and pretrained.generation_config is not None:
        pretrained.generation_config.save_pretrained(directory)
