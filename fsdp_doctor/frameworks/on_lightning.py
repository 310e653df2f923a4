"""Adapter for Lightning, which owns its training loop: a callback examines the session between its steps."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.frameworks.adapter import (
    STEPS_BEFORE,
    Adapter,
    Extractor,
    FrameworkSession,
    PlainModel,
    SavedFiles,
    Shims,
)

_NUM_SEQUENCES = 64


class LightningSession(FrameworkSession):
    goes_on = False

    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        import lightning.pytorch as pl

        if not dist.is_initialized():
            dist.init_process_group("nccl")  # which Lightning would do in fit
        self._configuration = configuration
        self._is_fsdp1 = configuration["strategy"] == "fsdp"
        self._trainer = pl.Trainer(
            accelerator="cuda",
            devices=plain.place.world_size,
            strategy=self._make_strategy(),
            precision="bf16-mixed" if self._is_fsdp1 else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=plain.workspace,
        )
        self._network = plain.build_module()
        self._module = _make_module(self._network, configuration)
        if configuration["offload"] != "none":
            self.shards_on = torch.device("cpu")

    def _make_strategy(self) -> Any:
        from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
        from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

        sharded = self._configuration["checkpoint"] == "sharded"
        if not self._is_fsdp1:
            num_ranks = self.plain.place.world_size
            return ModelParallelStrategy(num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=sharded)
        return FSDPStrategy(
            auto_wrap_policy={Qwen3DecoderLayer},
            cpu_offload=self._configuration["offload"] != "none",
            state_dict_type="sharded" if sharded else "full",
            use_orig_params=True,
        )

    def train(self, num_steps: int, at: Callable[[int], None], resume_from: pathlib.Path | None = None) -> None:
        import lightning.pytorch as pl

        before = 0 if resume_from is None else STEPS_BEFORE
        session = self

        class LookIn(pl.Callback):  # type: ignore[misc]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                session.model = trainer.strategy.model if session._is_fsdp1 else session._network
                session.optimizer = trainer.optimizers[0]
                at(0)

            def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                at(trainer.global_step - before)

        # Every batch is the same sequence: Lightning documents that a resume within an epoch starts its data again.
        rows: Any = self.plain.make_batch(0)[:1].repeat(_NUM_SEQUENCES, 1)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
        self._trainer.fit_loop.epoch_loop.max_steps = before + num_steps
        self._trainer.callbacks.append(LookIn())
        self._trainer.fit(self._module, loader, ckpt_path=resume_from)

    def save(self, directory: pathlib.Path) -> None:
        self._trainer.save_checkpoint(directory)

    def list_extractions(self) -> Mapping[str, Extractor]:
        return {"save_checkpoint": self._save_checkpoint, "consolidate_checkpoint": self._consolidate}

    def _save_checkpoint(self, directory: pathlib.Path) -> SavedFiles:
        if self._configuration["checkpoint"] == "full":
            self.save(directory / "weights.pt")
            return SavedFiles(directory=directory, format="torch.save", part=("state_dict",))
        self.save(directory)
        return SavedFiles(directory=directory, format="dcp", part=("model" if self._is_fsdp1 else "state_dict",))

    def _consolidate(self, directory: pathlib.Path) -> SavedFiles:
        """Consolidates the checkpoint on every rank, so that all ranks end in the same way."""
        self.save(directory / "sharded")
        self._trainer.strategy.barrier()
        whole = directory / str(self.plain.place.rank) / "weights.pt"
        whole.parent.mkdir()
        words = ["consolidate_checkpoint", str(directory / "sharded"), "--output_file", str(whole)]
        with mock.patch.object(sys, "argv", words):
            # As `python -m` does, which makes it the main module.
            runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__", alter_sys=True)
        return SavedFiles(directory=whole.parent, format="torch.save", part=("state_dict",))


def _make_module(network: nn.Module, configuration: Mapping[str, str]) -> Any:
    """Makes a LightningModule from the network's submodules, so that its names match the plain model."""
    import lightning.pytorch as pl
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    layers: Any = network.get_submodule("model.layers")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, child in network.named_children():
                self.add_module(name, child)

        def configure_model(self) -> None:
            if configuration["strategy"] == "fsdp":
                return
            offload = CPUOffloadPolicy() if configuration["offload"] != "none" else OffloadPolicy()
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for part in (*layers, network):
                mesh = self.device_mesh["data_parallel"]
                fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload)

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            return network(input_ids=batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.trainer.strategy.model.parameters(), lr=1e-3)

    return Module()


class LightningAdapter(Adapter):
    modules = ("lightning.pytorch", "lightning.pytorch.strategies", "transformers.models.qwen3.modeling_qwen3")

    def prepare_emulated_device(self, shims: Shims) -> None:
        from lightning.pytorch.accelerators import AcceleratorRegistry

        AcceleratorRegistry.register("cuda", _make_accelerator_class(), override=True)
        shims.note("lightning.pytorch.accelerators:AcceleratorRegistry")
        shims.translate_backend()

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return LightningSession(configuration, plain)


def _make_accelerator_class() -> type:
    """Makes the class that describes the emulated device to Lightning.

    The class is derived from CUDAAccelerator, because FSDPStrategy requires one.
    """
    from lightning.pytorch.accelerators import CUDAAccelerator

    device = torch.get_device_module("emulated")

    class EmulatedAccelerator(CUDAAccelerator):  # type: ignore[misc]
        def setup_device(self, chosen: torch.device) -> None:
            device.set_device(chosen)

        def setup(self, trainer: Any) -> None:
            pass

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            return list(range(int(devices)))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("emulated", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return int(os.environ["LOCAL_WORLD_SIZE"])

        @staticmethod
        def is_available() -> bool:
            return True

    return EmulatedAccelerator


ADAPTER = LightningAdapter()
