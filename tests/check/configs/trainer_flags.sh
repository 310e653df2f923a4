# The training, and what follows it.
torchrun --nproc_per_node=4 --nnodes 2 train.py \
    --model_name_or_path meta-llama/Llama-3.1-8B \
    --output_dir out \
    --fsdp "full_shard auto_wrap offload" \
    --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer
python evaluate.py --model out
