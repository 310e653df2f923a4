"""``load_full_tensors``: one load from its arguments to its report.

1. Read the model: every tensor is a target with its names, its layout over the ranks, and this rank's part of it.
2. The ranks agree on targets and arguments, on who has the source, and on the names. With the Hub's names, each part of
    a fused target becomes a separate target. From here on an error of one rank is raised on all.
3. Match the names, shapes and dtypes of the source with the targets.
4. Allocate the memory that the load needs, agree once more, and prepare the model for the writes.
5. Read each part from the source and write it into its shard. Each rank does this for itself, or rank 0 for all.
6. Check that no file has changed, and agree that no rank has failed.
7. Copy the shards to their second memory, which some FSDP1 units have.
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
    """Fills the shards of a model, and its buffers, in place from full tensors.

    Every rank of the model's mesh must call it with the same arguments. Only the source may differ: either only rank 0
    (the first of the mesh) or every rank has it. The ranks agree on the load before anything is written, and again at
    the end; an error of one rank is raised as LoadError on all others, so none waits in a collective forever.

    No object of the model is replaced: an existing optimizer keeps its parameters, tied parameters stay tied, and each
    shard keeps its device, its pinning and its dtype. Tensors on the meta device are given memory: on the CPU for a
    shard under CPUOffloadPolicy, otherwise on the compute device. All copies have finished when the function returns.

    No rank holds a full model. Device memory in addition to the shards: if only rank 0 has the source, two buckets on
    rank 0, and the share of two buckets on each other rank. If every rank has the source, memory is needed only for
    tensors that are cast, or whose shards are not contiguous. Host memory: at most 256 MiB of pinned memory, and 64 MiB
    for tensors that are not laid out in the source like the shards.

    model: a model under FSDP2 (``fully_shard``; any mesh, Shard and Replicate) or FSDP1 (``use_orig_params`` or not),
        under any offload, before the first forward or after training. It may be half-moved (its parameters report
        another device than their shards have) or, under FSDP2, on the meta device.
    source: full tensors on any device, by name (see ``names``): a mapping; an iterable of (name, tensor); a safetensors
        file; or a directory of such files with or without an index. An iterable may reuse the memory of a tensor after
        the next tensor is requested, and a generator is closed at the end. If every rank has the source, each rank
        reads only its own rows and nothing is communicated. If only rank 0 has the source, the other ranks pass None or
        an empty mapping. A tied tensor may have any of its names in the source, or several of them.
    strict: False leaves tensors that the source lacks unchanged, and skips tensors that the model does not have. The
        report names the tensors of both kinds. Shapes and dtypes must fit in any case. Results of ``get_extra_state``
        in the source are skipped; the report names all such entries of the model.
    dtype: ``keep``: a tensor with another dtype than in the model is an error. ``cast``: such a tensor is cast.
    names: ``model``: the source has the names that the model had before it was wrapped (by FSDP1, activation
        checkpointing, torch.compile; peft's names stay as they are). ``hub``: the names in files of
        ``save_pretrained``. These files may have a separate tensor for each expert of a fused tensor. ``auto``: the
        names that the source has; for an iterable, the model's names. Or a mapping in the form of
        :func:`read_hub_view`. With any of these, each rank reads only its own rows.
    experts: see :func:`full_tensors`; for experts that were divided over groups of ranks before FSDP sharded them. The
        source has all experts as one tensor, and each rank gets its own experts.
    tensors: see :func:`full_tensors`; the tensors to fill instead of the model's own, such as an average of its
        weights. At least one of them must be a DTensor. The source must have exactly these tensors, and the model is
        left unchanged.
    buffers: non-persistent buffers, by name, on every rank. Buffers on the meta device must be given. The report names
        the buffers that are not given: after ``to_empty`` their values are undefined.
    bucket_bytes: device memory of one bucket, in bytes.
    check_sums: whether tensors in files of :func:`save_full_tensors` are compared with the checksums of their save
        before anything is written. The ranks of a node divide the files among themselves, so each node reads each byte
        one additional time. Files of other programs have no sums; the report says how many tensors were compared.

    Raises LoadError on every rank, before anything is written, for

    - names that are missing or superfluous, a source with some of the Hub's and some of the model's names, Hub names
        that are unknown or do not belong to the model's tensors, and a mapping of names that is not one-to-one;
    - wrong shapes or dtypes, and tied names with different values;
    - files that are absent, cannot be opened, are truncated or not in safetensors' format;
    - a model that is not sharded, and groups of ranks with different tensors under one name (meshes of some of the
        ranks, plain parameters whose values differ);
    - ranks whose models or arguments differ, or whose files differ in names, shapes, dtypes, or the 4 KiB in the middle
        of a tensor (checked for at most 128 tensors).

    The items of an iterator are checked one by one during the load, and a file that was written to or replaced is
    detected at the end. In both cases the error says how many tensors had been written. Another exception (OSError, an
    exception of the iterator) is passed on unchanged on the rank that raised it, and the other ranks raise LoadError.
    Raises TypeError or ValueError for invalid arguments, and UnreadableTensors for a model with tensors whose memory
    does not hold their values. A load that is not strict accepts such a model if the source has none of these tensors.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, Generator):
            # The source may be an extraction, in which other ranks wait for this rank until it is closed.
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
        place = find_place(contents, otherwise="load it with model.load_state_dict")
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
            # FSDP1 may have a second copy of the shard on another device, which a forward under mixed precision reads
            # and to which the next reshard returns.
            loaded, *others = unit.memories
            for other in others:
                other.copy_(loaded)
        not_given = [b.names[0] for b in contents.transient_buffers if not {*b.names} & {*(buffers or ())}]
        return replace(
            report, extra_states=contents.extra_states, buffers_not_given=tuple(not_given), discarded=discarded
        )


def check_arguments(model: nn.Module, bucket_bytes: int) -> None:
    """Raises TypeError or ValueError for invalid arguments."""
    reader.check_model(model)
    if not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes must be a whole number, not {type(bucket_bytes).__name__}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")


def check_between_steps(model: nn.Module, contents: ModelContents) -> None:
    """Raises LoadError if a step is running, and for an FSDP1 model whose backward raised."""
    if (running := private.find_running_step(list(model.modules()))) is not None:
        raise LoadError(f"the load was called during a {running}: call it between two training steps")
    if broken := [unit.flat_name for unit in contents.fsdp1_units if unit.open_step == "backward"]:
        raise LoadError(
            f"a backward raised and left {join_some(broken)} in a state from which FSDP1 cannot recover: build "
            "and wrap the model again, then load"
        )


def settle(model: nn.Module, contents: ModelContents, device: torch.device) -> tuple[str, ...]:
    """Waits for copies from and to the shards on all streams, and resets the model to the idle state between two steps.

    Parameters that a forward without a backward left unsharded, a pending gather, and the leftovers of a step that
    raised would otherwise be used again, with values from before the load. Returns the names of the parameters whose
    gradients were discarded: see ``LoadReport.discarded``.
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
    """Matches the source with the targets, reads it, writes each rank's parts, and returns the report.

    prepare_model: a function that is called before the first write, after all ranks have found that they can write.
    share: this rank's share of the files, whose checksums from the save are compared before the first write; None to
        compare nothing.
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
    """Yields (index of a target, full tensor), each target once."""
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
