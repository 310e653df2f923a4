"""Tensors that a caller gives beside a model, such as an average of its weights: out, to disk, and in again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extraction import (
    adapted,
    assert_close,
    assert_same,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    local_of,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    shard_qwen2,
    train_step,
)
from support.ranks import this_device, this_rank, together, world_size
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import fsdp_doctor
from fsdp_doctor import (
    LoadError,
    PlanMismatch,
    UnreadableTensors,
    examine,
    fingerprint,
    fingerprint_tensors,
    full_state_dict,
    full_tensors,
    load_full_tensors,
    load_optimizer_state,
    local_shards,
    read_hub_view,
    save_full_tensors,
    save_optimizer_state,
    unchanged,
    weights_info,
)

Average = dict[str, torch.Tensor]


def _averaged(model: nn.Module, steps: int = 3) -> Average:
    """Averages as trainers do: float64 shards of the parameters that train, moved after each step."""
    average = {n: p.detach().clone().double() for n, p in model.named_parameters() if p.requires_grad}
    for step in range(steps):
        train_step(model, step)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                average[name].lerp_(parameter.detach().double(), 0.3)
    return average


def _whole(average: Average) -> Average:
    return {name: tensor.full_tensor() for name, tensor in average.items()}  # type: ignore[attr-defined]


@everywhere
def test_an_average_is_extracted_saved_and_loaded_beside_its_model() -> None:
    model = fsdp2(new_net())
    average = _averaged(model)
    own, expected = extracted(model), _whole(average)
    tied = expected | {"head.weight": expected["embed.weight"]}
    assert_same(extracted(model, tensors=average), tied)
    assert_same(dict(fsdp_doctor.engines.verl_weights(model, tensors=average)[0]), tied)
    assert_same(full_state_dict(model, tensors=average, ranks="all"), tied, torch.device("cpu"))
    infos = weights_info(model, tensors=average)
    assert list(infos) == [name for name in own if name in tied]
    assert all((info.shape, info.dtype) == (tied[n].shape, torch.float64) for n, info in infos.items())
    assert fingerprint(model, tensors=average).tensors == fingerprint_tensors(tied).tensors
    assert {shard.name for shard in local_shards(model, tensors=average)} == {*tied}
    assert_same(extracted(model, tensors=average, dtype=torch.float32), {n: t.float() for n, t in tied.items()})
    with new_directory() as directory:
        save_full_tensors(model, directory, names="model", tensors=average)
        again = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
        report = load_full_tensors(model, directory, tensors=again)
    assert report.loaded == len(average)
    assert all(torch.equal(local_of(again[name]), local_of(tensor)) for name, tensor in average.items())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
    load_full_tensors(model, {n: t.cpu() for n, t in expected.items()} if this_rank() == 0 else None, tensors=zeros)
    assert_same(extracted(model, tensors=zeros), tied)
    assert_same(extracted(model), own)


@everywhere
def test_an_average_with_the_rest_of_the_model_is_a_whole_checkpoint() -> None:
    model = fsdp2(new_net())
    average = {name: tensor.float() for name, tensor in _averaged(model).items()}
    own, expected = extracted(model), _whole(average)
    both = extracted(model, tensors=model.state_dict() | average | {"head.weight": average["embed.weight"]})
    assert_same(both, own | expected | {"head.weight": expected["embed.weight"]})


@on_the_device
def test_an_average_under_an_offload_policy_lies_on_the_host() -> None:
    model = fsdp2(new_net().cpu(), offload_policy=CPUOffloadPolicy())
    average = {name: p.detach().clone() * 2 for name, p in model.named_parameters()}
    own = extracted(model)
    whole = {name: tensor * 2 for name, tensor in own.items() if name in average or name == "head.weight"}
    assert_same(extracted(model, tensors=average), whole)


@everywhere
def test_averages_of_adapters_are_merged_into_what_is_given() -> None:
    pytest.importorskip("peft")
    model = shard_qwen2(adapted())
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_same(extracted(model, tensors=own), {n: t for n, t in extracted(model).items() if "inv_freq" not in n})
    factors = {name: tensor * 2 for name, tensor in own.items() if ".lora_A." in name}
    base = extracted(model, lora="base")
    # Twice the product, which is in the merged weights once.
    expected = {name: tensor + (tensor - base[name]) for name, tensor in extracted(model).items()}
    assert_close(
        {name: tensor.cpu() for name, tensor in extracted(model, tensors=own | factors).items()},
        {name: tensor.cpu() for name, tensor in expected.items()},
    )
    adapters = {name: tensor for name, tensor in own.items() if ".lora_" in name}
    assert_same(extracted(model, lora="adapter", tensors=adapters), extracted(model, lora="adapter"))
    weights = {name: tensor for name, tensor in own.items() if ".lora_" not in name}
    assert_same(extracted(model, lora="base", tensors=weights), base)
    with raises_soon(ValueError, "lora_A"):
        extracted(model, tensors=weights)


@everywhere
def test_what_is_not_the_models_is_refused_by_name() -> None:
    model = fsdp2(new_net())
    shards = {"large.weight": local_of(model.large.weight).clone()}
    cases: tuple[tuple[type[Exception], Any, str], ...] = (
        (ValueError, {"other.weight": torch.ones(2)}, "other.weight"),
        (ValueError, {"scratch": torch.ones(2)}, "scratch"),
        (ValueError, {"large.weight": torch.ones(2, 512)}, "large.weight"),
        (ValueError, shards, "DTensor.from_local"),
        (ValueError, {"embed.weight": torch.ones(23, 8), "head.weight": torch.ones(23, 8)}, "tied"),
        (TypeError, [("large.weight", model.large.weight)], "mapping"),
        (TypeError, {"large.weight": 1}, "large.weight"),
        (UnreadableTensors, {"scale": torch.eye(8)[0].to_sparse()}, "scale"),
    )
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda tensors: dict(full_tensors(model, tensors=tensors)),
        lambda tensors: full_state_dict(model, tensors=tensors),
        lambda tensors: weights_info(model, tensors=tensors),
        lambda tensors: fingerprint(model, tensors=tensors),
        lambda tensors: save_full_tensors(model, "/nowhere", names="model", tensors=tensors),
        lambda tensors: load_full_tensors(model, {}, tensors=tensors),
    )
    for kind, tensors, words in cases:
        for function in functions:
            together()
            with raises_soon(kind, words):
                function(tensors)
    with raises_soon(LoadError, "large.weight"):
        load_full_tensors(model, {}, tensors={"large.weight": model.large.weight})


@on_the_device
def test_tensors_of_an_fsdp1_unit_are_refused() -> None:
    model = fsdp1(new_net(empty=False))
    with raises_soon(ValueError, "FSDP1"):
        extracted(model, tensors={name: p.detach().clone() for name, p in model.named_parameters()})


@everywhere
def test_plain_tensors_are_whole_on_every_rank() -> None:
    model = fsdp2(new_net())
    whole = torch.arange(1031 * 512.0, device=this_device()).view(1031, 512)
    average = {"large.weight": whole, "embed.weight": model.embed.weight.detach() * 2}
    got = extracted(model, tensors=average)
    assert torch.equal(got["large.weight"], whole)
    with raises_soon(PlanMismatch, "large.weight"):
        extracted(model, tensors=average | {"large.weight": whole * (1 + this_rank())})


@everywhere
def test_tensors_that_one_rank_lacks_are_known_to_all() -> None:
    model = fsdp2(new_net())
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    if this_rank() == world_size() - 1:
        del average["large.weight"]
    with raises_soon(PlanMismatch, "large.weight"):
        extracted(model, tensors=average)
    extracted(model)


@everywhere
def test_what_is_no_model_is_refused_in_a_sentence_by_every_function() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    average: Any = {"w": DTensor.from_local(torch.ones(1, device=this_device()), mesh_over())}
    functions: tuple[Callable[[Any], Any], ...] = (
        examine,
        full_tensors,
        full_state_dict,
        weights_info,
        local_shards,
        fingerprint,
        read_hub_view,
        lambda model: fsdp_doctor.fingerprint_variants(model, ["w"]),
        lambda model: load_full_tensors(model, {}),
        lambda model: load_optimizer_state(model, optimizer, {}),
        lambda model: save_full_tensors(model, "/nowhere"),
        lambda model: save_optimizer_state(model, optimizer, "/nowhere"),
        lambda model: unchanged(model).__enter__(),
        lambda model: fsdp_doctor.engines.verl_weights(model),
        lambda model: fsdp_doctor.measure_memory(model),
    )
    for function in functions:
        for odd in (average, nn.Linear, None):
            together()
            with raises_soon(TypeError, "the model must be a torch.nn.Module, not"):
                function(odd)
