"""Expected weights of a model with LoRA adapters, computed from the reference on the host.

The product is computed in float64. A method that merges rounds three times: the product, its scaling, the sum.
Therefore a merged weight is right if each of its values is as near to the exact value as rounding allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_doctor.case import local_pieces
from fsdp_doctor.case.findings import compare, describe_first_difference
from fsdp_doctor.checkpoints.names import strip_adapters, strip_wrappers
from fsdp_doctor.weights.extract import ShardPlace
from fsdp_doctor.weights.fsdp import reader


@dataclass(frozen=True)
class Merged:
    """Weight with its LoRA adapter added, and the error that rounding may cause.

    exact: the weight in float64.
    bound: the largest possible error of each element in ``dtype``.
    dtype: the dtype of the weight.
    """

    exact: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype

    def describe_difference(self, actual: torch.Tensor) -> str:
        """Describes how the host tensor ``actual`` differs from the exact weight; empty within the bound."""
        bound = self.bound
        if actual.dtype != self.dtype:  # and was rounded once more
            bound = bound + self.exact.abs() * torch.finfo(actual.dtype).eps
        wrong = ~((actual.to(torch.float64) - self.exact).abs() <= bound).reshape(-1)
        return describe_first_difference(wrong, actual, self.exact) if bool(wrong.any()) else ""


@dataclass(frozen=True)
class RankPart:
    """Part of a tensor that this rank holds, flattened, on the host.

    merged: the part with the adapter added; None for a tensor without an adapter.
    """

    values: torch.Tensor
    merged: Merged | None

    def describe_difference(self, actual: torch.Tensor, place: ShardPlace, full: torch.Tensor) -> str:
        """Describes how a yielded shard or its place differs from this part; empty if both are right.

        full: the tensor without adapters.
        """
        if actual.numel() != self.values.numel():
            return f"a shard of {actual.numel()} elements where this rank holds {self.values.numel()}"
        difference = (
            self.merged.describe_difference(actual.reshape(-1)) if self.merged else compare(actual, self.values)
        )
        if difference or not compare(place.of(full), self.values):
            return difference
        return "its place does not match the elements that this rank holds"


def is_adapter(name: str) -> bool:
    """Returns whether a parameter with that name belongs to an adapter."""
    return ".lora_" in name


def compute_merged_weights(model: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, Merged]:
    """Computes the merged value of each weight that has an adapter, by the weight's name in the model that peft was
    given.

    full: every tensor of the sharded model, unsharded, by its unwrapped name.
    """
    merged: dict[str, Merged] = {}
    for module_name, module in model.named_modules():
        prefix = strip_wrappers(f"{module_name}.") if module_name else ""
        if f"{prefix}base_layer.weight" not in full or not hasattr(module, "scaling"):
            continue
        base = full[f"{prefix}base_layer.weight"]
        ((adapter, scaling),) = module.scaling.items()
        a, b = (full[f"{prefix}lora_{factor}.{adapter}.weight"].to(torch.float64) for factor in "AB")
        size = base.to(torch.float64).abs() + abs(scaling) * (b.abs() @ a.abs())
        roundings = a.shape[0] + 4
        merged[strip_adapters(f"{prefix}base_layer.weight")] = Merged(
            exact=base.to(torch.float64) + scaling * (b @ a),
            bound=size * roundings * torch.finfo(base.dtype).eps,
            dtype=base.dtype,
        )
    return merged


def select_base_weights(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Selects all tensors except the adapters, by their names in the model that peft was given."""
    return {strip_adapters(name): tensor for name, tensor in full.items() if not is_adapter(name)}


def select_adapter_weights(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Selects only the adapters, by their names in peft's adapter files, which lack the adapter's own name."""
    return {name.replace(".default", ""): tensor for name, tensor in full.items() if is_adapter(name)}


def compute_rank_parts(
    model: nn.Module, full: Mapping[str, torch.Tensor], merged: Mapping[str, Merged]
) -> dict[str, RankPart]:
    """Computes this rank's part of each tensor except the adapters.

    The result has every name of each tensor in the model that peft was given.

    full: every tensor of the sharded model, unsharded, by its unwrapped name.
    """
    exact = _cut_parts(model, {name: weight.exact for name, weight in merged.items()})
    bound = _cut_parts(model, {name: weight.bound for name, weight in merged.items()})
    return {
        name: RankPart(part, Merged(exact[name], bound[name], merged[name].dtype) if name in merged else None)
        for name, part in _cut_parts(model, select_base_weights(full)).items()
    }


def _cut_parts(model: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts this rank's part out of each tensor, and flattens the part.

    ``full`` has the names of the model that peft was given.
    """
    names = [name for every in reader.read(model).list_all_names() for name in every if not is_adapter(name)]
    by_unwrapped_name = {name: full[strip_adapters(name)] for name in names if strip_adapters(name) in full}
    return {
        strip_adapters(name): piece.expected.reshape(-1)
        for piece in local_pieces.list_model_pieces(model, by_unwrapped_name)
        if piece.expected is not None
        for name in piece.names
        if name in by_unwrapped_name
    }
