"""Holds what a path yields against its contract and the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Shard

from fsdp_doctor.case import lora_reference
from fsdp_doctor.case.lora_reference import Merged
from fsdp_doctor.case.reference import Reference, shard_slices
from fsdp_doctor.fsdp import fsdp2
from fsdp_doctor.fsdp.names import unwrapped
from fsdp_doctor.matrix.contracts import Contract
from fsdp_doctor.verdict.records import Problem, ProblemKind

_SHOWN = 3


class Verifier:
    """Checks one path's yield, entry by entry, on one rank.

    Call :meth:`check` with each entry, as :func:`read` returned it while the path was running, and
    :meth:`problems` at the end.
    """

    def __init__(
        self,
        contract: Contract,
        reference: Reference,
        *,
        rank: int,
        compute_device: torch.device,
        compute_dtype: torch.dtype,
        parameter_devices: dict[str, torch.device],
        shard_group_of_one: bool,
        merged_weights: Mapping[str, Merged] = MappingProxyType({}),
    ) -> None:
        self._contract = contract
        self._reference = reference
        self._rank = rank
        self._compute_device = compute_device
        self._compute_dtype = compute_dtype
        self._parameter_devices = parameter_devices
        self._shard_group_of_one = shard_group_of_one
        self._merged = merged_weights if contract.weights == "merged" else {}
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
        """What was found: one problem for each kind, with the first few names of each sort."""
        self._check_names()
        return tuple(
            Problem(kind=kind, detail="; ".join(f"{what}: {first_names(names)}" for what, names in sorts.items()))
            for kind, sorts in self._found.items()
        )

    def _expected_tensors(self) -> dict[str, torch.Tensor]:
        match self._contract.form:
            case "flat" if self._shard_group_of_one:
                # torch says in a warning that it returns the full state dict where nothing is sharded.
                return self._reference.full
            case "flat":
                flat = {f"{prefix}_flat_param": shard for prefix, shard in self._reference.flat.items()}
                return flat | self._reference.buffers()
            case "optimizer":
                return self._reference.optimizer
        full = self._reference.full
        if self._contract.keys == "parameters":
            full = {name: full[name] for name in self._reference.parameters}
        match self._contract.weights:
            case "merged":
                return lora_reference.base_weights(full)
            case "adapter":
                return lora_reference.adapter_weights(full)
        return full

    def _note(self, kind: ProblemKind, what: str, name: str) -> None:
        self._found.setdefault(kind, {}).setdefault(what, []).append(name)

    def _has_right_form(self, entry: YieldedEntry) -> bool:
        promised = self._contract.form
        sharded = entry.form in ("dtensor", "sharded tensor")
        if promised in ("full", "optimizer"):
            fits = entry.form == "tensor"
        elif promised == "info":
            fits = entry.form == "info"
        elif promised == "sharded":
            fits = sharded or (entry.form == "tensor" and self._is_plain(entry.name))
        else:
            fits = entry.form in ("tensor", "sharded tensor")
        if not fits:
            self._note("wrong", f"{entry.form} where {_FORM_IN_WORDS[promised]} was promised", entry.name)
        return fits

    def _is_plain(self, name: str) -> bool:
        """Whether this entry has nothing to be sharded into: a buffer, or anything in a shard group of one."""
        return self._shard_group_of_one or name in self._reference.buffers()

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
            case "compute" if expected.is_floating_point():
                return self._compute_dtype
            case _:
                return expected.dtype

    def _promised_device(self, name: str) -> torch.device:
        match self._contract.device:
            case "cpu":
                return torch.device("cpu")
            case "parameter":
                return self._parameter_devices.get(name, self._compute_device)
            case _:
                return self._compute_device

    def _check_value(self, entry: YieldedEntry, expected: torch.Tensor) -> None:
        if tuple(entry.shape) != tuple(expected.shape) and self._contract.form != "flat":
            self._note("wrong", f"shape {tuple(entry.shape)}, not {tuple(expected.shape)}", entry.name)
            return
        if entry.data is None:
            return
        if entry.form in ("dtensor", "sharded tensor") and self._contract.form == "sharded":
            if not entry.tiles:
                self._note("wrong", "its shards do not make up the whole tensor once", entry.name)
                return
            own = self._reference.local.get(entry.name)
            expected = own if own is not None else _own_part(entry, expected)
        if entry.name in self._merged:
            difference = self._merged[entry.name].difference(entry.data)
        else:
            difference = compare(entry.data, expected.to(entry.data.dtype))
        if difference:
            self._note("wrong", difference, entry.name)

    def _check_names(self) -> None:
        if self._contract.ranks == "rank0" and self._rank != 0 and not self._seen:
            return
        missing = [name for name in self._expected if name not in self._seen]
        if missing and not self._seen:
            self._found["incomplete"] = {"no data on this rank, of": [f"{len(missing)} promised entries"]}
            return
        for name in missing:
            self._note("incomplete", f"missing of {len(self._expected)} names", name)
        for name in sorted(self._seen - set(self._expected)):
            self._note("incomplete", "not a name of the model", name)


_FORM_IN_WORDS = {
    "full": "a full tensor",
    "sharded": "a sharded tensor",
    "flat": "a flat shard",
    "info": "shape and dtype alone",
    "optimizer": "a full tensor",
}


@dataclass(frozen=True, kw_only=True)
class YieldedEntry:
    """One yielded entry, read: what it is, where it lies, and its data on the host.

    local_device: where the local part of a DTensor lies. slices: where the local part lies in the
    full tensor, for a sharded entry. tiles: whether all ranks' parts are shards that make up the tensor.
    """

    name: str
    form: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    local_device: torch.device | None = None
    data: torch.Tensor | None = None
    slices: tuple[slice, ...] | None = None
    tiles: bool = True

    @property
    def sort(self) -> str:
        """Form, dtype and kind of device: what two runs on different devices must have in common."""
        place = self.device.type
        if self.local_device is not None and self.local_device.type != place:
            place += f" with its local part on {self.local_device.type}"
        return f"{self.form} {str(self.dtype).removeprefix('torch.')} {place}"


def read(name: str, value: Any) -> YieldedEntry:
    """Looks at one entry and brings its data to the host. An exception here is the path's."""
    if isinstance(value, tuple):
        shape, dtype = value
        return YieldedEntry(name=name, form="info", shape=shape, dtype=dtype, device=torch.device("meta"))
    if isinstance(value, DTensor):
        local = fsdp2.local_tensor(value)
        return YieldedEntry(
            name=name,
            form="dtensor",
            shape=value.shape,
            dtype=value.dtype,
            device=value.device,
            local_device=local.device,
            data=local.detach().cpu(),
            slices=shard_slices(value.shape, value.device_mesh, value.placements, dist.get_rank()),
            tiles=value.device_mesh.size() == 1 or any(isinstance(p, Shard) for p in value.placements),
        )
    if isinstance(value, ShardedTensor):
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
        form=type(value).__name__,
        shape=torch.Size(),
        dtype=torch.uint8,
        device=torch.device("meta"),
    )


def _read_sharded_tensor(name: str, value: Any) -> YieldedEntry:
    shards = value.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
    slices = None
    if shards:
        metadata = shards[0].metadata
        slices = tuple(
            slice(offset, offset + size)
            for offset, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        )
    return YieldedEntry(
        name=name,
        form="sharded tensor",
        shape=value.size(),
        dtype=value.dtype,
        device=local.device,
        data=local.detach().cpu(),
        slices=slices,
        tiles=sum(math.prod(shard.shard_sizes) for shard in value.metadata().shards_metadata) == value.size().numel(),
    )


def _own_part(entry: YieldedEntry, full: torch.Tensor) -> torch.Tensor:
    return full[entry.slices] if entry.slices is not None else full.new_empty(0)


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
    """The device that each parameter and buffer reports, under its unwrapped name."""
    return {unwrapped(name): tensor.device for name, tensor in fsdp2.entries(model)}


def first_names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
