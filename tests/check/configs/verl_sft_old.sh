torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \
    model.partial_pretrain=Qwen/Qwen2.5-7B \
    model.fsdp_config.cpu_offload=True \
    model.fsdp_config.offload_params=True \
    model.strategy=fsdp
