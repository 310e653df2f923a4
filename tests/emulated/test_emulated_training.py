"""Gradients, optimizers and whole models on the emulated device are those of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.emulated_device import DEVICE
from support.emulated_inputs import (
    BF16,
    FLOATS,
    FP16,
    FP32,
    INF,
    Inputs,
    assert_same,
    assert_same_tensor,
    both,
    with_gradients,
)
from torch import Tensor
from torch.nn import functional

BACKWARD: dict[str, Callable[[Inputs, torch.dtype], tuple[Tensor, ...]]] = {
    "linear": lambda t, d: (lambda x, w, b: with_gradients(functional.linear(x, w, b), x, w, b))(
        t.leaf(2, 3, 8, dtype=d), t.leaf(6, 8, dtype=d), t.leaf(6, dtype=d)
    ),
    "matmul": lambda t, d: (lambda x, y: with_gradients(x @ y, x, y))(
        t.leaf(2, 3, 4, dtype=d), t.leaf(2, 4, 5, dtype=d)
    ),
    "embedding": lambda t, d: (lambda w: with_gradients(functional.embedding(t.ints(3, 5), w), w))(
        t.leaf(8, 4, dtype=d)
    ),
    "embedding with padding": lambda t, d: (
        lambda w: with_gradients(functional.embedding(t.ints(30), w, padding_idx=1), w)
    )(t.leaf(8, 4, dtype=d)),
    "silu": lambda t, d: (lambda x: with_gradients(functional.silu(x), x))(t.leaf(3, 9, dtype=d)),
    "softmax": lambda t, d: (lambda x: with_gradients(functional.softmax(x, -1, dtype=FP32).to(d), x))(
        t.leaf(3, 9, dtype=d)
    ),
    "rms norm by hand": lambda t, d: (
        lambda x, w: with_gradients(
            w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(d), x, w
        )
    )(t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d)),
    "rms_norm": lambda t, d: (lambda x, w: with_gradients(functional.rms_norm(x, (8,), w), x, w))(
        t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d)
    ),
    "layer_norm": lambda t, d: (lambda x, w, b: with_gradients(functional.layer_norm(x, (8,), w, b), x, w, b))(
        t.leaf(3, 8, dtype=d), t.leaf(8, dtype=d), t.leaf(8, dtype=d)
    ),
    "cross_entropy": lambda t, d: (lambda x: with_gradients(functional.cross_entropy(x, t.of([1, -100, 3])), x))(
        t.leaf(3, 9, dtype=d)
    ),
    "cross_entropy summed and smoothed": lambda t, d: (
        lambda x: with_gradients(functional.cross_entropy(x, t.ints(3), reduction="sum", label_smoothing=0.1), x)
    )(t.leaf(3, 9, dtype=d)),
    "index": lambda t, d: (lambda x: with_gradients(x[t.ints(20)], x))(t.leaf(8, 4, dtype=d)),
    "gather": lambda t, d: (lambda x: with_gradients(x.gather(1, t.ints(4, 3)), x))(t.leaf(4, 8, dtype=d)),
    "index_add": lambda t, d: (lambda x, y: with_gradients(x.index_add(0, t.ints(5), y), x, y))(
        t.leaf(8, 4, dtype=d), t.leaf(5, 4, dtype=d)
    ),
    "topk": lambda t, d: (lambda x: with_gradients(x.topk(3).values, x))(t.leaf(6, 8, dtype=d)),
    "cat and split": lambda t, d: (lambda x, y: with_gradients(torch.cat([y, x]).split([1, 4])[1], x, y))(
        t.leaf(3, 2, dtype=d), t.leaf(2, 2, dtype=d)
    ),
    "as_strided": lambda t, d: (lambda x: with_gradients(x.as_strided((3, 3), (1, 1)), x))(t.leaf(8, dtype=d)),
    "expand": lambda t, d: (lambda x: with_gradients(x.expand(4, 3) * 2, x))(t.leaf(1, 3, dtype=d)),
    "where": lambda t, d: (lambda x, y: with_gradients(torch.where(t.bools(3, 4), x, y), x, y))(
        t.leaf(3, 4, dtype=d), t.leaf(4, dtype=d)
    ),
    "cumsum": lambda t, d: (lambda x: with_gradients(x.cumsum(-1), x))(t.leaf(3, 4, dtype=d)),
    "norm": lambda t, d: (lambda x: with_gradients(torch.linalg.vector_norm(x, dim=-1), x))(t.leaf(3, 4, dtype=d)),
    "cast": lambda t, d: (lambda x: with_gradients(x.to(d).float(), x))(t.leaf(3, 4)),
    "conv1d depthwise and causal": lambda t, d: (
        lambda x, w, b: with_gradients(functional.conv1d(x, w, b, padding=3, groups=6)[..., :9], x, w, b)
    )(t.leaf(2, 6, 9, dtype=d), t.leaf(6, 1, 4, dtype=d), t.leaf(6, dtype=d)),
    "conv1d of a transposed": lambda t, d: (
        lambda x, w: with_gradients(functional.silu(functional.conv1d(x.transpose(1, 2), w, groups=6)), x, w)
    )(t.leaf(2, 9, 6, dtype=d), t.leaf(6, 1, 4, dtype=d)),
}


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "bool mask": {"mask": torch.bool},
    "float mask": {"mask": FP32},
    "grouped": {"kv_heads": 2, "enable_gqa": True},
    "grouped and causal": {"kv_heads": 2, "enable_gqa": True, "is_causal": True},
    "own scale": {"scale": 0.3},
    "longer keys": {"keys": 11},
    "longer keys and bool mask": {"keys": 11, "mask": torch.bool},
    "long": {"queries": 70, "keys": 70, "is_causal": True},
}


@pytest.mark.parametrize("compute", BACKWARD.values(), ids=BACKWARD)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_those_of_the_cpu(compute: Callable[..., Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: compute(t, dtype)))


def attend(
    t: Inputs,
    dtype: torch.dtype,
    queries: int = 7,
    keys: int = 7,
    kv_heads: int = 4,
    mask: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    query = t.leaf(2, 4, queries, 16, dtype=dtype)
    key, value = t.leaf(2, kv_heads, keys, 16, dtype=dtype), t.leaf(2, kv_heads, keys, 16, dtype=dtype)
    allowed = torch.ones(queries, keys).tril().bool()
    added = torch.zeros(queries, keys).masked_fill(~allowed, -INF)
    if mask is not None:
        options["attn_mask"] = (allowed if mask == torch.bool else added.to(dtype)).to(t.device)
    return with_gradients(functional.scaled_dot_product_attention(query, key, value, **options), query, key, value)


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_and_its_gradients_are_those_of_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: attend(t, dtype, **options)))


def test_attention_with_a_mask_that_wants_a_gradient_is_that_of_the_cpu() -> None:
    def op(t: Inputs) -> tuple[Tensor, ...]:
        query, mask = t.leaf(1, 2, 5, 8), t.leaf(5, 5)
        return with_gradients(
            functional.scaled_dot_product_attention(query, t(1, 2, 5, 8), t(1, 2, 5, 8), mask), query, mask
        )

    assert_same(*both(op))


def test_attention_under_no_grad_is_that_of_the_cpu() -> None:
    def op(t: Inputs) -> Tensor:
        with torch.no_grad():
            return functional.scaled_dot_product_attention(t(1, 2, 5, 8), t(1, 2, 5, 8), t(1, 2, 5, 8), is_causal=True)

    assert_same(*both(op))


def test_attention_with_dropout_is_reproducible() -> None:
    x = Inputs(DEVICE)(1, 2, 5, 8)
    torch.manual_seed(1)
    first = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "amsgrad": {"foreach": True, "amsgrad": True},
    "maximize": {"foreach": True, "maximize": True},
    "tensor lr": {"foreach": False, "lr": torch.tensor(0.01)},
}


def trained(t: Inputs, dtype: torch.dtype, options: dict[str, Any], steps: int = 3) -> list[Any]:
    parameters = [torch.nn.Parameter(x) for x in t.list((5, 4), (7,), (), dtype=dtype)]
    optimizer = torch.optim.AdamW(parameters, **{"lr": 0.01, "weight_decay": 0.1, **options})
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = t(*parameter.shape, dtype=dtype)
        optimizer.step()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return [parameter.detach() for parameter in parameters] + states


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_adamw_updates_to_the_bits_of_the_cpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same(*both(lambda t: trained(t, dtype, options)))


def test_adamw_chooses_foreach_for_the_device() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameters = [torch.nn.Parameter(torch.ones(2, device=DEVICE))]
    assert _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False) == (False, True)


@pytest.mark.parametrize("foreach", [None, True, False], ids=["default", "foreach", "for-loop"])
@pytest.mark.parametrize("norm_type", [2.0, INF], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_clipped_gradients_are_those_of_the_cpu(foreach: bool | None, norm_type: float, dtype: torch.dtype) -> None:
    def op(t: Inputs) -> list[Tensor]:
        parameters = [torch.nn.Parameter(x) for x in t.list((5, 4), (7,), (30,), dtype=dtype)]
        for parameter in parameters:
            parameter.grad = t(*parameter.shape, dtype=dtype)
        # The CPU's default is the loop, an accelerator's is foreach.
        own = foreach if foreach is not None else (None if t.device == DEVICE else True)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type, foreach=own)
        return [norm, *(parameter.grad for parameter in parameters if parameter.grad is not None)]

    assert_same(*both(op))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype) -> None:
    def op(t: Inputs) -> tuple[Tensor, ...]:
        x, w = t.leaf(3, 4), t.leaf(4, 5)
        with torch.autocast(t.device, dtype=dtype):
            y = x @ w
        return with_gradients(y, x, w)

    assert_same(*both(op))


# Whole models


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3 tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3.5": ("Qwen3_5TextConfig", LINEAR_ATTENTION),
}


def model_of(name: str, attention: str, dtype: torch.dtype) -> torch.nn.Module:
    config_name, options = MODELS[name]
    config = getattr(transformers, config_name, None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(
        config(**SMALL, **options), attn_implementation=attention, dtype=dtype
    )
    return made.train()


def one_step(model: torch.nn.Module, device: str) -> dict[str, Tensor]:
    model = copy.deepcopy(model).to(device)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    weights = {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **gradients, "norm": norm, **weights}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_a_model_is_that_of_the_cpu(name: str, attention: str, dtype: torch.dtype) -> None:
    model = model_of(name, attention, dtype)
    there, here = one_step(model, DEVICE), one_step(model, "cpu")
    assert there.keys() == here.keys()
    assert sum(key.startswith("gradient") for key in there) >= 20
    for key in there:
        assert_same_tensor(there[key], here[key], key)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_batch_is_that_of_the_cpu(attention: str) -> None:
    model = model_of("qwen3", attention, FP32)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    here = model(input_ids=tokens, attention_mask=mask).logits.detach()
    there = model.to(DEVICE)(input_ids=tokens.to(DEVICE), attention_mask=mask.to(DEVICE)).logits.detach()
    assert_same_tensor(there, here)


def test_a_model_generates_the_tokens_of_the_cpu() -> None:
    model = model_of("qwen3", "sdpa", FP32).eval()
    tokens = torch.randint(0, 128, (1, 5), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    here = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    there = model.to(DEVICE).generate(tokens.to(DEVICE), attention_mask=torch.ones_like(tokens).to(DEVICE), **options)
    assert there.tolist() == here.tolist()
