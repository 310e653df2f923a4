"""The fix: full tensors out of a sharded model, in every state that the matrix knows.

Each rank's shard is read where it lies, brought to the compute device, cast and merged if asked for,
and gathered there. The model is never moved and never changed, so a module that ``model.to(device)``
left half-moved (verl issue 5995) or flat shards on the CPU (verl PR 4726) are shards like any other.

    sources         what there is in the model, and how each tensor of it is gathered
    lora            which of it are adapters, and what is merged into what
    dtypes          the dtypes in which it is gathered and yielded
    plan            buckets of transfers; kept_plans keeps it for as long as the model is as it was
    transfers       allocation and collectives; flat_transfers for FSDP1's flat parameters
    agreement       the ranks compare plans, promise buckets, and say when they leave
    without_autograd    alike in every grad mode and in inference mode
    interruptible   the waiting for another rank, which Ctrl-C ends
    pipeline        loads and gathers bucket after bucket: streams, the loader, host_copies (pageable memory)
    full            full_tensors and weights_info; state_dict collects them on the host
    own_shards      what a rank holds of each tensor, and its place in the whole
    local           local_shards
"""

from fsdp_doctor.extract.agreement import PlanMismatch, RankLeft
from fsdp_doctor.extract.full import BUCKET_BYTES, WeightInfo, full_tensors, weights_info
from fsdp_doctor.extract.local import LocalShard, local_shards
from fsdp_doctor.extract.own_shards import ShardPlace
from fsdp_doctor.extract.state_dict import full_state_dict

__all__ = [
    "BUCKET_BYTES",
    "LocalShard",
    "PlanMismatch",
    "RankLeft",
    "ShardPlace",
    "WeightInfo",
    "full_state_dict",
    "full_tensors",
    "local_shards",
    "weights_info",
]
