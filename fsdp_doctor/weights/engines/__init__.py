"""Weights of a sharded model in the forms that inference engines take.

An engine is imported only when a form of it is asked for.

interfaces       vllm_weight_source, sglang_buckets, verl_weights and verl_shards
packed_bucket    packed_buckets, read_bucket: bytes and an index, for any other receiver
checksums        read_engine_checksums: the checksums that a running engine reports of its weights
"""

from fsdp_doctor.weights.engines.checksums import EngineChecksums, read_engine_checksums
from fsdp_doctor.weights.engines.interfaces import (
    SglangBucket,
    sglang_buckets,
    verl_shards,
    verl_weights,
    vllm_weight_source,
)
from fsdp_doctor.weights.engines.packed_bucket import PackedBucket, PackedTensor, packed_buckets, read_bucket

__all__ = [
    "EngineChecksums",
    "PackedBucket",
    "PackedTensor",
    "SglangBucket",
    "packed_buckets",
    "read_bucket",
    "read_engine_checksums",
    "sglang_buckets",
    "verl_shards",
    "verl_weights",
    "vllm_weight_source",
]
