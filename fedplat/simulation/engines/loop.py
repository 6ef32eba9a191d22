"""The reference engine: it trains one client after the other, on one thread of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from fedplat.model import Parameters
from fedplat.simulation.engines.client_states import ClientStates
from fedplat.simulation.engines.client_trainer import ClientTraining, Contents, InProcessTrainer, num_examples
from fedplat.simulation.engines.interface import Engine, LocalUpdate, Work
from fedplat.simulation.engines.version_refs import Versions


class LoopEngine(Engine):
    """Trains each client when its result is fetched."""

    def __init__(self, task: ClientTraining) -> None:
        self._federation = task.federation
        self._trainer = InProcessTrainer(task)
        self._versions = Versions(self._trainer.retire)
        self._states = ClientStates[Contents]()
        self._begun: set[Work] = set()

    @property
    @override
    def num_clients(self) -> int:
        return self._federation.num_clients

    @override
    def num_examples(self, client: int) -> int:
        return self._federation.num_examples(client)

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.publish(version, model)

    @override
    def retire(self, version: int) -> None:
        self._versions.retire(version)

    @override
    def begin(self, works: Sequence[Work]) -> None:
        """Record the tasks: those that are dropped before their result is fetched are never computed."""
        for work in works:
            self._versions.begin(work)
            self._begun.add(work)

    @override
    def result(self, work: Work) -> LocalUpdate:
        """Train the client, or score the version on it."""
        self._begun.remove(work)
        try:
            outcome = self._trainer.answer(work, self._states.begin(work) or {})
        finally:
            self._versions.end(work)
        if outcome.contents is not None:
            self._states.put(work, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, work), outcome.metrics)

    @override
    def drop(self, work: Work) -> None:
        if work in self._begun:
            self._begun.remove(work)
            self._versions.end(work)
        self._states.undo(work)

    @override
    def memories(self) -> Mapping[int, Contents]:
        return dict(self._states)

    @override
    def remember(self, memories: Mapping[int, Contents]) -> None:
        self._states.replace(memories)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._trainer.evaluate(model)

    @override
    def close(self) -> None:
        pass
