"""A worker process: it answers requests from the queue that all workers share."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from typing import NamedTuple

from fedplat import texts
from fedplat.config import user_code
from fedplat.model import Parameters, Schema
from fedplat.simulation.engines import malloc, messages
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.messages import Done, ScoreRequest, StateSlot, TrainTask
from fedplat.simulation.engines.shared_memory import Arrays, Texts
from fedplat.simulation.engines.trainers import TaskTrainer


class Shared(NamedTuple):
    """The memory that all processes share: model versions, updates and client states (`notes`)."""

    schema: Schema
    versions: Arrays
    updates: Arrays
    notes: Texts


class EngineWorker:
    """Answers requests with the trainer of this process."""

    def __init__(self, trainer: TaskTrainer, shared: Shared) -> None:
        self._trainer, self._shared = trainer, shared
        self._loaded: dict[int, int] = {}  # versions by slot

    def answer(self, request: TrainTask | ScoreRequest) -> Done:
        """Carry out a request and return the reply; never raises, because a failure is a reply too."""
        try:
            return self._score(request) if isinstance(request, ScoreRequest) else self._train(request)
        except BaseException as exc:  # the process boundary: the parent raises it
            if user_code.is_interrupt(exc):
                raise
            return Done(request.number, failure=texts.describe(exc)[: messages.MAX_FAILURE])

    def _train(self, request: TrainTask) -> Done:
        self._load(request.version, request.base)
        notes, before, note = self._shared.notes, request.before, None
        contents = {} if before is None else messages.unpack_state(notes.read(before.slot, before.size))
        task = ClientTask(
            request.client, request.version, request.seed, request.fraction, request.scores, request.round_number
        )
        outcome = self._trainer.answer(task, contents, self._shared.updates.array(request.update))
        if outcome.contents is not None:
            note = StateSlot(request.after, notes.write(request.after, messages.pack_state(outcome.contents)))
        return Done(request.number, dict(outcome.metrics), note)

    def _load(self, version: int, slot: int) -> None:
        """Read a version at its first use; it replaces the one that was in that slot."""
        before = self._loaded.get(slot)
        if before == version:
            return
        if before is not None:
            self._trainer.retire(before)
        self._trainer.publish(version, Parameters(self._shared.schema, self._shared.versions.array(slot)))
        self._loaded[slot] = version

    def _score(self, request: ScoreRequest) -> Done:
        model = Parameters(self._shared.schema, self._shared.versions.array(request.base))
        return Done(request.number, self._trainer.evaluate(model, request.start, request.stop))


def serve(worker: EngineWorker, queue: socket.socket, answers: socket.socket, current: memoryview) -> None:
    """Answer requests until the queue is closed.

    `current[0]` is the client in training, `IDLE` or `NO_CLIENT`: the parent reads it if this process is killed.
    """
    # The parent decides when to end. This process runs none of the parent's tasks, so it must not handle its signals.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if torch := sys.modules.get("torch"):  # a learner need not use it
        torch.set_num_threads(1)
    malloc.keep_freed_memory()
    gc.freeze()  # else each collection would visit, and so copy, all objects from before the fork
    while content := queue.recv(messages.MAX_BYTES):
        request = messages.requests.decode(content)
        current[0] = request.client if isinstance(request, TrainTask) else NO_CLIENT
        try:
            answers.send(messages.encode(worker.answer(request)))
        except BrokenPipeError:
            return  # the parent has ended
        current[0] = IDLE


IDLE, NO_CLIENT = -1, -2
"""The activity of a worker that trains no client: waiting, or scoring a model."""
