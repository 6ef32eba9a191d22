"""Many clients in each operation: for small models, whose steps take longer to launch than to compute."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from typing_extensions import override

from fedplat import client_state, errors
from fedplat.model import Parameters
from fedplat.pytorch.vectorized import batched, layout
from fedplat.simulation.engines.client_trainer import InProcessTrainer, one_thread
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.engines.tasks import ClientStates, ClientTraining, Contents, LocalResult, Versions, num_examples


class VmapEngine(Engine):
    """Trains all waiting tasks of one version together, when the first of their results is fetched.

    `device` is a PyTorch device; by default a GPU if there is one. Raises `EngineError` for a model or training options
    that cannot be vectorized.
    """

    def __init__(self, task: ClientTraining, device: str | None = None) -> None:
        self._federation = task.federation
        self._trainer = InProcessTrainer(task, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            self._cohort_trainer = batched.CohortTrainer(self._trainer.trainee, task.options)
        except layout.UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        self._bases: dict[int, layout.Base] = {}
        self._versions = Versions(self._bases.pop)
        self._states = ClientStates[Contents]()
        self._waiting: dict[int, dict[ClientTask, None]] = defaultdict(dict)
        self._done: dict[ClientTask, LocalResult] = {}

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
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        for task in tasks:
            self._versions.begin(task)
            self._waiting[task.version][task] = None

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Train the client together with other waiting ones, or score it alone."""
        if task.scores:
            del self._waiting[task.version][task]
            contents = self._states.begin(task) or {}
            self._done[task] = self._trainer.score(task, contents, self._bases[task.version].parameters)
        elif task not in self._done:
            self._train(task)
        outcome = self._done.pop(task)
        self._versions.end(task)
        if outcome.contents is not None:
            self._states.put(task, outcome.contents)
        return LocalUpdate(outcome.update, num_examples(self._federation, task), outcome.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._waiting[task.version] or task in self._done:
            self._waiting[task.version].pop(task, None)
            self._done.pop(task, None)
            self._versions.end(task)
        else:
            self._states.undo(task)

    @override
    def client_states(self) -> Mapping[int, Contents]:
        return dict(self._states)

    @override
    def set_client_states(self, client_states: Mapping[int, Contents]) -> None:
        self._states.replace(client_states)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._trainer.evaluate(model)

    @override
    def close(self) -> None:
        pass

    def _train(self, task: ClientTask) -> None:
        """Train a task together with tasks of about its size, so that all end at about the same step."""
        waiting = self._waiting[task.version]
        tasks = sorted(
            (each for each in waiting if not each.scores),
            key=lambda each: (-each.fraction * self.num_examples(each.client), each.client),
        )
        groups = np.array_split(np.arange(len(tasks)), math.ceil(len(tasks) / self.at_once))
        tasks = next(members for group in groups if task in (members := [tasks[index] for index in group]))
        states = [client_state.ClientState(self._states.begin(each)) for each in tasks]
        trainings = [self._trainer.training(each, state) for each, state in zip(tasks, states, strict=True)]
        try:
            with one_thread():
                results = self._cohort_trainer.train(self._bases[task.version], trainings)
        except layout.UnsuitableError as exc:
            raise _unsuitable(exc) from exc
        for each, state, (update, metrics) in zip(tasks, states, results, strict=True):
            del waiting[each]
            self._done[each] = LocalResult(update, metrics, state.contents if state.changed else None)


def _unsuitable(exc: layout.UnsuitableError) -> errors.EngineError:
    return errors.EngineError(f'engine = "vmap": {exc}; use "loop" or "processes"')
