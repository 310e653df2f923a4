"""Adapter for verl.

It runs the engine of verl's actor workers without Ray, with the calls that these workers make.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles, Shims


class VerlSession(FrameworkSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        from verl.utils.device import get_device_name

        self._device_name = get_device_name()
        # verl's Worker does the same if Ray shows it every device of the node.
        torch.get_device_module(plain.device).set_device(plain.device)
        self._engine = _make_engine(configuration, plain)
        self._engine.initialize()
        self.model, self.optimizer = self._engine.module, self._engine.optimizer
        # initialize() leaves offloaded tensors on the CPU, as every use of the engine does.
        self.onload()

    def step(self, tokens: torch.Tensor) -> None:
        engine = self._engine
        batch = tokens.to(self._device_name)
        with engine.train_mode(disable_auto_offload=True):
            # FSDPEngineWithLMHead.forward_step does the same.
            with torch.autocast(device_type=self._device_name, dtype=torch.bfloat16):
                loss = engine.module(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            engine.optimizer_step()
            engine.lr_scheduler_step()

    def offload(self) -> None:
        self._move("cpu")

    def onload(self) -> None:
        self._move(self._device_name)

    def _move(self, device: str) -> None:
        parameters, optimizer = self._engine.is_param_offload_enabled, self._engine.is_optimizer_offload_enabled
        if parameters or optimizer:
            self._engine.to(device, model=parameters, optimizer=optimizer, grad=parameters)

    def save(self, directory: pathlib.Path) -> None:
        # A worker saves between two uses of the engine, while the offloaded tensors are on the CPU.
        self.offload()
        self._engine.save_checkpoint(str(directory), global_step=self.num_steps)
        self.onload()

    def load(self, directory: pathlib.Path) -> None:
        self.offload()
        self._engine.load_checkpoint(str(directory), del_local_after_load=False)
        self.onload()

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {
            "get_per_tensor_param": lambda directory: self._read_tensors(),
            "get_per_tensor_param.merged": lambda directory: self._read_tensors(),
            "get_per_tensor_param.adapter": lambda directory: self._read_tensors(base_sync_done=True),
            "get_per_tensor_param.layered": lambda directory: self._read_tensors(
                layered_summon=True, base_sync_done=True
            ),
            "save_checkpoint.hf_model": self._save_hf_model,
        }

    def _read_tensors(self, **options: bool) -> Iterator[tuple[str, Any]]:
        tensors, _ = self._engine.get_per_tensor_param(**options)
        yield from tensors

    def _save_hf_model(self, directory: pathlib.Path) -> SavedFiles:
        self._engine.save_checkpoint(str(directory), global_step=self.num_steps)
        return SavedFiles(directory=directory / "huggingface", format="safetensors")


def _make_engine(configuration: Mapping[str, str], plain: PlainModel) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.utils.device import get_device_name, get_nccl_backend
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    if not dist.is_initialized():
        dist.init_process_group(f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}")
    offload = configuration["offload"].split("+")
    model = HFModelConfig(
        path=str(plain.write_pretrained()),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=False,  # it needs flash attention
        enable_gradient_checkpointing=False,
        lora_rank=4 if plain.has_adapters else 0,
        lora_adapter_path=_save_adapter(plain) if plain.has_adapters else None,
        lora={"merge": configuration["lora"] == "merge"},
    )
    engine = FSDPEngineConfig(
        strategy=configuration["strategy"],
        param_offload="param" in offload,
        optimizer_offload="optimizer" in offload,
        offload_policy="policy" in offload,
        use_torch_compile=False,
    )
    saved = ["model", "optimizer", "extra"]
    checkpoint = CheckpointConfig(save_contents=[*saved, "hf_model"], load_contents=saved)
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=100)
    return FSDPEngineWithLMHead(model, engine, optimizer, checkpoint)


def _save_adapter(plain: PlainModel) -> str:
    """Saves the plain model's adapters with peft, and returns the directory, from which verl adds them to its model."""
    directory = plain.workspace / f"adapter-{plain.weights}-{plain.place.rank}"
    model: Any = plain.build_module()
    model.save_pretrained(str(directory))
    return str(directory)


class VerlAdapter(Adapter):
    modules = (
        "transformers.models.qwen3.modeling_qwen3",
        "verl.workers.engine.fsdp.transformer_impl",
        "verl.workers.config",
        "verl.trainer.config",
    )

    def prepare_emulated_device(self, shims: Shims) -> None:
        device = torch.get_device_module("emulated")
        functions: dict[str, Callable[[], Any]] = {
            "get_device_name": lambda: "emulated",
            "get_torch_device": lambda: device,
            "get_device_id": device.current_device,
            "get_nccl_backend": lambda: "emulated",
            "is_device_available": lambda: True,
        }
        # verl's modules have imported these functions by name. Before 0.9, verl has no plug-in for a device.
        for module in [module for name, module in sys.modules.items() if name.startswith("verl.")]:
            vars(module).update({name: functions[name] for name in functions.keys() & vars(module).keys()})
        shims.note("verl.utils.device")
        shims.replace("verl.workers.engine.fsdp.transformer_impl:device_name", "emulated")
        shims.replace("verl.utils.checkpoint.fsdp_checkpoint_manager:is_cuda_available", True)

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return VerlSession(configuration, plain)


ADAPTER = VerlAdapter()
