"""What dcp.load raises is no Exception: "except Exception" around a resume does not see it.

torchrun --nproc-per-node 2 checkpoint_exception_passes_except.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
directory = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
dist.broadcast_object_list(directory, src=0)
dcp.save({"present": torch.ones(2)}, checkpoint_id=directory[0])
shown = False
try:
    try:
        dcp.load({"missing": torch.zeros(2)}, checkpoint_id=directory[0])
    except Exception as error:
        print(f"rank {dist.get_rank()}: seen by except Exception: {type(error).__name__}")
except BaseException as error:
    shown = True
    print(f"rank {dist.get_rank()}: not seen by except Exception: {type(error).__mro__[:2]}")
dist.destroy_process_group()
print("shown" if shown else "not shown", flush=True)
