"""What the model and the caller keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.extraction import (
    INTEGERS,
    all_trainable,
    assert_same,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    local_of,
    new_net,
    qwen,
    shard_qwen2,
    tensors_of,
    train_step,
)
from support.ranks import (
    device_type,
    this_device,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
)

from fsdp_doctor import full_tensors


def _state(model: nn.Module) -> list[tuple[str, Any, torch.Tensor, bool, torch.device, int]]:
    return [
        (name, type(tensor), local_of(tensor).clone(), tensor.requires_grad, tensor.device, local_of(tensor).data_ptr())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


@everywhere
def test_the_live_model_and_its_training_are_left_alone() -> None:
    builders: list[Callable[[], nn.Module]] = [
        lambda: fsdp2(new_net()),
        lambda: fsdp1(new_net(empty=False)),
        lambda: fsdp1(all_trainable(new_net(empty=False)), use_orig_params=False),
    ]
    if device_type() != "cpu":
        builders.append(lambda: fsdp2(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=True)))
    for build in builders:
        left_alone, model = build(), build()
        assert train_step(left_alone) == train_step(model)
        before = _state(model)
        for _, tensor in full_tensors(model, dtype=torch.bfloat16, keep_dtype=INTEGERS, bucket_bytes=64 << 10):
            tensor.fill_(1)
        for _, tensor in full_tensors(model):
            tensor.fill_(1)
        for one, other in zip(before, _state(model), strict=True):
            assert one[:2] + one[3:] == other[:2] + other[3:], f"{one[0]} is not what it was"
            assert torch.equal(one[2].cpu(), other[2].cpu()), f"{one[0]} has other values"
        losses = [(train_step(left_alone, seed), train_step(model, seed)) for seed in (1, 2)]
        assert all(one == other for one, other in losses), losses


@everywhere
def test_a_kept_tensor_does_not_change_when_training_goes_on() -> None:
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False)), fsdp1(new_net(empty=False), use_orig_params=True)):
        kept = extracted(model)
        copies = {name: tensor.clone() for name, tensor in kept.items()}
        train_step(model)
        later = extracted(model)
        assert_same(kept, copies)
        assert not torch.equal(later["embed.weight"], kept["embed.weight"])


@everywhere
def test_wrapped_layers_have_plain_names() -> None:
    for wrap in (checkpoint_wrapper, torch.compile, lambda layer: torch.compile(checkpoint_wrapper(layer))):
        for shard in (fsdp2, fsdp1):
            net = new_net(empty=False)
            expected = tensors_of(net)
            for index, layer in enumerate(net.layers):
                net.layers[index] = wrap(layer)
            assert_same(extracted(shard(net)), expected)


@everywhere
def test_a_transformer_with_gradient_checkpointing_is_as_before_sharding() -> None:
    model = qwen()
    expected = tensors_of(model)
    model.gradient_checkpointing_enable()
    model = shard_qwen2(model.train())
    assert_same(extracted(model), expected)
    tokens = torch.arange(8, device=this_device()).view(1, 8)
    model(tokens, labels=tokens).loss.backward()
    assert_same(extracted(model), expected)
