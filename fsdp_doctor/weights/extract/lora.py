"""LoRA: which tensors are base weights, which are adapters, and which product is merged into which weight.

The layers are peft's; peft itself is needed only if the model has such layers. An adapter of an unknown kind is
refused, since a wrong tensor would be worse.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from typing_extensions import assert_never

from fsdp_doctor.checkpoints.names import strip_adapters, strip_wrappers
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.sources import FlatUnit, Source, TensorSpec, list_specs

Lora = Literal["merged", "adapter", "base"]


@dataclass(frozen=True)
class LoraAdapter:
    """Adapter of one weight. ``a`` and ``b`` are the names of its two factors in the sharded model."""

    a: str
    b: str
    scaling: float
    transposed: bool


@dataclass
class Layers:
    """Adapters that peft put into a model, by unwrapped names.

    adapters: the adapters of each adapted weight.
    merged: the weights into which adapters are merged in place now.
    unsupported: the reason, for each weight whose adapters cannot be merged.
    copies: (prefix of the trained copy, prefix of the original, plain prefix) of each module that is trained as a
        whole.
    wrappers: the prefixes of other modules that peft wrapped, with the kind of wrapper.
    prompts: the kinds of prompt learning, which has no layers.
    active: the names of the active adapters.
    biases: for each adapter, which of the model's own biases are trained with it, in peft's words.
    layers: the prefixes of the adapted layers.
    embeddings: the prefixes of adapted layers that are the model's input or output embedding.
    targets: for each adapter, the modules that its configuration names.
    """

    adapters: dict[str, list[LoraAdapter]] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, str, str]] = field(default_factory=list)
    wrappers: dict[str, str] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    active: set[str] = field(default_factory=set)
    biases: dict[str, str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    targets: dict[str, str | frozenset[str]] = field(default_factory=dict)
    has_adapters: bool = False


def list_factor_names(adapters: Mapping[str, Sequence[LoraAdapter]]) -> list[str]:
    """Lists the names of all factors without duplicates, in the model's order, which is the same on every rank."""
    return list(
        dict.fromkeys(name for many in adapters.values() for adapter in many for name in (adapter.a, adapter.b))
    )


def make_deltas(
    adapters: Mapping[str, Sequence[LoraAdapter]], factors: Mapping[str, torch.Tensor]
) -> dict[str, list[Delta]]:
    """Returns the products to merge into each weight.

    factors: the full tensors by their names.
    """
    return {
        weight: [Delta(factors[adapter.a], factors[adapter.b], adapter.scaling, adapter.transposed) for adapter in many]
        for weight, many in adapters.items()
    }


def check(lora: str) -> None:
    """Raises ValueError unless ``lora`` is one of the three allowed words."""
    if lora not in get_args(Lora):
        raise ValueError(f"lora must be one of {', '.join(get_args(Lora))}, not {lora!r}")


def select(layers: Layers, sources: Sequence[Source], lora: Lora) -> tuple[list[Source], dict[str, list[LoraAdapter]]]:
    """Returns the sources to yield, under their output names, and the adapters to merge into each weight.

    Raises NotImplementedError for an adapter that cannot be merged, RuntimeError if adapters that are merged in place
    hide the base, and ValueError for "adapter" unless exactly one adapter is active.
    """
    if layers.prompts:
        raise NotImplementedError(f"the model learns prompts ({', '.join(layers.prompts)}); only LoRA is supported")
    if not layers.has_adapters:
        if lora == "adapter":
            raise ValueError('lora="adapter": the model has no adapters')
        return list(sources), {}
    match lora:
        case "base":
            return _rename(sources, _make_base_names(layers)), {}
        case "adapter":
            return _rename(sources, make_adapter_names(layers)), {}
        case "merged":
            name_of = _make_merged_names(layers)
            chosen = _rename(sources, name_of)
            _refuse_ties(sources, layers)
            adapters = {name_of(weight) or weight: many for weight, many in layers.adapters.items()}
            return chosen, _fit_strides(chosen, adapters)
        case _:
            assert_never(lora)


def _refuse_ties(sources: Sequence[Source], layers: Layers) -> None:
    """Raises NotImplementedError for an adapter of a tied weight.

    peft's merge changes the weight under all of its names, although only the adapted layer computes with the adapter.
    """
    for source in sources:
        for spec in list_specs(source):
            adapted = [name for name in spec.names if name in layers.adapters]
            if adapted and len(spec.names) > 1:
                raise NotImplementedError(
                    f"{adapted[0]} has an adapter and is tied to "
                    f"{', '.join(name for name in spec.names if name != adapted[0])}: after a merge the two would "
                    "differ"
                )


def _fit_strides(sources: Sequence[Source], adapters: dict[str, list[LoraAdapter]]) -> dict[str, list[LoraAdapter]]:
    """Inverts ``transposed`` of the adapters of each weight that an FSDP1 unit stores transposed; returns ``adapters``.

    Raises NotImplementedError for strides that are neither row-major nor those of a transposed matrix.
    """
    for source in sources:
        for span in source.spans if isinstance(source, FlatUnit) else ():
            name, shape = span.spec.names[0], span.spec.shape
            if name not in adapters or span.stride == (shape[1], 1):
                continue
            if span.stride != (1, shape[0]):
                raise NotImplementedError(f"{name}: adapters cannot be merged into a weight with strides {span.stride}")
            adapters[name] = [replace(adapter, transposed=not adapter.transposed) for adapter in adapters[name]]
    return adapters


def find_adapter_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that peft put into a model, by unwrapped prefixes; an empty list if peft was never
    imported.
    """
    if "peft" not in sys.modules:
        return []
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (PeftModel, BaseTunerLayer, AuxiliaryTrainingWrapper)
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))
    return [(strip_wrappers(f"{name}." if name else ""), module) for name, module in named]


def read(modules: Iterable[tuple[str, nn.Module]]) -> Layers:
    """Reads the model's adapters in their present state."""
    layers = Layers()
    if "peft" not in sys.modules:
        return layers
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    embeddings: list[Any] = []
    for prefix, module in modules:
        if isinstance(module, PeftModel):
            configs = module.peft_config
            embeddings += _find_embeddings(module)
            for adapter, config in configs.items():
                targets = getattr(config, "target_modules", None) or ()
                layers.targets[adapter] = targets if isinstance(targets, str) else frozenset(targets)
            layers.prompts += [
                str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values() if c.is_prompt_learning
            ]
            layers.biases |= {adapter: getattr(config, "bias", "none") for adapter, config in configs.items()}
        elif isinstance(module, BaseTunerLayer):
            layers.has_adapters = True
            layers.layers.append(prefix)
            if any(module.base_layer is base for base in embeddings):
                layers.embeddings.append(prefix)
            layers.active.update(module.active_adapters)
            _read_layer(layers, prefix, module)
        elif isinstance(module, ModulesToSaveWrapper):
            layers.has_adapters = True
            trained = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
            used = trained[0] if trained and not module.disable_adapters else None
            copy = f"{prefix}modules_to_save.{used}." if used else f"{prefix}original_module."
            layers.copies.append((copy, f"{prefix}original_module.", prefix))
        elif isinstance(module, AuxiliaryTrainingWrapper):
            layers.has_adapters = True
            layers.wrappers[prefix] = type(module).__name__
    return layers


def _find_embeddings(model: Any) -> list[Any]:
    """Finds the base layers of the model's input and output embeddings that have adapters."""
    getters = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    bases = [getattr(get(), "base_layer", None) for get in getters if get is not None]
    return [base for base in bases if base is not None]


def _read_layer(layers: Layers, prefix: str, module: Any) -> None:
    from peft.tuners import lora

    # peft's ParamWrapper has a parameter that is no layer's weight, such as fused experts.
    weight = f"{prefix}base_layer.{getattr(module, 'parameter_name', 'weight')}"
    if type(module) not in (lora.Linear, lora.Embedding):
        layers.unsupported[weight] = type(module).__name__
        return
    active = [name for name in module.active_adapters if name in (*module.lora_A, *module.lora_embedding_A)]
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
            layers.adapters.setdefault(weight, []).append(_make_adapter(prefix, module, name))


def _make_adapter(prefix: str, module: Any, name: str) -> LoraAdapter:
    scaling = float(module.scaling[name])
    if name in module.lora_embedding_A:
        return LoraAdapter(f"{prefix}lora_embedding_A.{name}", f"{prefix}lora_embedding_B.{name}", scaling, True)
    transposed = bool(getattr(module, "fan_in_fan_out", False))
    return LoraAdapter(f"{prefix}lora_A.{name}.weight", f"{prefix}lora_B.{name}.weight", scaling, transposed)


def _make_merged_names(layers: Layers) -> Callable[[str], str | None]:
    for weight, why in layers.unsupported.items():
        raise NotImplementedError(
            f"{strip_adapters(weight)}: adapters of this kind cannot be merged out of place ({why})"
        )
    return _make_plain_names(layers, [(copy, prefix) for copy, _, prefix in layers.copies])


def _make_base_names(layers: Layers) -> Callable[[str], str | None]:
    for weight in layers.merged:
        raise RuntimeError(f"{weight}: adapters are merged into this weight; unmerge them to read the base")
    return _make_plain_names(layers, [(original, prefix) for _, original, prefix in layers.copies])


def _make_plain_names(layers: Layers, copies: list[tuple[str, str]]) -> Callable[[str], str | None]:
    """Returns a function from a name to the name in the model that peft was given; None for tensors that peft added."""
    _refuse_wrappers(layers)

    def find_name(name: str) -> str | None:
        for copy, prefix in copies:
            if name.startswith(copy):
                name = prefix + name[len(copy) :]
        if ".modules_to_save." in name or ".original_module." in name or ".lora_" in name:
            return None
        return strip_adapters(name)

    return find_name


def make_adapter_names(layers: Layers) -> Callable[[str], str | None]:
    """Returns a function from a tensor's name in the model to its name in peft's file of the active adapter.

    The function returns None for tensors that the file does not have.
    """
    if len(layers.active) != 1:
        active = ", ".join(sorted(layers.active)) or "none"
        raise ValueError(f'lora="adapter" needs exactly one active adapter; active: {active}')
    (adapter,) = layers.active
    _refuse_wrappers(layers)
    bias = layers.biases.get(adapter, "none")
    biases = {f"{prefix}base_layer.bias" for prefix in layers.layers}
    embeddings = (
        tuple(f"{prefix}base_layer." for prefix in layers.embeddings) if _saves_embeddings(layers, adapter) else ()
    )

    def find_name(name: str) -> str | None:
        if name.startswith(embeddings):
            return name
        if f".modules_to_save.{adapter}." in name:
            return name.replace(f".modules_to_save.{adapter}.", ".")
        if (bias == "all" and name.endswith(".bias")) or (bias.endswith("_only") and name in biases):
            return name
        parts = name.split(".")
        kind = next((index for index, part in enumerate(parts) if part.startswith("lora_")), len(parts))
        if parts[kind + 1 : kind + 2] != [adapter]:
            return None
        # peft's files have DoRA's magnitude as a parameter of the layer, not of a module of its own.
        rest = parts[kind + 2 :] if parts[kind] != "lora_magnitude_vector" else []
        return ".".join([*parts[: kind + 1], *rest])

    return find_name


def _saves_embeddings(layers: Layers, adapter: str) -> bool:
    """Returns whether peft saves the embeddings, too.

    peft does so if the adapter's configuration names an embedding layer by its usual name.
    """
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = layers.targets.get(adapter, frozenset())
    if not isinstance(targets, str):
        return not targets.isdisjoint(EMBEDDING_LAYER_NAMES)
    names = [strip_adapters(prefix).removesuffix(".") for prefix in layers.layers]
    return any(re.fullmatch(targets, name) for name in names if name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES)


def _refuse_wrappers(layers: Layers) -> None:
    for prefix, kind in layers.wrappers.items():
        raise NotImplementedError(f"{prefix.removesuffix('.')}: adapters of this kind ({kind}) are not supported")


def _rename(sources: Sequence[Source], name_of: Callable[[str], str | None]) -> list[Source]:
    """Renames the sources, and drops each source for which ``name_of`` returns None."""
    renamed: list[Source] = []
    for source in sources:
        if isinstance(source, FlatUnit):
            named = [(span, _rename_spec(span.spec, name_of)) for span in source.spans]
            if spans := tuple(replace(span, spec=spec) for span, spec in named if spec is not None):
                renamed.append(replace(source, spans=spans))
        elif (spec := _rename_spec(source.spec, name_of)) is not None:
            renamed.append(replace(source, spec=spec))
    return renamed


def _rename_spec(spec: TensorSpec, name_of: Callable[[str], str | None]) -> TensorSpec | None:
    names = tuple(name for name in map(name_of, spec.names) if name is not None)
    return replace(spec, names=names) if names else None


def find_factors(sources: Sequence[Source], adapters: Mapping[str, list[LoraAdapter]]) -> dict[str, Source]:
    """Returns the sources of the adapters' factors by name. A factor in an FSDP1 unit is treated as a separate unit."""
    names = set(list_factor_names(adapters))
    sources_of_factors: dict[str, Source] = {}
    for source in sources:
        if isinstance(source, FlatUnit):
            for span in source.spans:
                for name in names.intersection(span.spec.names):
                    sources_of_factors[name] = replace(source, spans=(span,))
        else:
            for name in names.intersection(source.spec.names):
                sources_of_factors[name] = source
    return sources_of_factors
