"""Adapter for torchtitan: its Trainer, checkpointer and small model.

Only the tokenizer and the data loader are fsdp-doctor's.
"""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles

_SEED = {"own": 0, "other": 1, "meta": 0}
_SEQUENCE = 16
_ASYNC_MODES = {"sync": "disabled", "async": "async", "pinned": "async_with_pinned_mem"}


class TorchtitanSession(FrameworkSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        self._trainer = _make_trainer(configuration, plain)
        self._takes_positions = "positions" in inspect.signature(type(self._trainer.model_parts[0]).forward).parameters
        self.model, self.optimizer = self._trainer.model_parts[0], next(iter(self._trainer.optimizers))
        if configuration["offload"] != "none":
            self.shards_on = torch.device("cpu")

    def step(self, tokens: torch.Tensor) -> None:
        inputs = {"input": tokens}
        if self._takes_positions:
            inputs["positions"] = torch.arange(_SEQUENCE).expand(2, _SEQUENCE).contiguous()
        self._trainer.step = self.num_steps + 1
        batches = [(inputs, tokens.roll(-1, dims=1))]
        self._trainer.train_step(self._trainer.batch_generator(batches))
        self._wait_for_save()

    def save(self, directory: pathlib.Path) -> None:
        """Begins to save. An asynchronous save continues during the next step, whose end waits for the save."""
        self._begin_save(directory, last_step=False)

    def _save(self, directory: pathlib.Path, last_step: bool) -> pathlib.Path:
        """Saves the current step, waits until all files are written, and returns the folder of the step."""
        self._begin_save(directory, last_step)
        self._trainer.checkpointer.maybe_wait_for_staging()
        self._wait_for_save()
        torch.distributed.barrier()
        return directory / f"step-{self.num_steps}"

    def _begin_save(self, directory: pathlib.Path, last_step: bool) -> None:
        self._trainer.checkpointer.folder = str(directory)
        self._trainer.checkpointer.save(self.num_steps, last_step=last_step)

    def _wait_for_save(self) -> None:
        checkpointer = self._trainer.checkpointer
        if checkpointer.save_future is not None:
            checkpointer.save_future.result()
            checkpointer.save_future = None

    def load(self, directory: pathlib.Path) -> None:
        self._trainer.checkpointer.folder = str(directory)
        self._trainer.checkpointer.load(step=2)

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {"save.dcp": self._save_dcp, "save.hf": self._save_hf}

    def _save_dcp(self, directory: pathlib.Path) -> SavedFiles:
        names = set(self.model.state_dict())
        folder = self._save(directory, last_step=False)
        return SavedFiles(directory=folder, format="dcp", renamed=lambda name: name if name in names else None)

    def _save_hf(self, directory: pathlib.Path) -> SavedFiles:
        folder = self._save(directory, last_step=True)
        tensors = dict(self.model.state_dict())
        exported = self._trainer.checkpointer.sd_adapter.to_hf(dict(tensors))
        names = {name: next(n for n, tensor in tensors.items() if tensor is value) for name, value in exported.items()}
        return SavedFiles(directory=folder, format="safetensors", renamed=names.get)


def _make_trainer(configuration: Mapping[str, str], plain: PlainModel) -> Any:
    is_older = importlib.util.find_spec("torchtitan.trainer") is None  # than 0.3
    config = _make_job_config(plain) if is_older else _make_config(plain)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, _SEQUENCE, 100
    config.training.enable_cpu_offload = configuration["offload"] != "none"
    config.checkpoint.enable, config.checkpoint.interval = True, 1
    config.checkpoint.async_mode = _ASYNC_MODES[configuration["async_mode"]]
    config.checkpoint.last_save_in_hf = config.checkpoint.last_save_model_only = True
    if not is_older:
        return config.build()
    from torchtitan.train import Trainer

    return Trainer(config)


def _make_job_config(plain: PlainModel) -> Any:
    """Makes the configuration for torchtitan 0.2, and registers the model that it names."""
    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    spec = get_train_spec("qwen3")
    # torchtitan 0.2.2 cannot shard tied weights with torch 2.13: it puts the embedding and the head into two groups.
    small = replace(spec.model_args["debugmodel"], n_layers=2, enable_weight_tying=False)
    builders = {"build_tokenizer_fn": None, "build_dataloader_fn": lambda **options: _NoData()}
    register_train_spec("doctor", replace(spec, model_args={"small": small}, **builders))
    config = JobConfig()
    config.model.name, config.model.flavor = "doctor", "small"
    config.model.hf_assets_path = config.job.dump_folder = str(plain.workspace)
    config.activation_checkpoint.mode = "none"
    (config.debug if hasattr(config, "debug") else config.training).seed = _SEED[plain.weights]
    return config


def _make_config(plain: PlainModel) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    config = qwen3_debugmodel()
    config.model_spec = model_registry("debugmodel_non_fused_qkv")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        # torchtitan before 0.3 used this attention. The default, flex attention, would be compiled.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = config.dataloader = SimpleNamespace(build=lambda **options: _NoData())
    config.dump_folder = config.hf_assets_path = str(plain.workspace)
    config.activation_checkpoint = None
    config.debug.seed = _SEED[plain.weights]
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


class _NoData:
    """Replaces the data loader and the tokenizer, because the caller of ``step`` brings the tokens."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"none": 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class TorchtitanAdapter(Adapter):
    modules = ("torchtitan.models.qwen3", "torchtitan.components.checkpoint")

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return TorchtitanSession(configuration, plain)


ADAPTER = TorchtitanAdapter()
