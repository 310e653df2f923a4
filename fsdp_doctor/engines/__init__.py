"""A sharded model's weights in the form that an inference engine takes; no engine is imported before it is asked for.

interfaces       vllm_weight_source, sglang_buckets, verl_weights and verl_shards
packed_bucket    packed_buckets, read_bucket: bytes and an index, for anything else
"""

from fsdp_doctor.engines.interfaces import SglangBucket, sglang_buckets, verl_shards, verl_weights, vllm_weight_source
from fsdp_doctor.engines.packed_bucket import PackedBucket, PackedTensor, packed_buckets, read_bucket

__all__ = [
    "PackedBucket",
    "PackedTensor",
    "SglangBucket",
    "packed_buckets",
    "read_bucket",
    "sglang_buckets",
    "verl_shards",
    "verl_weights",
    "vllm_weight_source",
]
