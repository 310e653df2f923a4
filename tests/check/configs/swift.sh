NPROC_PER_NODE=2 swift sft \
    --model Qwen/Qwen3-4B \
    --tuner_type full \
    --fsdp '{"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_version": 2}}'
