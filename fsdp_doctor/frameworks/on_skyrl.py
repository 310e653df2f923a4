"""Adapter for SkyRL.

It runs the strategy of SkyRL's policy workers without Ray, with the calls that these workers make.
"""

from __future__ import annotations

import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles, Shims

_CUDA_FUNCTIONS = ("current_device", "set_device", "synchronize", "empty_cache", "manual_seed_all")
_LORA_RANK = 4


class SkyrlSession(FrameworkSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
        from skyrl.train.config import FSDPConfig, ModelConfig, OptimizerConfig

        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl")  # as its workers do
        self._manual = configuration["offload"] == "manual"
        model = ModelConfig()
        model.lora.rank = _LORA_RANK if plain.has_adapters else 0
        self._strategy = FSDPStrategy(
            FSDPConfig(cpu_offload=configuration["offload"] == "cpu_offload"),
            OptimizerConfig(lr=1e-3, scheduler="constant", num_warmup_steps=0),
            model,
            num_training_steps=100,
        )
        self._strategy.setup_distributed()
        policy = plain.build_module()
        if plain.has_adapters:
            from peft import TaskType

            # SkyRL's own adapters have a task type, which its checkpoints name.
            cast(Any, policy).peft_config["default"].task_type = TaskType.CAUSAL_LM
        self.model, self.optimizer, self._scheduler = self._strategy.prepare((policy, None, None))
        if configuration["offload"] == "cpu_offload":
            self.shards_on = torch.device("cpu")

    def step(self, tokens: torch.Tensor) -> None:
        batch = tokens.to(self.plain.device)
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self._strategy.backward(loss, self.model, self.optimizer)
        self._strategy.optimizer_step(self.optimizer, self.model, self._scheduler)

    def offload(self) -> None:
        if self._manual:
            self._strategy.offload_to_cpu(self.model, self.optimizer)

    def onload(self) -> None:
        if self._manual:
            self._strategy.backload_to_gpu(self.model, self.optimizer)

    def save(self, directory: pathlib.Path) -> None:
        rank = self.plain.place.rank
        self._strategy.save_checkpoint(self.model, str(directory), rank, self.optimizer, self._scheduler)

    def load(self, directory: pathlib.Path) -> None:
        self._strategy.load_checkpoint(self.model, str(directory), self.optimizer, self._scheduler)

    def list_extractions(self) -> Mapping[str, Extractor]:
        from skyrl.backends.skyrl_train.distributed import fsdp_utils

        return {
            "extract_weights": lambda directory: self._extract(),
            "collect_lora_params": lambda directory: fsdp_utils.collect_lora_params(self.model),
            "layered_summon_lora_params": lambda directory: fsdp_utils.layered_summon_lora_params(self.model),
            "save_hf_model": self._save_hf_model,
        }

    def _extract(self) -> Iterator[tuple[str, torch.Tensor]]:
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor

        for chunk in FSDPWeightExtractor(self.model).extract_weights(torch.bfloat16):
            yield from zip(chunk.names, chunk.tensors, strict=True)

    def _save_hf_model(self, directory: pathlib.Path) -> SavedFiles:
        self._strategy.save_hf_model(self.model, str(directory))
        return SavedFiles(directory=directory, format="safetensors")


class SkyrlAdapter(Adapter):
    # SkyRL itself is imported in a worker, because the stand-ins for its dependencies exist only there.
    modules = ("transformers.trainer", "transformers.models.qwen3.modeling_qwen3", "peft")

    def prepare_emulated_device(self, shims: Shims) -> None:
        import typing_extensions

        for name in ("flash_attn", "flash_attn.bert_padding"):
            module: Any = types.ModuleType(name)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
            module.pad_input = module.unpad_input = None
            sys.modules[name] = module
        shims.note("flash_attn.bert_padding")
        shims.replace("typing:TypedDict", typing_extensions.TypedDict)
        device = torch.get_device_module("emulated")
        for name in _CUDA_FUNCTIONS:
            shims.replace(f"torch.cuda:{name}", getattr(device, name))
        shims.replace("torch:Tensor.cuda", lambda tensor, *arguments, **options: tensor.to("emulated"))

        def empty(*size: Any, **options: Any) -> torch.Tensor:
            placed = {"device": "emulated"} if options.get("device") == "cuda" else {}
            made: torch.Tensor = before(*size, **options | placed)
            return made

        def make_mesh(kind: str, *arguments: Any, **options: Any) -> Any:
            return init_device_mesh("emulated", *arguments, **options)

        before = shims.replace("torch:empty", empty)
        module = "skyrl.backends.skyrl_train.distributed.fsdp_utils"
        init_device_mesh = shims.replace(f"{module}:init_device_mesh", make_mesh)
        shims.translate_backend()

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return SkyrlSession(configuration, plain)


ADAPTER = SkyrlAdapter()
