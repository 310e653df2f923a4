"""Unseen programs that load or prepare a sharded model, and export it."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ..entries import publish
from .program import SIZES, Unseen, full, shard


@publish("huggingface/transformers#45662", names=("experts.2", "experts.3"), first_run="found")
class EpRank0Broadcast(Unseen):
    """Rank 0's experts are broadcast over those of every rank when the model is prepared."""

    left, right = "prepared", "pretrained"

    def run(self) -> None:
        torch.manual_seed(0)
        sizes = SIZES | {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16}
        config = Qwen3MoeConfig(**sizes, num_experts_per_tok=2)
        model: Any = Qwen3MoeForCausalLM(config)
        if self.rank == 0:
            model.save_pretrained(self.path("pretrained"))
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                w = getattr(layer.mlp.experts, name)
                setattr(layer.mlp.experts, name, nn.Parameter(w.detach().chunk(2)[self.rank].clone()))
        self.fsdp2_prepare_model(model, init_device_mesh("cpu", (2,)))
        out = {}
        for name, tensor in model.state_dict().items():
            out[name] = full(tensor).contiguous()
            if ".experts." in name:
                parts = [torch.empty_like(out[name]) for _ in range(2)]
                dist.all_gather(parts, out[name])
                out[name] = torch.cat(parts)
        if self.rank == 0:
            hub = Qwen3MoeForCausalLM(config)
            hub.load_state_dict(out)
            hub.save_pretrained(self.path("prepared"))

    def fsdp2_prepare_model(self, model: Any, mesh: Any) -> None:
        ep = {p for n, p in model.named_parameters() if ".experts." in n} if self.mended else None
        full_sd = {k: v.detach().clone() for k, v in model.state_dict().items()}
        own = {k: v for k, v in full_sd.items() if self.mended and ".experts." in k}
        shard(model, model.model.layers, mesh=mesh, ignored_params=ep)
        sharded = {}
        for name, ref in model.state_dict().items():
            if name in own:
                sharded[name] = own[name]
                continue
            value = full_sd[name] if dist.get_rank() == 0 else torch.empty_like(full_sd[name])
            dist.broadcast(value, src=0)
            sharded[name] = distribute_tensor(value, ref.device_mesh, ref.placements)
        model.load_state_dict(sharded, assign=True)


@publish("NVIDIA/Megatron-LM#7452", names=("layers.1",), first_run="found")
class PpStageLocalNames(Unseen):
    """Each pipeline stage numbers its layers from 0, and reads those of the first stage."""

    left, right = "resumed_pp2", "step-3"

    def run(self) -> None:
        model = self.build(0)
        config = model.config
        shard(model, model.model.layers)
        self.train(model)
        dcp.save({"model": self.checkpoint_state_dict(model, 0)}, checkpoint_id=self.path("step-3"))
        model = self.build(1)
        offset = self.make_stage(model, self.rank, 2)
        dcp.load({"model": self.checkpoint_state_dict(model, offset)}, checkpoint_id=self.path("step-3"))
        self.export(model, offset, config)

    def build(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SIZES))

    def make_stage(self, model: Any, stage: int, stages: int) -> int:
        """Keeps only this stage's part of the model. Returns the index of the part's first layer in the whole model."""
        layers = list(model.model.layers)
        per = len(layers) // stages
        model.model.layers = nn.ModuleList(layers[stage * per : (stage + 1) * per])
        if stage != 0:
            model.model.embed_tokens = None
        if stage != stages - 1:
            model.model.norm = None
            model.lm_head = None
        return stage * per

    def checkpoint_state_dict(self, model: Any, offset: int, is_export: bool = False) -> dict[str, torch.Tensor]:
        """Makes the state dict under which the checkpoint is read and written."""
        out = {}
        for name, value in model.state_dict().items():
            if (self.mended or is_export) and name.startswith("model.layers."):
                _, _, local, rest = name.split(".", 3)
                name = f"model.layers.{int(local) + offset}.{rest}"
            out[name] = value
        return out

    def export(self, model: Any, offset: int, config: Any) -> None:
        """Writes every stage's layers under the model's own numbers."""
        directory = self.path("resumed_pp2")
        os.makedirs(directory, exist_ok=True)
        mine = {k: v.contiguous() for k, v in self.checkpoint_state_dict(model, offset, is_export=True).items()}
        name = f"model-{self.rank + 1:05d}-of-00002.safetensors"
        save_file(mine, os.path.join(directory, name), metadata={"format": "pt"})
        names: list[dict[str, str]] = [{}, {}]
        dist.all_gather_object(names, dict.fromkeys(mine, name))
        if self.rank == 0:
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(directory)
            index = {"metadata": {}, "weight_map": names[0] | names[1]}
            pathlib.Path(directory, "model.safetensors.index.json").write_text(json.dumps(index))


@publish("NVIDIA/Megatron-LM#2769", "NVIDIA/Megatron-LM#5714", names=("gate_proj", "up_proj"), first_run="found")
class SwigluSwizzleUnderFsdp2(Unseen):
    """Rows of a fused gate and up projection are permuted as for tensor parallelism, under FSDP2."""

    left, right = "exported", "pretrained"

    def run(self) -> None:
        if self.rank == 0:
            self.build(0).save_pretrained(self.path("pretrained"))
        dist.barrier()
        model = self.build(1)
        for layer in model.model.layers:
            layer.mlp = FusedMLP(64, 128)
        shard(model, model.model.layers)
        given = load_file(self.path("pretrained", "model.safetensors"))
        fused = {k: v for k, v in given.items() if ".mlp." not in k}
        for k, v in given.items():
            if k.endswith("mlp.gate_proj.weight"):
                fused[k.replace("gate_proj", "linear_fc1")] = torch.cat([v, given[k.replace("gate_proj", "up_proj")]])
            elif k.endswith("mlp.down_proj.weight"):
                fused[k.replace("down_proj", "linear_fc2")] = v
        for name, p in model.named_parameters():
            with torch.no_grad():
                p.to_local().copy_(self.local_rows(name, fused[name], self.rank, 2, 1))
        self.export(model)

    def build(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))

    def local_rows(self, name: str, full: torch.Tensor, rank: int, shards: int, tp_size: int) -> torch.Tensor:
        """Takes the rows of a checkpoint tensor that belong to this rank's shard."""
        if "linear_fc1" in name and not (self.mended and tp_size == 1):
            w, v = full.chunk(2)
            return torch.cat([w.chunk(shards)[rank], v.chunk(shards)[rank]])
        return full.chunk(shards)[rank]

    def export(self, model: Any) -> None:
        out = {}
        for name, p in model.state_dict().items():
            t = p.full_tensor()
            if "linear_fc1" in name:
                w, v = t.chunk(2)
                out[name.replace("linear_fc1", "gate_proj")] = w
                out[name.replace("linear_fc1", "up_proj")] = v
            else:
                out[name.replace("linear_fc2", "down_proj")] = t
        if self.rank == 0:
            hub = self.build(2)
            hub.load_state_dict(out)
            hub.save_pretrained(self.path("exported"))


class FusedMLP(nn.Module):
    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, 2 * inter, bias=False)
        self.linear_fc2 = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        out: torch.Tensor = self.linear_fc2(nn.functional.silu(gate) * up)
        return out
