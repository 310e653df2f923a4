"""A sharded model's weights in the form that an inference engine takes; no engine is imported before it is asked for.

for_vllm         vllm_weight_source: vLLM's WeightSource over a model
for_sglang       sglang_buckets: flattened buckets, serialized as SGLang takes them
for_verl         verl_weights, verl_shards: what verl's engines return
packed_bucket    packed_buckets, read_bucket: bytes and an index, for anything else
"""

from fsdp_doctor.engines.for_sglang import SglangBucket, sglang_buckets
from fsdp_doctor.engines.for_verl import verl_shards, verl_weights
from fsdp_doctor.engines.for_vllm import vllm_weight_source
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
