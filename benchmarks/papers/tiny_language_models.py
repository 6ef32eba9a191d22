"""Texts and models of the experiments with tiny language models: Shakespeare's plays as bytes, and a Llama and a GPT-2.

The file `tinyshakespeare.txt` is in the data folder (`FEDPLAT_DATA`). A row has 64 tokens, which are bytes; the target
of each is the next byte. transformers and peft make the models, with random weights: nothing is downloaded.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from typing_extensions import override

from fedplat.errors import MissingExtraError
from fedplat.model import Parameters
from fedplat.pytorch import convert, training
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.simulation import Dataset, Federation
from fedplat.simulation.data.sources import data_folder
from fedplat.simulation.data.sources.common import find_data_file

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens and the next tokens, each int64 [rows, LENGTH]."""

LENGTH = 64
NUM_SPEAKERS, NUM_ROWS, MAX_HELD_OUT = 8, 48, 256
"""The speakers with most lines are the clients; each trains on its first rows, and the next ones are held out."""
BASE_STEPS = 500
BASES = Path("runs/papers/bases")
RANK = 4
TEST_FRACTION = 0.1


class Logits(nn.Module):
    """A causal language model of transformers whose outputs are logits, [rows, tokens, time]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits.transpose(1, 2)


def read_speakers() -> dict[str, bytes]:
    """Return the lines of each speaker, by name. Raises `DataError` without the file."""
    hint = "The text is that of Andrej Karpathy's char-rnn."
    text = find_data_file(data_folder(), "tinyshakespeare.txt", hint).read_text("utf-8")
    found: dict[str, list[str]] = {}
    for speech in text.strip().split("\n\n"):
        name, _, lines = speech.partition(":\n")
        found.setdefault(name, []).append(lines)
    return {name: "\n".join(lines).encode() for name, lines in found.items()}


def find_largest(speakers: dict[str, bytes]) -> list[str]:
    """Return the names of the speakers that are clients, by the number of their bytes."""
    sizes = Counter({name: len(lines) for name, lines in speakers.items()})
    return [name for name, _ in sizes.most_common(NUM_SPEAKERS)]


def cut(text: bytes) -> Rows:
    """Return the rows of a text; the last, shorter one is left out."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int64)
    num_rows = (len(tokens) - 1) // LENGTH
    inputs, targets = tokens[: num_rows * LENGTH], tokens[1 : num_rows * LENGTH + 1]
    return inputs.reshape(-1, LENGTH), targets.reshape(-1, LENGTH)


def federate(first: int = 0, count: int = NUM_SPEAKERS, pooled: bool = False) -> Federation:
    """Return some of the largest speakers as clients, whose lines are in rot13; `pooled`: as one client.

    The central test data are the held-out rows of these speakers.
    """
    speakers = read_speakers()
    names = find_largest(speakers)
    rows = [cut(codecs.encode(speakers[name].decode(), "rot13").encode()) for name in names]
    ends = np.cumsum([len(inputs) for inputs, _ in rows])
    begins = [0, *ends[:-1]]
    parts = [np.arange(begin, begin + NUM_ROWS) for begin in begins]
    held_out = [
        np.arange(begin + NUM_ROWS, min(begin + NUM_ROWS + MAX_HELD_OUT, end))
        for begin, end in zip(begins, ends, strict=True)
    ]
    inputs, targets = (np.concatenate(each) for each in zip(*rows, strict=True))
    chosen = slice(first, first + count)
    parts, held_out, names = parts[chosen], held_out[chosen], names[chosen]
    test = np.concatenate(held_out)
    if pooled:
        parts, held_out, names = [np.concatenate(parts)], [np.concatenate(held_out)], ["all"]
    return Federation(inputs, targets, parts, inputs[test], targets[test], tuple(names), held_out)


def read_plays() -> Dataset:
    """Return all lines, of which the last tenth is the central test data, for models that shift the labels themselves.

    Rows have one token more, which is only predicted, and is the first of the next row.
    """
    inputs, targets = cut(b"\n\n".join(read_speakers().values()))
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    end = round((1 - TEST_FRACTION) * len(rows))
    return Dataset(rows[:end], rows[:end], rows[end:], rows[end:])


def make_llama() -> Any:
    """Return a random Llama of 106,816 parameters."""
    transformers, _ = _load()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=256, max_position_embeddings=128, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def make_gpt2() -> Any:
    """Return a random GPT-2 of 124,672 parameters, without dropout."""
    transformers, _ = _load()
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=2,
        vocab_size=256,
        n_positions=128,
        use_cache=False,
        **without,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def make_adapted() -> Logits:
    """Return the trained base with adapters of rank 4 on its queries and values: 1,792 numbers."""
    _, peft = _load()
    base = make_llama()
    base.load_state_dict(convert.to_torch(load_base()))
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Logits(peft.get_peft_model(base, config))


def make_half_adapted() -> Logits:
    """Return the same with factors A that are not trained: FFA-LoRA (Sun et al. 2024, arXiv 2403.12313)."""
    module = make_adapted()
    for name, value in module.named_parameters():
        if "lora_A" in name:
            value.requires_grad_(False)
    return module


@functools.cache
def load_base() -> Parameters:
    """Return the weights of a Llama that was trained on the lines of all other speakers, and keep them in a file."""
    speakers = read_speakers()
    clients = find_largest(speakers)
    text = b"\n\n".join(lines for name, lines in speakers.items() if name not in clients)
    path = BASES / f"{hashlib.sha256(text).hexdigest()[:16]}-{BASE_STEPS}.safetensors"
    if path.exists():
        return Parameters.from_bytes(path.read_bytes())
    inputs, targets = (torch.from_numpy(each) for each in cut(text))
    learner = Learner(model=lambda: Logits(make_llama()))
    trainee, base = training.Trainee(learner), learner.initial()
    options = LocalOptions(epochs=1, max_steps=BASE_STEPS, batch_size=32, learning_rate=3e-3, optimizer="adamw")
    work = training.LocalTraining(examples=training.TensorExamples(inputs, targets), options=options, seed=0)
    training.train(trainee, base, work)
    found = Parameters.from_arrays({name.removeprefix("model."): value for name, value in base.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_bytes(found.to_bytes())
    whole.replace(path)  # two cells may make the same file at once
    return found


def _load() -> tuple[Any, Any]:
    """Return transformers and peft, whose import takes seconds. Raises `MissingExtraError`."""
    try:
        import peft
        import transformers
    except ImportError as exc:
        raise MissingExtraError(
            f"{exc.name} is not installed; install transformers and peft with: pip install 'fedplat[huggingface]'"
        ) from exc
    return transformers, peft
