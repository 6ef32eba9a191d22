"""Worker processes of an engine: their queue, their answers, and the memory that they share with this process.

Only the process that created a file calls `acquire` and `release`; its children use the same slot numbers. The kernel
frees the memory when the last of these processes ends, whatever the cause.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from fedplat import errors
from fedplat.config import user_code
from fedplat.model import Bytes, Parameters, Schema
from fedplat.simulation.engines import interface, trainers
from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.tasks import SCORING, TaskFailure, describe_task

Serve = Callable[[socket.socket, socket.socket, memoryview], None]
"""The main function of a worker: (request queue, answer socket, the client that it trains in shared memory)."""


class ForkedWorkers:
    """Forked worker processes, which end with this process at the latest.

    Both sockets preserve message boundaries (SOCK_SEQPACKET), so all workers can read and write the same ones, and the
    next free worker receives the next request.
    """

    def __init__(self, num_workers: int, serve: Serve) -> None:
        self._queue, queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._current = memoryview(mmap.mmap(-1, 8 * num_workers)).cast("q")
        self._failure = ""
        context = multiprocessing.get_context("fork")
        self._processes: list[BaseProcess] = []
        for number in range(num_workers):
            self._current[number] = IDLE
            arguments = (serve, queue, answers, self._current[number : number + 1])
            process = context.Process(target=self._run_worker, args=arguments, name=f"trainer-{number}", daemon=True)
            process.start()
            self._processes.append(process)
        queue.close()
        answers.close()

    def __len__(self) -> int:
        return len(self._processes)

    def send(self, request: TrainTask | ScoreRequest) -> bool:
        """Put a request into the queue; returns False if the queue is full.

        Raises `EngineError` if all workers have ended.
        """
        try:
            self._queue.send(encode(request), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except BrokenPipeError as exc:
            raise errors.EngineError("all worker processes have ended; see their messages on stderr") from exc
        return True

    def receive(self) -> list[Done]:
        """Wait for answers and return them. Raises `EngineError` in every call after a worker has died."""
        while not self._failure:
            sentinels = {process.sentinel: process for process in self._processes}
            ready = connection.wait([self._answers, *sentinels])
            if self._answers in ready:
                return self._read()
            died = next(number for number, process in enumerate(self._processes) if process.sentinel in ready)
            current = self._current[died]
            activities = {IDLE: "while it was idle", NO_CLIENT: "while it scored a model"}
            activity = activities.get(current, f"while it trained client {current}")
            self._failure = describe_exit(self._processes[died], activity, "use fewer workers or smaller batches")
        raise errors.EngineError(self._failure)

    def close(self) -> None:
        """Terminate all workers at once, even in the middle of a task."""
        self._queue.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
            process.close()
        self._answers.close()

    def _read(self) -> list[Done]:
        replies: list[Done] = []
        while True:
            try:
                content = self._answers.recv(MAX_BYTES, 0 if not replies else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return replies
            if not content:
                return replies
            replies.append(decode_replies.decode(content))

    def _run_worker(self, serve: Serve, queue: socket.socket, answers: socket.socket, current: memoryview) -> None:
        # Else the worker would keep the parent's ends open, and could not detect that the parent has ended.
        self._queue.close()
        self._answers.close()
        serve(queue, answers, current)


def describe_exit(process: BaseProcess, activity: str, advice: str) -> str:
    """Return how a worker process has ended; `advice` is for one that was killed, probably for lack of memory."""
    process.join()
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = f"; it probably ran out of memory: {advice}" if code == -signal.SIGKILL else ""
    return f"the worker process {process.pid} {how} {activity}{hint}"


class Shared(NamedTuple):
    """The memory that all processes share: model versions, updates and client states (`notes`)."""

    schema: Schema
    versions: Arrays
    updates: Arrays
    notes: Texts


class EngineWorker:
    """Answers requests with the trainer of this process."""

    def __init__(self, trainer: trainers.TaskTrainer, shared: Shared) -> None:
        self._trainer, self._shared = trainer, shared
        self._loaded: dict[int, int] = {}  # versions by slot

    def answer(self, request: TrainTask | ScoreRequest) -> Done:
        """Carry out a request and return the reply; never raises, because a failure is a reply too."""
        try:
            return self._score(request) if isinstance(request, ScoreRequest) else self._train(request)
        except BaseException as exc:  # the process boundary: the parent raises it
            if user_code.is_interrupt(exc):
                raise
            action = SCORING if isinstance(request, ScoreRequest) else describe_task(_read_task(request))
            return Done(request.number, failure=TaskFailure.of(action, exc))

    def _train(self, request: TrainTask) -> Done:
        self._load(request.version, request.base)
        notes, before, note = self._shared.notes, request.before, None
        contents = {} if before is None else unpack_state(notes.read(before.slot, before.size))
        outcome = self._trainer.answer(_read_task(request), contents, self._shared.updates.array(request.update))
        if outcome.contents is not None:
            note = StateSlot(request.after, notes.write(request.after, pack_state(outcome.contents)))
        return Done(request.number, dict(outcome.metrics), note, num_examples=outcome.num_examples)

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


def _read_task(request: TrainTask) -> ClientTask:
    return ClientTask(
        request.client, request.version, request.seed, request.fraction, request.scores, request.round_number
    )


def serve_requests(worker: EngineWorker, queue: socket.socket, answers: socket.socket, current: memoryview) -> None:
    """Answer requests until the queue is closed.

    `current[0]` is the client in training, `IDLE` or `NO_CLIENT`: the parent reads it if this process is killed.
    """
    # The parent decides when to end. This process runs none of the parent's tasks, so it must not handle its signals.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if torch := sys.modules.get("torch"):  # a learner need not use it
        torch.set_num_threads(1)
    interface.keep_freed_memory()
    gc.freeze()  # else each collection would visit, and so copy, all objects from before the fork
    while content := queue.recv(MAX_BYTES):
        request = requests.decode(content)
        current[0] = request.client if isinstance(request, TrainTask) else NO_CLIENT
        try:
            answers.send(encode(worker.answer(request)))
        except BrokenPipeError:
            return  # the parent has ended
        current[0] = IDLE


IDLE, NO_CLIENT = -1, -2
"""The activity of a worker that trains no client: waiting, or scoring a model."""


MAX_BYTES = 1 << 16
"""The largest message, in bytes."""


class StateSlot(Struct, frozen=True, array_like=True):
    """A client state in shared memory: its slot and its size in bytes."""

    slot: int
    size: int


class TrainTask(Struct, frozen=True, tag=True, array_like=True):
    """A training or scoring task of one client.

    `base` is the slot of the version, `before` the client state at the start if there is one. `update` and `after` are
    the slots to write the update and the new client state to; a task that scores uses neither.
    """

    number: int
    client: int
    version: int
    seed: int
    fraction: float
    base: int
    update: int
    before: StateSlot | None
    after: int
    scores: bool
    round_number: int = 0


class ScoreRequest(Struct, frozen=True, tag=True, array_like=True):
    """A request to score the model in slot `base` on the central test examples [start, stop)."""

    number: int
    base: int
    start: int
    stop: int


class Done(Struct, frozen=True, array_like=True):
    """The reply to a request. `note` is the new client state if it changed."""

    number: int
    metrics: dict[str, float] = {}
    note: StateSlot | None = None
    failure: TaskFailure | None = None
    num_examples: float | None = None


encode = msgspec.msgpack.encode
requests = msgspec.msgpack.Decoder(TrainTask | ScoreRequest)
decode_replies = msgspec.msgpack.Decoder(Done)
_contents = msgspec.msgpack.Decoder(dict[str, memoryview])


def pack_state(contents: Mapping[str, Parameters]) -> bytes:
    """Encode a client state."""
    return encode({name: values.to_bytes() for name, values in contents.items()})


def unpack_state(content: bytes) -> dict[str, Parameters]:
    """Decode a client state that `pack_state` encoded."""
    return {name: Parameters.from_bytes(values) for name, values in _contents.decode(content).items()}


class _Slots:
    """Reusable slot numbers; the last one released is reused first, because its pages exist and may be in a cache."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._descriptor = os.memfd_create("fedplat")
        self._free: list[int] = []
        self._count = 0

    def acquire(self) -> int:
        """Return a free slot; its content is undefined."""
        if self._free:
            return self._free.pop()
        self._count += 1
        os.ftruncate(self._descriptor, self._count * self._stride)
        return self._count - 1

    def release(self, slot: int) -> None:
        """Free a slot; no process may use it any more."""
        self._free.append(slot)

    def close(self) -> None:
        """Free the memory, as soon as no array refers to it."""
        os.close(self._descriptor)


class Arrays(_Slots):
    """Slots for arrays of one size, which processes map and use in place."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE)
        self._size = size_bytes
        self._mapped: dict[int, mmap.mmap] = {}

    def array(self, slot: int) -> Bytes:
        """Return the bytes of a slot."""
        if slot not in self._mapped:
            self._mapped[slot] = mmap.mmap(self._descriptor, self._stride, offset=slot * self._stride)
        return np.frombuffer(self._mapped[slot], np.uint8, self._size)

    def lend(self, slot: int) -> Bytes:
        """Return the bytes of a slot, and release the slot when nothing refers to them any more."""
        array = self.array(slot)
        weakref.finalize(array, self.release, slot).atexit = False
        return array[:]

    def close(self) -> None:
        """Free the memory, as soon as no array refers to it."""
        self._mapped.clear()
        super().close()


class Texts(_Slots):
    """Slots for bytes of any length, which are copied in and out."""

    def __init__(self) -> None:
        super().__init__(1 << 36)  # offsets in a sparse file: only written pages use memory

    def write(self, slot: int, content: bytes) -> int:
        """Replace the content of a slot; returns its size in bytes."""
        view, start = memoryview(content), slot * self._stride
        while view:
            count = os.pwrite(self._descriptor, view, start)
            view, start = view[count:], start + count
        return len(content)

    def read(self, slot: int, size: int) -> bytes:
        """Return the first `size` bytes of a slot."""
        parts: list[bytes] = []
        start = slot * self._stride
        while size:
            parts.append(os.pread(self._descriptor, size, start))
            start, size = start + len(parts[-1]), size - len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)
