"""An engine without torch: each client fits a line to its own few points, by gradient steps in NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedplat.model import Parameters
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate

NUM_WEIGHTS = 8


class LeastSquares:
    """Trains when it is asked for a result, or at once; results are the same. Remembers each client's last update."""

    def __init__(
        self, num_clients: int, *, eager: bool = False, num_steps: int = 4, diverges: int | None = None
    ) -> None:
        rng = np.random.default_rng(11)
        self._truth = rng.normal(size=NUM_WEIGHTS)
        self._inputs = [rng.normal(size=(5 + client % 7, NUM_WEIGHTS)) for client in range(num_clients)]
        self._eager, self._num_steps, self._diverges = eager, num_steps, diverges
        self._models: dict[int, Parameters] = {}
        self._done: dict[ClientTask, LocalUpdate] = {}
        self._before: dict[ClientTask, Mapping[str, Parameters] | None] = {}
        self._memories: dict[int, Mapping[str, Parameters]] = {}
        self.under_way: set[ClientTask] = set()
        self.calls: Counter[str] = Counter()
        self.widest = 0
        self.scale = 1.0

    @property
    def num_clients(self) -> int:
        return len(self._inputs)

    @property
    def published(self) -> list[int]:
        """The versions that tasks may begin with."""
        return sorted(self._models)

    def num_examples(self, client: int) -> int:
        return len(self._inputs[client])

    def publish(self, version: int, model: Parameters) -> None:
        assert version not in self._models
        self._models[version] = model

    def retire(self, version: int) -> None:
        del self._models[version]

    def begin(self, tasks: Sequence[ClientTask]) -> None:
        assert len({task.client for task in tasks} | {task.client for task in self.under_way}) == len(tasks) + len(
            self.under_way
        ), "a client has two tasks under way"
        self.calls["begun"] += len(tasks)
        self.widest = max(self.widest, len(tasks))
        self.under_way.update(tasks)
        for task in tasks:
            assert task.version in self._models
            if self._eager and not task.scores:
                self._done[task] = self._train(task)

    def result(self, task: ClientTask) -> LocalUpdate:
        self.under_way.remove(task)
        self.calls["scored" if task.scores else "results"] += 1
        if task.scores:
            return LocalUpdate(Parameters.from_arrays({}), 2.0 + task.client, {"distance": self._distance(task)})
        trained = self._done.pop(task, None) or self._train(task)
        self._before[task] = self._memories.get(task.client)
        self._memories[task.client] = {"last": trained.update}
        return trained

    def drop(self, task: ClientTask) -> None:
        self.calls["dropped"] += 1
        self._done.pop(task, None)
        if task in self.under_way:
            self.under_way.remove(task)
            return
        before = self._before.pop(task)
        if before is None:
            del self._memories[task.client]
        else:
            self._memories[task.client] = before

    def client_states(self) -> Mapping[int, Mapping[str, Parameters]]:
        return dict(self._memories)

    def set_client_states(self, client_states: Mapping[int, Mapping[str, Parameters]]) -> None:
        self._memories = dict(client_states)

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        self.calls["evaluations"] += 1
        return {"distance": float(np.linalg.norm(model["weight"] - self._truth))}

    def close(self) -> None:
        pass

    def _distance(self, task: ClientTask) -> float:
        """Of a model that a client has made its own."""
        own, last = self._models[task.version]["weight"], self._memories.get(task.client)
        if last is not None:
            own = own + 0.01 * last["last"]["weight"]
        return float(np.linalg.norm(own - self._truth))

    def _train(self, task: ClientTask) -> LocalUpdate:
        """A part of the last update is added to the first step, so that it shows whether memory is kept."""
        base = self._models[task.version]["weight"].astype(np.float64)
        rng = np.random.default_rng(task.seed)
        weight, inputs = base.copy(), self._inputs[task.client]
        targets = inputs @ self._truth + 0.01 * rng.normal(size=len(inputs))
        last = self._memories.get(task.client)
        if last is not None:
            weight += 0.01 * last["last"]["weight"]
        for _ in range(max(1, int(np.ceil(task.fraction * self._num_steps)))):
            weight -= 0.05 * inputs.T @ (inputs @ weight - targets) / len(inputs)
        if task.client == self._diverges:
            weight[:] = np.nan
        update = Parameters.from_arrays({"weight": (self.scale * (weight - base)).astype(np.float32)})
        loss = float(np.mean((inputs @ weight - targets) ** 2))
        return LocalUpdate(update, float(len(inputs)), {"loss": loss, "fraction": task.fraction})


def initial() -> Parameters:
    """The model of version 0."""
    return Parameters.from_arrays({"weight": np.zeros(NUM_WEIGHTS, np.float32)})
