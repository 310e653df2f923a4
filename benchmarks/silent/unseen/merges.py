"""Unseen programs that merge adapters: into what a sync sends, and into a quantized base."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ..entries import publish
from .program import SIZES, Unseen, full, save_adapter, shard


@contextlib.contextmanager
def merged_lora_context(model: Any) -> Iterator[None]:
    """Adds the LoRA delta to the base weights, and restores them on exit."""
    backup = {}
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, LoraLayer):
                w: Any = m.get_base_layer().weight
                backup[w] = w.detach().clone()
                a, b = (full(x["default"].weight) for x in (m.lora_A, m.lora_B))
                delta = m.scaling["default"] * (b @ a)
                w.add_(distribute_tensor(delta, w.device_mesh, w.placements) if isinstance(w, DTensor) else delta)
        try:
            yield
        finally:
            for w, old in backup.items():
                w.copy_(old)


@publish("verl-project/verl#6782", "verl-project/verl#7014", names=("q_proj", "v_proj", "down_proj"), first_run="found")
class LoraSyncAfterMergeExit(Unseen):
    """The generator of merged weights is read after the context has put the base weights back."""

    left, right, as_base = "rollout", "base", True

    def run(self) -> None:
        torch.manual_seed(0)
        base = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
        if self.rank == 0:
            base.save_pretrained(self.path("base"))
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
        model: Any = get_peft_model(base, lora)
        shard(model, model.base_model.model.model.layers)
        self.train(model)
        received = dict(self.get_per_tensor_param_mended(model) if self.mended else self.get_per_tensor_param(model))
        if self.rank == 0:
            torch.manual_seed(1)
            rollout = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
            rollout.load_state_dict(received)
            rollout.save_pretrained(self.path("rollout"))
        save_adapter(model, self.path("adapter"), self.rank)

    def collect(self, model: Any) -> dict[str, torch.Tensor]:
        params = {k: v for k, v in model.state_dict().items() if "lora_" not in k}
        return {k.removeprefix("base_model.model.").replace(".base_layer", ""): v for k, v in params.items()}

    def get_per_tensor_param(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with merged_lora_context(model):
            params = self.collect(model)
        return ((name, full(p)) for name, p in params.items())

    def get_per_tensor_param_mended(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        with merged_lora_context(model):
            for name, p in self.collect(model).items():
                yield name, full(p).clone()


@publish("unslothai/unsloth#4919", "unslothai/unsloth-zoo#803", names=("q_proj", "gate_proj"), first_run="missed")
class Fp8MergeWithoutScale(Unseen):
    """A LoRA adapter is merged into FP8 codes that were not multiplied by their scales."""

    left = "merged_16bit"

    def commands(self) -> list[list[str]]:
        return [*super().commands(), ["checkpoint", "verify", self.path("base_fp8")]]

    def run(self) -> None:
        if self.rank != 0:
            return
        lora = self.write_base()
        out = self.merge_and_overwrite_lora(self.path("base_fp8"), lora)
        os.makedirs(self.path("merged_16bit"))
        save_file(out, self.path("merged_16bit", "model.safetensors"), metadata={"format": "pt"})
        config = json.loads(pathlib.Path(self.path("base_fp8", "config.json")).read_text())
        del config["quantization_config"]
        pathlib.Path(self.path("merged_16bit", "config.json")).write_text(json.dumps(config))

    def expand(self, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]

    def quantize(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        r, c = w.shape
        scale = w.reshape(r // 32, 32, c // 32, 32).abs().amax((1, 3)).clamp(min=1e-8) / 448.0
        return (w / self.expand(scale, w.shape)).to(torch.float8_e4m3fn), scale

    def write_base(self) -> dict[str, torch.Tensor]:
        """Writes a base model as published in FP8, and returns an adapter trained on it."""
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
        out, lora = {}, {}
        for k, v in model.state_dict().items():
            out[k] = v.to(torch.bfloat16)
            if k.endswith("_proj.weight"):
                out[k], out[f"{k}_scale_inv"] = self.quantize(v)
                if "q_proj" in k or "v_proj" in k:
                    name = "base_model.model." + k.removesuffix(".weight")
                    lora[f"{name}.lora_A.weight"] = torch.randn(8, v.shape[1]) * 0.02
                    lora[f"{name}.lora_B.weight"] = torch.randn(v.shape[0], 8) * 0.02
        os.makedirs(self.path("base_fp8"))
        save_file(out, self.path("base_fp8", "model.safetensors"), metadata={"format": "pt"})
        config = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
        quantized = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
        }
        text = json.dumps(config | {"quantization_config": quantized})
        pathlib.Path(self.path("base_fp8", "config.json")).write_text(text)
        return lora

    def merge_and_overwrite_lora(self, base: str, lora: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = {}
        with safe_open(os.path.join(base, "model.safetensors"), "pt") as f:
            for key in f.keys():  # noqa: SIM118 (the file is no dictionary)
                if self.mended and key.endswith("_scale_inv"):
                    continue
                w = f.get_tensor(key)
                dtype = w.dtype
                if self.mended and dtype == torch.float8_e4m3fn:
                    w = w.float() * self.expand(f.get_tensor(f"{key}_scale_inv"), w.shape)
                    dtype = torch.bfloat16
                name = "base_model.model." + key.removesuffix(".weight")
                if f"{name}.lora_A.weight" in lora:
                    a, b = lora[f"{name}.lora_A.weight"], lora[f"{name}.lora_B.weight"]
                    w = w.float() + 2.0 * (b @ a)
                out[key] = w.to(dtype)
        return out
