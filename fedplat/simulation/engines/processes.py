"""Engines that train one client after the other: on one thread of this process, or in persistent worker processes.

Workers are forked, so they start at once, and neither the data nor the user's module is pickled or sent. They receive
tasks from one queue, the longest first, and arrays pass through shared memory in both directions. The module must not
use a GPU, which a forked process cannot share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import override

from fedplat import system
from fedplat.config import user_code
from fedplat.errors import ModelError, UnsuitableEngineError
from fedplat.model import Parameters, Schema
from fedplat.simulation.engines import trainers, worker_pool
from fedplat.simulation.engines.interface import ClientTask, LocalUpdate
from fedplat.simulation.engines.tasks import (
    NO_UPDATE,
    SCORING,
    ClientStates,
    ClientTraining,
    Contents,
    FederationEngine,
    InProcessEngine,
    Versions,
    WorkQueue,
    describe_task,
    make_error,
    num_examples,
)
from fedplat.simulation.engines.trainers import make_trainer
from fedplat.simulation.engines.worker_pool import (
    Arrays,
    Done,
    EngineWorker,
    ForkedWorkers,
    ScoreRequest,
    Shared,
    StateSlot,
    Texts,
    TrainTask,
    serve_requests,
)

_WAITING = 8
"""Queued requests for each worker: enough that no worker is idle while this process is busy, and few, so that a long
task that is begun later still runs before short ones."""


class ProcessEngine(FederationEngine):
    """Trains clients in `num_workers` processes, one thread each; by default one for each core.

    The processes start with the first version. All versions must have its schema. Raises `UnsuitableEngineError` on
    systems other than Linux.
    """

    def __init__(self, task: ClientTraining, num_workers: int | None = None) -> None:
        if not system.has_forked_workers():
            raise UnsuitableEngineError('engine = "processes": its workers need Linux; use "auto" or "loop" here')
        self._federation = task.federation
        self._num_workers = num_workers or system.num_cores()
        self._trainer = trainers.make_trainer(task)
        self._started: tuple[ForkedWorkers, Shared] | None = None
        self._versions = Versions(self._forget)
        self._slots: dict[int, int] = {}
        self._states = ClientStates[StateSlot](self._release)
        self._initial_states: Mapping[int, Contents] = {}
        self._queue = WorkQueue[tuple[TrainTask, Done]](self._versions, self.num_examples)
        self._sent: dict[int, TrainTask | ScoreRequest] = {}
        self._scored: dict[int, tuple[ScoreRequest, Done]] = {}

    @override
    def publish(self, version: int, model: Parameters) -> None:
        """Add a committed version. Raises `ModelError` if its schema differs from the first version's."""
        self._trainer.check(model)
        _, shared = self._start(model.schema)
        self._slots[version] = self._place_model(model, shared)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        self._queue.begin(tasks)
        self._send_tasks()

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Wait for a task. Raises what the training raised, by `make_error`; `EngineError` if a worker has died."""
        while not self._queue.has_answer(task):
            self._receive()
        request, done = self._queue.fetch(task)
        if done.failure is not None or task.scores:
            self._discard(request)
        if done.failure is not None:
            raise done.failure.error()
        if task.scores:
            return LocalUpdate(NO_UPDATE, num_examples(self._federation, task, done.num_examples), done.metrics)
        shared = self._shared
        if done.note is None:
            shared.notes.release(request.after)
        else:
            self._states.put(task, done.note)
        update = Parameters(shared.schema.uploaded, shared.updates.lend(request.update))
        return LocalUpdate(update, num_examples(self._federation, task, done.num_examples), done.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task not in self._queue:
            self._states.undo(task)
        elif answer := self._queue.drop(task):
            self._discard(answer[0])

    @override
    def client_states(self) -> Mapping[int, Contents]:
        if self._started is None:
            return self._initial_states
        notes = self._started[1].notes
        return {client: worker_pool.unpack_state(notes.read(note.slot, note.size)) for client, note in self._states}

    @override
    def set_client_states(self, client_states: Mapping[int, Contents]) -> None:
        self._initial_states = client_states
        if self._started is not None:
            self._place_states(self._started[1])

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        """Score a model on the central test data: each worker a part of it, or one worker all of it.

        The mean of parts is not the value of every metric.
        """
        total = len(self._federation.test_targets)
        if not total:
            return {}
        workers, shared = self._start(model.schema)
        slot = self._place_model(model, shared)
        num_parts = min(len(workers), total) if self._trainer.splits_test else 1
        bounds = np.linspace(0, total, num_parts + 1).astype(int).tolist()
        requests = [ScoreRequest(self._queue.new_number(), slot, *part) for part in itertools.pairwise(bounds)]
        for request in requests:
            self._send(request)
        while not all(request.number in self._scored for request in requests):
            self._receive()
        parts = [self._scored.pop(request.number) for request in requests]
        shared.versions.release(slot)
        return _mean(parts)

    @override
    def close(self) -> None:
        if self._started is not None:
            workers, shared = self._started
            workers.close()
            for slots in (shared.versions, shared.updates, shared.notes):
                slots.close()
            self._started = None

    @property
    def _shared(self) -> Shared:
        assert self._started is not None
        return self._started[1]

    def _start(self, schema: Schema) -> tuple[ForkedWorkers, Shared]:
        if self._started is None:
            shared = Shared(schema, Arrays(schema.size_bytes), Arrays(schema.uploaded.size_bytes), Texts())
            worker = EngineWorker(self._trainer, shared)
            self._started = ForkedWorkers(self._num_workers, functools.partial(serve_requests, worker)), shared
            self._place_states(shared)
        elif difference := schema.difference_from(self._started[1].schema):
            raise ModelError(difference)
        return self._started

    def _place_states(self, shared: Shared) -> None:
        self._states.clear()  # first, so that their slots are free
        notes: dict[int, StateSlot] = {}
        for client, contents in self._initial_states.items():
            slot = shared.notes.acquire()
            notes[client] = StateSlot(slot, shared.notes.write(slot, worker_pool.pack_state(contents)))
        self._states.replace(notes)

    def _release(self, note: StateSlot) -> None:
        self._shared.notes.release(note.slot)

    def _place_model(self, model: Parameters, shared: Shared) -> int:
        slot = shared.versions.acquire()
        shared.versions.array(slot)[:] = model.buffer
        return slot

    def _forget(self, version: int) -> None:
        self._shared.versions.release(self._slots.pop(version))

    def _send_tasks(self) -> None:
        while len(self._sent) < _WAITING * self._num_workers and (drawn := self._queue.draw()):
            number, task = drawn
            shared = self._shared
            self._send(
                TrainTask(
                    number,
                    task.client,
                    task.version,
                    task.seed,
                    task.fraction,
                    self._slots[task.version],
                    shared.updates.acquire(),
                    self._states.begin(task),
                    shared.notes.acquire(),
                    task.scores,
                    task.round_number,
                )
            )

    def _send(self, request: TrainTask | ScoreRequest) -> None:
        assert self._started is not None
        self._sent[request.number] = request
        while not self._started[0].send(request):
            self._receive()

    def _receive(self) -> None:
        assert self._started is not None
        for done in self._started[0].receive():
            request = self._sent.pop(done.number)
            if isinstance(request, ScoreRequest):
                self._scored[done.number] = request, done
            elif not self._queue.put(done.number, (request, done)):
                self._discard(request)
        self._send_tasks()

    def _discard(self, request: TrainTask) -> None:
        self._shared.updates.release(request.update)
        self._shared.notes.release(request.after)


def _mean(parts: list[tuple[ScoreRequest, Done]]) -> dict[str, float]:
    """Average the metrics of parts by their numbers of examples. Raises the error of a part that failed."""
    for _, done in parts:
        if done.failure is not None:
            raise done.failure.error()
    total = sum(request.stop - request.start for request, _ in parts)
    return {
        name: sum(done.metrics[name] * (request.stop - request.start) for request, done in parts) / total
        for name in parts[0][1].metrics
    }


class LoopEngine(InProcessEngine):
    """Trains each client when its result is fetched."""

    def __init__(self, task: ClientTraining) -> None:
        super().__init__()
        self._federation = task.federation
        self._trainer = make_trainer(task)
        self._versions = Versions(self._trainer.retire)
        self._begun: set[ClientTask] = set()

    @override
    def publish(self, version: int, model: Parameters) -> None:
        self._trainer.publish(version, model)

    @override
    def begin(self, tasks: Sequence[ClientTask]) -> None:
        """Record the tasks: those that are dropped before their result is fetched are never computed."""
        for task in tasks:
            self._versions.begin(task)
            self._begun.add(task)

    @override
    def result(self, task: ClientTask) -> LocalUpdate:
        """Train the client, or score the version on it."""
        self._begun.remove(task)
        try:
            outcome = self._trainer.answer(task, self._states.begin(task) or {})
        except BaseException as exc:  # of the owner's code: the error is that of a worker
            if user_code.is_interrupt(exc):
                raise
            raise make_error(describe_task(task), exc) from exc
        finally:
            self._versions.end(task)
        if outcome.contents is not None:
            self._states.put(task, outcome.contents)
        weight = num_examples(self._federation, task, outcome.num_examples)
        return LocalUpdate(outcome.update, weight, outcome.metrics)

    @override
    def drop(self, task: ClientTask) -> None:
        if task in self._begun:
            self._begun.remove(task)
            self._versions.end(task)
        self._states.undo(task)

    @override
    def evaluate(self, model: Parameters) -> Mapping[str, float]:
        try:
            return self._trainer.evaluate(model)
        except BaseException as exc:  # as above
            if user_code.is_interrupt(exc):
                raise
            raise make_error(SCORING, exc) from exc
