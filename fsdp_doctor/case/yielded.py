"""Copies to the host each entry that a method yields, and compares it with the contract and the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement
from typing_extensions import assert_never

from fsdp_doctor.case import lora_reference
from fsdp_doctor.case.findings import Findings, compare
from fsdp_doctor.case.lora_reference import Merged, RankPart
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.sharding import find_stated_part
from fsdp_doctor.matrix.contracts import Contract, PromisedForm
from fsdp_doctor.verdict.records import Problem
from fsdp_doctor.weights.extract import LocalShard, ShardPlace
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.dtypes import name_dtype
from fsdp_doctor.weights.fsdp.shards import LocalPart, compute_part

YieldedForm: TypeAlias = Literal["tensor", "dtensor", "sharded tensor", "local shard", "info", "other"]


@dataclass(frozen=True, kw_only=True)
class YieldedEntry:
    """Entry that a method yielded: its type, its place, and its data on the host.

    shape: the shape of the whole tensor.
    data: the data; for a sharded entry, this rank's part; None for an entry that is not a tensor.
    type_name: the type of an entry that is neither a tensor nor a (shape, dtype) pair.
    local_device: for a DTensor, the device of its local part.
    mesh: for a DTensor, the ranks of its mesh.
    placements: the placements of a DTensor.
    is_freed: whether the memory of the data was freed, so that nothing can be read.
    rank_part: this rank's part of a ShardedTensor, and of a DTensor whose framework states the part.
    num_elements: for a ShardedTensor, the number of elements of all shards.
    place: for a local shard, the place of its elements in the whole tensor.
    """

    name: str
    form: YieldedForm
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    data: torch.Tensor | None = None
    is_freed: bool = False
    type_name: str = ""
    local_device: torch.device | None = None
    mesh: torch.Tensor | None = None
    placements: tuple[Placement, ...] = ()
    rank_part: LocalPart | None = None
    num_elements: int = 0
    place: ShardPlace | None = None

    @property
    def is_sharded(self) -> bool:
        return self.form in ("dtensor", "sharded tensor")

    @property
    def form_in_words(self) -> str:
        return self.type_name or self.form

    @property
    def kind(self) -> str:
        """Form, dtype and device type of the entry, which must be the same in runs on different devices."""
        place = self.device.type
        if self.local_device is not None and self.local_device.type != place:
            place += f" with its local part on {self.local_device.type}"
        return f"{self.form_in_words} {name_dtype(self.dtype)} {place}"

    def explain_no_shard(self, shard_group_of_one: bool) -> str:
        """Explains why the parts of a sharded entry do not make up one tensor; empty if they do.

        shard_group_of_one: whether each rank holds the whole tensor, so that a replicated placement is right, too.
        """
        if any(isinstance(placement, Partial) for placement in self.placements):
            placements = ", ".join(map(repr, self.placements))
            return f"placed as {placements}, so what a rank holds is a summand and not a shard"
        if self.mesh is not None:
            whole = shard_group_of_one or self.mesh.numel() == 1
            divided = whole or any(map(private.count_interleaved, self.placements))
        else:
            divided = self.num_elements == self.shape.numel()
        return "" if divided else "its shards do not make up the whole tensor once"

    def find_part(self, rank: int) -> LocalPart:
        """Returns the part of the tensor that is the rank's data. Raises LayoutError for unsupported placements."""
        if self.mesh is not None and self.rank_part is None:
            return compute_part(rank, self.shape, self.mesh, self.placements)
        return self.rank_part or LocalPart.from_slices(tuple(slice(0, 0) for _ in self.shape))


def read(name: str, value: Any, *, waits: bool = False) -> YieldedEntry:
    """Reads one entry and copies its data to the host. The data is complete after a wait for the device.

    An exception during the read counts as the method's exception.

    waits: whether the host waits for the copy, which then needs no pinned memory. A case that measures memory waits.
    """
    if isinstance(value, LocalShard):
        shard = value.tensor
        return YieldedEntry(
            name=name,
            form="local shard",
            shape=value.shape,
            dtype=shard.dtype,
            device=shard.device,
            data=_copy_to_host(shard, waits),
            is_freed=_is_freed(shard),
            place=value.place,
        )
    if isinstance(value, tuple):
        shape, dtype = value
        return YieldedEntry(name=name, form="info", shape=shape, dtype=dtype, device=torch.device("meta"))
    if isinstance(value, DTensor):
        local = private.read_local_tensor(value)
        return YieldedEntry(
            name=name,
            form="dtensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=_copy_to_host(local, waits),
            is_freed=_is_freed(local),
            local_device=local.device,
            mesh=value.device_mesh.mesh,
            placements=tuple(value.placements),
            rank_part=find_stated_part(value),
        )
    if private.is_sharded_tensor(value):
        return _read_sharded_tensor(name, value, waits)
    if isinstance(value, torch.Tensor):
        return YieldedEntry(
            name=name,
            form="tensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=_copy_to_host(value, waits),
            is_freed=_is_freed(value),
        )
    nowhere = torch.device("meta")
    type_name = type(value).__name__
    return YieldedEntry(
        name=name, form="other", type_name=type_name, shape=torch.Size(), dtype=torch.uint8, device=nowhere
    )


def _read_sharded_tensor(name: str, value: Any, waits: bool) -> YieldedEntry:
    shards = value.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    rank_part = None
    if shards:
        metadata = shards[0].metadata
        begins_and_sizes = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        rank_part = LocalPart.from_slices(tuple(slice(begin, begin + size) for begin, size in begins_and_sizes))
    return YieldedEntry(
        name=name,
        form="sharded tensor",
        shape=value.size(),
        dtype=value.dtype,
        device=local.device,
        data=_copy_to_host(local, waits),
        rank_part=rank_part,
        num_elements=sum(math.prod(shard.shard_sizes) for shard in value.metadata().shards_metadata),
    )


def _is_freed(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's storage was resized to nothing, which is how FSDP frees unsharded parameters."""
    return bool(tensor.numel()) and not tensor.is_meta and not tensor.untyped_storage().nbytes()


def _copy_to_host(tensor: torch.Tensor, waits: bool) -> torch.Tensor | None:
    """Copies the tensor's data; returns None for a tensor on the meta device, and if the memory was freed.

    The copy is complete after a wait for the device. It is issued on the current stream and waits for nothing else,
    because a host that waits would order later work on other streams.

    waits: whether the host waits for the copy all the same.
    """
    if tensor.is_meta or _is_freed(tensor):
        return None
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    if waits:
        return tensor.detach().cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def iterate_entries(result: Any) -> Iterator[tuple[str, Any]]:
    """Yields the (name, value) pairs of a method's result: a mapping, or any iterable of pairs.

    An entry is released before the next entry is requested, so that a streamed tensor is not in memory twice. Raises
    TypeError for any other result.
    """
    if isinstance(result, Mapping):
        result = result.items()
    if not isinstance(result, Iterable):
        raise TypeError(f"a method returns a mapping or yields (name, tensor), not {type(result).__name__}")
    yield from map(_unpack_pair, result)


def _unpack_pair(item: Any) -> tuple[str, Any]:
    name, value = item
    if not isinstance(name, str):
        raise TypeError(f"a method yields (name, tensor) with a str for a name, not {type(name).__name__}")
    return name, value


@dataclass(frozen=True, kw_only=True)
class ExpectedYield:
    """Entries that a method must yield on one rank, with their devices and dtypes.

    compute_dtype: the dtype to which FSDP casts parameters for the computation; None if it casts nothing.
    parameter_devices: the device that each parameter and buffer reports when the method starts, by its name.
    merged_weights: the weights with their adapters added, for a contract that promises them.
    rank_parts: this rank's part of each tensor, for a contract that promises this rank's shards.
    earlier: the entries that the method had to yield in its previous call; None for the first call.
    """

    contract: Contract
    reference: Reference
    rank: int
    compute_device: torch.device
    compute_dtype: torch.dtype | None
    parameter_devices: Mapping[str, torch.device]
    shard_group_of_one: bool
    merged_weights: Mapping[str, Merged] = field(default_factory=dict)
    rank_parts: Mapping[str, RankPart] = field(default_factory=dict)
    earlier: ExpectedYield | None = None


class Verifier:
    """Checks the entries that one method yields on one rank.

    Call :meth:`check` with each entry, as :func:`read` returned it while the method was running, and
    :meth:`list_problems` at the end.
    """

    def __init__(self, expectation: ExpectedYield) -> None:
        self._expectation = expectation
        self._contract = expectation.contract
        self._reference = expectation.reference
        self._merged = expectation.merged_weights if self._contract.weights == "merged" else {}
        self._expected = self._list_expected_tensors()
        self._earlier = Verifier(expectation.earlier) if expectation.earlier else None
        self._seen: set[str] = set()
        self._findings = Findings()

    @property
    def num_promised(self) -> int:
        return len(self._expected)

    def check(self, entry: YieldedEntry) -> None:
        """Compares one entry with the contract and the reference, without using the device."""
        if entry.name in self._seen:
            self._findings.note("wrong", "came twice", entry.name)
            return
        self._seen.add(entry.name)
        expected = self._expected.get(entry.name)
        if expected is None or not self._has_right_form(entry):
            return
        self._check_place(entry, expected)
        difference = self._describe_difference(entry, expected)
        earlier = self._earlier
        if difference and earlier and not earlier._describe_difference(entry, earlier._expected[entry.name]):
            difference = "stale, the values of before the last training step"
        if difference:
            self._findings.note("wrong", difference, entry.name)

    def check_kept(self, entry: YieldedEntry, at_the_end: YieldedEntry) -> None:
        """Checks that a kept tensor has the same values after the method has ended as when the tensor was yielded."""
        if entry.data is None:
            return
        if at_the_end.data is None or compare(at_the_end.data, entry.data):
            since = "freed" if at_the_end.is_freed else "overwritten"
            what = f"kept to the end, and {since} since it was yielded, where the method promises keeps=True"
            self._findings.note("wrong", what, entry.name)

    def list_problems(self) -> tuple[Problem, ...]:
        """Returns one problem for each kind of finding, with the first few names of each."""
        self._check_names()
        return self._findings.list_problems()

    def _list_expected_tensors(self) -> dict[str, torch.Tensor]:
        if self._contract.form == "flat":
            if self._expectation.shard_group_of_one:
                # torch says in a warning that it returns the full state dict where nothing is sharded.
                return self._reference.full
            return self._reference.flat | self._reference.list_buffers()
        if self._contract.form == "optimizer":
            return self._reference.optimizer
        full = self._reference.full
        if self._contract.keys == "parameters":
            full = {name: full[name] for name in self._reference.parameters}
        match self._contract.weights:
            case "merged":
                return lora_reference.select_base_weights(full)
            case "adapter":
                return lora_reference.select_adapter_weights(full)
            case "own":
                return full
            case _:
                assert_never(self._contract.weights)

    def _has_right_form(self, entry: YieldedEntry) -> bool:
        promised = self._contract.form
        match promised:
            case "full" | "optimizer":
                fits = entry.form == "tensor"
            case "info":
                fits = entry.form == "info"
            case "sharded":
                # A buffer, and anything in a shard group of one, has nothing to be sharded into.
                is_plain = self._expectation.shard_group_of_one or entry.name in self._reference.buffer_names
                fits = entry.is_sharded or (entry.form == "tensor" and is_plain)
            case "local":
                fits = entry.form == "local shard"
            case "flat":
                fits = entry.form in ("tensor", "sharded tensor")
            case _:
                assert_never(promised)
        if not fits:
            what = f"{entry.form_in_words} where {_FORM_IN_WORDS[promised]} was promised"
            self._findings.note("wrong", what, entry.name)
        return fits

    def _check_place(self, entry: YieldedEntry, expected: torch.Tensor) -> None:
        dtype = self._choose_promised_dtype(entry, expected)
        if entry.dtype != dtype:
            what = f"dtype {name_dtype(entry.dtype)} where {name_dtype(dtype)} was promised"
            self._findings.note("misplaced", what, entry.name)
        # The step counter of Adam is a host scalar wherever its parameter lies.
        host_scalar = self._contract.form == "optimizer" and expected.ndim == 0
        if entry.form == "info" or self._contract.device == "any" or host_scalar:
            return
        device = self._choose_promised_device(entry.name)
        if entry.device != device:
            self._findings.note("misplaced", f"on {entry.device} where {device} was promised", entry.name)
        elif entry.local_device is not None and entry.local_device != entry.device:
            split = f"half-moved, says {entry.device} and has its local shard on {entry.local_device}"
            self._findings.note("misplaced", split, entry.name)

    def _choose_promised_dtype(self, entry: YieldedEntry, expected: torch.Tensor) -> torch.dtype:
        match self._contract.dtype:
            case "any":
                return entry.dtype
            case "compute":
                return (self._expectation.compute_dtype if expected.is_floating_point() else None) or expected.dtype
            case "master":
                return expected.dtype
            case _:
                assert_never(self._contract.dtype)

    def _choose_promised_device(self, name: str) -> torch.device:
        match self._contract.device:
            case "cpu":
                return torch.device("cpu")
            case "parameter":
                return self._expectation.parameter_devices.get(name, self._expectation.compute_device)
            case "compute" | "any":
                return self._expectation.compute_device
            case _:
                assert_never(self._contract.device)

    def _describe_difference(self, entry: YieldedEntry, expected: torch.Tensor) -> str:
        """Describes how the entry's shape or values differ from the expected tensor; empty if they are right."""
        if tuple(entry.shape) != tuple(expected.shape) and self._contract.form != "flat":
            return f"shape {tuple(entry.shape)}, not {tuple(expected.shape)}"
        if entry.is_freed:
            return "its memory was freed before it was read"
        if entry.data is None:
            return ""
        if entry.is_sharded and self._contract.form == "sharded":
            if why_not := entry.explain_no_shard(self._expectation.shard_group_of_one):
                return why_not
            expected = entry.find_part(self._expectation.rank).read(expected)
        if entry.place is not None:
            return self._expectation.rank_parts[entry.name].describe_difference(entry.data, entry.place, expected)
        if entry.name in self._merged:
            return self._merged[entry.name].describe_difference(entry.data)
        return compare(entry.data, expected)

    def _check_names(self) -> None:
        if self._contract.ranks == "rank0" and self._expectation.rank != 0 and not self._seen:
            return
        missing = [name for name in self._expected if name not in self._seen and not self._has_other_name(name)]
        if missing and not self._seen:
            self._findings.note("incomplete", "no data on this rank, of", f"{len(missing)} promised entries")
            return
        for name in missing:
            self._findings.note("incomplete", f"missing of {len(self._expected)} names", name)
        for name in sorted(self._seen - set(self._expected)):
            self._findings.note("incomplete", "not a name of the model", name)

    def _has_other_name(self, name: str) -> bool:
        """Returns whether a tied parameter came under another of its names and the contract allows this.

        The names of a tied parameter share one tensor.
        """
        tensor = self._expected[name]
        is_enough = self._contract.keys == "any name"
        return is_enough and any(self._expected.get(other) is tensor for other in self._seen)


_FORM_IN_WORDS: dict[PromisedForm, str] = {
    "full": "a full tensor",
    "sharded": "a sharded tensor",
    "local": "this rank's shard and its place",
    "flat": "a flat shard",
    "info": "only shape and dtype",
    "optimizer": "a full tensor",
}


def read_parameter_devices(model: nn.Module) -> dict[str, torch.device]:
    """Reads the device that each parameter, flat parameter and buffer reports, by its unwrapped name."""
    contents = reader.read(model)
    devices = {name: tensor.tensor.device for tensor in contents.list_tensors() for name in tensor.names}
    for unit in contents.fsdp1_units:
        devices[unit.flat_name] = unit.flat_parameter.device
        devices |= {name: shown.device for name, shown in unit.shown.items()}
    return devices
