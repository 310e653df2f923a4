"""A script with Lightning's FSDP2 under CPUOffloadPolicy."""

import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


class Module(lightning.LightningModule):
    def configure_model(self):
        fully_shard(self.model, offload_policy=CPUOffloadPolicy())


trainer = lightning.Trainer(strategy=ModelParallelStrategy(save_distributed_checkpoint=False), devices=2)
