"""The trainer that each process of an engine has, for learners of all kinds."""

from __future__ import annotations

from typing import Protocol

from fedplat.learner import ArrayLearner
from fedplat.model import Bytes, Parameters
from fedplat.simulation.engines.array_trainer import InProcessArrays
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.tasks import ClientTraining, Contents, LocalResult


class TaskTrainer(Protocol):
    """Trains clients one after the other, on data in the memory of this process."""

    splits_test: bool
    """True if the metrics of test data are the means of those of its parts."""

    def check(self, model: Parameters) -> None:
        """Raise `ModelError` if a model does not fit the learner."""
        ...

    def publish(self, version: int, model: Parameters) -> None:
        """Store a version until it is retired. Raises `ModelError` if it does not fit the learner."""
        ...

    def retire(self, version: int) -> None:
        """Remove a version."""
        ...

    def answer(self, task: ClientTask, contents: Contents, buffer: Bytes | None = None) -> LocalResult:
        """Train or score a client; the update is written to `buffer` if there is one."""
        ...

    def evaluate(self, model: Parameters, start: int = 0, stop: int | None = None) -> dict[str, float]:
        """Score a model on the central test examples [start, stop); returns no metrics without examples."""
        ...


def make_trainer(task: ClientTraining) -> TaskTrainer:
    """Return a trainer for the learner of a task."""
    if isinstance(task.learner, ArrayLearner):
        return InProcessArrays(task)
    from fedplat.simulation.engines.client_trainer import InProcessTrainer

    return InProcessTrainer(task)
