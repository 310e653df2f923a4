"""A script that sets up the Trainer itself."""

from transformers import TrainingArguments

WRAPPED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "use_orig_params": False}
arguments = TrainingArguments(output_dir="out", fsdp=["full_shard", "offload"], fsdp_config=WRAPPED)
