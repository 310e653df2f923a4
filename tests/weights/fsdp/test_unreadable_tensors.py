"""Tensors whose memory is not their values: every function refuses them by name, on every rank, before anything."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.examined import finding, kinds
from support.extraction import (
    adapted,
    assert_same,
    everywhere,
    extracted,
    mesh_over,
    on_the_device,
    qwen,
    raises_soon,
    shard_qwen2,
    tensors_of,
)
from support.ranks import Setting, on_ranks, this_device, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_doctor import (
    UnreadableTensors,
    engines,
    examine,
    fingerprint,
    fingerprint_tensors,
    full_state_dict,
    full_tensors,
    load_full_tensors,
    local_shards,
    save_full_tensors,
    unchanged,
    weights_info,
)

# Of bitsandbytes, torchao and peft, which are asked here for what they are not made for.
pytestmark = pytest.mark.filterwarnings("ignore")


def _saved(model: nn.Module, names: Any) -> Any:
    with new_directory() as directory:
        return save_full_tensors(model, directory, names=names)


# Where a move to a device quantizes nothing.
on_the_cpu = on_ranks(Setting("cpu", 3))

FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "full_tensors": lambda model: dict(full_tensors(model)),
    "full_tensors by the Hub's names": lambda model: dict(full_tensors(model, names="auto")),
    "base": lambda model: dict(full_tensors(model, lora="base")),
    "full_state_dict": full_state_dict,
    "weights_info": weights_info,
    "local_shards": lambda model: list(local_shards(model)),
    "fingerprint": fingerprint,
    "fingerprint of a part": lambda model: fingerprint(model, combined=False),
    "verl_weights": lambda model: dict(engines.verl_weights(model)[0]),
    "save by the model's names": lambda model: _saved(model, "model"),
    "save by any names": lambda model: _saved(model, "auto"),
    "load": lambda model: load_full_tensors(model, {}),
}


def _refused_by_all(model: nn.Module, *names: str) -> None:
    for function in FUNCTIONS.values():
        together()
        with raises_soon(UnreadableTensors, *names):
            function(model)
    assert set(names) <= {*finding(model, "unreadable").names}


def linear4bit(storage: torch.dtype = torch.bfloat16) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", quant_storage=storage)
    weight = bnb.nn.Params4bit(torch.randn(128, 64), requires_grad=False, quant_type="nf4", quant_storage=storage)
    layer.weight = weight._quantize("cpu")
    return nn.Sequential(nn.LayerNorm(64, dtype=torch.bfloat16), layer)


def linear8bit() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False)
    layer.weight.requires_grad_(False)
    layer.weight = layer.weight._quantize("cpu")
    return nn.Sequential(nn.LayerNorm(64), layer)


def with_owner(**tensors: torch.Tensor) -> nn.Module:
    """A module that has these tensors, as other quantizers' have, behind a plain layer."""
    owner = nn.Module()
    for name, tensor in tensors.items():
        owner.register_buffer(name, tensor)
    return nn.Sequential(nn.Linear(4, 4), owner)


CODES: dict[str, Callable[[], nn.Module]] = {
    "4 bits as bfloat16": linear4bit,
    "4 bits as bytes": functools.partial(linear4bit, torch.uint8),
    "8 bits": linear8bit,
    "gptq": lambda: with_owner(qweight=torch.ones(8, 64, dtype=torch.int32), scales=torch.ones(1, 64)),
    "float8 with scales": lambda: with_owner(
        weight=torch.ones(8, 8).to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(1, 1)
    ),
    "mxfp4": lambda: with_owner(
        down_proj_blocks=torch.ones(2, 4, 16, dtype=torch.uint8), down_proj_scales=torch.ones(2, 4, dtype=torch.uint8)
    ),
}
NAMES = {"gptq": "1.qweight", "mxfp4": "1.down_proj_blocks"}


@everywhere
def test_codes_of_a_quantization_are_refused_by_every_function() -> None:
    for kind, build in CODES.items():
        _refused_by_all(fully_shard(build(), mesh=mesh_over()), NAMES.get(kind, "1.weight"))


@on_the_device
def test_codes_in_a_flat_parameter_are_refused_by_every_function() -> None:
    for use_orig_params in (True, False):
        model = linear4bit()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": this_device()}
        _refused_by_all(FullyShardedDataParallel(model, **options), "1.weight")


@on_the_cpu
def test_modules_of_bitsandbytes_that_are_not_quantized_have_values() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for build in (bnb.nn.Linear4bit, functools.partial(bnb.nn.Linear8bitLt, has_fp16_weights=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), build(8, 16))
        expected = tensors_of(model)
        assert_same(extracted(fully_shard(model, mesh=mesh_over())), expected)


@on_the_device
def test_a_weight_that_is_dequantized_when_it_is_read_is_refused() -> None:
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128, bias=False))
    model[1].weight = nn.Parameter(torch.randn(128, 64), requires_grad=False)
    parametrize.replace_parameter_4bit(model[1], "weight", quant_type="nf4")
    _refused_by_all(fully_shard(model, mesh=mesh_over()), "1.parametrizations.weight.original")


def _qlora() -> Any:
    """A causal language model in 4 bits, as ``from_pretrained`` with a quantization makes it, with adapters."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16, llm_int8_skip_modules=[]
    )
    with new_directory() as directory:
        if this_rank() == 0:
            qwen().to(torch.bfloat16).save_pretrained(directory)
        together()
        model = type(qwen()).from_pretrained(directory, quantization_config=config, dtype=torch.bfloat16)
    return adapted(model)


@on_the_device
def test_adapters_over_codes_can_be_had_alone() -> None:
    peft = pytest.importorskip("peft")
    plain = _qlora()
    saved = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(plain).items()}
    model = shard_qwen2(plain)
    assert_same(extracted(model, lora="adapter"), saved)
    _refused_by_all(model)
    factors = {name: torch.zeros(info.shape) for name, info in _factors(model).items()}
    report = load_full_tensors(model, factors, strict=False, dtype="cast")
    assert report.loaded == len(factors) > 0
    assert all(not tensor.any() for tensor in extracted(model, lora="adapter").values())
    codes = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    with raises_soon(UnreadableTensors, codes):
        load_full_tensors(model, {codes: torch.zeros(128, 64)}, strict=False)


def _factors(model: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in model.named_parameters() if ".lora_" in name}


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("odd", tensor)
    return model


def two_tensors() -> nn.Module:
    model = nn.Linear(4, 4)
    model.odd = nn.Parameter(TwoTensor(torch.randn(6, 4), torch.randn(6, 4)))
    return model


def torchao_int8() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Linear(4, 4)
    model.odd = nn.Linear(64, 64, bias=False)
    quantization.quantize_(model.odd, quantization.Int8WeightOnlyConfig())
    return model


FORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wrapper": (two_tensors, "odd"),
    "torchao": (torchao_int8, "odd.weight"),
    "quantized": (lambda: with_buffer(torch.quantize_per_tensor(torch.randn(6), 0.1, 0, torch.qint8)), "odd"),
    "sparse": (lambda: with_buffer(torch.eye(4).to_sparse()), "odd"),
    "nested": (lambda: with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "odd"),
    "conjugated": (lambda: with_buffer(torch.tensor([1 + 2j]).conj()), "odd"),
}


@everywhere
def test_what_is_not_dense_is_refused_by_every_function() -> None:
    for kind, (build, name) in FORMS.items():
        model = build()
        if this_device().type == "cpu" or kind == "wrapper":
            # Not all of these can be moved to a device, and fully_shard does not move what it is to ignore.
            ignored = {p for n, p in model.named_parameters() if n == name} if kind == "torchao" else None
            fully_shard(model, mesh=mesh_over(), ignored_params=ignored)
        _refused_by_all(model, name)
        with raises_soon(UnreadableTensors, name), unchanged(model):
            pass


@everywhere
def test_a_lazy_module_is_refused_by_every_function() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    fully_shard(model[0], mesh=mesh_over())
    _refused_by_all(model, "1.weight", "1.bias")


def float8_model() -> nn.Module:
    """Makes a model whose rows divide by 2 and 3 ranks, as torchao's hook of the gather expects."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 132), nn.Linear(132, 6))
    return float8.convert_to_float8_training(model, config=config)


@everywhere
def test_weights_that_are_gathered_in_float8_are_those_that_train() -> None:
    expected = tensors_of(nn.Sequential(*float8_model()))
    expected = {name: getattr(tensor, "_tensor", tensor) for name, tensor in expected.items()}
    model = fully_shard(float8_model().to(this_device()), mesh=mesh_over())
    assert type(model[1].weight._local_tensor).__name__ == "WeightWithDynamicFloat8CastTensor"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        assert_same(extracted(model), expected)
        assert fingerprint(model) == fingerprint_tensors(expected)
        with unchanged(model), contextlib.suppress(StopIteration):
            next(iter(local_shards(model)))
        assert _saved(model, "model").num_bytes > 0
        assert "unreadable" not in kinds(examine(model))
        load_full_tensors(model, {name: torch.full_like(tensor, 0.5) for name, tensor in expected.items()})
        assert all((tensor == 0.5).all() for tensor in extracted(model).values())
        model(torch.ones(16, 64, device=this_device())).sum().backward()
        optimizer.step()
        expected = {
            name: getattr(parameter.full_tensor(), "_tensor", parameter.full_tensor()).detach().clone()
            for name, parameter in model.named_parameters()
        }
