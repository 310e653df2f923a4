"""Tests of accelerate's suite that need two GPUs, in other words, on ranks that need none.

In accelerate each of them is a script of its own that a test starts under torchrun or `accelerate launch` and judges by
its exit code. Here each is a test. Three pass; the fourth shows an open issue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

MakeAccelerator = Callable[..., Any]


def _prepared(accelerator: Any, model: nn.Module) -> tuple[nn.Module, Any]:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return model, optimizer


def _small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def _train(accelerator: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        seed = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(8, 16, generator=seed).to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_tensors_of_other_lengths_are_padded_and_gathered(make_accelerator: MakeAccelerator, this_rank: Any) -> None:
    """test_utils/scripts/test_ops.py: what every rank gathers where each has more than the one before it."""
    accelerator = make_accelerator()
    mine = torch.full((this_rank.rank + 1,), float(this_rank.rank + 1), device=accelerator.device)
    padded = accelerator.pad_across_processes(mine, pad_first=False)
    assert padded.shape == (this_rank.world_size,)
    assert accelerator.gather(padded).tolist() == [1.0, 0.0, 2.0, 2.0]


@pytest.mark.ranks(2)
def test_merged_shards_are_the_weights_that_were_trained(make_accelerator: MakeAccelerator, this_rank: Any) -> None:
    """test_utils/scripts/test_merge_weights.py: a sharded checkpoint becomes one file, which a plain model loads."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    accelerator = make_accelerator(state_dict_type="SHARDED_STATE_DICT")
    model, optimizer = _prepared(accelerator, _small_model(seed=0))
    _train(accelerator, model, optimizer, range(2))
    accelerator.save_state(str(this_rank.scratch))
    merge_fsdp_weights(str(this_rank.scratch / "pytorch_model_fsdp_0"), str(this_rank.scratch))
    trained = accelerator.get_state_dict(model)
    this_rank.barrier()
    merged = _small_model(seed=1)
    merged.load_state_dict(load_file(this_rank.scratch / "model.safetensors"))
    for name, weight in trained.items():
        assert torch.equal(merged.state_dict()[name], weight.cpu()), name


class _WithBuffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((2, 2), value))


@pytest.mark.xfail(reason="accelerate issue 3898: in 1.15 a buffer is taken for a DTensor", strict=False)
@pytest.mark.ranks(2)
def test_every_rank_gets_rank_0s_buffers(make_accelerator: MakeAccelerator, this_rank: Any) -> None:
    """tests/fsdp/test_fsdp2_cpu_ram_efficient_loading_buffers.py, issue 3898: one rank reads, the others are given.

    There every rank has the right value already, and the test passes if nothing is sent; here only rank 0 has it.
    """
    accelerator = make_accelerator(cpu_ram_efficient_loading=True)
    model, _ = _prepared(accelerator, _WithBuffer(42.0 if this_rank.rank == 0 else 0.0))
    assert dict(model.named_buffers())["scale"].tolist() == [[42.0, 42.0], [42.0, 42.0]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_run_that_is_resumed_ends_as_the_one_that_went_on(
    make_accelerator: MakeAccelerator, this_rank: Any, form: str
) -> None:
    """test_checkpointing of tests/fsdp/test_fsdp.py, which compares accuracies; here weights, after two more steps."""

    accelerator = make_accelerator(state_dict_type=form)
    model, optimizer = _prepared(accelerator, _small_model(seed=0))
    _train(accelerator, model, optimizer, range(2))
    accelerator.save_state(str(this_rank.scratch))
    _train(accelerator, model, optimizer, range(2, 4))

    accelerator = make_accelerator(state_dict_type=form)
    resumed, optimizer = _prepared(accelerator, _small_model(seed=1))
    accelerator.load_state(str(this_rank.scratch))
    _train(accelerator, resumed, optimizer, range(2, 4))
    weights = dict(model.named_parameters())
    for name, weight in resumed.named_parameters():
        assert torch.equal(weight.to_local(), weights[name].to_local()), name
