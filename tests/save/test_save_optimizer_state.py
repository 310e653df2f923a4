"""The file of an optimizer's state is what torch gathers, is read by torch, and has the checksums of what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.extraction import all_trainable, everywhere, fsdp1, fsdp2, mesh_over, new_net, raises_soon
from support.ranks import Setting, device_type, on_ranks, this_device, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from fsdp_doctor import SaveError, load_optimizer_state, save_optimizer_state
from fsdp_doctor.checkpoints.verification import verify

_FULL = StateDictOptions(full_state_dict=True)
_DIMS: dict[str, Any] = {"empty": False}


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: fsdp2(new_net(**_DIMS)),
    "policy": lambda: fsdp2(new_net(**_DIMS), offload_policy=CPUOffloadPolicy(pin_memory=False)),
}
ON_DEVICE: dict[str, Callable[[], nn.Module]] = {
    "columns": lambda: fsdp2(new_net(**_DIMS), shard_placement_fn=_by_columns),
    "fsdp1": lambda: fsdp1(all_trainable(new_net(**_DIMS)), use_orig_params=False),
    "fsdp1-orig": lambda: fsdp1(new_net(**_DIMS)),
}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + this_rank())
    tokens = torch.randint(0, 20, (2, 5), generator=generator).to(this_device())
    model(tokens).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = adamw(model, lr=0.01, weight_decay=0.3)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def full_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """On every rank."""
    return get_optimizer_state_dict(model, optimizer, options=_FULL)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {*actual["state"]} == {*expected["state"]}
    for name, entries in expected["state"].items():
        assert {*actual["state"][name]} == {*entries}
        for key, value in entries.items():
            found = actual["state"][name][key]
            assert found.dtype == value.dtype
            assert torch.equal(found.cpu(), value.cpu()), (name, key)
    for group, other in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert sorted(group["params"]) == sorted(other["params"])
        # torch makes a list of a tuple when it loads.
        options = [{k: tuple(v) if k == "betas" else v for k, v in g.items() if k != "params"} for g in (group, other)]
        assert options[0] == options[1], options


@everywhere
def test_the_file_is_what_torch_gathers_and_is_loaded_by_both() -> None:
    for build in {**BUILDS, **(ON_DEVICE if device_type() != "cpu" else {})}.values():
        model, optimizer = trained(build)
        expected = full_state_of(model, optimizer)
        with new_directory() as directory:
            save_optimizer_state(model, optimizer, directory)
            saved = torch.load(directory / "optimizer.pt", mmap=True, weights_only=True)
            assert_same(saved, expected)
            other = build()
            fresh = adamw(other, lr=0.5)
            load_optimizer_state(other, fresh, saved)
            assert_same(full_state_of(other, fresh), expected)
            third = build()
            fresh = adamw(third, lr=0.5)
            set_optimizer_state_dict(third, fresh, saved, options=_FULL)
            assert_same(full_state_of(third, fresh), expected)
            together()
            if this_rank() == 0:
                assert [path.name for path in directory.iterdir()] == ["optimizer.pt"]
                assert verify(directory).answer == "sound"
                data = bytearray((directory / "optimizer.pt").read_bytes())
                data[len(data) // 2] ^= 1
                (directory / "optimizer.pt").write_bytes(data)
                assert "checksum" in {finding.trouble for finding in verify(directory).findings}


@on_ranks(Setting("cpu", 4))
def test_replicas_save_each_element_once() -> None:
    model, optimizer = trained(lambda: fsdp2(new_net(**_DIMS), mesh_over(2, 2)))
    with new_directory() as directory:
        save_optimizer_state(model, optimizer, directory)
        saved = torch.load(directory / "optimizer.pt", weights_only=True)
        assert_same(saved, full_state_of(model, optimizer))
        if this_rank() == 0:
            assert verify(directory).answer == "sound"


@everywhere
def test_what_cannot_be_saved_is_refused_on_every_rank() -> None:
    model, optimizer = trained(BUILDS["rows"])
    with new_directory() as directory:
        with raises_soon(SaveError, "not sharded"):
            save_optimizer_state(new_net(), optimizer, directory)
        with raises_soon(SaveError, "that the model does not have"):
            save_optimizer_state(BUILDS["rows"](), optimizer, directory)
        together()
        assert not directory.exists()
        save_optimizer_state(model, optimizer, directory)
        with raises_soon(SaveError, "optimizer.pt already"):
            save_optimizer_state(model, optimizer, directory)
