"""What the weights of a model with LoRA adapters are, merged and adapter alone: from the reference, on the host.

The product is computed in float64. Whoever merges rounds: the product, its scaling, the sum. So a
merged weight is not one number but all that are as near to it as rounding brings anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_doctor.fsdp.names import unwrapped, without_adapters


@dataclass(frozen=True)
class Merged:
    """exact: in float64. bound: how far off each element may be in ``dtype``, the weight's own."""

    exact: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype

    def difference(self, actual: torch.Tensor) -> str:
        """How ``actual``, on the host, differs; empty if it does not."""
        bound = self.bound
        if actual.dtype != self.dtype:  # and was rounded once more
            bound = bound + self.exact.abs() * torch.finfo(actual.dtype).eps
        wrong = ~((actual.to(torch.float64) - self.exact).abs() <= bound).reshape(-1)
        if not bool(wrong.any()):
            return ""
        first = int(wrong.nonzero()[0])
        got, want = actual.reshape(-1)[first].item(), self.exact.reshape(-1)[first].item()
        return f"{int(wrong.sum())} of {actual.numel()} elements differ, the first at {first}: {got!r}, not {want!r}"


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def merged_weights(model: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, Merged]:
    """Each weight that has an adapter, under the name of the model that peft was given.

    full: every tensor of the sharded model, unsharded, by its unwrapped name.
    """
    found: dict[str, Merged] = {}
    for module_name, module in model.named_modules():
        prefix = unwrapped(f"{module_name}.") if module_name else ""
        if f"{prefix}base_layer.weight" not in full or not hasattr(module, "scaling"):
            continue
        base = full[f"{prefix}base_layer.weight"]
        ((adapter, scaling),) = module.scaling.items()
        a, b = (full[f"{prefix}lora_{factor}.{adapter}.weight"].to(torch.float64) for factor in "AB")
        size = base.to(torch.float64).abs() + abs(scaling) * (b.abs() @ a.abs())
        steps = a.shape[0] + 4
        found[without_adapters(f"{prefix}base_layer.weight")] = Merged(
            exact=base.to(torch.float64) + scaling * (b @ a),
            bound=size * steps * torch.finfo(base.dtype).eps,
            dtype=base.dtype,
        )
    return found


def base_weights(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that is no adapter, under the names of the model that peft was given."""
    return {without_adapters(name): tensor for name, tensor in full.items() if not is_adapter(name)}


def adapter_weights(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter alone, under the names of peft's adapter files: those of the model without the adapter's own."""
    return {name.replace(".default", ""): tensor for name, tensor in full.items() if is_adapter(name)}
