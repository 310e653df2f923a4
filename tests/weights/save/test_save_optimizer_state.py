"""The file of an optimizer's state is what torch gathers, is read by torch, and has the checksums of what was saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from support.broken_steps import raising
from support.extraction import all_trainable, everywhere, fsdp1, fsdp2, mesh_over, new_net, raises_soon
from support.optimizers import Gathering, Local, OfRows
from support.ranks import Setting, device_type, of_all_ranks, on_ranks, this_device, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from fsdp_doctor import LoadError, SaveError, load_optimizer_state, save_optimizer_state
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
    """Gathers the full state on every rank."""
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


@everywhere
def test_after_a_raised_step_the_file_is_the_state_before_it() -> None:
    parts: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    builds = {**BUILDS, **(ON_DEVICE if device_type() != "cpu" else {})}
    for (name, build), part in itertools.product(builds.items(), parts):
        model, optimizer = trained(build)
        expected = full_state_of(model, optimizer)
        with raising(model.get_submodule("layers.1"), part):
            step(model, optimizer, seed=2)
        with new_directory() as directory:
            save_optimizer_state(model, optimizer, directory)
            saved = torch.load(directory / "optimizer.pt", weights_only=True)
        assert saved["state"], name
        assert_same(saved, expected)


@on_ranks(Setting("cpu", 4))
def test_replicas_save_each_element_once() -> None:
    model, optimizer = trained(lambda: fsdp2(new_net(**_DIMS), mesh_over(2, 2)))
    with new_directory() as directory:
        save_optimizer_state(model, optimizer, directory)
        saved = torch.load(directory / "optimizer.pt", weights_only=True)
        assert_same(saved, full_state_of(model, optimizer))
        if this_rank() == 0:
            assert verify(directory).answer == "sound"


def _in_steps(optimizer_type: Any, build: Callable[[], nn.Module] = BUILDS["rows"], **options: Any) -> Any:
    model = build()
    optimizer = optimizer_type((p for p in model.parameters() if p.requires_grad), **options)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def _full_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns what the momentum is as a whole, of an optimizer that keeps it in any way."""
    full = {}
    for name, parameter in model.named_parameters():
        held = of_all_ranks(optimizer.state.get(parameter, {}).get("momentum"))
        whole = [value.cpu() for value in held if value is not None and value.shape == parameter.shape]
        parts = [value.cpu() for value in held if value is not None]
        if parts:
            full[name] = whole[0] if whole else torch.cat(parts)
    return full


@on_ranks(Setting("emulated", 2), Setting("cpu", 1), Setting("cpu", 3))
def test_whose_a_tensor_is_follows_from_its_shape_on_all_ranks() -> None:
    """Covers parameters of which one rank's shard is all, and another rank has none."""
    for optimizer_type, options in ((Gathering, {}), (Gathering, {"owners": True}), (Local, {})):
        model, optimizer = _in_steps(optimizer_type, **options)
        expected = _full_momentum(model, optimizer)
        with new_directory() as directory:
            save_optimizer_state(model, optimizer, directory)
            saved = torch.load(directory / "optimizer.pt", weights_only=True)["state"]
            assert {*saved} == {*expected}
            for name, momentum in expected.items():
                assert torch.equal(saved[name]["momentum"], momentum), (optimizer_type, name)
            if this_rank() == 0:
                assert verify(directory).answer == "sound"


def _adamw_of_torchao(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim").AdamW8bit([*parameters])


class _SkipsOneStep(torch.optim.AdamW):
    """An optimizer that skips a step on one rank, as where each rank looks for overflows by itself."""

    def step(self) -> None:  # type: ignore[override]
        self.skipped = getattr(self, "skipped", this_rank() != 1) or False
        if self.skipped:
            super().step()
        self.skipped = True


class _WithLists(Local):
    """Optimizer with lists, as L-BFGS keeps its history."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for entries in self.state.values():
            entries.setdefault("history", []).append(entries["momentum"].clone())


class _Counting(Local):
    """Optimizer that counts its steps under a key of its own, as some outside of torch do."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


@everywhere
def test_state_that_cannot_be_made_whole_is_refused_by_name_before_writing() -> None:
    refused: list[tuple[Any, list[str]]] = [
        (lambda p: Gathering(p, drifts=True), ["momentum of", "values differ between ranks [0, 1"]),
        (OfRows, ["rows of", "neither the shape of the parameter"]),
        (_SkipsOneStep, ["step of", "is 2.0", "1.0 of torch.float32 on rank 1"]),
        (_WithLists, ["history of", "is a list"]),
        (_Counting, ["does not belong to any of its parameters"]),
    ]
    for make, words in refused:
        model, optimizer = _in_steps(make)
        with new_directory() as directory:
            with raises_soon(SaveError, *words):
                save_optimizer_state(model, optimizer, directory)
            together()
            assert not directory.exists() or not any(directory.iterdir()), words


@on_ranks(Setting("cpu", 2))
def test_eight_bit_moments_are_refused_by_name() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(nn.Sequential(nn.Embedding(20, 256), nn.Linear(256, 256)), mesh=mesh_over())

    # Compiled, the two steps would take half a minute of a processor.
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = _in_steps(_adamw_of_torchao, build)
    with new_directory() as directory, raises_soon(SaveError, "exp_avg of 1.weight", "OptimState8bit"):
        save_optimizer_state(model, optimizer, directory)
    with raises_soon(LoadError, "exp_avg of 1.weight", "OptimState8bit", "written nothing"):
        load_optimizer_state(model, optimizer, full_state_of(*_in_steps(torch.optim.AdamW, build)))
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Embedding(20, 256), nn.Linear(256, 256)), device_id=this_device(), use_orig_params=True
    )
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), min_8bit_size=16)
    step(model, optimizer, 0)
    with new_directory() as directory, raises_soon(SaveError, "qmap1 of"):
        save_optimizer_state(model, optimizer, directory)


@everywhere
def test_options_that_are_tensors_are_saved_as_numbers_and_fill_tensors() -> None:
    builds = [BUILDS["rows"], *([ON_DEVICE["fsdp1-orig"]] if device_type() != "cpu" else [])]
    for build, lr in itertools.product(builds, (0.25, torch.tensor(0.25))):
        betas = torch.tensor(0.5), torch.tensor(0.75)
        model, optimizer = _in_steps(torch.optim.AdamW, build, lr=lr, betas=betas, foreach=False)
        with new_directory() as directory:
            save_optimizer_state(model, optimizer, directory)
            saved = torch.load(directory / "optimizer.pt", weights_only=True)
            assert (saved["param_groups"][0]["lr"], tuple(saved["param_groups"][0]["betas"])) == (0.25, (0.5, 0.75))
            other = build()
            with_tensors = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.125), torch.tensor(0.25))}
            fresh = adamw(other, **with_tensors, foreach=False)
            load_optimizer_state(other, fresh, saved)
            assert [with_tensors["lr"], *with_tensors["betas"]] == [0.25, 0.5, 0.75]
            assert fresh.param_groups[0]["betas"][0] is with_tensors["betas"][0]
            step(other, fresh, 3)
            with_numbers = adamw(other)
            load_optimizer_state(other, with_numbers, full_state_of(model, optimizer))
            assert with_numbers.param_groups[0]["betas"] == (0.5, 0.75)


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
        with raises_soon(SaveError, "already has optimizer.pt"):
            save_optimizer_state(model, optimizer, directory)


@everywhere
def test_the_remedy_for_a_model_that_is_not_sharded_saves_what_loads() -> None:
    whole = all_trainable(new_net(**_DIMS)).to(this_device())
    optimizer = adamw(whole)
    step(whole, optimizer, 1)
    with new_directory() as directory:
        with raises_soon(SaveError, "not sharded: on one rank, save with torch.save what", "get_optimizer_state_dict"):
            save_optimizer_state(whole, optimizer, directory)
        together()
        if this_rank() == 0:
            directory.mkdir()
            torch.save(get_optimizer_state_dict(whole, optimizer), directory / "optimizer.pt")
        together()
        saved = torch.load(directory / "optimizer.pt", weights_only=True)
    model = fsdp2(all_trainable(new_net(**_DIMS)))
    other = adamw(model)
    load_optimizer_state(model, other, saved)
    assert_same(full_state_of(model, other), saved)


@everywhere
def test_the_remedy_for_a_load_that_is_not_sharded_loads() -> None:
    model, optimizer = trained(BUILDS["rows"])
    saved = full_state_of(model, optimizer)
    whole = new_net(**_DIMS).to(this_device())
    other = adamw(whole)
    with raises_soon(LoadError, "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"):
        load_optimizer_state(whole, other, saved)
    together()
    set_optimizer_state_dict(whole, other, saved)
    assert len(other.state_dict()["state"]) == len(saved["state"])
