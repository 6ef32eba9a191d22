"""What a simulation is made of: the driver knows these and no implementation of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fedplat.model import Parameters


class Work(NamedTuple):
    """One client's local training, as an assignment asks for it.

    `client` is its index in the fleet, from 0 on. `version` is the model version that it begins with. `seed` decides
    the order of its batches and all else that is random in it, so that the result does not depend on when, where and
    beside whom it is computed. `fraction` is the part of its local steps that it has time for: 1 but for stragglers
    whose partial work counts. A work that `scores` trains nothing: the client scores the version, with what it
    remembers, on the examples that it keeps from training.
    """

    client: int
    version: int
    seed: int
    fraction: float = 1.0
    scores: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LocalUpdate:
    """What local training gave: the difference from the base version, and what the client reports of it.

    The update of a work that scores has no tensors, and its examples are those that it scored.
    """

    update: Parameters
    num_examples: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


class Engine(Protocol):
    """Trains simulated clients. All engines give the same updates for the same works, to 1e-6.

    The driver publishes a version before any work names it, begins works as soon as it knows that their reports will
    matter, as many at once as it can, and asks for each result once, in any order. A client has at most one work under
    way; what a client remembers between rounds (a control variate, personal layers) is the engine's.
    """

    @property
    def num_clients(self) -> int:
        """Number of clients that have data."""
        ...

    def num_examples(self, client: int) -> int:
        """How many examples a client trains on; known without training, for its time and its weight."""
        ...

    def publish(self, version: int, model: Parameters) -> None:
        """Makes a committed version known; `model` is not changed afterwards."""
        ...

    def retire(self, version: int) -> None:
        """No further work begins with this version."""
        ...

    def begin(self, works: Sequence[Work]) -> None:
        """Begins works, now or when the first result is asked for, together where that is faster."""
        ...

    def result(self, work: Work) -> LocalUpdate:
        """Waits for a work's result and hands it over. Raises what the training raised."""
        ...

    def drop(self, work: Work) -> None:
        """Nobody will ask for this result, or its update was not merged: what the client remembers of it is forgotten.

        What it remembered before counts again. A work is dropped at most once, before or after its result.
        """
        ...

    def memories(self) -> Mapping[int, Mapping[str, Parameters]]:
        """What clients remember between rounds, by client and name; only those that remember something."""
        ...

    def remember(self, memories: Mapping[int, Mapping[str, Parameters]]) -> None:
        """Replaces what clients remember, before any work begins: a run that was stopped goes on."""
        ...

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Scores a model on the data that no client has; empty if there are none."""
        ...

    def close(self) -> None:
        """Ends processes and frees memory."""
        ...
