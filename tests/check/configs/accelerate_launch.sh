accelerate launch --config_file accelerate_v1.yaml --num_processes 6 --fsdp_offload_params false train.py \
    --model_name_or_path meta-llama/Llama-3.1-8B
