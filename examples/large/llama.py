"""A model of Llama's shape in plain PyTorch, and how it may be divided among ranks.

Its configuration is a file with Hugging Face's names. The parts: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467),
rotary positions (Su et al. 2021, arXiv 2104.09864), attention whose queries share keys and values in groups (Ainslie et
al. 2023, arXiv 2305.13245) and SwiGLU (Shazeer 2020, arXiv 2002.05202), put together as in Touvron et al. 2023, arXiv
2302.13971.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional

from fedplat.pytorch.parallel import ParallelPlan

CONFIG = Path(__file__).resolve().parent / "config.json"
Size = Annotated[int, msgspec.Meta(ge=1)]

PLAN = ParallelPlan(
    tensor={
        "layers.*.input_layernorm": "sequence_parallel",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.post_attention_layernorm": "sequence_parallel",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    stages=("embed_tokens", "layers.*", "norm", "lm_head"),
)
"""Tensor ranks have some of the heads, and some of the inner units of SwiGLU; a pipeline may cut between layers."""


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model, by Hugging Face's names. Other names of such a file do not change the computation."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    max_position_embeddings: Size
    vocab_size: Size
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: Literal[False] = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_scaling: None = None

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size}: expected a multiple of 2 x {self.num_attention_heads} heads, since "
                "rotary positions turn pairs"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads}: expected a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )

    @property
    def head_size(self) -> int:
        """The entries of a query, a key or a value."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """The number of parameters, by formula."""
        kept = self.num_key_value_heads * self.head_size
        attention = 2 * self.hidden_size * (self.hidden_size + kept)  # queries and outputs; keys and values
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size


def read_config(path: Path) -> LlamaConfig:
    """Read a configuration. Raises `ValueError` for sizes that do not fit, and for what this model does not compute."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LlamaConfig)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path}: {exc}") from exc


class RotaryEmbedding(nn.Module):
    """Turns pairs of entries by angles that grow with the position, so that products depend on distances."""

    frequencies: torch.Tensor

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        # No values of the model: every rank computes them itself.
        self.register_buffer("frequencies", theta ** (-torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Turn entry i with entry i + size / 2, as Hugging Face does: [..., positions, size]."""
        positions = torch.arange(values.shape[-2], device=values.device)
        angles = torch.outer(positions, self.frequencies)
        cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
        first, second = values.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several queries share one key and one value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kept = config.num_key_value_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kept, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kept, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = RotaryEmbedding(config.head_size, config.rope_theta)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it: [batch, positions, hidden_size]."""
        queries, keys = (self.rotary(self._heads(part)) for part in (self.q_proj(values), self.k_proj(values)))
        shared = self._heads(self.v_proj(values))
        mixed = functional.scaled_dot_product_attention(queries, keys, shared, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        # The number of heads follows from the width: a tensor rank has some of them.
        return values.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The layer's second half: inner units, each with a gate."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute each position by itself: [batch, positions, hidden_size]."""
        return self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))


class LlamaLayer(nn.Module):
    """Attention and SwiGLU, each after a normalisation and beside a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute one layer: [batch, positions, hidden_size]."""
        values = values + self.self_attn(self.input_layernorm(values))
        return values + self.mlp(self.post_attention_layernorm(values))


class LlamaModel(nn.Module):
    """A language model; its `forward` is fit for a pipeline."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # None in the stages of a pipeline that have other parts.
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_hidden_layers))
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Linear | None = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=config.initializer_range)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token: [batch, positions] to [batch, tokens, positions].

        In a stage of a pipeline, the attributes of other stages are None, and their layers pass values on. One tensor
        goes from stage to stage: [batch, positions, hidden_size].
        """
        if self.embed_tokens is not None:
            values = self.embed_tokens(values)
        for layer in self.layers:
            values = layer(values)
        if self.norm is not None:
            values = self.norm(values)
        if self.lm_head is None:
            return values
        return self.lm_head(values).transpose(1, 2).contiguous()  # a tensor of its own: FSDP's hooks want no view
