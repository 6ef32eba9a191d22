"""The model: a language model with low-rank adapters (LoRA), which alone are trained and sent.

`python model.py` writes the digest of the base into job.toml, so that no client trains adapters for another one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from fedplat import Learner
from fedplat import Parameters
from fedplat.pytorch.huggingface import causal_lm
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

BASE = ""
"""The folder of a model of transformers, which all clients have, such as "/models/llama"; "" for a tiny random one."""

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_tokenizer() -> Any:
    """Return the tokenizer of the base; that of the tiny one has a token for each byte."""
    return AutoTokenizer.from_pretrained(BASE, local_files_only=True) if BASE else ByT5Tokenizer(extra_ids=0)


def make_base() -> Any:
    """Return the base, whose weights are the same on all clients."""
    if BASE:
        return AutoModelForCausalLM.from_pretrained(BASE, local_files_only=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(make_tokenizer()), max_position_embeddings=256, initializer_range=0.1, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def make_model() -> Any:
    """Return the base with new adapters, also in the head of a random one, which knows nothing."""
    targets = "all-linear" if BASE else [*LINEAR_LAYERS, "lm_head"]
    return get_peft_model(make_base(), LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def build() -> torch.nn.Module:
    """Return the model as fedplat trains it: its outputs are the logits [batch, tokens, time]."""
    return causal_lm(make_model())


LEARNER = Learner(model=build, share="trained")


def initial() -> Parameters:
    """Return the values that the job begins with: those of the adapters."""
    return LEARNER.initial()


def main() -> None:
    """Write the digest of the base into job.toml."""
    file = Path(__file__).with_name("job.toml")
    digest = LEARNER.base_sha256()
    file.write_text(re.sub('base_sha256 = "[^"]*"', f'base_sha256 = "{digest}"', file.read_text()))
    print(f"job.toml is for the base {digest}")


if __name__ == "__main__":
    main()
