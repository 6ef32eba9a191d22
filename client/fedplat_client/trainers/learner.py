"""Local training with a learner of any library: what a simulation trains, on a real client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.learner import ArrayLearner, Data, check_config, check_data, config_of_round
from fedplat.randomness import use_seeds
from fedplat_client.task import EvaluateResult, Task, TrainResult

ClientData: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]] | Callable[[Task], Data]
Seed: TypeAlias = int | Callable[[Task], int]


@dataclass(frozen=True, kw_only=True)
class LearnerTrainer:
    """A trainer and an evaluator for a learner, such as one that was simulated before.

    ```python
    trainer = LearnerTrainer(learner=Centroids(), data=(inputs, targets))
    client.add_trainer("digits", trainer)
    client.add_evaluator("digits", trainer.evaluate)
    ```

    Equal seeds, data and tasks give equal bits, if the learner keeps its contract (`fedplat.testing.check_learner`).
    """

    learner: ArrayLearner
    data: ClientData
    """Inputs and targets, or a function that returns them for a task."""
    seed: Seed = 0
    """Seeds all randomness, anew in each round; or a function of the task that returns the seed of its training."""

    def __call__(self, task: Task) -> TrainResult:
        """Train the task's model."""
        data = check_data(self.data(task) if callable(self.data) else self.data)
        metrics = train(self.learner, task, data, self.seed)
        return TrainResult(parameters=task.parameters, num_examples=len(data[1]), metrics=metrics)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Score the task's model on the data, without training."""
        data = check_data(self.data(task) if callable(self.data) else self.data)
        with use_seeds(0):
            metrics = self.learner.evaluate(task.parameters, data)
        return EvaluateResult(num_examples=len(data[1]), metrics=metrics)


def train(
    learner: ArrayLearner, task: Task, data: Any, seed: Seed, *, seeds_itself: bool = False, **options: object
) -> Mapping[str, float]:
    """Train a learner for a task, and return the metrics. Raises `JobFileError` and `Cancelled`.

    A learner that `seeds_itself` seeds the generators of the process, and lets no other thread use them meanwhile.
    """
    check_config(learner, task.config)
    task.progress(0.0)
    config = config_of_round(task.config, task.round)
    number = seed_of(task, seed)
    with contextlib.nullcontext() if seeds_itself else use_seeds(number):
        metrics = learner.train(task.parameters, data, config, number, **options)
    task.progress(1.0)
    return metrics


def seed_of(task: Task, seed: Seed) -> int:
    """Return the seed of a training: a new one for each round and attempt."""
    if callable(seed):
        return seed(task)
    return int(np.random.SeedSequence([seed, task.round, task.attempt]).generate_state(1)[0])
