"""Which engine computes a task fastest, found by letting each compute the first rounds.

Nothing is computed only to be measured: the rounds of a trial count like all others. An engine is changed while no
work is under way, and only where clients remember nothing from round to round: that stays with its engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from fedplat.errors import EngineError
from fedplat.model import Parameters
from fedplat.simulation.engines.client_trainer import ClientTraining, Contents
from fedplat.simulation.engines.interface import Engine, LocalUpdate, Work
from fedplat.simulation.engines.loop import LoopEngine
from fedplat.simulation.engines.processes import ProcessEngine
from fedplat.simulation.engines.vmap import VmapEngine

ROUNDS = 3
"""Of a trial: the first ones make an engine start, allocate and record."""
MIN_TRIAL_S = 0.5
"""Seconds after which a trial ends with the round."""


@dataclass
class _Candidate:
    """An engine on trial. `best` is the most examples a second in one of its rounds."""

    name: str
    make: Callable[[], Engine]
    engine: Engine | None = None
    versions: set[int] = field(default_factory=set[int])
    rounds: int = 0
    seconds: float = 0.0
    best: float = 0.0


class AutoEngine:
    """Trains with `processes` (with one worker: `loop`), then with `vmap`, and from then on with the faster one.

    `clock` tells seconds. `choice` says what was chosen, and why.
    """

    def __init__(self, task: ClientTraining, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        first = _Candidate("loop", lambda: LoopEngine(task))
        if num_workers > 1:
            first = _Candidate("processes", lambda: ProcessEngine(task, num_workers))
        self._open = [first, _Candidate("vmap", lambda: _vmap(task))]
        self._tried: list[_Candidate] = []
        self._current, self._clock = self._open.pop(0), clock
        self._engine = self._current.engine = self._current.make()
        self._models: dict[int, Parameters] = {}
        self._under_way: dict[Work, None] = {}
        self._spent = self._examples = 0.0
        self.choice = f"{first.name}, to begin with"

    @property
    def num_clients(self) -> int:
        """Number of clients that have data."""
        return self._engine.num_clients

    def num_examples(self, client: int) -> int:
        """How many examples a client trains on."""
        return self._engine.num_examples(client)

    def publish(self, version: int, model: Parameters) -> None:
        """Makes a committed version known."""
        self._models[version] = model
        self._engine.publish(version, model)
        self._current.versions.add(version)

    def retire(self, version: int) -> None:
        """No further work begins with this version."""
        del self._models[version]
        self._engine.retire(version)
        self._current.versions.discard(version)

    def begin(self, works: Sequence[Work]) -> None:
        """Begins works, with the next engine if it is time for that."""
        if not self._under_way:
            self._end_of_round()
        self._under_way |= dict.fromkeys(works)
        with self._time():
            self._engine.begin(works)

    def result(self, work: Work) -> LocalUpdate:
        """Waits for a work's result."""
        with nullcontext() if work.scores else self._time():  # engines differ in training
            try:
                trained = self._engine.result(work)
            except EngineError:
                if self._current.name != "vmap" or not self._tried:
                    raise
                self._give_up()
                trained = self._engine.result(work)
        del self._under_way[work]
        if not work.scores:
            self._examples += work.fraction * trained.num_examples
        return trained

    def drop(self, work: Work) -> None:
        """Nobody will ask for this result, or its update was not merged."""
        self._under_way.pop(work, None)
        self._engine.drop(work)

    def memories(self) -> Mapping[int, Contents]:
        """What clients remember."""
        return self._engine.memories()

    def remember(self, memories: Mapping[int, Contents]) -> None:
        """Replaces what clients remember."""
        self._engine.remember(memories)

    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Scores a model on the data that no client has."""
        return self._engine.evaluate(model)

    def close(self) -> None:
        """Ends all engines that were tried."""
        for candidate in (*self._tried, self._current):
            if candidate.engine is not None:
                candidate.engine.close()
                candidate.engine = None

    @contextmanager
    def _time(self) -> Generator[None]:
        start = self._clock()
        yield
        self._spent += self._clock() - start

    def _end_of_round(self) -> None:
        current = self._current
        if not self._examples:
            return
        current.rounds += 1
        current.seconds += self._spent
        current.best = max(current.best, self._examples / max(self._spent, 1e-9))
        self._spent = self._examples = 0.0
        is_tried = current.rounds >= ROUNDS or current.seconds >= MIN_TRIAL_S
        if not self._is_decided and is_tried and not self._engine.memories():
            self._next()

    @property
    def _is_decided(self) -> bool:
        return not self._open and not self._tried

    def _next(self) -> None:
        """Goes on with the next candidate, or with the best when all were tried."""
        self._tried.append(self._current)
        while self._open:
            candidate = self._open.pop(0)
            try:
                candidate.engine = candidate.make()
            except EngineError:
                continue  # it cannot do this task
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

    def _give_up(self) -> None:
        """`vmap` turned out not to be able to do it: goes on with the engine before, and with the same works."""
        self._use(self._tried[-1])
        self._open, self._tried = [], []
        self.choice = f"{self._current.name}: vmap cannot do it"
        self._engine.begin(list(self._under_way))

    def _use(self, candidate: _Candidate) -> None:
        assert candidate.engine is not None
        self._current, self._engine = candidate, candidate.engine
        for version in candidate.versions - self._models.keys():
            self._engine.retire(version)
        for version in self._models.keys() - candidate.versions:
            self._engine.publish(version, self._models[version])
        candidate.versions = set(self._models)


def _vmap(task: ClientTraining) -> Engine:
    engine = VmapEngine(task)
    if engine.at_once < 2:
        raise EngineError("the model is too large to train several of it at once")
    return engine
