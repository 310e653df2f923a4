"""LoRA: which tensors are base weights and which adapters, and the product that is merged into which weight.

The layers are peft's; peft itself is not needed unless the model has them. What is not understood is
refused: a tensor that came out wrong would be worse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_doctor.extract.sources import Entry, Source, Unit
from fsdp_doctor.fsdp.names import unwrapped, without_adapters

Lora = Literal["merged", "adapter", "base"]


@dataclass(frozen=True)
class Delta:
    """One adapter's share of one weight: ``scaling * B @ A``, or its transpose.

    a: (r, in), b: (out, r), both whole and on the device.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool

    def part(self, start: int, numel: int) -> torch.Tensor:
        """The elements [start, start + numel) of the flattened product, 1-D."""
        left, right = (self.a.t(), self.b.t()) if self.transposed else (self.b, self.a)
        columns = right.shape[1]
        first, last = start // columns, -(-(start + numel) // columns)
        rows = (left[first:last] @ right) * self.scaling
        skipped = start - first * columns
        return rows.reshape(-1)[skipped : skipped + numel]


@dataclass(frozen=True)
class Adapter:
    """One adapter of one weight, by the names of its two factors in the sharded model."""

    a: str
    b: str
    scaling: float
    transposed: bool


@dataclass
class Layers:
    """What peft made of a model, by unwrapped names.

    adapters: of each adapted weight. merged: a weight that has adapters in it now. unsupported: why a weight's
    adapters cannot be merged. copies: (the trained copy's prefix, the original's prefix, the plain prefix) of
    each module that is trained as a whole. active: the names of the active adapters.
    """

    adapters: dict[str, list[Adapter]] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str, str]] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    found: bool = False


def check(lora: str) -> None:
    """Raises ValueError for a word that is none of the three."""
    if lora not in get_args(Lora):
        raise ValueError(f"lora must be one of {', '.join(get_args(Lora))}, not {lora!r}")


def select(model: nn.Module, sources: Sequence[Source], lora: Lora) -> tuple[list[Source], dict[str, list[Adapter]]]:
    """The sources to yield, under the names to yield, and what is to be merged into which.

    Raises NotImplementedError for an adapter that cannot be merged, RuntimeError where adapters that
    are merged in place hide the base, ValueError for "adapter" without exactly one active adapter.
    """
    layers = read(model)
    if not layers.found:
        if lora == "adapter":
            raise ValueError('lora="adapter": the model has no adapters')
        return list(sources), {}
    names = {"merged": _merged_name, "base": _base_name, "adapter": _adapter_name}[lora](layers)
    chosen = [kept for source in sources for kept in _renamed(source, names)]
    return chosen, {names(weight) or weight: a for weight, a in layers.adapters.items()} if lora == "merged" else {}


def read(model: nn.Module) -> Layers:
    """The model's adapters, from its modules; empty where peft was never imported."""
    layers = Layers()
    if "peft" not in sys.modules:
        return layers
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for name, module in model.named_modules():
        prefix = unwrapped(f"{name}." if name else "")
        if isinstance(module, BaseTunerLayer):
            layers.found = True
            layers.active.update(module.active_adapters)
            _read_layer(layers, prefix, module)
        elif isinstance(module, ModulesToSaveWrapper):
            layers.found = True
            trained = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
            used = trained[0] if trained and not module.disable_adapters else None
            copy = f"{prefix}modules_to_save.{used}." if used else f"{prefix}original_module."
            layers.copies.append((copy, f"{prefix}original_module.", prefix))
        elif isinstance(module, AuxiliaryTrainingWrapper):
            layers.found = True
            layers.unsupported[prefix] = type(module).__name__
    return layers


def _read_layer(layers: Layers, prefix: str, module: Any) -> None:
    from peft.tuners import lora

    weight = f"{prefix}base_layer.weight"
    active = (
        [name for name in module.active_adapters if name in (*module.lora_A, *module.lora_embedding_A)]
        if (isinstance(module, lora.LoraLayer))
        else []
    )
    if type(module) not in (lora.Linear, lora.Embedding):
        layers.unsupported[weight] = type(module).__name__
        return
    if module.merged:
        layers.merged.append(weight)
        if set(module.merged_adapters) != set(active):
            layers.unsupported[weight] = f"{', '.join(module.merged_adapters)} merged and {', '.join(active)} active"
        return
    if module.disable_adapters:
        return
    for name in active:
        variant = getattr(module, "lora_variant", {}).get(name)
        if variant is not None or module.use_dora.get(name):
            layers.unsupported[weight] = type(variant).__name__ if variant is not None else "DoRA"
        elif getattr(module, "lora_bias", {}).get(name):
            layers.unsupported[weight] = "lora_bias"
        else:
            layers.adapters.setdefault(weight, []).append(_adapter(prefix, module, name))


def _adapter(prefix: str, module: Any, name: str) -> Adapter:
    scaling = float(module.scaling[name])
    if name in module.lora_embedding_A:
        return Adapter(f"{prefix}lora_embedding_A.{name}", f"{prefix}lora_embedding_B.{name}", scaling, True)
    transposed = bool(getattr(module, "fan_in_fan_out", False))
    return Adapter(f"{prefix}lora_A.{name}.weight", f"{prefix}lora_B.{name}.weight", scaling, transposed)


def _merged_name(layers: Layers) -> Callable[[str], str | None]:
    for weight, why in layers.unsupported.items():
        raise NotImplementedError(f"{weight}: adapters of this kind cannot be merged out of place ({why})")
    return _plain_names([(copy, prefix) for copy, _, prefix in layers.copies])


def _base_name(layers: Layers) -> Callable[[str], str | None]:
    for weight in layers.merged:
        raise RuntimeError(f"{weight}: adapters are merged into it; unmerge them to read the base")
    return _plain_names([(original, prefix) for _, original, prefix in layers.copies])


def _plain_names(copies: list[tuple[str, str]]) -> Callable[[str], str | None]:
    """The name in the model that peft was given; None for what that model does not have."""

    def name_of(name: str) -> str | None:
        for copy, prefix in copies:
            if name.startswith(copy):
                name = prefix + name[len(copy) :]
        if ".modules_to_save." in name or ".original_module." in name or ".lora_" in name:
            return None
        plain = without_adapters(name)
        if plain.startswith("base_model.") or "_adapter." in plain:
            raise NotImplementedError(f"{name}: what peft does with it is not understood")
        return plain

    return name_of


def _adapter_name(layers: Layers) -> Callable[[str], str | None]:
    if len(layers.active) != 1:
        active = ", ".join(sorted(layers.active)) or "none"
        raise ValueError(f'lora="adapter" needs exactly one active adapter; active: {active}')
    (adapter,) = layers.active

    def name_of(name: str) -> str | None:
        if f".modules_to_save.{adapter}." in name:
            return name.replace(f".modules_to_save.{adapter}.", ".")
        parts = name.split(".")
        if not any(part.startswith("lora_") for part in parts) or adapter not in parts:
            return None
        return name.replace(f".{adapter}", "")

    return name_of


def _renamed(source: Source, name_of: Callable[[str], str | None]) -> Iterator[Source]:
    if isinstance(source, Unit):
        spans = tuple(
            replace(span, entry=entry)
            for span in source.spans
            if (entry := _renamed_entry(span.entry, name_of)) is not None
        )
        if spans:
            yield replace(source, spans=spans)
        return
    entry = _renamed_entry(source.entry, name_of)
    if entry is not None:
        yield replace(source, entry=entry)


def _renamed_entry(entry: Entry, name_of: Callable[[str], str | None]) -> Entry | None:
    names = tuple(name for name in map(name_of, entry.names) if name is not None)
    return replace(entry, names=names) if names else None


def factors(sources: Sequence[Source], adapters: Mapping[str, list[Adapter]]) -> dict[str, Source]:
    """The sources of the adapters' factors by their names; a span of a unit as a unit of its own."""
    wanted = {name for many in adapters.values() for adapter in many for name in (adapter.a, adapter.b)}
    found: dict[str, Source] = {}
    for source in sources:
        if isinstance(source, Unit):
            for span in source.spans:
                for name in wanted.intersection(span.entry.names):
                    found[name] = replace(source, spans=(span,))
        else:
            for name in wanted.intersection(source.entry.names):
                found[name] = source
    return found
