"""Engines are given the Hub's names, of which a fused tensor has several."""

from __future__ import annotations

import pytest
import torch
from support import engine_modules
from support.extraction import assert_same, everywhere, shard_qwen2
from support.families import new_family
from support.ranks import Setting, of_all_ranks, on_ranks, world_size
from torch.distributed.tensor import Shard

from fsdp_doctor import NamesError, engines, read_hub_view


@everywhere
def test_engines_are_given_the_hubs_names_of_fused_experts() -> None:
    plain = new_family("qwen3-moe")
    state = plain.state_dict()
    expected = {name: view.read(state[view.name]).clone() for name, view in read_hub_view(plain).items()}
    model = shard_qwen2(plain)
    assert_same(dict(engines.verl_weights(model)[0]), expected)
    with engine_modules.vllm("stand-in"):
        source = engines.vllm_weight_source(model)
        assert {one.name: one.shape for one in source.metadata} == {n: tuple(t.shape) for n, t in expected.items()}
        assert_same(dict(source.iter_full()), expected)
        # A rank has all of an expert, or nothing: vLLM knows chunks of dims alone.
        assert not source.implements_iter_local()
        assert engines.vllm_weight_source(model, names="model").implements_iter_local()
    with engine_modules.verl("stand-in"):
        own = {name: (spec, shard.cpu()) for name, shard, spec in engines.verl_shards(model)[0]}
    for name, full in expected.items():
        spec, shard = own[name]
        if ".experts." in name:
            assert spec.gather_group.size() == world_size()
            assert torch.equal(shard, full.flatten()[spec.place : spec.place + len(shard)]), name
            assert sum(of_all_ranks(len(shard))) == full.numel()


@on_ranks(Setting("cpu", 2))
def test_verl_is_not_given_shards_that_it_cannot_be_told_of() -> None:
    model = shard_qwen2(new_family("qwen3-moe"), shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)
    with engine_modules.verl("stand-in"):
        with pytest.raises(NamesError, match=r"experts\.0\.gate_proj\.weight.* sharded by columns"):
            list(engines.verl_shards(model)[0])
        assert dict(engines.verl_weights(model)[0]).keys() == read_hub_view(model).keys()
