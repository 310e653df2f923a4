"""A script with Lightning's FSDP1."""

import lightning
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import CPUOffload

strategy = FSDPStrategy(cpu_offload=CPUOffload(offload_params=True), sharding_strategy="HYBRID_SHARD")
trainer = lightning.Trainer(strategy=strategy, devices=4, num_nodes=2)
