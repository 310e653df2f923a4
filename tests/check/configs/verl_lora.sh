python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.adv_estimator=grpo
