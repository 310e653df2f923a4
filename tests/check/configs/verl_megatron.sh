python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    trainer.n_gpus_per_node=8
