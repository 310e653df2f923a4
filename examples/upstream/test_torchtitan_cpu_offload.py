"""torchtitan: a Trainer goes on from a checkpoint as the one that wrote it, with and without enable_cpu_offload."""

from types import SimpleNamespace

import pytest
import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import config_registry, model_registry

_NO_DATA = SimpleNamespace(state_dict=dict, load_state_dict=len)


def _train(this_rank, offload, mode, steps):  # returns the parameters; a Trainer begins with what the folder has
    config = config_registry.qwen3_debugmodel()
    config.model_spec = model_registry("debugmodel_non_fused_qkv")
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.model_spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = config.dataloader = SimpleNamespace(build=lambda **_: _NO_DATA)
    config.dump_folder, config.debug.seed = str(this_rank.scratch), steps
    config.training.enable_cpu_offload, config.training.disable_cuda_graphs = offload, True
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.async_mode = True, 1, mode
    config.activation_checkpoint, config.parallelism.spmd_backend = None, "partial_dtensor"
    trainer, tokens = config.build(), torch.arange(16).reshape(1, 16)
    trainer.checkpointer.load()
    for trainer.step in range(4 - steps, 4):  # load has set it to the step before
        trainer.train_step(trainer.batch_generator([({"input": tokens, "positions": tokens}, tokens)]))
        trainer.checkpointer.save(trainer.step) if trainer.step == 2 else None
    trainer.checkpointer.maybe_wait_for_saving()
    return [parameter.detach().cpu().to_local().clone() for parameter in trainer.model_parts[0].parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
@pytest.mark.parametrize("offload", [False, True])
def test_resume(this_rank, offload, mode):
    straight, resumed = (_train(this_rank, offload, mode, steps) for steps in (3, 1))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
