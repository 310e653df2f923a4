"""How the gradients of the next backward are reduced, as this rank can read it: attributes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.fsdp.reader import HeldModel


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """Names of parameters, of an FSDP1 unit its flat parameter's, and of their units what is set.

    unsynchronized: whose gradients stay on their rank. unreplicated: whose gradients are not reduced over the replicas.
    open_ended: whose backward is not to be the last before the optimizer's step.
    divided: by each divisor that was set in place of the number of ranks.
    unmanaged: that train, and are no shards, beside what FSDP shards over several ranks.
    mixed: of several dtypes, which train in one unit of FSDP2 before its first forward.
    """

    unsynchronized: tuple[str, ...] = ()
    unreplicated: tuple[str, ...] = ()
    open_ended: tuple[str, ...] = ()
    divided: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unmanaged: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()


def read_gradient_facts(model: nn.Module, held: HeldModel) -> GradientFacts:
    """held: of the model, as the reader gives it."""
    names_of: dict[int, list[str]] = {}
    for own in held.parameters:
        if own.unit is not None and isinstance(own.tensor, DTensor):
            names_of.setdefault(id(own.unit), []).append(own.names[0])
    reduced = [(names_of.get(id(unit), []), unit.switches) for unit in held.fsdp2_units]
    reduced += [([f"{unit.prefix}flat_param"], unit.switches) for unit in held.fsdp1_units]
    divided: dict[str, list[str]] = {}
    # Experts on a part of the ranks have had tokens of all ranks that the largest unit is on.
    num_ranks = max((switches.num_ranks for _, switches in reduced), default=1)
    for names, switches in reduced:
        if switches.divided_by not in (None, str(switches.num_ranks), str(num_ranks)):
            divided.setdefault(switches.divided_by, []).extend(names)
    return GradientFacts(
        unsynchronized=tuple(name for names, switches in reduced if not switches.synchronizes for name in names),
        unreplicated=tuple(
            name for names, switches in reduced if switches.synchronizes and not switches.all_reduces for name in names
        ),
        open_ended=tuple(name for names, switches in reduced if not switches.ends for name in names),
        divided=tuple((divisor, tuple(names)) for divisor, names in divided.items()),
        unmanaged=tuple(_unmanaged(model, held)),
        mixed=tuple(_mixed(held)),
    )


def _unmanaged(model: nn.Module, held: HeldModel) -> Iterator[str]:
    """DDP around the model would reduce them."""
    several = any(unit.group.size() > 1 for unit in held.fsdp1_units) or any(
        own.unit is not None and isinstance(own.tensor, DTensor) and own.tensor.device_mesh.size() > 1
        for own in held.parameters
    )
    if several and not isinstance(model, DistributedDataParallel):
        for own in held.parameters:
            if own.tensor.requires_grad and not isinstance(own.tensor, DTensor):
                yield own.names[0]


def _mixed(held: HeldModel) -> Iterator[str]:
    names = {id(own.tensor): own.names[0] for own in held.parameters}
    for unit in held.fsdp2_units:
        for parameters in [] if unit.is_initialized else unit.trained_together:
            if len({parameter.dtype for parameter in parameters}) > 1:
                yield from (names[id(parameter)] for parameter in parameters if id(parameter) in names)
