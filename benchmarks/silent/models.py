"""The model that the programs train: two blocks, each with a buffer that training changes, and experts if requested."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """Experts whose matrices are stacked: one tensor has the same matrix of all experts."""

    def __init__(self, number: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * inner, width) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(number, width, inner) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("bd,eid->ebi", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebi,edi->bd", torch.nn.functional.silu(gate) * up, self.down_proj)


class Block(nn.Module):
    score_bias: torch.Tensor

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.register_buffer("score_bias", torch.zeros(width))
        self.experts = Experts(experts, width, inner) if experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.k_proj(torch.tanh(self.q_proj(self.norm(x)))) + self.score_bias.to(x.dtype)
        if self.experts is not None:
            x = x + self.experts(x)
        if self.training:  # as a router counts its tokens
            self.score_bias.add_(0.125)
        out: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return x + out


class Net(nn.Module):
    def __init__(self, width: int, inner: int, vocabulary: int, experts: int, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner, experts) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits
