"""Lightning: ModelParallelStrategy cannot train a model that configure_model has sharded with CPUOffloadPolicy.

torchrun --nproc-per-node 2 lightning_fsdp2_cpu_offload_fails.py    on accelerators
"""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def configure_model(self):
        self.layer = nn.Linear(8, 8)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"], offload_policy=CPUOffloadPolicy())

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


strategy = ModelParallelStrategy(
    data_parallel_size=2, tensor_parallel_size=1, process_group_backend="cpu:gloo,cuda:nccl"
)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(accelerator="cuda", devices=2, strategy=strategy, max_steps=1, **quiet)
try:
    trainer.fit(Module(), DataLoader(torch.ones(8, 8)))
    wrong, said = False, "one step was trained"
except Exception as error:
    wrong, said = True, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
print(f"{'wrong' if wrong else 'right'}: rank {os.environ['RANK']}: {said}", flush=True)
print("shown" if wrong else "not shown", flush=True)
