"""dcp.load refuses what dcp.save wrote of weights that torchao multiplies in MXFP8.

torchrun --nproc-per-node 1 mxfp8_checkpoint_cannot_be_read.py    on the CPU; needs torchao
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
directory = tempfile.mkdtemp()
dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
try:
    dcp.load({"model": model.state_dict()}, checkpoint_id=directory)
    print("not shown")
except dcp.CheckpointException as error:
    print("Unsupported" + str(error).partition("Unsupported")[2].partition(" was not")[0])
    print("shown")
