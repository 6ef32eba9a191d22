"""What engines train: the learner, the data and the options; and the trainer that each of their processes has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fedplat.learner import ArrayLearner
from fedplat.model import Bytes, Parameters
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.interface import ClientTask

Contents = Mapping[str, Parameters]
"""A client state: parameters by name, as in `ClientState`."""
NO_UPDATE = Parameters.from_arrays({})
"""The update of a task that scores."""


class LocalResult(NamedTuple):
    """The result of a task; `contents` is the new client state, or None if it did not change."""

    update: Parameters
    metrics: Mapping[str, float]
    contents: Contents | None


class ClientTraining(NamedTuple):
    """The learner, the data and the options of local training.

    For a `fedplat.pytorch.training.Learner` the options are `LocalOptions`; for an `ArrayLearner` a job's `[config]`.
    """

    federation: Federation
    learner: Any
    options: Any
    seed: int = 0
    """The seed of the initial values of clients' personal layers."""


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
        from fedplat.simulation.engines.array_trainer import InProcessArrays

        return InProcessArrays(task)
    from fedplat.simulation.engines.client_trainer import InProcessTrainer

    return InProcessTrainer(task)


def num_examples(federation: Federation, task: ClientTask) -> float:
    """Return the number of examples that a task trains on or scores."""
    return float((federation.num_held_out if task.scores else federation.num_examples)(task.client))
