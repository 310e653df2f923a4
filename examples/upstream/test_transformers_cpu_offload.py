"""transformers' own FSDP2 under fsdp_cpu_offload: what is loaded trains, and what is saved is what trained."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.distributed import DistributedConfig, gather_full_state_dict

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_offload_and_state_dict(this_rank, offload):
    torch.manual_seed(0)
    small = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **_SIZES)
    plain = AutoModelForCausalLM.from_config(small)
    plain.save_pretrained(this_rank.scratch)  # rank 0 alone writes
    this_rank.barrier()
    config = DistributedConfig(fsdp_size=2, fsdp_cpu_offload=offload)
    model = AutoModelForCausalLM.from_pretrained(this_rank.scratch, distributed_config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(16, device=this_rank.device).reshape(2, 8)
    for _ in range(2):  # what is read out is what the model computes with, before a step and after it
        plain.load_state_dict(gather_full_state_dict(model), strict=this_rank.rank == 0)
        loss = model(input_ids=ids, labels=ids).loss
        if this_rank.rank == 0:
            torch.testing.assert_close(loss.cpu(), plain(input_ids=ids.cpu(), labels=ids.cpu()).loss)
        loss.backward(), optimizer.step(), optimizer.zero_grad()
