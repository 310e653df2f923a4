: "${NUM_GPUS:=4}"
uv run -m skyrl_train.entrypoints.main_base \
  trainer.policy.model.path=Qwen/Qwen3-4B \
  trainer.strategy=fsdp2 \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  trainer.algorithm.use_kl_loss=true
