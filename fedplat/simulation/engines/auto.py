"""The engine that measures which other engine is the fastest, by running the first rounds with each of them.

The rounds of a trial count like all others: nothing is computed only to be measured. The engine changes only while no
task is in progress and no client has a state, because each engine stores its own client states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from typing_extensions import override

from fedplat.errors import EngineError
from fedplat.learner import ArrayLearner
from fedplat.model import Parameters
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.engines.loop import LoopEngine
from fedplat.simulation.engines.processes import ProcessEngine
from fedplat.simulation.engines.tasks import ClientTraining, Contents

ROUNDS = 3
"""Rounds of a trial: in the first ones an engine starts, allocates memory and records its operations."""
MIN_TRIAL_S = 0.5
"""Seconds of training after which a trial ends early, at the end of the round."""


@dataclass
class _Candidate:
    """An engine on trial; `best` is its highest throughput in a round, in examples a second."""

    name: str
    make: Callable[[], Engine]
    engine: Engine | None = None
    versions: set[int] = field(default_factory=set[int])
    rounds: int = 0
    seconds: float = 0.0
    best: float = 0.0


class AutoEngine(Engine):
    """Trains with `processes` (with one worker: `loop`), then with `vmap`, and from then on with the faster one.

    `clock` returns seconds. `choice` describes the chosen engine and the measured throughputs, for people.
    """

    def __init__(self, task: ClientTraining, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        first = _Candidate("loop", lambda: LoopEngine(task))
        if num_workers > 1:
            first = _Candidate("processes", lambda: ProcessEngine(task, num_workers))
        self._untried = [first, _Candidate("vmap", lambda: _make_vmap(task))]
        self._tried: list[_Candidate] = []
        self._current, self._clock = self._untried.pop(0), clock
        self._engine = self._current.engine = self._current.make()
        self._models: dict[int, Parameters] = {}
        self._in_progress: dict[ClientTask, None] = {}
        self._spent = self._examples = 0.0
        self.choice = f"{first.name}, to begin with"

    @property
    @override
    def num_clients(self) -> int:
        return self._engine.num_clients

    @override
    def num_examples(self, client: int) -> int:
        return self._engine.num_examples(client)

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._models[version] = model
        self._engine.publish(version, model)
        self._current.versions.add(version)

    @override
    def retire(self, version: int) -> None:
        del self._models[version]
        self._engine.retire(version)
        self._current.versions.discard(version)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Begin tasks, with the next engine if a trial has ended."""
        if not self._in_progress:
            self._end_round()
        self._in_progress |= dict.fromkeys(tasks)
        with self._time():
            self._engine.begin(tasks)

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Wait for a task. If `vmap` turns out not to support it, the engine before computes it."""
        with nullcontext() if task.scores else self._time():  # engines differ in training only
            try:
                trained = self._engine.result(task)
            except EngineError:
                if self._current.name != "vmap" or not self._tried:
                    raise
                self._fall_back()
                trained = self._engine.result(task)
        del self._in_progress[task]
        if not task.scores:
            self._examples += task.fraction * trained.num_examples
        return trained

    @override
    def drop(self, task: ClientTask) -> None:
        self._in_progress.pop(task, None)
        self._engine.drop(task)

    @override
    def client_states(self) -> Mapping[int, Contents]:
        return self._engine.client_states()

    @override
    def set_client_states(self, client_states: Mapping[int, Contents]) -> None:
        self._engine.set_client_states(client_states)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        return self._engine.evaluate(model)

    @override
    def close(self) -> None:
        for candidate in (*self._tried, self._current):
            if candidate.engine is not None:
                candidate.engine.close()
                candidate.engine = None

    @contextmanager
    def _time(self) -> Generator[None]:
        start = self._clock()
        yield
        self._spent += self._clock() - start

    def _end_round(self) -> None:
        current = self._current
        if not self._examples:
            return
        current.rounds += 1
        current.seconds += self._spent
        current.best = max(current.best, self._examples / max(self._spent, 1e-9))
        self._spent = self._examples = 0.0
        is_tried = current.rounds >= ROUNDS or current.seconds >= MIN_TRIAL_S
        if not self._is_decided and is_tried and not self._engine.client_states():
            self._try_next()

    @property
    def _is_decided(self) -> bool:
        return not self._untried and not self._tried

    def _try_next(self) -> None:
        """Change to the next candidate, or to the fastest one when all were tried."""
        self._tried.append(self._current)
        while self._untried:
            candidate = self._untried.pop(0)
            try:
                candidate.engine = candidate.make()
            except EngineError:
                continue  # it does not support this task
            self._use(candidate)
            return
        self._decide()

    def _decide(self) -> None:
        tried, self._tried = sorted(self._tried, key=lambda each: -each.best), []
        self._use(tried[0])
        for other in tried[1:]:
            if other.engine is not None:
                other.engine.close()
        self.choice = ", ".join(f"{each.name} with {each.best:,.0f} examples/s" for each in tried)

    def _fall_back(self) -> None:
        """Return to the engine before `vmap`, with the same tasks."""
        self._use(self._tried[-1])
        self._untried, self._tried = [], []
        self.choice = f"{self._current.name}: vmap does not support this training"
        self._engine.begin(list(self._in_progress))

    def _use(self, candidate: _Candidate) -> None:
        assert candidate.engine is not None
        self._current, self._engine = candidate, candidate.engine
        for version in candidate.versions - self._models.keys():
            self._engine.retire(version)
        for version in self._models.keys() - candidate.versions:
            self._engine.publish(version, self._models[version])
        candidate.versions = set(self._models)


def _make_vmap(task: ClientTraining) -> Engine:
    if isinstance(task.learner, ArrayLearner):
        raise EngineError("only PyTorch modules can be vectorized")
    from fedplat.simulation.engines.vmap import VmapEngine

    engine = VmapEngine(task)
    if engine.at_once < 2:
        raise EngineError("the model is too large to train several copies of it at once")
    return engine
