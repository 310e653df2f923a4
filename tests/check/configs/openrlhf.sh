ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --zero_stage 3 --actor_num_gpus_per_node 4
