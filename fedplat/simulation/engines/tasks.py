"""What engines train: the learner, the data and the options; and the result of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedplat.model import Parameters
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


def num_examples(federation: Federation, task: ClientTask) -> float:
    """Return the number of examples that a task trains on or scores."""
    return float((federation.num_held_out if task.scores else federation.num_examples)(task.client))
