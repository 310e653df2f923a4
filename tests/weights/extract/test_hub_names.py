"""Tensors come out under the Hub's names as parts of what is gathered, whatever their shards are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from support.extraction import MIB, adapted, assert_close, assert_same, layers_of, raises_soon, shard_qwen1, shard_qwen2
from support.families import new_family
from support.loading import everywhere, on_four
from support.ranks import Setting, accelerator, device_type, of_all_ranks, on_ranks, this_device, this_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_doctor
from fsdp_doctor import NamesError, TensorView, full_tensors, local_shards, read_hub_view, weights_info

FAMILY = "qwen3-moe"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"

Tensors = dict[str, torch.Tensor]


def _in_hub_names(model: nn.Module) -> Tensors:
    """Names the tensors of the unsharded model."""
    state = model.state_dict()
    return {name: view.read(state[view.name]).detach().cpu() for name, view in read_hub_view(model).items()}


@everywhere
def test_full_tensors_in_hub_names_are_parts_of_what_is_gathered() -> None:
    expected = _in_hub_names(new_family(FAMILY))
    on_devices: list[Callable[[Any], Any]] = [
        lambda model: shard_qwen2(model, offload_policy=CPUOffloadPolicy()),
        shard_qwen1,
        lambda model: shard_qwen1(model, use_orig_params=False),
    ]
    for shard in (shard_qwen2, *(on_devices if device_type() != "cpu" else [])):
        model = shard(new_family(FAMILY))
        for names in ("hub", "auto", read_hub_view(model)):
            tensors = dict(full_tensors(model, names=names))
            assert_same(tensors, expected)
            experts = [tensors[name] for name, view in read_hub_view(model).items() if view.name == FUSED]
            assert len({tensor.untyped_storage().data_ptr() for tensor in experts}) == 1
        info = weights_info(model, names="hub", dtype=torch.bfloat16)
        halves = dict(full_tensors(model, names="hub", dtype=torch.bfloat16))
        assert {name: (i.shape, i.dtype) for name, i in info.items()} == {
            n: (t.shape, t.dtype) for n, t in halves.items()
        }
        assert list(info) == list(halves)
        assert_same(fsdp_doctor.full_state_dict(model, names="hub", ranks="all"), expected, torch.device("cpu"))


@on_ranks(Setting("emulated", 2))
def test_hub_names_take_no_more_device_memory_than_the_models() -> None:
    model = shard_qwen2(new_family(FAMILY))
    peaks = {}
    for names in ("model", "hub"):
        for _ in full_tensors(model, names=names, bucket_bytes=MIB // 16):
            pass
        accelerator().reset_peak_memory_stats()
        before = accelerator().memory_allocated()
        for _ in full_tensors(model, names=names, bucket_bytes=MIB // 16):
            pass
        peaks[names] = accelerator().max_memory_allocated() - before
    assert peaks["hub"] == peaks["model"]


def _over_two_dims(dim: int, fsdp_dim: int | None) -> Any:
    """Experts that are distributed along a dim, then sharded by FSDP along one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    placement_fn = (lambda p: Shard(fsdp_dim) if p.ndim == 3 else None) if fsdp_dim is not None else None
    model = new_family(FAMILY)
    for layer in layers_of(model):
        for name, experts in list(layer.mlp.experts.named_parameters()):
            setattr(layer.mlp.experts, name, nn.Parameter(distribute_tensor(experts, mesh["ep"], [Shard(dim)])))
        fully_shard(layer, mesh=mesh["fsdp"], shard_placement_fn=placement_fn)
    return fully_shard(model, mesh=mesh["fsdp"])


@on_four
def test_experts_sharded_along_any_dims_have_the_same_tensors_shards_and_fingerprints() -> None:
    plain = new_family(FAMILY)
    expected = _in_hub_names(plain)
    fingerprints = fsdp_doctor.fingerprint_tensors(expected)
    models = [
        shard_qwen2(new_family(FAMILY)),
        *(_over_two_dims(*dims) for dims in ((0, None), (0, 1), (1, None), (2, 1))),
    ]
    for model in models:
        assert_same(dict(full_tensors(model, names="hub")), expected)
        assert not fsdp_doctor.compare_fingerprints(fsdp_doctor.fingerprint(model, names="hub"), fingerprints)
        covered = dict.fromkeys(expected, 0)
        for shard in local_shards(model, names="hub"):
            assert shard.shape == expected[shard.name].shape
            part = shard.place.of(expected[shard.name])
            assert torch.equal(shard.tensor, part.view(shard.tensor.shape)), shard.name
            assert (shard.place.numel, len(shard.tensor.shape)) == (shard.tensor.numel(), part.ndim)
            covered[shard.name] += shard.tensor.numel()
        everyone = of_all_ranks(covered)
        experts = [name for name in expected if ".experts." in name]
        assert {sum(each[name] for each in everyone) - expected[name].numel() for name in experts} == {0}


@on_ranks(Setting("emulated", 2))
def test_each_rank_of_flat_shards_has_ranges_of_hub_tensors() -> None:
    expected = _in_hub_names(new_family(FAMILY))
    model = shard_qwen1(new_family(FAMILY))
    fingerprints = fsdp_doctor.fingerprint_tensors(expected)
    assert not fsdp_doctor.compare_fingerprints(fsdp_doctor.fingerprint(model, names="hub"), fingerprints)
    for shard in local_shards(model, names="hub"):
        assert torch.equal(shard.tensor.cpu(), shard.place.of(expected[shard.name]))


@everywhere
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_are_merged_under_hub_names() -> None:
    options = {"target_modules": ["q_proj", "o_proj"]}
    merged: Any = adapted(new_family(FAMILY), **options).merge_and_unload()
    expected = _in_hub_names(merged)
    model = shard_qwen2(adapted(new_family(FAMILY), **options))
    assert_close(dict(full_tensors(model, names="hub")), expected)
    base = _in_hub_names(new_family(FAMILY))
    assert_same(dict(full_tensors(model, names="hub", lora="base")), base)
    with raises_soon(NamesError, "the names of peft's files"):
        full_tensors(model, names="hub", lora="adapter")
    assert all("lora_" in name for name, _ in full_tensors(model, names="auto", lora="adapter"))
    assert isinstance(model, peft.PeftModel)


@pytest.mark.filterwarnings("ignore")  # peft warns of the weights that it cannot find for such parameters
def test_adapters_of_fused_experts_are_refused_by_name_unlike_their_base() -> None:
    plain = new_family(FAMILY)
    own, of_hub = {name: t.clone() for name, t in plain.state_dict().items()}, _in_hub_names(plain)
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(plain, target_parameters=fused, target_modules=["q_proj"], r=2)
    for extract in (full_tensors, local_shards, fsdp_doctor.fingerprint):
        with pytest.raises(
            NotImplementedError, match=r"model\.layers\.0\.mlp\.experts\.(gate_up|down)_proj: .*ParamWrapper"
        ):
            extract(model)  # type: ignore[operator]
    # Without ranks the tensors are on the CPU.
    for names, expected in (("model", own), ("hub", of_hub)):
        tensors = dict(full_tensors(model, lora="base", names=names))  # type: ignore[arg-type]
        assert {name: t.tolist() for name, t in tensors.items()} == {name: t.tolist() for name, t in expected.items()}
    assert dict(full_tensors(model, lora="adapter")).keys() == peft.get_peft_model_state_dict(model).keys()


@on_ranks(Setting("emulated", 2))
def test_names_that_do_not_fit_are_an_error_on_every_rank() -> None:
    model = shard_qwen2(new_family(FAMILY))
    views = read_hub_view(model)
    one, other = (f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1))
    with raises_soon(NamesError, "is not covered exactly once"):
        full_tensors(model, names={**views, one: views[other]})
    exchanged = {**views, one: views[other], other: views[one]}
    with raises_soon(fsdp_doctor.PlanMismatch, "the ranks do not extract the same"):
        list(full_tensors(model, names=exchanged if this_rank() else views))
    tensors = dict(full_tensors(model, names=exchanged))
    assert torch.equal(tensors[one], dict(full_tensors(model, names=views))[other])
    net = fully_shard(nn.Sequential(nn.Linear(4, 4)).to(this_device()))
    with raises_soon(NamesError, "not a model of transformers"):
        full_tensors(net, names="hub")
    assert [name for name, _ in full_tensors(net, names="auto")] == ["0.weight", "0.bias"]


@on_ranks(Setting("emulated", 2))
def test_a_part_that_fsdp1_divides_is_gathered_but_no_shard() -> None:
    columns = {name: TensorView("0.weight", (8, 4), (8, 1), offset) for name, offset in (("left", 0), ("right", 4))}
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    weight = net[0].weight.detach().clone()
    flat = torch.distributed.fsdp.FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)
    with raises_soon(NamesError, "left is a part of 0.weight, whose shards cut across this part"):
        list(local_shards(flat, names=columns))
    assert_same(dict(full_tensors(flat, names=columns)), {"left": weight[:, :4], "right": weight[:, 4:]})


@on_ranks(Setting("cpu", 2))
def test_columns_of_rows_are_blocks_of_a_shard() -> None:
    columns = {name: TensorView("weight", (4, 6), (1, 8), offset) for name, offset in (("left", 0), ("right", 4))}
    model = fully_shard(nn.Linear(8, 6, bias=False))
    whole = dict(full_tensors(model))["weight"]
    assert_same(dict(full_tensors(model, names=columns)), {"left": whole[:, :4].t(), "right": whole[:, 4:].t()})
    for shard in local_shards(model, names=columns):
        full = whole[:, :4].t() if shard.name == "left" else whole[:, 4:].t()
        assert shard.tensor.shape == (4, 3)
        assert torch.equal(shard.tensor, shard.place.of(full))
    assert isinstance(model.weight, DTensor)
