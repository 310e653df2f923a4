"""verl: after initialize(), which ends with the offload, the rollout is given the weights of the file."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [64, 65])  # of the embedding: 65 do not divide by two ranks
@pytest.mark.parametrize("offload", ["none", "param_offload", "offload_policy"])
def test_weights_for_the_rollout(this_rank, offload, rows):
    torch.manual_seed(0)
    small = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, vocab_size=rows, **_SIZES)
    plain = AutoModelForCausalLM.from_config(small)
    if this_rank.rank == 0:
        plain.save_pretrained(this_rank.scratch)
    this_rank.barrier()
    attention = {"override_config": {"attn_implementation": "sdpa"}, "use_remove_padding": False}
    model = HFModelConfig(path=str(this_rank.scratch), load_tokenizer=False, **attention)
    offloads = {} if offload == "none" else {offload: True}
    engine = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, **offloads)
    engine = FSDPEngineWithLMHead(model, engine, FSDPOptimizerConfig(total_training_steps=9), CheckpointConfig())
    engine.initialize()
    given = {name: value.cpu() for name, value in engine.get_per_tensor_param()[0]}
    torch.testing.assert_close(given, {name: value.to(given[name].dtype) for name, value in plain.state_dict().items()})
