"""The engine that measures which other engine is the fastest, by running some rounds with each of them.

The rounds of a trial count like all others: nothing is computed only to be measured. A study begins in this process,
where nothing has to start. Another engine is tried when its start costs little compared with the time spent so far, so
a small study never waits for processes or for the vectorization of its model. A task is completed by the engine that
began it. The states of clients are stored by their engine: they can move only while no task is in progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from typing_extensions import override

from fedplat import errors, learner, system
from fedplat.model import Parameters
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate
from fedplat.simulation.engines.processes import LoopEngine, ProcessEngine
from fedplat.simulation.engines.tasks import ClientTraining, Contents

ROUNDS = 3
"""Rounds of a trial: in the first ones an engine starts, allocates memory and records its operations."""
MIN_TRIAL_S = 0.5
"""Seconds of training after which a trial ends early, at the end of the round."""
PROCESSES_AFTER_S = 5.0
VMAP_AFTER_S = 15.0
"""Seconds of training before `processes` and `vmap` are tried: ten times what their start costs."""


@dataclass(eq=False)
class _Candidate:
    """An engine, tried after `after_s` seconds; `best` is its highest throughput in a round, in examples a second."""

    name: str
    make: Callable[[], Engine]
    after_s: float = 0.0
    engine: Engine | None = None
    versions: set[int] = field(default_factory=set[int])
    rounds: int = 0
    seconds: float = 0.0
    best: float = 0.0
    spent: float = 0.0
    examples: float = 0.0
    results: int = 0

    @property
    def is_tried(self) -> bool:
        """True if its throughput is known."""
        return self.rounds >= ROUNDS or self.seconds >= MIN_TRIAL_S

    def end_round(self) -> None:
        """Measure the throughput since the last call."""
        self.rounds += 1
        self.seconds += self.spent
        self.best = max(self.best, self.examples / max(self.spent, 1e-9))
        self.spent = self.examples = 0.0
        self.results = 0


class AutoEngine(Engine):
    """Trains with `loop`, then perhaps with `processes` and with `vmap`, and from then on with the fastest one.

    `clock` returns seconds. `choice` describes the chosen engine and the measured throughputs, for people.
    """

    def __init__(self, task: ClientTraining, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._current = _Candidate("loop", lambda: LoopEngine(task))
        self._untried = [_Candidate("vmap", lambda: _make_vmap(task), VMAP_AFTER_S)]
        if num_workers > 1 and system.has_forked_workers():
            self._untried.insert(
                0, _Candidate("processes", lambda: ProcessEngine(task, num_workers), PROCESSES_AFTER_S)
            )
        self._started, self._clock = [self._current], clock
        self._engine = self._current.engine = self._current.make()
        self._models: dict[int, Parameters] = {}
        self._in_progress: dict[ClientTask, _Candidate] = {}
        self._is_decided = False
        self._total_s = 0.0
        self.choice = self._current.name

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
        for candidate in self._started:
            if candidate.engine is not None and version in candidate.versions:
                candidate.engine.retire(version)
                candidate.versions.discard(version)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Begin tasks, with another engine if a trial is due or has ended."""
        self._end_round()
        self._in_progress |= dict.fromkeys(tasks, self._current)
        with self._time(self._current):
            self._engine.begin(tasks)

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Wait for a task. If `vmap` turns out not to support it, `loop` computes it."""
        candidate = self._in_progress[task]
        try:
            trained = self._fetch(task, candidate)
        except errors.EngineError:
            if candidate.name != "vmap" or candidate.rounds:
                raise
            candidate = self._fall_back(candidate)
            trained = self._fetch(task, candidate)
        self._leave(task)
        if not task.scores:
            candidate.examples += task.fraction * trained.num_examples
            candidate.results += 1
        return trained

    @override
    def drop(self, task: ClientTask) -> None:
        engine = self._in_progress.get(task, self._current).engine
        assert engine is not None
        engine.drop(task)
        self._leave(task)

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
        for candidate in self._started:
            _close(candidate)

    def _fetch(self, task: ClientTask, candidate: _Candidate) -> LocalUpdate:
        assert candidate.engine is not None
        if task.scores:  # engines differ in training only
            return candidate.engine.result(task)
        with self._time(candidate):
            return candidate.engine.result(task)

    def _leave(self, task: ClientTask) -> None:
        """Forget a task, and close an engine that has lost the trial after its last one."""
        candidate = self._in_progress.pop(task, self._current)
        if self._is_decided and candidate is not self._current and candidate not in self._in_progress.values():
            _close(candidate)

    @contextmanager
    def _time(self, candidate: _Candidate) -> Generator[None]:
        start = self._clock()
        yield
        seconds = self._clock() - start
        candidate.spent += seconds
        self._total_s += seconds

    def _end_round(self) -> None:
        """Measure the current engine, and change to another one if it is time to."""
        current = self._current
        if self._is_decided or not current.results:
            return
        if self._in_progress and (current.spent < MIN_TRIAL_S or current.results < len(self._in_progress)):
            return  # some client always trains: a round is as many results as there are tasks in progress
        current.end_round()
        if not current.is_tried:
            return
        if states := current.engine.client_states() if current.engine is not None else {}:
            self._move(states)
            return
        while self._untried and self._total_s >= self._untried[0].after_s:
            if self._start(self._untried.pop(0)):
                return
        fastest = max(self._started, key=lambda each: each.best)
        if fastest is not current:
            self._use(fastest)
        if not self._untried:
            self._decide()

    def _start(self, candidate: _Candidate) -> bool:
        """Change to an engine that was not tried yet; return False if it does not support this training."""
        try:
            candidate.engine = candidate.make()
        except errors.EngineError:
            return False
        self._started.append(candidate)
        self._use(candidate)
        return True

    def _move(self, states: Mapping[int, Contents]) -> None:
        """Change to processes with the states of clients, which only then can be trained by several at once."""
        if self._in_progress or self._total_s < PROCESSES_AFTER_S:
            return
        if self._untried[0].name == "processes" and self._start(self._untried[0]):
            self._engine.set_client_states(states)
        self._decide()

    def _decide(self) -> None:
        self._untried, self._is_decided = [], True
        busy = {*self._in_progress.values(), self._current}
        for other in self._started:
            if other not in busy:
                _close(other)
        tried = sorted(self._started, key=lambda each: (each is not self._current, -each.best))
        self.choice = ", ".join(
            each.name + (f" with {each.best:,.0f} examples/s" if each.rounds else "") for each in tried
        )

    def _fall_back(self, failed: _Candidate) -> _Candidate:
        """Return to the fastest engine before `vmap`, with the tasks that this one had begun."""
        self._started.remove(failed)
        self._use(max(self._started, key=lambda each: each.best))
        tasks = [task for task, candidate in self._in_progress.items() if candidate is failed]
        self._in_progress |= dict.fromkeys(tasks, self._current)
        self._decide()
        _close(failed)
        self.choice = f"{self._current.name}: vmap does not support this training"
        self._engine.begin(tasks)
        return self._current

    def _use(self, candidate: _Candidate) -> None:
        assert candidate.engine is not None
        self._current, self._engine = candidate, candidate.engine
        for version in self._models.keys() - candidate.versions:
            self._engine.publish(version, self._models[version])
        candidate.versions = set(self._models)


def _close(candidate: _Candidate) -> None:
    if candidate.engine is not None:
        candidate.engine.close()
        candidate.engine = None


def _make_vmap(task: ClientTraining) -> Engine:
    if isinstance(task.learner, learner.ArrayLearner):
        raise errors.EngineError("only PyTorch modules can be vectorized")
    from fedplat.simulation.engines.client_trainer import VmapEngine

    engine = VmapEngine(task)
    if engine.at_once < 2:
        raise errors.EngineError("the model is too large to train several copies of it at once")
    return engine
