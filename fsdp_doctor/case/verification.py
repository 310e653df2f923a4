"""Holds what a path yields against its contract and the reference."""

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
from fsdp_doctor.case.lora_reference import Merged
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.fsdp.shards import HeldPart, held_part
from fsdp_doctor.matrix.contracts import Contract, PromisedForm
from fsdp_doctor.verdict.records import Problem, ProblemKind

YieldedForm: TypeAlias = Literal["tensor", "dtensor", "sharded tensor", "info", "other"]

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ExpectedYield:
    """What one path is to yield on one rank, where, and in which dtype.

    parameter_devices: what each parameter and buffer reports when the path starts, by its name.
    merged_weights: what a contract that promises weights with their adapters added is held against.
    """

    contract: Contract
    reference: Reference
    rank: int
    compute_device: torch.device
    compute_dtype: torch.dtype
    parameter_devices: Mapping[str, torch.device]
    shard_group_of_one: bool
    merged_weights: Mapping[str, Merged] = field(default_factory=dict)


class Verifier:
    """Checks one path's yield, entry by entry, on one rank.

    Call :meth:`check` with each entry, as :func:`read` returned it while the path was running, and
    :meth:`problems` at the end.
    """

    def __init__(self, expectation: ExpectedYield) -> None:
        self._asked = expectation
        self._contract = expectation.contract
        self._reference = expectation.reference
        self._merged = expectation.merged_weights if self._contract.weights == "merged" else {}
        self._expected = self._expected_tensors()
        self._seen: set[str] = set()
        self._found: dict[ProblemKind, dict[str, list[str]]] = {}

    def check(self, entry: YieldedEntry) -> None:
        """Compares one entry. Nothing here touches the device."""
        if entry.name in self._seen:
            self._note("wrong", "came twice", entry.name)
            return
        self._seen.add(entry.name)
        expected = self._expected.get(entry.name)
        if expected is None or not self._has_right_form(entry):
            return
        self._check_place(entry, expected)
        self._check_value(entry, expected)

    def problems(self) -> tuple[Problem, ...]:
        """What was found: one problem for each kind, with the first few names of each finding."""
        self._check_names()
        return tuple(
            Problem(kind=kind, detail="; ".join(f"{what}: {first_names(names)}" for what, names in findings.items()))
            for kind, findings in self._found.items()
        )

    def _expected_tensors(self) -> dict[str, torch.Tensor]:
        if self._contract.form == "flat":
            if self._asked.shard_group_of_one:
                # torch says in a warning that it returns the full state dict where nothing is sharded.
                return self._reference.full
            return self._reference.flat | self._reference.buffers()
        if self._contract.form == "optimizer":
            return self._reference.optimizer
        full = self._reference.full
        if self._contract.keys == "parameters":
            full = {name: full[name] for name in self._reference.parameters}
        match self._contract.weights:
            case "merged":
                return lora_reference.base_weights(full)
            case "adapter":
                return lora_reference.adapter_weights(full)
            case "own":
                return full
            case _:
                assert_never(self._contract.weights)

    def _note(self, kind: ProblemKind, what: str, name: str) -> None:
        self._found.setdefault(kind, {}).setdefault(what, []).append(name)

    def _has_right_form(self, entry: YieldedEntry) -> bool:
        promised = self._contract.form
        match promised:
            case "full" | "optimizer":
                fits = entry.form == "tensor"
            case "info":
                fits = entry.form == "info"
            case "sharded":
                fits = entry.is_sharded or (entry.form == "tensor" and self._is_plain(entry.name))
            case "flat":
                fits = entry.form in ("tensor", "sharded tensor")
            case _:
                assert_never(promised)
        if not fits:
            self._note("wrong", f"{entry.form_in_words} where {_FORM_IN_WORDS[promised]} was promised", entry.name)
        return fits

    def _is_plain(self, name: str) -> bool:
        """Whether this entry has nothing to be sharded into: a buffer, or anything in a shard group of one."""
        return self._asked.shard_group_of_one or name in self._reference.buffers()

    def _check_place(self, entry: YieldedEntry, expected: torch.Tensor) -> None:
        dtype = self._promised_dtype(entry, expected)
        if entry.dtype != dtype:
            self._note("misplaced", f"dtype {_short(entry.dtype)} where {_short(dtype)} was promised", entry.name)
        # The step counter of Adam is a host scalar wherever its parameter lies.
        host_scalar = self._contract.form == "optimizer" and expected.ndim == 0
        if entry.form == "info" or self._contract.device == "any" or host_scalar:
            return
        device = self._promised_device(entry.name)
        if entry.device != device:
            self._note("misplaced", f"on {entry.device} where {device} was promised", entry.name)
        elif entry.local_device is not None and entry.local_device != entry.device:
            split = f"half-moved, says {entry.device} and has its local shard on {entry.local_device}"
            self._note("misplaced", split, entry.name)

    def _promised_dtype(self, entry: YieldedEntry, expected: torch.Tensor) -> torch.dtype:
        match self._contract.dtype:
            case "any":
                return entry.dtype
            case "compute":
                return self._asked.compute_dtype if expected.is_floating_point() else expected.dtype
            case "master":
                return expected.dtype
            case _:
                assert_never(self._contract.dtype)

    def _promised_device(self, name: str) -> torch.device:
        match self._contract.device:
            case "cpu":
                return torch.device("cpu")
            case "parameter":
                return self._asked.parameter_devices.get(name, self._asked.compute_device)
            case "compute" | "any":
                return self._asked.compute_device
            case _:
                assert_never(self._contract.device)

    def _check_value(self, entry: YieldedEntry, expected: torch.Tensor) -> None:
        if tuple(entry.shape) != tuple(expected.shape) and self._contract.form != "flat":
            self._note("wrong", f"shape {tuple(entry.shape)}, not {tuple(expected.shape)}", entry.name)
            return
        if entry.data is None:
            return
        if entry.is_sharded and self._contract.form == "sharded":
            why_not = entry.why_no_shard()
            if why_not:
                self._note("wrong", why_not, entry.name)
                return
            expected = entry.part(self._asked.rank).read(expected)
        if entry.name in self._merged:
            difference = self._merged[entry.name].difference(entry.data)
        else:
            difference = compare(entry.data, expected.to(entry.data.dtype))
        if difference:
            self._note("wrong", difference, entry.name)

    def _came_otherwise(self, name: str) -> bool:
        """Whether a tied parameter came under another of its names, where that is enough: they share one tensor."""
        if self._contract.keys != "any name":
            return False
        tensor = self._expected[name]
        return any(self._expected.get(other) is tensor for other in self._seen)

    def _check_names(self) -> None:
        if self._contract.ranks == "rank0" and self._asked.rank != 0 and not self._seen:
            return
        missing = [name for name in self._expected if name not in self._seen and not self._came_otherwise(name)]
        if missing and not self._seen:
            self._found["incomplete"] = {"no data on this rank, of": [f"{len(missing)} promised entries"]}
            return
        for name in missing:
            self._note("incomplete", f"missing of {len(self._expected)} names", name)
        for name in sorted(self._seen - set(self._expected)):
            self._note("incomplete", "not a name of the model", name)


_FORM_IN_WORDS: dict[PromisedForm, str] = {
    "full": "a full tensor",
    "sharded": "a sharded tensor",
    "flat": "a flat shard",
    "info": "shape and dtype alone",
    "optimizer": "a full tensor",
}


@dataclass(frozen=True, kw_only=True)
class YieldedEntry:
    """One yielded entry, read: what it is, where it lies, and its data on the host.

    shape: of the whole tensor. data: of a sharded entry, this rank's part; None of what is no tensor.
    type_name: of what is neither a tensor nor its shape and dtype.
    local_device, mesh, placements: of a DTensor, where its local part lies, the ranks of its mesh, and its placements.
    own_part, num_elements: of a ShardedTensor, which part this rank's shard is, and the elements of all shards.
    """

    name: str
    form: YieldedForm
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    data: torch.Tensor | None = None
    type_name: str = ""
    local_device: torch.device | None = None
    mesh: torch.Tensor | None = None
    placements: tuple[Placement, ...] = ()
    own_part: HeldPart | None = None
    num_elements: int = 0

    @property
    def is_sharded(self) -> bool:
        return self.form in ("dtensor", "sharded tensor")

    @property
    def form_in_words(self) -> str:
        return self.type_name or self.form

    @property
    def kind(self) -> str:
        """Form, dtype and kind of device: what two runs on different devices must have in common."""
        place = self.device.type
        if self.local_device is not None and self.local_device.type != place:
            place += f" with its local part on {self.local_device.type}"
        return f"{self.form_in_words} {_short(self.dtype)} {place}"

    def why_no_shard(self) -> str:
        """Why the parts of a sharded entry are not those of one tensor; empty if they are."""
        if any(isinstance(placement, Partial) for placement in self.placements):
            return f"placed as {_in_words(self.placements)}, so what a rank holds is a summand and not a shard"
        if self.mesh is not None:
            divided = self.mesh.numel() == 1 or any(map(private.num_interleaved, self.placements))
        else:
            divided = self.num_elements == self.shape.numel()
        return "" if divided else "its shards do not make up the whole tensor once"

    def part(self, rank: int) -> HeldPart:
        """Which part of the tensor the rank's data is. Raises LayoutError for placements that are not understood."""
        if self.mesh is not None:
            return held_part(rank, self.shape, self.mesh, self.placements)
        return self.own_part or HeldPart.of_slices(tuple(slice(0, 0) for _ in self.shape))


def read(name: str, value: Any) -> YieldedEntry:
    """Looks at one entry and brings its data to the host. An exception here is the path's."""
    if isinstance(value, tuple):
        shape, dtype = value
        return YieldedEntry(name=name, form="info", shape=shape, dtype=dtype, device=torch.device("meta"))
    if isinstance(value, DTensor):
        local = private.local_tensor(value)
        return YieldedEntry(
            name=name,
            form="dtensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=local.detach().cpu(),
            local_device=local.device,
            mesh=value.device_mesh.mesh,
            placements=tuple(value.placements),
        )
    if private.is_sharded_tensor(value):
        return _read_sharded_tensor(name, value)
    if isinstance(value, torch.Tensor):
        return YieldedEntry(
            name=name,
            form="tensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            data=value.detach().cpu(),
        )
    return YieldedEntry(
        name=name,
        form="other",
        type_name=type(value).__name__,
        shape=torch.Size(),
        dtype=torch.uint8,
        device=torch.device("meta"),
    )


def _read_sharded_tensor(name: str, value: Any) -> YieldedEntry:
    shards = value.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    own_part = None
    if shards:
        metadata = shards[0].metadata
        begins_and_sizes = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        own_part = HeldPart.of_slices(tuple(slice(begin, begin + size) for begin, size in begins_and_sizes))
    return YieldedEntry(
        name=name,
        form="sharded tensor",
        shape=value.size(),
        dtype=value.dtype,
        device=local.device,
        data=local.detach().cpu(),
        own_part=own_part,
        num_elements=sum(math.prod(shard.shard_sizes) for shard in value.metadata().shards_metadata),
    )


def entries_of(result: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a path returned: a mapping, or anything that yields pairs.

    An entry is let go before the next one is asked for, so that what is streamed is not held twice.
    """
    if isinstance(result, Mapping):
        result = result.items()
    if not isinstance(result, Iterable):
        raise TypeError(f"a path returns a mapping or yields (name, tensor), not {type(result).__name__}")
    yield from map(_pair, result)


def _pair(item: Any) -> tuple[str, Any]:
    name, value = item
    if not isinstance(name, str):
        raise TypeError(f"a path yields (name, tensor) with a str for a name, not {type(name).__name__}")
    return name, value


def compare(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """How two host tensors differ, bit by bit; empty if they do not. NaNs compare by their bits."""
    if actual.numel() != expected.numel():
        return f"{actual.numel()} elements, not {expected.numel()}"
    a, b = bits(actual), bits(expected)
    if torch.equal(a, b):
        return ""
    itemsize = actual.element_size()
    differs = (a != b).view(-1, itemsize).any(dim=1)
    first = int(differs.nonzero()[0])
    got, want = actual.reshape(-1)[first].item(), expected.reshape(-1)[first].item()
    return f"{int(differs.sum())} of {actual.numel()} elements differ, the first at {first}: {got!r}, not {want!r}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def parameter_devices(model: nn.Module) -> dict[str, torch.device]:
    """The device that each parameter, flat parameter and buffer reports, under its unwrapped name."""
    held = reader.read(model)
    devices = {name: tensor.shown.device for tensor in held.tensors() for name in tensor.names}
    for unit in held.fsdp1_units:
        devices[unit.flat_name] = unit.flat_parameter.device
        devices |= {name: shown.device for name, shown in unit.shown.items()}
    return devices


def first_names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _in_words(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(repr, placements))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
