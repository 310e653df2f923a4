"""Attention on the meta device as a fused kernel has it: no matrix of all pairs of tokens.

It takes the place of ``scaled_dot_product_attention``, and is an implementation of transformers' own for the models
that have another fused kernel than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# As `attn_implementation` of transformers.
IMPLEMENTATION = "fsdp-doctor-fused"


def register() -> None:
    """With transformers, under IMPLEMENTATION. Such an implementation is given no mask."""
    import transformers

    transformers.AttentionInterface.register(IMPLEMENTATION, _of_transformers)


@contextlib.contextmanager
def in_place_of_torchs() -> Iterator[None]:
    """In its place in torch, because a checkpointed layer runs once more within the backward, where no mode of torch's
    functions is on.
    """
    original = nn.functional.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *_others: object, **_named: object) -> Any:
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]

    nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def _of_transformers(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: object, **_named: object
) -> tuple[Tensor, None]:
    """query, key, value: (sequences, heads, tokens, size); the output has the tokens before the heads."""
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its output and the logarithm of each row's sum; its backward adds up in float32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences, heads, tokens, _ = query.shape
        # The tokens before the heads in memory, so that what joins the heads copies nothing.
        output = query.new_empty(sequences, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _output, sums = ctx.saved_tensors
        added_up, rows = query.new_empty(query.shape, dtype=torch.float32), sums.new_empty(sums.shape)
        made = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        del added_up, rows
        return made
