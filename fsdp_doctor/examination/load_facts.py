"""What a load may have left behind, as this rank can read it: attributes alone, no value is looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.fsdp.names import unwrapped
from fsdp_doctor.fsdp.reader import HeldModel


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """held, unheld: the names of the parameters that train, by whether the optimizer has them; empty without one.

    holds_masters: whether the optimizer has parameters in their stead that are in a dtype of more bits, as masters are.
    rounded: the names of parameters with a state in a floating dtype of fewer bits; rounded_entries: the state's keys.
    untied: pairs of names that the model's configuration ties, and that are two tensors.
    replaced: the names under which modules have parameters that FSDP2 does not gather, but others, or other memory, in
    their place.
    recast: the names of parameters that FSDP2 takes to be in another dtype than they are.
    second_memories: the FSDP1 units whose local shard is other memory than their flat parameter.
    stray_pieces: the names of parameters that are pieces of another FSDP1 unit's flat parameter.
    """

    held: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    holds_masters: bool = False
    rounded: tuple[str, ...] = ()
    rounded_entries: tuple[str, ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    replaced: tuple[str, ...] = ()
    recast: tuple[str, ...] = ()
    second_memories: tuple[str, ...] = ()
    stray_pieces: tuple[str, ...] = ()


def read_load_facts(model: nn.Module, held: HeldModel, optimizer: torch.optim.Optimizer | None) -> LoadFacts:
    """held: of the model, as the reader gives it."""
    facts = LoadFacts(
        untied=tuple(_untied(model, held)),
        replaced=tuple(_replaced(model, held)),
        recast=_names(held, [parameter for unit in held.fsdp2_units for parameter in unit.recast]),
        second_memories=tuple(_second_memories(held)),
        stray_pieces=held.stray_pieces,
    )
    if optimizer is None:
        return facts
    names = {id(parameter): name for name, parameter in _parameters(held)}
    in_groups = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(name, id(parameter) in in_groups) for name, parameter in _parameters(held) if parameter.requires_grad]
    own_bits = max((_bits(parameter) for _, parameter in _parameters(held)), default=0)
    others = [parameter for key, parameter in in_groups.items() if key not in names]
    rounded = list(_rounded(optimizer, names))
    return dataclasses.replace(
        facts,
        held=tuple(name for name, is_held in trained if is_held),
        unheld=tuple(name for name, is_held in trained if not is_held),
        holds_masters=bool(others) and min(map(_bits, others)) > own_bits,
        rounded=tuple(dict.fromkeys(name for name, _ in rounded)),
        rounded_entries=tuple(dict.fromkeys(entry for _, entry in rounded)),
    )


def _replaced(model: nn.Module, held: HeldModel) -> Iterator[str]:
    if places := [place for unit in held.fsdp2_units for place in unit.replaced]:
        prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        yield from (unwrapped(prefixes[id(module)] + name) for module, name in places)
    yield from _names(held, [parameter for unit in held.fsdp2_units for parameter, _ in unit.moved])


def _second_memories(held: HeldModel) -> Iterator[str]:
    """A unit with two memories on two devices is half-moved, which is another finding."""
    for unit in held.fsdp1_units:
        memories = unit.memories
        if len(memories) > 1 and memories[0].device == memories[1].device:
            yield unit.flat_name


def _names(held: HeldModel, parameters: list[nn.Parameter]) -> tuple[str, ...]:
    wanted = set(map(id, parameters))
    return tuple(tensor.names[0] for tensor in held.parameters if id(tensor.tensor) in wanted)


def _parameters(held: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """By name what an optimizer made now would hold; of an FSDP1 unit the flat parameter, or the originals."""
    yield from ((tensor.names[0], tensor.tensor) for tensor in held.parameters)
    for unit in held.fsdp1_units:
        if unit.keeps_originals:
            yield from ((names[0], tensor) for names, tensor in zip(unit.names, unit.originals, strict=True))
        else:
            yield f"{unit.prefix}flat_param", unit.flat_parameter


def _rounded(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    for parameter, entries in optimizer.state.items():
        if id(parameter) not in names:
            continue
        for entry, value in entries.items():
            is_moment = isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()
            if is_moment and _bits(value) < _bits(parameter):
                yield names[id(parameter)], entry


def _bits(tensor: torch.Tensor) -> int:
    """Of a floating dtype; 0 of another."""
    return torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else 0


def _untied(model: nn.Module, held: HeldModel) -> Iterator[tuple[str, str]]:
    first_name = {name: names[0] for names in held.all_names() for name in names}
    for prefix, module in model.named_modules():
        root = unwrapped(f"{prefix}." if prefix else "")
        for one, other in ((root + one, root + other) for one, other in _tied_by_configuration(module).items()):
            if {one, other} <= first_name.keys() and first_name[one] != first_name[other]:
                yield one, other


def _tied_by_configuration(module: nn.Module) -> Mapping[str, str]:
    """By name of a weight the one that a model of transformers ties it to; before version 5 always the embedding's."""
    # Of the class: FullyShardedDataParallel answers for the module that it wraps.
    tied = getattr(type(module), "_tied_weights_keys", None) or {}
    if not tied or not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        return {}
    if isinstance(tied, Mapping):
        return tied
    found: Any = getattr(module, "get_input_embeddings", None)
    embedding = found() if found is not None else None
    names = [name for name, child in module.named_modules() if child is embedding]
    return {name: f"{unwrapped(names[0])}.weight" for name in tied} if names else {}
