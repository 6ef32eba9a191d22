"""What the ranks of a layout do: train the small model, and return what they measured."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from fedplat.client_state import ClientState
from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import ParallelTrainee, make_gradients, make_layout
from fedplat.pytorch.training import LocalOptions, MakeOptimizer, StepSchedule, check_examples
from fedplat.pytorch.training.learner import Learner, make_loss
from fedplat.pytorch.training.stepper import StepAlgorithm, Stepper
from support.model_parallel.llama import PLAN, Llama, examples

LEARNER = Learner(model=Llama)


def train(ranks: Ranks, layout: str, options: dict[str, Any] | None = None, precision: str = "fp32") -> dict[str, Any]:
    """Train the model in a layout; return the losses of its steps and the digest of the result on rank 0."""
    place = make_layout(ranks, Parallel.from_text(layout))
    trainee = ParallelTrainee(LEARNER, place, PLAN, precision)  # type: ignore[arg-type]
    model = LEARNER.initial(3)
    trainee.load(model, ClientState())
    table = LocalOptions(learning_rate=0.5, batch_size=13, epochs=5, **(options or {}))
    plan = StepSchedule(num_examples=26, options=table, seed=7)
    data = check_examples(TensorDataset(*examples()), ranks.device)
    gradients = make_gradients(place, 7)
    algorithm = StepAlgorithm(loss=make_loss(LEARNER))
    sgd: MakeOptimizer = lambda values: torch.optim.SGD(values, 0.5)  # noqa: E731
    stepper = Stepper(trainee.parameters(), table, 0.5, algorithm, make_optimizer=sgd)
    losses: list[float] = []
    for scores in gradients.compute_steps(trainee, stepper, plan, data):
        stepper.step()
        losses.append(gradients.sum_scores(scores).means()["loss"])
    trainee.save(model, ClientState())
    elements = sum(local_size(each) for each in trainee.parameters().values())
    digest = hashlib.sha256(model.to_bytes()).hexdigest() if ranks.is_first else ""
    return {"losses": losses, "digest": digest, "elements": elements}


def local_size(tensor: torch.Tensor) -> int:
    """The number of a tensor's entries that this rank has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
