"""The engine that all others are compared with: this process, one client after the other, one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedplat.model import Parameters
from fedplat.simulation.engines.client_states import ClientStates
from fedplat.simulation.engines.client_trainer import ClientTraining, Contents, InProcessTrainer, num_examples
from fedplat.simulation.engines.interface import LocalUpdate, Work
from fedplat.simulation.engines.version_refs import Versions


class LoopEngine:
    """Trains each client when its result is asked for."""

    def __init__(self, task: ClientTraining) -> None:
        self._federation = task.federation
        self._resident = InProcessTrainer(task)
        self._versions = Versions(self._resident.retire)
        self._memories = ClientStates[Contents]()
        self._begun: set[Work] = set()

    @property
    def num_clients(self) -> int:
        """Number of clients that have data."""
        return self._federation.num_clients

    def num_examples(self, client: int) -> int:
        """How many examples a client trains on."""
        return self._federation.num_examples(client)

    def publish(self, version: int, model: Parameters) -> None:
        """Makes a committed version known."""
        self._resident.publish(version, model)

    def retire(self, version: int) -> None:
        """No further work begins with this version."""
        self._versions.retire(version)

    def begin(self, works: Sequence[Work]) -> None:
        """Remembers them: what is dropped later need not be computed at all."""
        for work in works:
            self._versions.begin(work)
            self._begun.add(work)

    def result(self, work: Work) -> LocalUpdate:
        """Trains the client, or lets it score."""
        self._begun.remove(work)
        try:
            outcome = self._resident.answer(work, self._memories.begin(work) or {})
        finally:
            self._versions.end(work)
        if outcome.contents is not None:
            self._memories.put(work, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, work), outcome.metrics)

    def drop(self, work: Work) -> None:
        """Forgets what the client remembers of it."""
        if work in self._begun:
            self._begun.remove(work)
            self._versions.end(work)
        self._memories.undo(work)

    def memories(self) -> Mapping[int, Contents]:
        """What clients remember."""
        return dict(self._memories)

    def remember(self, memories: Mapping[int, Contents]) -> None:
        """Replaces what clients remember."""
        self._memories.replace(memories)

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Scores a model on the data that no client has."""
        return self._resident.evaluate(model)

    def close(self) -> None:
        """Nothing: the memory goes with the engine."""
