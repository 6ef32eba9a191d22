"""A worker process: takes requests from the queue that all workers share, and answers with what came of them."""

from __future__ import annotations

import gc
import signal
import socket
from typing import NamedTuple

import torch

from fedplat.model import Parameters, Schema
from fedplat.simulation.engines import malloc, messages
from fedplat.simulation.engines.client_trainer import InProcessTrainer
from fedplat.simulation.engines.interface import Work
from fedplat.simulation.engines.messages import Done, Note, ScoreRequest, TrainTask
from fedplat.simulation.engines.shared_memory import Arrays, Texts


class Shared(NamedTuple):
    """The memory that processes have in common: model versions, updates, and what clients remember."""

    schema: Schema
    versions: Arrays
    updates: Arrays
    notes: Texts


class EngineWorker:
    """Answers requests with what is resident."""

    def __init__(self, resident: InProcessTrainer, shared: Shared) -> None:
        self._resident, self._shared = resident, shared
        self._known: dict[int, int] = {}

    def answer(self, request: TrainTask | ScoreRequest) -> Done:
        """What came of a request; never raises."""
        try:
            return self._score(request) if isinstance(request, ScoreRequest) else self._train(request)
        except Exception as exc:  # the boundary of the process: the parent raises it
            return Done(request.number, failure=f"{type(exc).__name__}: {exc}"[: messages.MAX_FAILURE])

    def _train(self, request: TrainTask) -> Done:
        self._know(request.version, request.base)
        notes, before, note = self._shared.notes, request.before, None
        contents = {} if before is None else messages.unpack_state(notes.read(before.slot, before.size))
        work = Work(request.client, request.version, request.seed, request.fraction, request.scores)
        outcome = self._resident.answer(work, contents, self._shared.updates.array(request.update))
        if outcome.contents is not None:
            note = Note(request.after, notes.write(request.after, messages.pack_state(outcome.contents)))
        return Done(request.number, dict(outcome.metrics), note)

    def _know(self, version: int, slot: int) -> None:
        """Reads a version at its first use; it replaces the one that was in that slot."""
        before = self._known.get(slot)
        if before == version:
            return
        if before is not None:
            self._resident.retire(before)
        self._resident.publish(version, Parameters(self._shared.schema, self._shared.versions.array(slot)))
        self._known[slot] = version

    def _score(self, request: ScoreRequest) -> Done:
        model = Parameters(self._shared.schema, self._shared.versions.array(request.base))
        return Done(request.number, self._resident.evaluate(model, request.start, request.stop))


def serve(worker: EngineWorker, queue: socket.socket, answers: socket.socket, doing: memoryview) -> None:
    """Works until the queue ends; `doing[0]` says what it is about, should this process be killed."""
    # The parent decides when to end, and this process has none of its tasks: it must not hear what was meant for it.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    malloc.keep()
    gc.freeze()  # else collections would look through all that was there before the fork, and so copy it
    while content := queue.recv(messages.MAX_BYTES):
        request = messages.requests.decode(content)
        doing[0] = request.client if isinstance(request, TrainTask) else NO_CLIENT
        try:
            answers.send(messages.encode(worker.answer(request)))
        except BrokenPipeError:
            return  # the parent is gone
        doing[0] = IDLE


IDLE, NO_CLIENT = -1, -2
"""What a worker is about that trains no client."""
