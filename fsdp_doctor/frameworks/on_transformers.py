"""Adapter for transformers' own FSDP2: ``from_pretrained`` shards the model, and a user's training loop trains it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import torch

from fsdp_doctor.frameworks.adapter import Adapter, Extractor, FrameworkSession, PlainModel, SavedFiles, Shims


class TransformersSession(FrameworkSession):
    def __init__(self, configuration: Mapping[str, str], plain: PlainModel) -> None:
        super().__init__(plain)
        self._configuration = configuration
        if configuration["offload"] != "none":
            self.shards_on = torch.device("cpu")
        self._read(plain.write_pretrained())

    def _read(self, directory: pathlib.Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(
            fsdp_size=self.plain.place.world_size,
            fsdp_cpu_offload=self._configuration["offload"] == "fsdp_cpu_offload",
            fsdp_mixed_precision=self._configuration["precision"] == "fsdp_mixed_precision",
        )
        self._pretrained = AutoModelForCausalLM.from_pretrained(
            directory, distributed_config=config, dtype=torch.float32
        )
        self.model = self._pretrained.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, tokens: torch.Tensor) -> None:
        batch = tokens.to(self.plain.device)
        self.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: pathlib.Path) -> None:
        from transformers.distributed import save_optimizer_distributed

        self._pretrained.save_pretrained(directory, distributed_checkpoint=True)
        save_optimizer_distributed(self.model, self.optimizer, str(directory / "optimizer"))

    def load(self, directory: pathlib.Path) -> None:
        from transformers.distributed import load_optimizer_distributed

        self._read(directory)
        load_optimizer_distributed(self.model, self.optimizer, str(directory / "optimizer"))

    def list_extractions(self) -> Mapping[str, Extractor]:
        from transformers.distributed import gather_full_state_dict

        return {
            "save_pretrained": self._save_gathered,
            "save_pretrained.consolidated": self._save_consolidated,
            "gather_full_state_dict": lambda directory: gather_full_state_dict(self.model),
        }

    def _save_gathered(self, directory: pathlib.Path) -> SavedFiles:
        self._pretrained.save_pretrained(directory)
        return SavedFiles(directory=directory, format="safetensors")

    def _save_consolidated(self, directory: pathlib.Path) -> SavedFiles:
        from transformers.distributed import consolidate_distributed_checkpoint

        self._pretrained.save_pretrained(directory / "shards", distributed_checkpoint=True)
        if self.plain.place.rank == 0:
            consolidate_distributed_checkpoint(directory / "shards", directory / "consolidated")
        return SavedFiles(directory=directory / "consolidated", format="safetensors")


class TransformersAdapter(Adapter):
    modules = (
        "transformers.models.qwen3.modeling_qwen3",
        "torch.distributed.checkpoint",
    )

    def prepare_emulated_device(self, shims: Shims) -> None:
        from transformers.distributed.utils import DISTRIBUTED_BACKEND_MAP

        backends = {**DISTRIBUTED_BACKEND_MAP, "emulated": "emulated"}
        shims.replace("transformers.distributed.utils:DISTRIBUTED_BACKEND_MAP", backends)

    def build(self, configuration: Mapping[str, str], plain: PlainModel) -> FrameworkSession:
        return TransformersSession(configuration, plain)


ADAPTER = TransformersAdapter()
