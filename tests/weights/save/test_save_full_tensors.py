"""Tests that what each rank saves at its place is the model before it was sharded, for every strategy."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import torch
from safetensors.torch import load_file
from support.expert_groups import GATHERED, NAME, ON_MESHES, on_four_devices, reference
from support.extraction import (
    EVEN,
    INTEGERS,
    UNEVEN,
    adapted,
    all_trainable,
    assert_same,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    tensors_of,
)
from support.families import new_family
from support.ranks import Setting, accelerator, device_type, of_all_ranks, on_ranks, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_doctor import SaveError, save_full_tensors
from fsdp_doctor.checkpoints.verification import verify
from fsdp_doctor.weights.save.writing import CHUNK_BYTES

BF16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}


def assert_saved(model: nn.Module, expected: dict[str, torch.Tensor], **options: Any) -> None:
    with new_directory() as directory:
        report = save_full_tensors(model, directory, **{"names": "model", **options})
        saved = {name: tensor for file in report.files for name, tensor in load_file(directory / file).items()}
        tied = {"head.weight"} & {*expected}
        assert {*saved} == {*expected} - tied
        for name, tensor in saved.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name].cpu()), name
        assert sum(of_all_ranks(report.num_written)) == sum(t.numel() * t.element_size() for t in saved.values())
        if this_rank() == 0:
            found = verify(directory)
            assert found.answer == "sound", found.to_text()
            assert not any("safetensors has no checksum" in each for each in found.unchecked)
            index = ["model.safetensors.index.json"] if len(report.files) > 1 else []
            beside = {"config.json", "generation_config.json"}
            assert {*os.listdir(directory)} - beside == {*report.files, *index, "fsdp-doctor.json"}


@everywhere
def test_fsdp2_is_saved_as_the_model_before_it_was_sharded() -> None:
    for dims in (EVEN, UNEVEN):
        expected = tensors_of(new_net(**dims))
        for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
            model = fsdp2(new_net(**dims), **offload)
            assert_saved(model, expected)
            assert_saved(model, cast_of(expected, torch.bfloat16), largest_file=100_000, **BF16)


@on_the_device
def test_fsdp1_is_saved_as_the_model_before_it_was_sharded() -> None:
    dims = {**UNEVEN, "empty": False}
    expected = tensors_of(new_net(**dims))
    for use_orig_params in (True, False):
        model = fsdp1(all_trainable(new_net(**dims)), use_orig_params=use_orig_params)
        assert_saved(model, expected, largest_file=100_000)
        assert_saved(model, cast_of(expected, torch.bfloat16), **BF16)


@on_ranks(Setting("cpu", 4))
def test_replicas_columns_and_tensor_parallelism_are_saved_once() -> None:
    expected = tensors_of(new_net(**EVEN))
    assert_saved(fsdp2(new_net(**EVEN), mesh_over(2, 2)), expected)
    columns = fsdp2(
        new_net(**EVEN), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 12 else None
    )
    assert_saved(columns, expected, largest_file=50_000)
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(up=nn.Linear(16, 32), down=nn.Linear(32, 16), norm=nn.LayerNorm(16)))
    expected = tensors_of(net)
    assert_saved(net, expected)
    mesh = mesh_over(2, 2)
    parallelize_module(net, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert_saved(fully_shard(net, mesh=mesh["outer"]), expected)


@on_the_device
def test_adapters_are_merged_as_into_the_full_tensors() -> None:
    for shard in (shard_qwen2, shard_qwen1):
        model = shard(adapted())
        assert_saved(model, extracted(model))
    assert_saved(model, extracted(model, dtype=torch.bfloat16), dtype=torch.bfloat16)


@on_ranks(Setting("emulated", 2), Setting("cpu", 2))
def test_what_is_saved_of_a_transformers_model_is_what_from_pretrained_loads() -> None:
    for family in ("qwen3-moe", "llama-tied", "gpt-oss"):
        model = new_family(family)
        expected = tensors_of(model)
        original = type(model)
        # An FSDP1 unit has no range of a transposed part.
        strategies = (shard_qwen2,) if family == "gpt-oss" else (shard_qwen2, shard_qwen1)
        for shard in strategies if device_type() == "emulated" else strategies[:1]:
            with new_directory() as directory:
                save_full_tensors(shard(new_family(family)), directory, largest_file=20_000)
                loaded = original.from_pretrained(directory)
                assert_same(tensors_of(loaded), expected, torch.device("cpu"))
                assert loaded.config.architectures == [original.__name__]
                if this_rank() == 0:
                    assert verify(directory).answer == "sound"


@on_four_devices
def test_experts_that_groups_of_ranks_have_are_saved_as_one_tensor() -> None:
    for build, mesh in GATHERED.values():
        assert_saved(build(), reference(), experts=mesh())
    for name in ("neighbours", "fsdp1"):
        with new_directory() as directory:
            with raises_soon(SaveError, NAME, "experts"):
                save_full_tensors(ON_MESHES[name][1](), directory, names="model")
            together()
            assert not directory.exists() or not os.listdir(directory)


@on_the_device
def test_device_memory_stays_within_the_bound() -> None:
    def peak(model: nn.Module, **options: Any) -> int:
        with new_directory() as directory:
            save_full_tensors(model, directory, names="model", **options)
            accelerator().reset_peak_memory_stats()
            before = accelerator().memory_allocated()
            save_full_tensors(model, directory, names="model", overwrite=True, **options)
            return int(accelerator().max_memory_allocated() - before)

    large = {"rows": 24, "hidden": 12, "large_rows": 40_000}
    shard_bytes = 40_000 * 512 * 4 // 2
    for offload in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = fsdp2(new_net(**large), **offload)
        assert peak(model) == 0
        # Its buffers are on the device.
        assert peak(model, **BF16) <= (4096 if offload else 2 * CHUNK_BYTES) < shard_bytes
