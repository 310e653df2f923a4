"""Compares a model and its optimizer after a load with the checkpoint, shard by shard, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import local_pieces
from fsdp_doctor.case.findings import Findings, compare
from fsdp_doctor.case.local_pieces import Full, LocalPiece
from fsdp_doctor.verdict.records import Problem
from fsdp_doctor.weights.fsdp import private, reader

# The parameters of a group, which each format writes in its own way.
_OPTIONS_NOT_COMPARED = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class _Facts:
    """Facts about a parameter or buffer before a load. The load may change only the values.

    pinned: whether an offload policy has pinned the shard's memory; False while copies are in flight.
    values: this rank's part, on the host; None on the meta device, or if copies are in flight.
    """

    device: torch.device
    local_device: torch.device
    dtype: torch.dtype
    pinned: bool
    trains: bool
    values: torch.Tensor | None


class LoadedState:
    """State of a model before a load, compared with its state after the load; local to a rank.

    Create it just before the load, and call :meth:`list_problems` just after the load.

    right: the values that the model must have, unsharded.
    device: the compute device.
    on_host: the parameters on the meta device whose shards belong on the host.
    pins: whether a torch offload policy may pin shards.
    buffers: the values of the non-persistent buffers, which no state dict contains.
    left_alone: the name of a tensor that the load must not change.
    watches: whether the values before the load may be read, which waits for copies in flight.
    """

    def __init__(
        self,
        model: nn.Module,
        right: Full,
        *,
        device: torch.device,
        on_host: Collection[str],
        pins: bool,
        buffers: Full,
        left_alone: str = "",
        watches: bool = True,
    ) -> None:
        self._model = model
        self._right = right
        self._device = device
        self._on_host = on_host
        self._pins = pins
        self._transient = buffers
        self._left_alone = left_alone
        self._watches = watches
        pieces = local_pieces.list_model_pieces(model, right)
        self._before = {piece.name: self._read_facts(piece) for piece in pieces}
        self._ties = {piece.names for piece in pieces}
        self._transient_places = {
            buffer.names[0]: (buffer.tensor.device, buffer.tensor.dtype)
            for buffer in reader.read(model).transient_buffers
        }
        self._modes = {name: module.training for name, module in model.named_modules()}
        self._findings = Findings()

    def list_problems(self, reported_missing: Iterable[str]) -> tuple[Problem, ...]:
        """Returns one problem for each kind of finding, with the first few names of each.

        reported_missing: the names that the method reported as not loaded.
        """
        reported = frozenset(reported_missing)
        pieces = local_pieces.list_model_pieces(self._model, self._right)
        for piece in pieces:
            self._check_piece(piece, reported)
        held = {name for piece in pieces for name in piece.names}
        for name in sorted(name for names in self._ties for name in names if name not in held):
            self._findings.note("incomplete", "not in the model any more", name)
        for tensor in reader.read(self._model).transient_buffers:
            self._check_transient(tensor.names[0], tensor.tensor)
        for name, module in self._model.named_modules():
            if module.training != self._modes.get(name, module.training):
                self._findings.note("poisoned", f"training is {module.training} where it was not", name or "the model")
        return self._findings.list_problems()

    def _read_facts(self, piece: LocalPiece) -> _Facts:
        local = piece.held
        meta = local.is_meta
        return _Facts(
            device=piece.device,
            local_device=local.device,
            dtype=local.dtype,
            pinned=self._watches and self._pins and not meta and local.device.type == "cpu" and local.is_pinned(),
            trains=piece.shown.requires_grad,
            values=None if meta or not self._watches else local.detach().to("cpu", copy=True),
        )

    def _check_piece(self, piece: LocalPiece, reported: frozenset[str]) -> None:
        known = next((names for names in self._ties if piece.name in names), None)
        if known is None:
            self._findings.note("incomplete", "not a name of the model before the load", piece.name)
            return
        if piece.names != known:
            self._findings.note("wrong", "a tensor of its own where the names were tied", piece.name)
        before = self._before[known[0]]
        if piece.held.is_meta:
            self._findings.note("incomplete", "still on the meta device", piece.name)
            return
        if piece.held.dtype != before.dtype:
            self._findings.note("misplaced", f"dtype {piece.held.dtype} where it was {before.dtype}", piece.name)
        if away := self._explain_misplaced(piece, before):
            self._findings.note("misplaced", away, piece.name)
        if piece.shown.requires_grad != before.trains:
            self._findings.note(
                "poisoned", f"requires_grad is {piece.shown.requires_grad} where it was {before.trains}", piece.name
            )
        if piece.name == self._left_alone:
            self._check_left_alone(piece, before, reported)
        elif piece.expected is not None:
            self._check_value(piece, before)

    def _check_left_alone(self, piece: LocalPiece, before: _Facts, reported: frozenset[str]) -> None:
        if not reported & set(piece.names):
            self._findings.note(
                "incomplete", "not in the checkpoint, not loaded, and not reported as missing", piece.name
            )
            return
        for held in piece.everywhere:
            if before.values is not None and (difference := compare(held.cpu(), before.values)):
                self._findings.note(
                    "wrong", f"not in the checkpoint, and changed all the same: {difference}", piece.name
                )
                return

    def _check_value(self, piece: LocalPiece, before: _Facts) -> None:
        assert piece.expected is not None
        actual = piece.held.cpu()
        difference = compare(actual, piece.expected)
        others = [] if difference else [compare(copy.cpu(), piece.expected) for copy in piece.copies]
        if unloaded := next(filter(None, others), ""):
            what = f"loaded into one of the tensors in which FSDP1 keeps it, but not into another: {unloaded}"
            self._findings.note("wrong", what, piece.name)
            return
        if not difference:
            if actual.dtype != piece.expected.dtype and actual.dtype == before.dtype:
                what = f"rounded to {actual.dtype} without an error, where the checkpoint has {piece.expected.dtype}"
                self._findings.note("misplaced", what, piece.name)
            return
        if before.values is not None and not compare(actual, before.values):
            self._findings.note("incomplete", "still what it was before the load", piece.name)
        else:
            self._findings.note("wrong", difference, piece.name)

    def _explain_misplaced(self, piece: LocalPiece, before: _Facts) -> str:
        """Explains why the tensor's device is wrong; empty if it is right.

        The right device is the device before the load or, for a buffer, also the compute device. A parameter from the
        meta device must be on the compute device or, under an offload policy, on the host.
        """
        if piece.device == self._device and not isinstance(piece.shown, nn.Parameter):
            return ""
        device, local_device = before.device, before.local_device
        if local_device.type == "meta":
            device = local_device = torch.device("cpu") if piece.name in self._on_host else self._device
        if piece.device != device:
            return f"on {piece.device} where {device} was promised"
        if piece.held.device != local_device:
            return f"its shard on {piece.held.device} where it was on {local_device}"
        return "in pageable memory where it was pinned" if before.pinned and not piece.held.is_pinned() else ""

    def _check_transient(self, name: str, buffer: torch.Tensor) -> None:
        """Checks that a non-persistent buffer keeps its values and dtype, and is on its earlier device or the compute
        device.

        A buffer that was on the meta device must get its values.
        """
        if buffer.is_meta:
            self._findings.note("incomplete", "still on the meta device, a buffer that no state dict has", name)
            return
        device, dtype = self._transient_places.get(name, (self._device, buffer.dtype))
        if buffer.dtype != dtype:
            what = f"dtype {buffer.dtype} where it was {dtype}, a buffer that no state dict has"
            self._findings.note("misplaced", what, name)
        home = self._device if device.type == "meta" else device
        if buffer.device not in (home, self._device):
            what = f"on {buffer.device} where it was on {home}, a buffer that no state dict has"
            self._findings.note("misplaced", what, name)
        actual, expected = private.read_local_tensor(buffer).cpu(), self._transient.get(name)
        if expected is not None and (difference := compare(actual, expected.to(actual.dtype))):
            self._findings.note("wrong", f"a buffer that no state dict has: {difference}", name)


def find_optimizer_problems(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Full, options: Sequence[Mapping[str, Any]]
) -> tuple[Problem, ...]:
    """Returns the differences between the optimizer and the checkpoint after a load.

    The optimizer must have every state, with the right dtype and values, and the param groups' options.
    """
    findings = Findings()
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                findings.note("wrong", f"a {type(value).__name__} where the checkpoint has a tensor", f"{index}.{key}")
    if problems := findings.list_problems():
        return problems
    pieces, missing = local_pieces.list_optimizer_pieces(model, optimizer, moments)
    for name in missing:
        findings.note("incomplete", "not in the optimizer's state", name)
    for piece in pieces:
        expected = piece.expected
        assert expected is not None
        if piece.held.dtype != expected.dtype:
            findings.note(
                "misplaced", f"dtype {piece.held.dtype} where the checkpoint has {expected.dtype}", piece.name
            )
        elif difference := compare(piece.held.cpu(), expected):
            findings.note("wrong", difference, piece.name)
    groups = read_options(optimizer)
    if len(groups) != len(options):
        what = f"{len(groups)} where the checkpoint has {len(options)}"
        findings.note("wrong", what, "the number of param groups")
    for group, wanted in zip(groups, options, strict=False):
        for key in wanted.keys() | group.keys():
            if _is_other_option(group.get(key), wanted.get(key)):
                findings.note("wrong", f"is {group.get(key)!r}, not {wanted.get(key)!r}", f"the option {key}")
    return findings.list_problems()


def read_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each of the optimizer's groups, without the parameters."""
    return [
        {key: value for key, value in group.items() if key not in _OPTIONS_NOT_COMPARED}
        for group in optimizer.param_groups
    ]


def _is_other_option(ours: Any, wanted: Any) -> bool:
    """Returns whether two options differ. A list equals a tuple, since a setter of torch turns tuples into lists."""
    ours, wanted = (tuple(value) if isinstance(value, list) else value for value in (ours, wanted))
    return isinstance(ours, torch.Tensor) != isinstance(wanted, torch.Tensor) or bool(ours != wanted)


def count_optimized(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> tuple[int, int]:
    """Returns (number of the model's parameters that an optimizer has, number of the model's parameters).

    In an FSDP1 unit with ``use_orig_params=False`` only the flat parameter counts.
    """
    flat_units = [unit for unit in reader.read(model).fsdp1_units if not unit.keeps_originals]
    shown = {id(tensor) for unit in flat_units for tensor in unit.shown.values()}
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in shown]
    return sum(id(parameter) in optimized for parameter in parameters), len(parameters)
