"""Tiny random language models with adapters, and their text, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

NUM_TOKENS, LENGTH = 64, 16


def make_llama(seed: int = 0) -> Any:
    """Return a Llama of 2 layers with width 32, whose weights follow from the seed."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=NUM_TOKENS, max_position_embeddings=64, use_cache=False
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def make_gpt2(seed: int = 0, width: int = 32, num_tokens: int = NUM_TOKENS, num_positions: int = 64) -> Any:
    """Return a GPT-2 of 2 layers, whose layers store their weights transposed and whose embeddings are tied."""
    sizes = {"n_embd": width, "vocab_size": num_tokens, "n_positions": num_positions}
    config = transformers.GPT2Config(**sizes, n_layer=2, n_head=2, use_cache=False, bos_token_id=1)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(config)


def with_adapters(
    base: Any, targets: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = 4, scaling: float = 2.0
) -> Any:
    """Add LoRA to a model; `c_attn` is a layer of GPT-2, which stores its weights transposed."""
    config = LoraConfig(
        r=rank,
        lora_alpha=scaling * rank,  # type: ignore[arg-type]  # any number will do
        target_modules=list(targets),
        fan_in_fan_out="c_attn" in targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def make_adapted() -> Any:
    """Return the Llama with adapters of 896 numbers."""
    return with_adapters(make_llama())


def make_example(numbers: Any, label: Any) -> dict[str, torch.Tensor]:
    """Make a text of some numbers and a class."""
    tokens = torch.from_numpy(np.append(np.abs(10 * np.asarray(numbers)), label).astype(np.int64) % NUM_TOKENS)
    return {"input_ids": tokens, "labels": tokens.clone()}


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that count up by a step of their own, of different lengths, padded with label -100."""

    def __init__(self, num_examples: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        steps, starts = rng.integers(1, 4, num_examples), rng.integers(0, NUM_TOKENS, num_examples)
        self.tokens = torch.from_numpy((starts[:, None] + steps[:, None] * np.arange(LENGTH)) % NUM_TOKENS)
        self.lengths = rng.integers(LENGTH // 2, LENGTH + 1, num_examples).tolist()

    def arrays(self) -> tuple[Any, Any]:
        """The tokens and their labels."""
        examples = [self[index] for index in range(len(self))]
        return tuple(torch.stack([each[name] for each in examples]).numpy() for name in ("input_ids", "labels"))  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.arange(LENGTH) < self.lengths[index]
        tokens = self.tokens[index].where(mask, 0)
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.where(mask, -100)}
