"""The models of `parallel_training.py`: a transformer, and stages that take a fixed time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from fedplat.pytorch.parallel import ParallelPlan

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS, LENGTH = 2048, 512, 1408, 8, 8, 32
PLAN = ParallelPlan(
    tensor={
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise",
        "layers.*.attention.wv": "colwise",
        "layers.*.attention.wo": "rowwise",
        "layers.*.attention_norm": "sequence_parallel",
        "layers.*.ffn.gate": "colwise",
        "layers.*.ffn.up": "colwise",
        "layers.*.ffn.down": "rowwise",
        "layers.*.ffn_norm": "sequence_parallel",
    },
    stages=("embedding", "layers.*", "norm", "output"),
)
SLEEPING_PLAN = ParallelPlan(stages=("layers.*",))


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the outputs of its layers, which ranks may divide."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        projected = (self.wq(values), self.wk(values), self.wv(values))
        heads = [each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in projected]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(values)) * self.up(values))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.ffn = nn.RMSNorm(WIDTH), FeedForward()

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attention(self.attention_norm(values))
        return values + self.ffn(self.ffn_norm(values))


class Transformer(nn.Module):
    """A language model of Llama's shape: rows of tokens to logits, [batch, vocabulary, sequence]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            values = self.embedding(values)
        for layer in self.layers:
            values = layer(values)
        if self.norm is not None:
            values = self.norm(values)
        return values if self.output is None else self.output(values).transpose(1, 2).contiguous()


def make_tokens(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of random tokens, and each token's successor."""
    rows = torch.randint(VOCABULARY, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class _SleepBackward(torch.autograd.Function):
    """Passes values on, and takes a fixed time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingLayer(nn.Module):
    """A layer whose forward pass and both halves of whose backward pass, for inputs and weights, take equal times."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.offset, self.seconds = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1)), seconds

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        if not values.requires_grad:  # the model's inputs: their half of the backward pass would be omitted
            values = values + self.offset
        inputs, weight = (_SleepBackward.apply(each, self.seconds) for each in (values, self.weight))
        return inputs * weight


class SleepingModel(nn.Module):
    """A layer for each stage of a pipeline."""

    def __init__(self, num_stages: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(seconds) for _ in range(num_stages))

    @override
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values
