"""Many clients in each operation: for small models, whose steps take longer to launch than to compute."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

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
from fedplat.simulation.engines.interface import Engine, LocalUpdate, Work
from fedplat.simulation.engines.version_refs import Versions


class VmapEngine(Engine):
    """Trains all waiting tasks of one version together, when the first of their results is fetched.

    `device` is a PyTorch device; by default a GPU if there is one. Raises `EngineError` for a model or training options
    that cannot be vectorized.
    """

    def __init__(self, task: ClientTraining, device: str | None = None) -> None:
        self._federation = task.federation
        self._trainer = InProcessTrainer(task, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            self._cohort_trainer = CohortTrainer(self._trainer.trainee, task.options)
        except UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        self._bases: dict[int, Base] = {}
        self._versions = Versions(self._bases.pop)
        self._states = ClientStates[Contents]()
        self._waiting: dict[int, dict[Work, None]] = defaultdict(dict)
        self._done: dict[Work, LocalResult] = {}

    @property
    @override
    def num_clients(self) -> int:
        return self._federation.num_clients

    @override
    def num_examples(self, client: int) -> int:
        return self._federation.num_examples(client)

    @property
    def at_once(self) -> int:
        """The largest number of clients that are trained at the same time."""
        return self._cohort_trainer.at_once()

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.check(model)
        self._bases[version] = self._cohort_trainer.base(model)

    @override
    def retire(self, version: int) -> None:
        self._versions.retire(version)

    @override
    def begin(self, works: Sequence[Work]) -> None:
        for work in works:
            self._versions.begin(work)
            self._waiting[work.version][work] = None

    @override
    def result(self, work: Work) -> LocalUpdate:
        """Train the client together with other waiting ones, or score it alone."""
        if work.scores:
            self._score(work)
        elif work not in self._done:
            self._train(work)
        outcome = self._done.pop(work)
        self._versions.end(work)
        if outcome.contents is not None:
            self._states.put(work, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, work), outcome.metrics)

    @override
    def drop(self, work: Work) -> None:
        if work in self._waiting[work.version] or work in self._done:
            self._waiting[work.version].pop(work, None)
            self._done.pop(work, None)
            self._versions.end(work)
        else:
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

    def _score(self, work: Work) -> None:
        del self._waiting[work.version][work]
        contents = self._states.begin(work) or {}
        self._done[work] = self._trainer.score(work, contents, self._bases[work.version].parameters)

    def _train(self, work: Work) -> None:
        """Train a task together with tasks of about its size, so that all end at about the same step."""
        waiting = self._waiting[work.version]
        works = sorted(
            (each for each in waiting if not each.scores),
            key=lambda each: (-each.fraction * self.num_examples(each.client), each.client),
        )
        groups = np.array_split(np.arange(len(works)), math.ceil(len(works) / self.at_once))
        works = next(members for group in groups if work in (members := [works[index] for index in group]))
        states = [ClientState(self._states.begin(each)) for each in works]
        trainings = [self._trainer.training(each, state) for each, state in zip(works, states, strict=True)]
        try:
            with one_thread():
                results = self._cohort_trainer.train(self._bases[work.version], trainings)
        except UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        for each, state, (update, metrics) in zip(works, states, results, strict=True):
            del waiting[each]
            self._done[each] = LocalResult(update, metrics, state.contents if state.changed else None)


def _unsuitable(exc: UnsuitableError) -> EngineError:
    return EngineError(f'engine = "vmap": {exc}; use "loop" or "processes"')
