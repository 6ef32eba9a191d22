"""The model of examples/large in a small size, and what tensor ranks do with it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import llama
from fedplat.client_state import ClientState
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import ParallelTrainee, make_layout
from fedplat.pytorch.training.learner import Learner
from support.model_parallel.scenarios import local_size

CONFIG = llama.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    vocab_size=40,
    initializer_range=0.2,  # so that attention is far from uniform
)
LEARNER = Learner(model=lambda: llama.LlamaModel(CONFIG))
STEPS, RATE = 6, 0.1


def make_model() -> llama.LlamaModel:
    """The model with values from a seed."""
    module = LEARNER.make(seed=4)
    assert isinstance(module, llama.LlamaModel)
    return module


def train(ranks: Ranks, layout: str) -> dict[str, Any]:
    """Steps of SGD in a layout."""
    trainee = ParallelTrainee(LEARNER, make_layout(ranks, Parallel.from_text(layout)), llama.PLAN)
    trainee.load(LEARNER.initial(4), ClientState())
    elements = sum(local_size(each) for each in trainee.parameters().values())
    return {"losses": descend(trainee.module), "elements": elements}


def train_alone() -> list[float]:
    """The same steps of the whole module."""
    return descend(make_model())


def descend(module: torch.nn.Module) -> list[float]:
    rows = torch.randint(CONFIG.vocab_size, (5, 13), generator=torch.Generator().manual_seed(6))
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(module(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
