"""Full tensors, or this rank's shards, of a sharded model, whatever state it is in: offloaded, half-moved, unsharded.

Each rank's shard is read where it lies, brought to the compute device, cast and merged if asked for, and gathered
there. The model is never moved or changed, so it does not matter whether ``model.to(device)`` left parameters that
report another device than their shards have (*half-moved*, verl issue 5995), or flat shards are on the CPU (verl PR
4726).

full            full_tensors, weights_info, full_state_dict: one extraction, step by step
plan            everything derived from a model and the arguments, kept until the model changes
lora            which tensors are adapters, and which products are merged into which weights
local           local_shards
"""

from fsdp_doctor.weights.extract.full import (
    ClosingIterator,
    WeightInfo,
    full_state_dict,
    full_tensors,
    weights_info,
)
from fsdp_doctor.weights.extract.local import LocalShard, local_shards
from fsdp_doctor.weights.extract.plan import BUCKET_BYTES
from fsdp_doctor.weights.transport.agreement import PlanMismatch, RankLeft
from fsdp_doctor.weights.transport.rank_groups import BuffersDiffer
from fsdp_doctor.weights.transport.shard_places import ShardPlace

__all__ = [
    "BUCKET_BYTES",
    "BuffersDiffer",
    "ClosingIterator",
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
