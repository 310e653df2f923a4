"""Plan of an extraction, made once for a model and the extraction's arguments, and kept until the model changes."""

from __future__ import annotations

import atexit
import collections
import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import assert_never

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.extract import lora as adapters
from fsdp_doctor.weights.extract.lora import Lora, LoraAdapter
from fsdp_doctor.weights.fsdp import reader
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection
from fsdp_doctor.weights.fsdp.dtypes import check_dtype
from fsdp_doctor.weights.fsdp.expert_groups import ExpertMeshes, Experts, list_expert_meshes, place_experts
from fsdp_doctor.weights.fsdp.forms import refuse
from fsdp_doctor.weights.fsdp.given_tensors import GivenTensors, put_in_place
from fsdp_doctor.weights.fsdp.snapshot import Snapshot
from fsdp_doctor.weights.names.hub_names import NameChoice, Names, check_names, choose_names
from fsdp_doctor.weights.names.output_names import OutputNames
from fsdp_doctor.weights.names.views import NamesError, TensorView
from fsdp_doctor.weights.transport.agreement import ComparedPlan
from fsdp_doctor.weights.transport.buckets import Bucket, Division
from fsdp_doctor.weights.transport.rank_groups import RankGroups, read_groups
from fsdp_doctor.weights.transport.sources import (
    FlatUnit,
    OutputDtypes,
    Placed,
    Plain,
    Rows,
    ShardGroup,
    Source,
    check_shards,
    compute_device,
    find_device,
    list_shards,
    list_sources,
    list_specs,
)

BUCKET_BYTES = 512 << 20
# Limit for the plans of one model, whose weights a trainer may extract in a few forms.
_MOST_PLANS = 4


@dataclass(frozen=True)
class Arguments:
    """Arguments of :func:`full_tensors`. Each public function of an extraction takes some of them."""

    device: torch.device | str | None
    dtype: torch.dtype | None
    keep_dtype: tuple[str, ...]
    bucket_bytes: int
    lora: Lora
    names: NameChoice | tuple[tuple[str, TensorView], ...]
    experts: ExpertMeshes
    in_step: bool

    @classmethod
    def check(
        cls,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        keep_dtype: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        lora: Lora = "merged",
        names: Names = "model",
        experts: Experts | None = None,
        in_step: bool = False,
    ) -> Arguments:
        """Returns the checked arguments.

        Raises ValueError for a word or number that is not allowed, TypeError for a wrong type.
        """
        adapters.check(lora)
        check_names(names)
        check_dtype(dtype)
        if not isinstance(bucket_bytes, int):
            raise TypeError(f"bucket_bytes must be an int, not {bucket_bytes!r}")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        keep = [keep_dtype] if isinstance(keep_dtype, str) or not isinstance(keep_dtype, Iterable) else keep_dtype
        if not all(isinstance(pattern, str) for pattern in keep):
            raise TypeError(f"keep_dtype must be names or patterns of names, not {keep_dtype!r}")
        given = tuple(names.items()) if isinstance(names, Mapping) else names
        return cls(device, dtype, tuple(keep), bucket_bytes, lora, given, list_expert_meshes(experts), in_step)


@dataclass(kw_only=True, eq=False)
class Plan:
    """Facts derived from a model and the arguments of a call. A plan holds no tensor, so it may be kept.

    all_sources: every tensor of the model, adapters included.
    sources: the tensors to yield.
    ranks: all ranks that take part.
    groups: the groups of ranks that may have different tensors under one name.
    merges: whether the model has adapters, active or not, that are to be merged.
    adapters: for each weight, the factors to merge into it.
    factors: the source of each factor.
    most_bytes: device memory that buckets and the caller's last tensor may take together.
    ready: the indices of the shards that a collective can read without a copy.
    names: the names under which the sources' tensors are yielded.
    in_step: whether a bucket is gathered only when the work of every rank's caller has finished.
    compared: the lines that must be the same on all ranks.
    """

    all_sources: list[Source]
    sources: list[Source]
    merges: bool
    adapters: dict[str, list[LoraAdapter]]
    factors: dict[str, Source]
    dtypes: OutputDtypes
    device: torch.device
    ranks: tuple[int, ...]
    groups: RankGroups
    buckets: list[Bucket]
    most_bytes: int
    ready: frozenset[int]
    in_step: bool
    compared: ComparedPlan
    names: OutputNames

    def count_promisable(self, first: int, wanted: int) -> int:
        """Counts the buckets from ``first`` on that a rank may promise at once: at least 1, at most ``wanted``.

        While the caller holds a tensor of one bucket, there must be memory to launch any later promised bucket. Memory
        for buckets before ``first`` that may still be pending is included, because these buckets are not yielded yet.
        """
        pending, together = first, self.buckets[first].nbytes
        while pending and (together := together + self.buckets[pending - 1].nbytes) <= self.most_bytes:
            pending -= 1
        before, beside = self.buckets[pending - 1] if pending else Bucket(), 0
        for at, (bucket, following) in enumerate(itertools.pairwise(self.buckets[pending : first + wanted]), pending):
            beside = max(beside, before.last_bytes + before.early_bytes + bucket.begun_bytes + bucket.nbytes)
            if at >= first and beside + following.launched_bytes + following.rounding_bytes > self.most_bytes:
                return at - first + 1
            before = bucket
        return wanted


class _KeptPlan:
    """Plan together with the state of the model from which it was made."""

    def __init__(self, model: nn.Module, arguments: Arguments, tensors: GivenTensors | None = None) -> None:
        contents = place_experts(put_in_place(reader.read(model), tensors), arguments.experts)
        if unused := contents.list_unused():
            raise RuntimeError(
                f"FSDP2 does not compute with the model's present {join_some(unused)}: the parameter was assigned "
                "or swapped after the first forward. Copy values into FSDP2's parameter instead of replacing the "
                "parameter or its memory"
            )
        # Only the adapters can be extracted from a model whose weights are quantized codes.
        refuse(contents.find_unreadable(but_strided=arguments.lora == "adapter"))
        peft_modules = adapters.find_adapter_modules(reader.find_innermost(model))
        self._snapshot = Snapshot(model, contents)
        self._peft_modules = [(prefix, weakref.ref(module)) for prefix, module in peft_modules]
        self._layers = adapters.read(peft_modules)
        self.shards = list_shards(contents)
        self.plan = _make_plan(model, contents, self.shards, self._layers, arguments)
        asked = [torch.device(arguments.device).type] if arguments.device is not None else []
        self._device_types = {*(group.device.type for group in list_shard_groups(self.plan.all_sources)), *asked}
        self._devices = self._read_devices()

    def find_shards(self, model: nn.Module) -> list[torch.Tensor] | None:
        """Finds the shards; None if the model has changed since the plan was made."""
        shards = self._snapshot.find_shards(model)
        if shards is None or self._read_devices() != self._devices:
            return None
        layers = adapters.read((prefix, module) for prefix, known in self._peft_modules if (module := known()))
        return shards if layers == self._layers else None

    def _read_devices(self) -> list[torch.device]:
        """Returns this rank's current device of each type on which shards are gathered or that the caller requested.

        The current device of a thread may change between calls.
        """
        return [find_device(device_type) for device_type in self._device_types]


_kept: weakref.WeakKeyDictionary[nn.Module, dict[Arguments, _KeptPlan]] = weakref.WeakKeyDictionary()
# Plans know process groups, which are not to outlive the interpreter's modules.
atexit.register(_kept.clear)


@defer_garbage_collection
def get_plan(
    model: nn.Module, arguments: Arguments, tensors: GivenTensors | None = None
) -> tuple[Plan, list[torch.Tensor]]:
    """Returns the plan, and this rank's present shards, each at the index ``place`` of its source.

    tensors: tensors to read instead of the model's own; such a plan is not kept.
    """
    reader.check_model(model)
    if tensors is not None:
        made = _KeptPlan(model, arguments, tensors)
        return made.plan, made.shards
    plans = _kept.get(model, {})
    kept = plans.get(arguments)
    shards = kept.find_shards(model) if kept is not None else None
    if kept is None or shards is None:
        kept = _KeptPlan(model, arguments)
        shards, kept.shards = kept.shards, []
    # In the order of their last use.
    others = [(known, plan) for known, plan in plans.items() if known != arguments]
    _kept[model] = dict([*others[1 - _MOST_PLANS :], (arguments, kept)])
    return kept.plan, shards


def list_differing_buffers(model: nn.Module) -> tuple[str, ...]:
    """Lists the buffers that differed between the ranks at their last comparison."""
    groups = [kept.plan.groups for kept in _kept.get(model, {}).values()]
    with_buffers = [each for each in groups if any(part.relation == "buffer" for part in each.parts)]
    return with_buffers[-1].differing if with_buffers else ()


def _make_plan(
    model: nn.Module,
    contents: reader.ModelContents,
    shards: Sequence[torch.Tensor],
    layers: adapters.Layers,
    arguments: Arguments,
) -> Plan:
    everything = list_sources(contents)
    check_shards(everything, shards)
    sources, merged = adapters.select(layers, everything, arguments.lora)
    refuse({spec.names[0]: spec.form for source in sources for spec in list_specs(source) if spec.form})
    if layers.has_adapters:
        # Names without what peft put into them.
        numbers = collections.Counter(name for source in sources for spec in list_specs(source) for name in spec.names)
        if ambiguous := [name for name, number in numbers.items() if number > 1]:
            raise RuntimeError(reader.describe_ambiguous(ambiguous))
    dtypes = OutputDtypes(arguments.dtype, arguments.keep_dtype)
    dtypes.check(sources)
    device = _choose_device(arguments.device, compute_device(contents, everything), bool(list_shard_groups(everything)))
    merged = _choose_merged(sources, merged)
    factors = adapters.find_factors(everything, merged)
    if lacking := [name for name in adapters.list_factor_names(merged) if name not in factors]:
        raise ValueError(
            f"tensors: {join_some(lacking)} is merged into a given weight, but is not given: also give it, or "
            'use lora="base"'
        )
    groups = read_groups(contents)
    names = _choose_names(model, sources, arguments)
    settings = (
        f"dtype={dtypes.dtype} bucket_bytes={arguments.bucket_bytes} lora={arguments.lora} {names} "
        f"in_step={arguments.in_step}"
    )
    division = Division(sources, dtypes, arguments.bucket_bytes, _count_merging_bytes(merged, factors))
    return Plan(
        all_sources=everything,
        sources=sources,
        merges=layers.has_adapters and arguments.lora == "merged",
        adapters=merged,
        factors=factors,
        dtypes=dtypes,
        device=device,
        ranks=groups.ranks or list_ranks(everything),
        groups=groups.find({source.place for source in (*sources, *factors.values())}),
        buckets=list(division.make_buckets()),
        most_bytes=division.most_bytes,
        ready=_find_ready_places(sources, shards, dtypes, device, merged),
        in_step=arguments.in_step,
        compared=ComparedPlan(describe_plan(sources, dtypes, settings, merged)),
        names=names,
    )


def _choose_merged(sources: Sequence[Source], merged: dict[str, list[LoraAdapter]]) -> dict[str, list[LoraAdapter]]:
    """Returns the adapters to merge, without the adapters of weights that were not requested."""
    if not merged:
        return merged
    names = {name for source in sources for spec in list_specs(source) for name in spec.names}
    return {weight: many for weight, many in merged.items() if weight in names}


def _choose_names(model: nn.Module, sources: Sequence[Source], arguments: Arguments) -> OutputNames:
    """Chooses the output names.

    Raises NamesError if the model's tensors cannot be given the names that were asked for.
    """
    names = arguments.names
    if arguments.lora == "adapter" and names != "model":
        if names != "auto":
            raise NamesError('lora="adapter" always uses the names of peft\'s files: use names="model" or names="auto"')
        names = "model"
    shapes = {name: spec.shape for source in sources for spec in list_specs(source) for name in spec.names}
    return OutputNames(choose_names(dict(names) if isinstance(names, tuple) else names, model, shapes))


def _choose_device(asked: torch.device | str | None, computes: torch.device, is_sharded: bool) -> torch.device:
    if asked is None:
        return computes
    device = torch.device(asked)
    if not is_sharded:
        return device if device.index is not None or device.type in ("cpu", "meta") else find_device(device.type)
    if device.type != computes.type or device.index not in (None, computes.index):
        raise ValueError(f"device={device}: the model's shards are gathered on {computes}")
    return computes


def _count_merging_bytes(merged: Mapping[str, list[LoraAdapter]], factors: Mapping[str, Source]) -> dict[str, int]:
    """Counts the device memory in bytes that each weight's adapters take while they are merged into it."""
    return {
        weight: 2 * sum(s.numel * s.dtype.itemsize for a in many for f in (a.a, a.b) for s in list_specs(factors[f]))
        for weight, many in merged.items()
    }


def _find_ready_places(
    sources: Sequence[Source],
    shards: Sequence[torch.Tensor],
    dtypes: OutputDtypes,
    device: torch.device,
    merged: Collection[str],
) -> frozenset[int]:
    """Finds the shards that a collective can read without a copy: on the device, in the output dtype, of full
    length.
    """

    def is_ready(source: Source) -> bool:
        shard = shards[source.place]
        names = {spec.names[0] for spec in list_specs(source)}
        there = shard.device == device and shard.is_contiguous() and names.isdisjoint(merged)
        is_even = not isinstance(source, Rows) or source.spec.numel == source.chunk * source.shard_group.size
        return there and is_even and {dtypes.choose(spec) for spec in list_specs(source)} == {shard.dtype}

    return frozenset(source.place for source in sources if isinstance(source, Rows | FlatUnit) and is_ready(source))


def list_shard_groups(sources: Sequence[Source]) -> list[ShardGroup]:
    groups = {source.shard_group.ranks: source.shard_group for source in sources if not isinstance(source, Plain)}
    return list(groups.values())


def list_ranks(sources: Sequence[Source]) -> tuple[int, ...]:
    """Lists the ranks that take part: the ranks of the model's largest shard group, which contains the other groups."""
    return max((shard_group.ranks for shard_group in list_shard_groups(sources)), key=len, default=(0,))


def describe_plan(
    sources: Sequence[Source], dtypes: OutputDtypes, settings: str, merged: Mapping[str, Sequence[LoraAdapter]]
) -> list[str]:
    """Returns the lines that must be the same on all ranks: the settings, each tensor, each adapter that is merged."""
    lines = [settings]
    for source in sources:
        layout = _describe_layout(source)
        lines += [f"{' = '.join(s.names)}: {list(s.shape)} {dtypes.choose(s)} {layout}" for s in list_specs(source)]
    return lines + [
        f"{weight} += {adapter.scaling} * {adapter.b} @ {adapter.a}{', transposed' if adapter.transposed else ''}"
        for weight, many in merged.items()
        for adapter in many
    ]


def _describe_layout(source: Source) -> str:
    match source:
        case Plain():
            return "whole"
        case Rows():
            return f"in {source.shard_group.size} shards of {source.chunk}"
        case Placed():
            return str(source.placements)
        case FlatUnit():
            return f"in a flat parameter of {source.shard_group.size} shards of {source.chunk}"
        case _:
            assert_never(source)
