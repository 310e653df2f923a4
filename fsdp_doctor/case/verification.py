"""Holds what a path yields against its contract and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from typing_extensions import assert_never

from fsdp_doctor.case import lora_reference
from fsdp_doctor.case.bitwise import compare
from fsdp_doctor.case.lora_reference import Merged
from fsdp_doctor.case.problem_notes import Findings
from fsdp_doctor.case.reference import Reference
from fsdp_doctor.case.shard_reference import OwnPart
from fsdp_doctor.case.yielded_entries import YieldedEntry
from fsdp_doctor.extract.dtypes import dtype_name
from fsdp_doctor.fsdp import reader
from fsdp_doctor.matrix.contracts import Contract, PromisedForm
from fsdp_doctor.verdict.records import Problem


@dataclass(frozen=True, kw_only=True)
class ExpectedYield:
    """What one path is to yield on one rank, where, and in which dtype.

    compute_dtype: to which FSDP casts parameters for the computation; None where it casts nothing.
    parameter_devices: what each parameter and buffer reports when the path starts, by its name.
    merged_weights: what a contract that promises weights with their adapters added is held against.
    own_parts: of each tensor, what this rank holds of it; for a contract that promises this rank's shards.
    earlier: what the path was to yield when it was called before; None of a first call.
    """

    contract: Contract
    reference: Reference
    rank: int
    compute_device: torch.device
    compute_dtype: torch.dtype | None
    parameter_devices: Mapping[str, torch.device]
    shard_group_of_one: bool
    merged_weights: Mapping[str, Merged] = field(default_factory=dict)
    own_parts: Mapping[str, OwnPart] = field(default_factory=dict)
    earlier: ExpectedYield | None = None


class Verifier:
    """Checks one path's yield, entry by entry, on one rank.

    Call :meth:`check` with each entry, as ``yielded_entries.read`` returned it while the path was running, and
    :meth:`problems` at the end.
    """

    def __init__(self, expectation: ExpectedYield) -> None:
        self._asked = expectation
        self._contract = expectation.contract
        self._reference = expectation.reference
        self._merged = expectation.merged_weights if self._contract.weights == "merged" else {}
        self._expected = self._expected_tensors()
        self._earlier = Verifier(expectation.earlier) if expectation.earlier else None
        self._seen: set[str] = set()
        self._found = Findings()

    @property
    def num_promised(self) -> int:
        """How many entries are promised."""
        return len(self._expected)

    def check(self, entry: YieldedEntry) -> None:
        """Compares one entry. Nothing here touches the device."""
        if entry.name in self._seen:
            self._found.note("wrong", "came twice", entry.name)
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
        return self._found.problems()

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

    def _has_right_form(self, entry: YieldedEntry) -> bool:
        promised = self._contract.form
        match promised:
            case "full" | "optimizer":
                fits = entry.form == "tensor"
            case "info":
                fits = entry.form == "info"
            case "sharded":
                fits = entry.is_sharded or (entry.form == "tensor" and self._is_plain(entry.name))
            case "local":
                fits = entry.form == "local shard"
            case "flat":
                fits = entry.form in ("tensor", "sharded tensor")
            case _:
                assert_never(promised)
        if not fits:
            self._found.note(
                "wrong", f"{entry.form_in_words} where {_FORM_IN_WORDS[promised]} was promised", entry.name
            )
        return fits

    def _is_plain(self, name: str) -> bool:
        """Whether this entry has nothing to be sharded into: a buffer, or anything in a shard group of one."""
        return self._asked.shard_group_of_one or name in self._reference.buffers()

    def _check_place(self, entry: YieldedEntry, expected: torch.Tensor) -> None:
        dtype = self._promised_dtype(entry, expected)
        if entry.dtype != dtype:
            self._found.note(
                "misplaced", f"dtype {dtype_name(entry.dtype)} where {dtype_name(dtype)} was promised", entry.name
            )
        # The step counter of Adam is a host scalar wherever its parameter lies.
        host_scalar = self._contract.form == "optimizer" and expected.ndim == 0
        if entry.form == "info" or self._contract.device == "any" or host_scalar:
            return
        device = self._promised_device(entry.name)
        if entry.device != device:
            self._found.note("misplaced", f"on {entry.device} where {device} was promised", entry.name)
        elif entry.local_device is not None and entry.local_device != entry.device:
            split = f"half-moved, says {entry.device} and has its local shard on {entry.local_device}"
            self._found.note("misplaced", split, entry.name)

    def _promised_dtype(self, entry: YieldedEntry, expected: torch.Tensor) -> torch.dtype:
        match self._contract.dtype:
            case "any":
                return entry.dtype
            case "compute":
                return (self._asked.compute_dtype if expected.is_floating_point() else None) or expected.dtype
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
        difference = self._difference(entry, expected)
        if difference and self._earlier is not None and self._earlier.has_value(entry):
            difference = "stale, the values of before the last training step"
        if difference:
            self._found.note("wrong", difference, entry.name)

    def has_value(self, entry: YieldedEntry) -> bool:
        """Whether an entry that is promised has the value that is expected of it."""
        return not self._difference(entry, self._expected[entry.name])

    def _difference(self, entry: YieldedEntry, expected: torch.Tensor) -> str:
        """How the value differs; empty if it does not."""
        if tuple(entry.shape) != tuple(expected.shape) and self._contract.form != "flat":
            return f"shape {tuple(entry.shape)}, not {tuple(expected.shape)}"
        if entry.data is None:
            return ""
        if entry.is_sharded and self._contract.form == "sharded":
            why_not = entry.why_no_shard(self._asked.shard_group_of_one)
            if why_not:
                return why_not
            expected = entry.part(self._asked.rank).read(expected)
        if entry.place is not None:
            return self._asked.own_parts[entry.name].difference(entry.data, entry.place, expected)
        if entry.name in self._merged:
            return self._merged[entry.name].difference(entry.data)
        return compare(entry.data, expected)

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
            self._found.note("incomplete", "no data on this rank, of", f"{len(missing)} promised entries")
            return
        for name in missing:
            self._found.note("incomplete", f"missing of {len(self._expected)} names", name)
        for name in sorted(self._seen - set(self._expected)):
            self._found.note("incomplete", "not a name of the model", name)


_FORM_IN_WORDS: dict[PromisedForm, str] = {
    "full": "a full tensor",
    "sharded": "a sharded tensor",
    "local": "this rank's shard and its place",
    "flat": "a flat shard",
    "info": "shape and dtype alone",
    "optimizer": "a full tensor",
}


def parameter_devices(model: nn.Module) -> dict[str, torch.device]:
    """The device that each parameter, flat parameter and buffer reports, under its unwrapped name."""
    held = reader.read(model)
    devices = {name: tensor.shown.device for tensor in held.tensors() for name in tensor.names}
    for unit in held.fsdp1_units:
        devices[unit.flat_name] = unit.flat_parameter.device
        devices |= {name: shown.device for name, shown in unit.shown.items()}
    return devices
