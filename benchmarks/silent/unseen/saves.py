"""Unseen programs whose saves lack what was trained."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import fsdp_doctor

from ..entries import publish
from .program import FULL, SIZES, Unseen, save_adapter, shard


@publish("huggingface/accelerate#4206", "huggingface/accelerate#4206", names=("lora_A", "lora_B"), first_run="found")
class Fsdp2AdapterRank0Slice(Unseen):
    """An adapter's local shards are written as if whole; after a resume rank 1 has its fresh adapter."""

    left, right = "resumed", "checkpoint-3/adapter_model.safetensors"

    def run(self) -> None:
        path = self.path("pytorch_model_fsdp.bin")
        model = self.build(1)
        self.train(model)
        self.save_fsdp_model(model, path)
        save_adapter(model, self.path("checkpoint-3"), self.rank)
        model = self.build(2)
        self.load_fsdp_model(model, path)
        save_adapter(model, self.path("resumed"), self.rank)

    def build(self, seed: int) -> Any:
        torch.manual_seed(0)
        base = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        torch.manual_seed(seed)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
        model: Any = get_peft_model(base, lora)
        return shard(model, model.base_model.model.model.layers)

    def save_fsdp_model(self, model: Any, path: str) -> None:
        if self.mended:
            sd = {k: v for k, v in get_model_state_dict(model, options=FULL).items() if "lora_" in k}
        else:
            sd = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        if self.rank == 0:
            torch.save(sd, path)
        dist.barrier()

    def load_fsdp_model(self, model: Any, path: str) -> Any:
        sd = torch.load(path, weights_only=True) if self.rank == 0 else {}
        if not self.mended:
            return set_peft_model_state_dict(model, sd, adapter_name=model.active_adapter)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True, strict=False)
        return set_model_state_dict(model, sd, options=options)


@publish("pytorch/torchtitan#1222", names=("e_score_correction_bias",), first_run="missed")
class ExpertBiasStaleReference(Unseen):
    """The checkpointer holds a router's bias that training has replaced by a new tensor."""

    command = "fingerprints"
    left = "step-3"

    def run(self) -> None:
        torch.manual_seed(0)
        sizes = SIZES | {"intermediate_size": 64, "moe_intermediate_size": 32, "num_key_value_heads": 4}
        ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        groups = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        config = DeepseekV3Config(**sizes, **ranks, **groups, first_k_dense_replace=1)
        config._experts_implementation = "eager"
        model: Any = DeepseekV3ForCausalLM(config)
        shard(model, model.model.layers)
        states = {"model": model.state_dict()}  # the checkpointer takes it once
        gate = model.model.layers[1].mlp.gate
        counts = torch.zeros(4)

        def count(gate: Any, inputs: Any, _: Any) -> None:
            x = inputs[0].detach().reshape(-1, config.hidden_size).float()
            scores = (x @ gate.weight.detach().float().T).sigmoid() + gate.e_score_correction_bias
            counts.add_(torch.bincount(scores.topk(2, dim=-1).indices.flatten(), minlength=4))

        def balance() -> None:
            with torch.no_grad():
                self.update_expert_bias(gate, counts, 1e-2)
                counts.zero_()

        gate.register_forward_hook(count)
        self.train(model, balance)
        dcp.save(states, checkpoint_id=self.path("step-3"))
        trained, saved = fsdp_doctor.fingerprint(model), fsdp_doctor.fingerprint_checkpoint(self.path("step-3"))
        self.report(fsdp_doctor.compare_fingerprints(trained, saved))

    def update_expert_bias(self, gate: Any, tokens_per_expert: torch.Tensor, coeff: float) -> None:
        counts = tokens_per_expert.clone()
        dist.all_reduce(counts)
        delta = coeff * torch.sign(counts.mean() - counts)
        delta = delta - delta.mean()
        if self.mended:
            gate.e_score_correction_bias.add_(delta)
        else:
            gate.e_score_correction_bias = gate.e_score_correction_bias + delta


@publish("NVIDIA-NeMo/Automodel#2511", "NVIDIA-NeMo/Automodel#2511", names=("lm_head.weight",), first_run="found")
class TiedHeadOmitted(Unseen):
    """A head that the meta device has untied is left out of the checkpoint, since config.json says that it is tied."""

    left, right = "after_resume.pt", "before_save.pt"

    def run(self) -> None:
        self.config = LlamaConfig(**SIZES | {"tie_word_embeddings": True})
        model = self.build(0)
        self.train(model)
        self.save(model, self.path("step-3"))
        self.dump(model, "before_save.pt")
        model = self.build(1)
        self.load(model, self.path("step-3"))
        self.dump(model, "after_resume.pt")

    def build(self, seed: int) -> Any:
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(self.config)
        model.to_empty(device="cpu")
        if self.mended:
            model.lm_head.weight = model.model.embed_tokens.weight
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.fill_(1.0) if "norm" in name else p.normal_(0, 0.02)
            if not self.mended:
                model.lm_head.weight.copy_(model.model.embed_tokens.weight)
            for _, buffer in model.model.rotary_emb.named_buffers():
                buffer.copy_(1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16)))
        return shard(model, model.model.layers)

    def save(self, model: Any, directory: str) -> None:
        sd: Any = get_model_state_dict(model, options=FULL)
        if self.config.tie_word_embeddings:
            sd.pop("lm_head.weight", None)
        if self.rank == 0:
            self.config.save_pretrained(directory)
            tensors = {k: v.contiguous() for k, v in sd.items()}
            save_file(tensors, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
        dist.barrier()

    def load(self, model: Any, directory: str) -> None:
        sd: dict[str, Any] = load_file(os.path.join(directory, "model.safetensors"))
        if self.config.tie_word_embeddings:
            sd["lm_head.weight"] = sd["model.embed_tokens.weight"].clone()
        set_model_state_dict(model, sd, options=FULL)

    def dump(self, model: Any, name: str) -> None:
        state: Any = get_model_state_dict(model, options=FULL)
        sd = {k: v.clone() for k, v in state.items()}
        if self.rank == 0:
            torch.save(sd, self.path(name))
