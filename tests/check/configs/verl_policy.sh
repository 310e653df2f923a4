#!/usr/bin/env bash
set -x
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
offload=True
# actor_rollout_ref.actor.strategy=fsdp

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['gsm8k/train.parquet']" \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    'actor_rollout_ref.actor.strategy=fsdp2' \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.fsdp_config.offload_policy=$offload \
    ++actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.n_gpus_per_node=8 \
    +trainer.use_legacy_worker_impl=disable \
    trainer.nnodes=2 $@
