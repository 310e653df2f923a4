"""accelerate: a new session goes on from load_state as the session that saved went on, with and without offload."""

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState


def _build(seed, **options):
    AcceleratorState._reset_state(True)  # the first plugin of a process would stay
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", **options))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _step(accelerator, model, optimizer):
    loss = model(torch.ones(2, 6, device=accelerator.device)).square().sum()
    accelerator.backward(loss), optimizer.step(), optimizer.zero_grad()
    return loss.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("version", "form"), [(2, "FULL"), (2, "SHARDED"), (1, "SHARDED")])
@pytest.mark.parametrize("offload", [False, True])
def test_resume(this_rank, version, form, offload):
    options = {"fsdp_version": version, "state_dict_type": f"{form}_STATE_DICT", "cpu_offload": offload}
    options["use_orig_params"] = version == 1 or None
    saved = _build(0, **options)
    _step(*saved), saved[0].save_state(str(this_rank.scratch))
    losses = [_step(*saved), _step(*saved)]
    fresh = _build(1, **options)
    fresh[0].load_state(str(this_rank.scratch))
    torch.testing.assert_close([_step(*fresh), _step(*fresh)], losses, rtol=0, atol=0)
