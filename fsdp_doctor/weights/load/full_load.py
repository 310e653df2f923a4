"""``load_full_tensors``: one load from its arguments to its report.

1. read the model: every tensor is a target, with its names, its layout over the ranks, and this rank's part of it
2. the ranks agree on targets and arguments, who has the source, and in which names; where these are the Hub's, what is
   a part of a target becomes a target of its own; an error of one is an error of all from here on
3. match the names, shapes and dtypes of the source with the targets
4. allocate what the load needs, agree once more, and prepare the model for the writes
5. read each part from the source and write it where the shard lies: each rank its own, or rank 0 everybody's
6. check that no file changed meanwhile, and agree that no rank failed
7. copy to the second memory of FSDP1's shards where there is one
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import disable_autograd, keep_present_modes, run_for_model
from fsdp_doctor.weights.fsdp.expert_groups import Experts, list_expert_meshes, place_experts
from fsdp_doctor.weights.fsdp.forms import refuse
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors, put_in_place
from fsdp_doctor.weights.fsdp.private import fsdp1, fsdp2
from fsdp_doctor.weights.fsdp.reader import ModelContents
from fsdp_doctor.weights.load.agreement import Holders, LoadAgreement, announce_early_errors
from fsdp_doctor.weights.load.from_first_rank import FromFirstRank
from fsdp_doctor.weights.load.matching import DtypeRule, Matching
from fsdp_doctor.weights.load.outcome import LoadError, LoadReport
from fsdp_doctor.weights.load.portions import LocalParts
from fsdp_doctor.weights.load.saved_sums import Share, check_sums as compare_sums, find_share
from fsdp_doctor.weights.load.source import LoadSource, TensorSource, Value, open_source
from fsdp_doctor.weights.load.source_names import SourceNames
from fsdp_doctor.weights.load.targets import (
    ModelPlace,
    Target,
    compare_groups,
    describe_targets,
    find_place,
    list_targets,
    match_transient_values,
    replace_memory,
)
from fsdp_doctor.weights.names.hub_names import Names, check_names
from fsdp_doctor.weights.transport.host_copies import HostCopies
from fsdp_doctor.weights.transport.streams import Streams

# A small model's bucket is as large as the model. A bucket is divided among all ranks.
LOAD_BUCKET_BYTES = 512 << 20
_LEAST_BUCKET_BYTES = 1 << 20


@run_for_model
def load_full_tensors(
    model: nn.Module,
    source: TensorSource,
    *,
    strict: bool = True,
    dtype: DtypeRule = "keep",
    names: Names = "auto",
    experts: Experts | None = None,
    tensors: GivenTensors | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    bucket_bytes: int = LOAD_BUCKET_BYTES,
    check_sums: bool = True,
) -> LoadReport:
    """Fills the shards of a model, and its buffers, where they lie, from full tensors.

    Every rank of the model's mesh must call it, with the same arguments except for the source, which either rank 0
    alone (the first of the mesh) or every rank has. They agree on what is loaded before anything is written, and again
    at the end; an error of one rank is a LoadError on all others, instead of a collective that never ends.

    Nothing of the model is replaced: an optimizer that was made before holds the same parameters, tied ones stay tied,
    each shard stays on its device, pinned or not, and in its dtype. Tensors on the meta device are given memory: on the
    CPU for a shard under CPUOffloadPolicy, else on the compute device. Everything has arrived when it returns.

    No rank holds a full model. Device memory beside the shards: two buckets on rank 0 if it alone has the source, and
    on the others what they get of them; none if every rank has it, except for a tensor that is cast or whose shard is
    not contiguous. Host memory: at most 256 MiB that are pinned, and 64 MiB for tensors that do not lie in the source
    as the shards have them.

    model: under FSDP2 (``fully_shard``; any mesh, Shard and Replicate) or FSDP1 (``use_orig_params`` or not), under any
        offload, half-moved too, on the meta device (FSDP2), before the first forward or after training.
    source: full tensors on any device, by name (see ``names``): a mapping; an iterable of (name, tensor), which
        may reuse the memory of a tensor when the next is asked for, and is closed at the end if it is a generator; a
        safetensors file, or a directory of such files with or without an index. If every rank has it, each reads its
        own rows only and nothing is communicated; if rank 0 alone has it, the others pass None or an empty mapping. A
        tied tensor may come under any of its names, or several.
    strict: False to leave as it is what the source lacks, and to skip what the model does not have; the report names
        both. Shapes and dtypes must fit all the same. The entries of a source that ``get_extra_state`` made are passed
        over; the report names those that the model has.
    dtype: ``keep``: a tensor of another dtype than the model's is an error; ``cast``: it is cast to the model's.
    names: ``model``: the source has the names that the model had before it was wrapped (by FSDP1, activation
        checkpointing, torch.compile; peft's names stay as they are). ``hub``: those that transformers gives the files
        of ``save_pretrained``, where an expert may have tensors of its own that are parts of one of the model's.
        ``auto``: whichever the names of the source are; the model's for an iterable. Or a mapping in the form of
        :func:`read_hub_view`. Each rank reads its own rows only, whatever the names.
    experts: as :func:`full_tensors`, of experts of which groups of ranks have others under one name: the source has all
        of them, as one tensor, and each rank gets its own.
    tensors: as :func:`full_tensors`: what is filled in place of the model's own, such as an average of its weights; at
        least one of them must be a DTensor. The source has these and no others, and the model is left as it is.
    buffers: non-persistent buffers, by name, on every rank; those on the meta device must be among them. The report
        names those that are not: after ``to_empty`` they hold whatever was in their memory.
    bucket_bytes: device memory of one bucket, in bytes.
    check_sums: whether tensors in files of :func:`save_full_tensors` are compared with the checksums of their save
        before anything is written. The ranks of a node divide the files between them, so each byte is read once more on
        each node. Files of other programs have no sums; the report says how many tensors were compared.

    Raises LoadError on every rank, before anything is written, for names that are missing or superfluous, a source
    that has some tensors by the Hub's names and others by the model's, Hub names that are unknown or are no parts of
    the model's tensors, a mapping of names that is not one-to-one, other shapes and dtypes, tied names with different
    values, files that are truncated or no safetensors, a model that is not sharded, tensors that are different ones
    under one name on groups of ranks (meshes of some of the ranks, plain parameters whose values differ), ranks whose
    models or arguments differ, or whose files do in names, shapes, dtypes, or the 4 KiB in the middle of a tensor (of
    128 tensors at most). The items of an iterator are checked as they come, and whether a file was written to or
    replaced meanwhile at the end: then the error says how many tensors had been written. On a rank where something else
    is raised (OSError, what an iterator raises) it stays what it is, and the others raise LoadError. Raises TypeError,
    ValueError for arguments that make no sense, and UnreadableTensors for a model with tensors whose memory is not
    their values, unless the load is not strict and the source has none of them.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, Generator):
            # It may be an extraction, whose other ranks wait for this one until it is closed.
            stack.callback(source.close)
        if isinstance(source, Iterator):
            source = keep_present_modes(source)
        return _load(
            model,
            source,
            strict=strict,
            dtype=dtype,
            names=names,
            experts=experts,
            tensors=tensors,
            buffers=buffers,
            bucket_bytes=bucket_bytes,
            check_sums=check_sums,
        )


@disable_autograd
def _load(
    model: nn.Module,
    source: TensorSource,
    *,
    strict: bool,
    dtype: DtypeRule,
    names: Names,
    experts: Experts | None,
    tensors: GivenTensors | None,
    buffers: Mapping[str, torch.Tensor] | None,
    bucket_bytes: int,
    check_sums: bool,
) -> LoadReport:
    with announce_early_errors(model):
        if dtype not in get_args(DtypeRule):
            raise ValueError(f"dtype must be one of {', '.join(get_args(DtypeRule))}, not {dtype!r}")
        if buffers is not None and not isinstance(buffers, Mapping):
            raise TypeError(f"buffers must be a mapping of names to tensors, not {type(buffers).__name__}")
        check_arguments(model, bucket_bytes)
        check_names(names)
        contents = place_experts(put_in_place(reader.read(model), tensors), list_expert_meshes(experts))
        # A load that is not strict may leave them as they are.
        refuse(contents.find_unreadable(but_strided=not strict))
        check_between_steps(model, contents)
        place = find_place(contents)
    agreement = LoadAgreement(place.ranks)
    with agreement.announce_errors(), contextlib.ExitStack() as stack:
        targets = list_targets(contents, place)
        transient = match_transient_values(contents.transient_buffers, buffers or {}, place.device)
        opened = open_source(source, is_first=dist.get_rank() == place.first, ignored=contents.extra_states)
        stack.enter_context(contextlib.closing(opened))
        settings = f"strict={strict} dtype={dtype} bucket_bytes={bucket_bytes} check_sums={check_sums}"
        source_names = SourceNames(names, model, targets, opened)
        lines = lambda: [settings, *describe_targets(targets)]  # noqa: E731
        holders, word = agreement.begin(opened, lines, compare_groups(contents, place), source_names.word)
        source_names.follow(word)
        parts = source_names.divide(targets)
        matching = Matching(
            parts,
            strict=strict,
            dtype=dtype,
            holders=holders,
            conflicts=source_names.rename(agreement.conflicts),
            unreadable=source_names.rename(contents.find_unreadable()),
        )
        share = find_share(place.ranks, dist.get_world_size()) if holders == "all" else Share(0, 1)

        discarded: tuple[str, ...] = ()

        def prepare_model() -> None:
            nonlocal discarded
            discarded = settle(model, contents, place.device)
            for fsdp2_unit in contents.fsdp2_units:
                fsdp2_unit.follow_moved()
            for buffer, value in transient:
                if buffer.is_meta:
                    replace_memory(buffer, value)
                else:
                    buffer.copy_(value)

        report = fill_targets(
            place,
            parts,
            opened,
            holders,
            matching,
            agreement,
            bucket_bytes,
            prepare_model,
            share if check_sums else None,
        )
        for unit in contents.fsdp1_units:
            # Where FSDP1 has the shard on another device, too: a forward under mixed precision reads it there, and the
            # next reshard returns to it.
            loaded, *others = unit.memories
            for other in others:
                other.copy_(loaded)
        not_given = [b.names[0] for b in contents.transient_buffers if not {*b.names} & {*(buffers or ())}]
        return replace(
            report, extra_states=contents.extra_states, buffers_not_given=tuple(not_given), discarded=discarded
        )


def check_arguments(model: nn.Module, bucket_bytes: int) -> None:
    """Raises TypeError, ValueError."""
    reader.check_model(model)
    if not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes must be a whole number, not {type(bucket_bytes).__name__}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")


def check_between_steps(model: nn.Module, contents: ModelContents) -> None:
    """Raises LoadError where a step runs, and for an FSDP1 model whose backward raised."""
    if (running := private.find_running_step(list(model.modules()))) is not None:
        raise LoadError(f"the load was called during a {running}: load between two steps")
    if broken := [unit.flat_name for unit in contents.fsdp1_units if unit.open_step == "backward"]:
        raise LoadError(
            f"a backward raised and left {join_some(broken)} in the middle of it, and FSDP1 cannot recover: build "
            "and wrap the model again, then load"
        )


def settle(model: nn.Module, contents: ModelContents, device: torch.device) -> tuple[str, ...]:
    """Waits for copies from and to the shards, on any stream, and brings the model into the state between two steps.

    What a forward without a backward left unsharded, a gather that is pending, and what a step left that raised would
    be used again, with the values from before the load. Returns the names of the parameters whose gradients were
    discarded: see ``LoadReport.discarded``.
    """
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    states = fsdp2.list_states(model)
    discarded = fsdp2.close_step(states) if fsdp2.find_open_step(states) else []
    fsdp2.reshard(states)
    if any(unit.open_step for unit in contents.fsdp1_units):
        fsdp1.close_forward(model)
    for unit in contents.fsdp1_units:
        unit.reshard()
        unit.unite_memories()
    names = {id(parameter.tensor): parameter.names[0] for parameter in contents.parameters}
    return tuple(names[id(parameter)] for parameter in discarded if id(parameter) in names)


def fill_targets(
    place: ModelPlace,
    targets: Sequence[Target],
    source: LoadSource,
    holders: Holders,
    matching: Matching,
    agreement: LoadAgreement,
    bucket_bytes: int,
    prepare_model: Callable[[], None] = lambda: None,
    share: Share | None = None,
) -> LoadReport:
    """Matches the source with the targets, reads it, and writes each rank's parts.

    prepare_model: called before the first write, when all ranks have found that they can write.
    share: of the files, which this rank compares with the sums of their save before that; None to compare nothing.
    """
    if holders == "first" and place.partial:
        raise LoadError(
            f"{join_some(place.partial)}: sharded over some of the model's ranks, on a mesh that is not a submesh "
            "of a mesh of all ranks, so rank 0 does not know which rank has which part: give every rank the "
            "source"
        )
    if source.kind in ("mapping", "files"):
        matching.add_all(source.tensors)
    checked = 0
    if share is not None and source.kind == "files":
        in_files = source.file_tensors
        checked = compare_sums({name: in_files[name] for names in matching.names.values() for name in names}, share)
    streams = Streams(place.device)
    with contextlib.closing(HostCopies(streams)) as copies:
        values = _iterate_values(source, matching, agreement, copies)
        if holders == "first":
            full_bytes = sum(target.shape.numel() * target.dtype.itemsize for target in targets)
            bucket_bytes = min(bucket_bytes, max(full_bytes, _LEAST_BUCKET_BYTES))
            if place.known_group is None:
                # One is about to be made, for which each rank waits for all others.
                agreement.agree()
            buckets = FromFirstRank(place, targets, bucket_bytes, agreement.agree, copies, streams)
            buckets.prepare()
            agreement.agree()
            prepare_model()
            with contextlib.closing(buckets):
                if dist.get_rank() != place.first:
                    return msgspec.json.decode(buckets.receive(agreement.count_written), type=LoadReport)
                buckets.send(values)
                copies.finish()
                source.check_unchanged()
                report = _make_report(matching, agreement, checked)
                agreement.agree(msgspec.json.encode(report).decode())
                return report
        agreement.agree()
        prepare_model()
        own_parts = LocalParts(copies, streams)
        for index, value in values:
            own_parts.write(targets[index], value)
        own_parts.finish()
        source.check_unchanged()
        agreement.agree()
        return _make_report(matching, agreement, checked)


def _iterate_values(
    source: LoadSource, matching: Matching, agreement: LoadAgreement, copies: HostCopies
) -> Iterator[tuple[int, Value]]:
    """(index of a target, full tensor), each target once."""
    if source.kind == "iterator":
        for name, value in source.read_items():
            index = matching.add(name, value)
            if index is not None:
                yield index, value
                agreement.count_written(1)
                # The iterator may fill the same memory again.
                copies.finish()
        matching.check_complete()
        return
    names = [(index, matching.names[index][0]) for index in sorted(matching.names)]
    if source.kind == "files":
        # Each file is read from its beginning to its end.
        begins = {name: (str(tensor.file.path), tensor.begin) for name, tensor in source.file_tensors.items()}
        names.sort(key=lambda pair: begins[pair[1]])
    for index, name in names:
        yield index, source.tensors[name]
        agreement.count_written(1)
        if source.makes_values:
            copies.finish()


def _make_report(matching: Matching, agreement: LoadAgreement, checked: int) -> LoadReport:
    return LoadReport(
        loaded=agreement.num_written,
        checked=checked,
        missing=tuple(matching.list_missing()),
        superfluous=tuple(matching.superfluous),
    )
