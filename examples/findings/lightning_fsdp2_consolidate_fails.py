"""Lightning: what ModelParallelStrategy has saved, Lightning's consolidate_checkpoint cannot read.

torchrun --nproc-per-node 2 lightning_fsdp2_consolidate_fails.py    on accelerators
"""

import subprocess
import sys
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def configure_model(self):
        self.layer = nn.Linear(8, 8)
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(accelerator="cuda", devices=2, strategy=strategy, max_steps=1, **quiet)
trainer.fit(Module(), DataLoader(torch.ones(8, 8)))
folder = trainer.strategy.broadcast(tempfile.mkdtemp() if trainer.is_global_zero else None)
trainer.save_checkpoint(f"{folder}/one.ckpt")
code = 0
if trainer.is_global_zero:
    tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    code = subprocess.run([*tool, f"{folder}/one.ckpt"]).returncode
print("shown" if code else "not shown", flush=True)
