"""vLLM: the packed sender reads weights on streams of its own, which do not wait for the step that is writing them.

torchrun --nproc-per-node 1 vllm_packed_sender_does_not_wait_for_the_step.py    on an accelerator
It sends what the weights were before the step.
"""

import os

import torch
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


class Communicator:
    """Keeps what it is given to broadcast, as the current stream finds it."""

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, src):
        self.sent.append(tensor.clone())


torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
device = torch.accelerator.current_accelerator()
weights = torch.zeros(64 << 20, device=device)
stepped = torch.ones(64 << 20).pin_memory()
communicator = Communicator()
# The first call makes the streams.
packed_nccl_broadcast_producer(iter([("weights", weights)]), communicator, 0, lambda item: item[1])
torch.accelerator.synchronize()
communicator.sent.clear()

# As an optimizer on the host ends its step, on the stream on which the sender is called.
weights.copy_(stepped, non_blocking=True)
packed_nccl_broadcast_producer(iter([("weights", weights)]), communicator, 0, lambda item: item[1])
torch.accelerator.synchronize()
old = int((communicator.sent[0].view(torch.float32) == 0).sum())
print(f"{'wrong' if old else 'right'}: {old} of {weights.numel()} weights were sent as they were before the step")
print("shown" if old else "not shown", flush=True)
