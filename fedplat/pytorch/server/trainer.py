"""The trainer that an operator registers for training on the server's own data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from fedplat import texts
from fedplat.errors import TrainingError
from fedplat.job.pool import ServerLearning
from fedplat.metrics import Metric
from fedplat.pytorch import training
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.parallel import ParallelPlan

Data: TypeAlias = Dataset[Any] | Callable[[], Dataset[Any]]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter], ServerLearning], torch.optim.Optimizer]
Made = TypeVar("Made")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerTrainer:
    """A module and the server's own examples; ordinary PyTorch, like a client's `TorchTrainer`.

    ```python
    trainer = ServerTrainer(model=make_model, data=public_dataset, evaluation=held_out)
    ```

    Each rank calls the functions itself, when it trains or evaluates and not before.
    """

    model: Callable[[], nn.Module]
    """Creates the module; the job's values replace its initial ones."""
    data: Data
    """A map-style dataset of (input, target) pairs, or a function that creates one; the same on every rank."""
    loss: training.Loss = nn.functional.cross_entropy
    """Mean loss of a batch of (output, target)."""
    evaluation: Data | None = None
    """Held-out examples, for `evaluate`."""
    optimizer: MakeOptimizer | None = None
    """Creates an optimizer to replace SGD, from the parameters and the job's table; its learning rates are scaled. In a
    layout the parameters are this rank's own, mostly `DTensor`s, and its state has to have their shapes."""
    metrics: tuple[Metric, ...] = ()
    """Metrics of evaluations, such as `fedplat.metrics.F1()`, besides `loss` and `accuracy`."""
    accuracy: training.Accuracy = "auto"
    """Which answers are correct, see `fedplat.pytorch.training.Learner`."""
    plan: ParallelPlan | None = None
    """The parts of the module that ranks divide, for jobs with `[pool.parallel]`; by default that of the module itself,
    if it is one of Hugging Face's."""

    @property
    def learner(self) -> training.Learner:
        """The module, the loss and the metrics."""
        return training.Learner(model=self.model, loss=self.loss, metrics=self.metrics, accuracy=self.accuracy)


def load_examples(data: Data, device: torch.device) -> training.Examples:
    """Return the examples of a trainer's data. Raises `ValueError` if it has no length or is empty."""
    given: Any = data
    return training.check_examples(given() if training.as_dataset(given) is None else given, device)


def make_on_all_ranks(ranks: Ranks, make: Callable[[], Made], what: str = "the trainer") -> Made:
    """Call `make` on every rank and return its result; if it fails on any rank, raise `TrainingError` on all.

    So a failure of the operator's code, or of a disk, on one rank leaves no other rank waiting. `what` names the result
    in errors.
    """
    made: list[Made] = []
    text = ""
    try:
        made.append(make())
    except Exception as exc:
        _logger.exception("On this rank %s cannot be used.", what)
        text = texts.repair(str(exc)) if isinstance(exc, ValueError) else texts.describe(exc)
    for rank, error in enumerate(ranks.all_gather(text.encode())):
        if error:
            raise TrainingError(f"{what} cannot be used on rank {rank}: {error.decode()}")
    return made[0]
