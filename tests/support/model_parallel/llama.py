"""A small Llama-shaped language model whose plan divides it in every way."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from fedplat.pytorch.parallel import ParallelPlan

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 40, 32, 4, 4, 12

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


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the width of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.wq(values), self.wk(values), self.wv(values))
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(values)) * self.up(values))


class Block(nn.Module):
    """One layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.ffn, self.dropout = nn.RMSNorm(WIDTH), FeedForward(), nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.dropout(self.attention(self.attention_norm(values)))
        return values + self.ffn(self.ffn_norm(values))


class Llama(nn.Module):
    """Rows of tokens to logits, [batch, vocabulary, sequence] as cross-entropy wants them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(WIDTH)
        self.output: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            values = self.embedding(values)
        for layer in self.layers:
            values = layer(values)
        if self.norm is not None:
            values = self.norm(values)
        return values if self.output is None else self.output(values).transpose(1, 2)


def examples(num_examples: int = 26) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens in which the next one follows from the last two."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (num_examples, LENGTH + 1), generator=generator)
    for place in range(2, LENGTH + 1):
        rows[:, place] = (rows[:, place - 1] + rows[:, place - 2]) % VOCABULARY
    return rows[:, :-1], rows[:, 1:]
