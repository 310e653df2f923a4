"""Full tensors into a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import get_args

import torch
from torch import nn

from fsdp_doctor.extract.without_autograd import in_present_modes, without_autograd
from fsdp_doctor.fsdp import reader
from fsdp_doctor.load.checks import DtypeRule, Rules
from fsdp_doctor.load.given import TensorSource, given
from fsdp_doctor.load.outcome import LoadReport
from fsdp_doctor.load.targets import (
    comparison_of,
    loaded_model,
    plan,
    settle,
    targets_of,
    write_other_memories,
)
from fsdp_doctor.load.together import Together, refused
from fsdp_doctor.load.transient_buffers import TransientBuffers
from fsdp_doctor.load.writing import LOAD_BUCKET_BYTES, Load, check_arguments


def load_full_tensors(
    model: nn.Module,
    source: TensorSource,
    *,
    strict: bool = True,
    dtype: DtypeRule = "keep",
    buffers: Mapping[str, torch.Tensor] | None = None,
    bucket_bytes: int = LOAD_BUCKET_BYTES,
) -> LoadReport:
    """Fills the shards of a model, and its buffers, where they lie, from full tensors.

    Every rank of the model's mesh must call it, with the same arguments but for the source, which rank 0 alone (the
    first of the mesh) or every rank has. They agree on what is loaded before anything is written, and again at the
    end; an error of one rank is a LoadError on all others, instead of a collective that stands still.

    Nothing of the model is replaced: an optimizer that was made before holds the same parameters, tied ones stay tied,
    each shard stays on its device, pinned or not, and in its dtype. What is on the meta device is given memory: a
    shard on the CPU under CPUOffloadPolicy, else on the compute device. All has arrived when it returns.

    No rank holds a full model. Device memory in use beside the shards: two buckets on rank 0 where it alone has the
    source, elsewhere what it gets of them; nothing where every rank has it, except a tensor that is cast or whose
    shard is not contiguous. Host memory: 256 MiB at most that are pinned,
    and 64 MiB for what does not lie in the source as the shards have it.

    model: under FSDP2 (``fully_shard``; any mesh, Shard and Replicate) or FSDP1 (``use_orig_params`` or not), under any
        offload, half-moved too, on the meta device (FSDP2), before the first forward or after training.
    source: by the names that the model had before it was wrapped (by FSDP1, activation checkpointing, torch.compile;
        peft's names stay as they are), full tensors on any device: a mapping; an iterable of (name, tensor), of which
        each tensor has been read when the next is asked for (a generator is closed at the end, also where it is
        refused); a safetensors file, or a directory of such files with or without an index. Where every rank has it,
        each reads its own rows only and nothing is communicated; where rank 0 alone has it, the others pass None or an
        empty mapping. A tied tensor may come under any of its names, or several.
    strict: False to leave as it is what the source lacks, and to skip what the model does not have; the report names
        both. Shapes and dtypes must fit all the same.
    dtype: ``keep`` a tensor of another dtype than the model's is an error; ``cast`` it is cast to the model's.
    buffers: non-persistent buffers, by name, on every rank; those on the meta device must be among them.
    bucket_bytes: of device memory of one bucket.

    Raises LoadError on every rank, before anything is written, for names that are missing or superfluous, for other
    shapes and dtypes, tied names with different values, files that are truncated or no safetensors, a model that is
    not sharded, tensors of which groups of ranks have others under one name (meshes of a part of the ranks, plain
    parameters whose values differ), ranks whose models or arguments differ, or whose files do in names, shapes,
    dtypes, or the 4 KiB in the middle of a tensor (of 128 tensors at most). What an iterator yields is known only as
    it comes, and that a file was written to or replaced while it was read, only at the end: then the error says how
    many tensors had been written. On a rank where something else is raised (OSError, what an iterator raises) it
    stays what it is, and the others raise LoadError. Raises TypeError, ValueError for arguments that make no sense.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, Generator):
            # It may be an extraction, whose other ranks wait for this one until it is closed.
            stack.callback(source.close)
        if isinstance(source, Iterator):
            source = in_present_modes(source)
        return _loaded(model, source, strict=strict, dtype=dtype, buffers=buffers, bucket_bytes=bucket_bytes)


@without_autograd
def _loaded(
    model: nn.Module,
    source: TensorSource,
    *,
    strict: bool,
    dtype: DtypeRule,
    buffers: Mapping[str, torch.Tensor] | None,
    bucket_bytes: int,
) -> LoadReport:
    with refused(model):
        if dtype not in get_args(DtypeRule):
            raise ValueError(f"dtype must be one of {', '.join(get_args(DtypeRule))}, not {dtype!r}")
        if buffers is not None and not isinstance(buffers, Mapping):
            raise TypeError(f"buffers must be a mapping of names to tensors, not {type(buffers).__name__}")
        check_arguments(model, bucket_bytes)
        held = reader.read(model)
        place = loaded_model(held)
    together = Together(place.ranks)
    with together.lasting(), contextlib.ExitStack() as stack:
        targets = targets_of(held, place)
        transient = TransientBuffers(held.transient_buffers, buffers or {}, place.device)
        have = given(source, is_first=torch.distributed.get_rank() == place.first)
        stack.callback(have.close)
        settings = f"strict={strict} dtype={dtype} bucket_bytes={bucket_bytes}"
        holders = together.begin(have, lambda: plan(targets, settings), comparison_of(held, place))

        def begin() -> None:
            settle(model, held, place.device)
            for unit in held.fsdp2_units:
                unit.follow_moved()
            transient.fill()

        report = Load(place, targets, together, bucket_bytes).run(have, holders, Rules(strict, dtype), begin)
        write_other_memories(held)
        return report
