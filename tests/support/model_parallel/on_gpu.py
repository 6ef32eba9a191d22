"""Trainings of a deep model on a GPU, and the memory that they need there."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import ParallelPlan, ParallelTrainee, make_gradients, make_layout
from fedplat.pytorch.training import Learner, LocalOptions, StepSchedule, check_examples
from fedplat.pytorch.training.learner import make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper

WIDTH = 1024
BLOCK_BYTES = 4 * (2 * 4 * WIDTH**2 + 5 * WIDTH)
"""The bytes of the parameters of a block, the unit that is sharded, offloaded and recomputed."""
PLAN = ParallelPlan(stages=("*",))
SEED = 7


def deep(num_blocks: int) -> nn.Module:
    """Return a perceptron with blocks of two layers, and no other parameters."""
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(num_blocks)
    )
    return nn.Sequential(*blocks)


def measure_peaks(ranks: Ranks, layouts: list[str], num_blocks: int, batch_size: int) -> list[int]:
    """Return the bytes of the GPU's memory that three steps of Adam need in each layout."""
    return [measure_peak(ranks, layout, num_blocks, batch_size) for layout in layouts]


def measure_peak(ranks: Ranks, layout: str, num_blocks: int, batch_size: int) -> int:
    """Return the largest size of all tensors together, from before the model to the end of the training."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(ranks, layout, num_blocks, batch_size)
    return torch.cuda.max_memory_allocated() - before


def train(ranks: Ranks, layout: str, num_blocks: int, batch_size: int) -> list[float]:
    """Train for three steps; return their losses."""
    learner = Learner(model=lambda: deep(num_blocks), loss=nn.functional.mse_loss)
    place = make_layout(ranks, Parallel.from_text(layout))
    trainee = ParallelTrainee(learner, place, PLAN)
    trainee.load(learner.initial(3), ClientState())
    options = LocalOptions(learning_rate=1e-4, batch_size=batch_size, epochs=3)
    values = torch.randn(batch_size, WIDTH, generator=torch.Generator().manual_seed(SEED))
    examples = check_examples(TensorDataset(values, values), ranks.device)
    plan = StepSchedule(num_examples=batch_size, options=options, seed=SEED)
    optimizer = torch.optim.Adam(trainee.parameters().values(), lr=1e-4, foreach=False)
    algorithm = StepAlgorithm(loss=make_loss(learner))
    stepper = Stepper(trainee.parameters(), options, 1e-4, algorithm, make_optimizer=lambda _: optimizer)
    gradients = make_gradients(place, SEED)
    losses: list[float] = []
    for scores in gradients.compute_steps(trainee, stepper, plan, examples):
        stepper.step()
        losses.append(gradients.sum_scores(scores).means()["loss"])
    return losses
