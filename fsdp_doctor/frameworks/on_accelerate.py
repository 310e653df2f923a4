"""Adapter for accelerate.

Its session trains like a user's script under the environment variables that ``accelerate launch`` would set.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles, Shims
from fsdp_doctor.matrix.frameworks.framework_matrix import StateDictType


def launch_environment(configuration: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that ``accelerate launch`` exports for a configuration."""
    version_1 = configuration["version"] != "fsdp2"
    ram_efficient = configuration["loading"] == "ram-efficient"
    variables: dict[str, Any] = {
        "ACCELERATE_USE_FSDP": True,
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": 1 if version_1 else 2,
        "FSDP_OFFLOAD_PARAMS": configuration["offload"] == "offload",
        "FSDP_STATE_DICT_TYPE": f"{configuration['state_dict_type'].upper()}_STATE_DICT",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": ram_efficient,
    }
    if version_1:
        variables |= {
            "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
            "FSDP_USE_ORIG_PARAMS": configuration["version"] == "fsdp1-orig",
            "FSDP_SYNC_MODULE_STATES": ram_efficient,
        }
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}


class AccelerateSession(FrameworkSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        from accelerate import Accelerator

        self._accelerator = Accelerator()
        if configuration["loading"] == "plain":
            model = plain.build_module()
        else:
            from transformers import AutoModelForCausalLM

            loaded: nn.Module = AutoModelForCausalLM.from_pretrained(plain.write_pretrained(), dtype=torch.float32)
            model = plain.add_buffers(loaded.train())
        if configuration["version"] == "fsdp2" or configuration["order"] == "together":
            prepared = self._accelerator.prepare(model, _make_adamw(model))
        else:
            wrapped = self._accelerator.prepare(model)
            prepared = wrapped, self._accelerator.prepare(_make_adamw(wrapped))
        self.model, self._prepared_optimizer = prepared
        self.optimizer = self._prepared_optimizer.optimizer
        self.state_dict_type = read_state_dict_type(self._accelerator)
        if configuration["offload"] == "offload":
            self.shards_on = torch.device("cpu")

    def step(self, tokens: torch.Tensor) -> None:
        batch = tokens.to(self._accelerator.device)
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self._prepared_optimizer.step()
        self._prepared_optimizer.zero_grad()

    def save(self, directory: pathlib.Path) -> None:
        self._accelerator.save_state(str(directory))

    def load(self, directory: pathlib.Path) -> None:
        self._accelerator.load_state(str(directory))

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {
            "get_state_dict": lambda directory: self._accelerator.get_state_dict(self.model),
            "save_model": self._save_model,
            "save_state.merge_fsdp_weights": self._merge_weights,
        }

    def _save_model(self, directory: pathlib.Path) -> SavedFiles:
        self._accelerator.save_model(self.model, str(directory))
        return SavedFiles(directory=directory, format="safetensors")

    def _merge_weights(self, directory: pathlib.Path) -> SavedFiles:
        from accelerate.utils import merge_fsdp_weights

        self.save(directory / "state")
        self._accelerator.wait_for_everyone()
        merge_fsdp_weights(str(directory / "state" / "pytorch_model_fsdp_0"), str(directory / "merged"))
        return SavedFiles(directory=directory / "merged", format="safetensors")


def read_state_dict_type(accelerator: Any) -> StateDictType | None:
    """Returns the state dict type of accelerate's FSDP plug-in; None if it is neither full nor sharded."""
    match accelerator.state.fsdp_plugin.state_dict_type.name:
        case "FULL_STATE_DICT":
            return "full"
        case "SHARDED_STATE_DICT":
            return "sharded"
    return None


def _make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class AccelerateAdapter(Adapter):
    modules = (
        "accelerate.utils.fsdp_utils",
        "transformers.models.qwen3.modeling_qwen3",
        "torch.distributed.checkpoint",
    )

    def prepare_emulated_device(self, shims: Shims) -> None:
        see_accelerator(shims)

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        os.environ |= launch_environment(configuration)
        return AccelerateSession(configuration, plain)


def see_accelerator(shims: Shims) -> None:
    """Makes accelerate, and frameworks that build on it, take the emulated device for CUDA."""
    from accelerate.utils import DistributedType

    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        return backend or "nccl", DistributedType.MULTI_GPU

    shims.set_variable("ACCELERATE_TORCH_DEVICE", f"emulated:{os.environ['LOCAL_RANK']}")
    shims.replace("accelerate.state:PartialState._prepare_backend", prepare_backend)
    shims.replace("accelerate.utils.dataclasses:is_cuda_available", lambda: True)
    shims.replace("torch.cuda:current_device", torch.get_device_module("emulated").current_device)
    shims.translate_backend()


ADAPTER = AccelerateAdapter()
