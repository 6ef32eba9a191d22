"""A random Llama with LoRA adapters, which several parts train."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from gpu.lines import Setting
from processes import NotInstalledError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
LARGE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
"""0.7 B parameters, 1.4 GB in bfloat16."""


class CausalModel(nn.Module):
    """A causal language model whose outputs are logits, [batch, vocabulary, time]."""

    def __init__(self, setting: Setting) -> None:
        """Draw the weights: float32 and tiny if the setting is small, otherwise bfloat16."""
        super().__init__()
        transformers, peft = _load("transformers"), _load("peft")
        sizes = SMALL if setting.is_small else LARGE
        self.num_tokens = sizes["vocab_size"]
        torch.manual_seed(0)
        special = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.LlamaConfig(**sizes, **special, max_position_embeddings=1024)
        with setting.device:
            base = transformers.LlamaForCausalLM(config)
        if not setting.is_small:
            base = base.to(torch.bfloat16)
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model: Any = peft.get_peft_model(base, adapters)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits.transpose(1, 2)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The adapters."""
        return [each for each in self.parameters() if each.requires_grad]


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise NotInstalledError(
            f"a language model with adapters needs transformers and peft, and {name} is not installed; install both in "
            "an environment of this program, as docs/contributing.md describes"
        ) from exc
