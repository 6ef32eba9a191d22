"""Many clients in each operation: for small models, of which a step takes longer to begin than to compute."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedplat.client_state import ClientState
from fedplat.errors import EngineError
from fedplat.model import Parameters
from fedplat.pytorch.vectorized.batched import CohortTrainer
from fedplat.pytorch.vectorized.layout import Base, UnsuitableError
from fedplat.simulation.engines.client_states import ClientStates
from fedplat.simulation.engines.client_trainer import (
    ClientTraining,
    Contents,
    InProcessTrainer,
    LocalResult,
    num_examples,
    one_thread,
)
from fedplat.simulation.engines.interface import LocalUpdate, Work
from fedplat.simulation.engines.version_refs import Versions


class VmapEngine:
    """Trains all works that wait for the same version together, when the first of their results is asked for.

    `device` is that of PyTorch; by default a GPU if there is one. Raises `EngineError` for what it cannot do.
    """

    def __init__(self, task: ClientTraining, device: str | None = None) -> None:
        self._federation = task.federation
        self._resident = InProcessTrainer(task, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            self._trainer = CohortTrainer(self._resident.trainee, task.options)
        except UnsuitableError as exc:
            raise _make_refusal(exc) from exc
        self._bases: dict[int, Base] = {}
        self._versions = Versions(self._bases.pop)
        self._memories = ClientStates[Contents]()
        self._waiting: dict[int, dict[Work, None]] = defaultdict(dict)
        self._done: dict[Work, LocalResult] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients that have data."""
        return self._federation.num_clients

    def num_examples(self, client: int) -> int:
        """How many examples a client trains on."""
        return self._federation.num_examples(client)

    @property
    def at_once(self) -> int:
        """Clients that are trained at the same time, at most."""
        return self._trainer.at_once()

    def publish(self, version: int, model: Parameters) -> None:
        """Makes a committed version known."""
        self._resident.check(model)
        self._bases[version] = self._trainer.base(model)

    def retire(self, version: int) -> None:
        """No further work begins with this version."""
        self._versions.retire(version)

    def begin(self, works: Sequence[Work]) -> None:
        """Lets works wait for each other."""
        for work in works:
            self._versions.begin(work)
            self._waiting[work.version][work] = None

    def result(self, work: Work) -> LocalUpdate:
        """Trains the client, and others with it; who scores does so alone."""
        if work.scores:
            self._score(work)
        elif work not in self._done:
            self._train(work)
        outcome = self._done.pop(work)
        self._versions.end(work)
        if outcome.contents is not None:
            self._memories.put(work, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, work), outcome.metrics)

    def drop(self, work: Work) -> None:
        """Forgets a work, or what the client remembers of it."""
        if work in self._waiting[work.version] or work in self._done:
            self._waiting[work.version].pop(work, None)
            self._done.pop(work, None)
            self._versions.end(work)
        else:
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

    def _score(self, work: Work) -> None:
        del self._waiting[work.version][work]
        contents = self._memories.begin(work) or {}
        self._done[work] = self._resident.score(work, contents, self._bases[work.version].parameters)

    def _train(self, work: Work) -> None:
        """Trains a work together with those of like size, so that they end at about the same step."""
        waiting = self._waiting[work.version]
        works = sorted(
            (each for each in waiting if not each.scores),
            key=lambda each: (-each.fraction * self.num_examples(each.client), each.client),
        )
        groups = np.array_split(np.arange(len(works)), math.ceil(len(works) / self.at_once))
        works = next(found for group in groups if work in (found := [works[place] for place in group]))
        memories = [ClientState(self._memories.begin(each)) for each in works]
        trainings = [self._resident.training(each, memory) for each, memory in zip(works, memories, strict=True)]
        try:
            with one_thread():
                found = self._trainer.train(self._bases[work.version], trainings)
        except UnsuitableError as exc:
            raise _make_refusal(exc) from exc
        for each, memory, (update, metrics) in zip(works, memories, found, strict=True):
            del waiting[each]
            self._done[each] = LocalResult(update, metrics, memory.contents if memory.changed else None)


def _make_refusal(exc: UnsuitableError) -> EngineError:
    return EngineError(f'engine = "vmap": {exc}; use "loop" or "processes"')
