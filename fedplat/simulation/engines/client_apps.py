"""Simulated clients that answer messages with a Flower ClientApp, in this process or in forked ones.

An answer depends on the message, the client, its state and the task's seed only: the global random number generators
are seeded before each one, PyTorch has one thread, and a client gets a copy of the message of its own. So all numbers
of workers have the same results.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec
from typing_extensions import override

from fedplat import errors, model, randomness
from fedplat.config.decoding import prepare_type
from fedplat.flower import apps, identity, records
from fedplat.simulation.engines import trainers, worker_pool

_AT_ONCE = 16
"""The most tasks that are sent to a worker together."""


class AppTask(msgspec.Struct, frozen=True, array_like=True):
    """A client that answers the current message; `number` identifies the task, `state` is its `Context.state`."""

    number: int
    client: int
    seed: int
    state: bytes = b""


class AppAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The files of a reply and of the client's new state, if it has one, or the failure of its app."""

    number: int
    reply: bytes = b""
    state: bytes = b""
    failure: str = ""


class Answers(Protocol):
    """The clients of an app. All tasks answer the message that was published last."""

    num_workers: int
    """The number of processes."""

    def publish(self, message: records.PackedMessage) -> None:
        """Set the message, and discard the tasks that were begun before."""
        ...

    def begin(self, tasks: Sequence[AppTask]) -> None:
        """Begin tasks whose answers will probably be asked for."""
        ...

    def result(self, task: AppTask) -> AppAnswer:
        """Return the answer to a task. Raises `EngineError` if a worker has died."""
        ...

    def drop(self, task: AppTask) -> None:
        """Discard a task whose answer is not needed."""
        ...

    @contextlib.contextmanager
    def server(self) -> Generator[None]:
        """Let this process be that of the ServerApp within the block."""
        yield

    def close(self) -> None:
        """End the workers."""


class LoopAnswers(Answers):
    """Clients in this process, which also runs the ServerApp: the random states of both are kept apart."""

    num_workers = 1

    def __init__(self, runner: apps.ClientAppRunner, num_clients: int) -> None:
        self._responder = _Responder(runner, num_clients)
        self._server_states: randomness.GeneratorStates | None = None

    @override
    def publish(self, message: records.PackedMessage) -> None:
        self._responder.message = message.to_parameters()

    @override
    def begin(self, tasks: Sequence[AppTask]) -> None:
        pass

    @override
    def result(self, task: AppTask) -> AppAnswer:
        self._server_states = self._server_states or randomness.get_states()
        with trainers.one_thread_of_torch():
            return self._responder.answer(task)

    @override
    def drop(self, task: AppTask) -> None:
        pass

    @override
    @contextlib.contextmanager
    def server(self) -> Generator[None]:
        identity.assume(identity.SERVER_NODE_ID)
        if self._server_states:
            randomness.set_states(self._server_states)
            self._server_states = None
        yield


class PooledAnswers(Answers):
    """Clients in forked processes, which have imported the app before."""

    def __init__(self, runner: apps.ClientAppRunner, num_clients: int, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers = [_Worker(_Responder(runner, num_clients), number) for number in range(num_workers)]
        self._message = b""
        self._waiting: collections.deque[AppTask] = collections.deque()
        self._begun: set[int] = set()
        self._answers: dict[int, AppAnswer] = {}

    @override
    def publish(self, message: records.PackedMessage) -> None:
        self._message = message.to_bytes()
        self._waiting.clear()
        self._begun.clear()
        self._answers.clear()
        for worker in self._workers:
            worker.has_message = False

    @override
    def begin(self, tasks: Sequence[AppTask]) -> None:
        self._begun |= {task.number for task in tasks}
        self._waiting.extend(tasks)
        self._send()

    @override
    def result(self, task: AppTask) -> AppAnswer:
        if task.number not in self._begun:
            self.begin([task])
        while task.number not in self._answers:
            self._receive()
        self._begun.remove(task.number)
        return self._answers.pop(task.number)

    @override
    def drop(self, task: AppTask) -> None:
        self._begun.discard(task.number)
        self._answers.pop(task.number, None)

    @override
    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _send(self) -> None:
        """Give tasks to idle workers, several at once if there are many."""
        for worker in self._workers:
            if worker.tasks or not self._waiting:
                continue
            count = min(max(1, len(self._waiting) // (4 * self.num_workers)), _AT_ONCE)
            tasks: list[AppTask] = []
            while self._waiting and len(tasks) < count:
                task = self._waiting.popleft()
                if task.number in self._begun:
                    tasks.append(task)
            if tasks:
                worker.send(tasks, self._message)

    def _receive(self) -> None:
        """Wait for the answers of a worker. Raises `EngineError` if one has died."""
        workers = {worker.connection: worker for worker in self._workers if worker.tasks}
        for ready in connection.wait(list(workers)):
            for answer in workers[ready].receive():  # pyright: ignore[reportArgumentType] - one of them
                if answer.number in self._begun:
                    self._answers[answer.number] = answer
        self._send()


class _Responder:
    """Answers tasks; failures of the app are answers too."""

    def __init__(self, runner: apps.ClientAppRunner, num_clients: int) -> None:
        self.message: model.Parameters | None = None
        self._runner, self._num_clients = runner, num_clients

    def answer(self, task: AppTask) -> AppAnswer:
        assert self.message is not None
        config = {"partition-id": task.client, "num-partitions": self._num_clients}
        state = model.Parameters.from_bytes(bytearray(task.state)) if task.state else None
        randomness.seed_generators(task.seed)
        try:
            done = self._runner.answer(self.message.copy(), task.client, config, state=state)
        except errors.FedplatError as exc:
            return AppAnswer(task.number, failure=str(exc))
        kept = b"" if done.state is apps.EMPTY_STATE else done.state.to_bytes()
        return AppAnswer(task.number, done.reply.to_bytes(), kept)


class _Worker:
    """One forked process, as its parent sees it. It is sent tasks only while it is idle."""

    def __init__(self, responder: _Responder, number: int) -> None:
        self.tasks: list[AppTask] = []
        self.has_message = False
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        # The other end must be closed here, or the end of the process would not be noticed. A daemonic process could
        # not have children, such as those of PyTorch's data loaders.
        self._process: BaseProcess = context.Process(
            target=_serve, args=(responder, other, self.connection), name=f"ClientApp-{number}", daemon=False
        )
        self._process.start()
        other.close()

    def send(self, tasks: list[AppTask], message: bytes) -> None:
        """Send tasks, after the message if the worker does not have it yet."""
        self.tasks = tasks
        try:
            self.connection.send_bytes(b"" if self.has_message else message)
            self.connection.send_bytes(msgspec.msgpack.encode(tasks))
        except OSError as exc:
            raise self._describe_end() from exc
        self.has_message = True

    def receive(self) -> list[AppAnswer]:
        """Return the answers to the tasks. Raises `EngineError` if the process has ended."""
        try:
            answers = msgspec.msgpack.decode(self.connection.recv_bytes(), type=prepare_type(list[AppAnswer]))
        except (EOFError, OSError) as exc:
            raise self._describe_end() from exc
        self.tasks = []
        return answers

    def close(self) -> None:
        """End the process at once."""
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _describe_end(self) -> errors.EngineError:
        clients = ", ".join(str(task.client) for task in self.tasks)
        activity = f"while the ClientApp of client {clients} ran"
        return errors.EngineError(worker_pool.describe_exit(self._process, activity, "use fewer workers"))


def _serve(responder: _Responder, connection: Connection, parent: Connection) -> None:
    """Answer tasks until the parent ends."""
    parent.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # stdout is for the results of the run
    with trainers.one_thread_of_torch(), contextlib.suppress(EOFError, OSError):
        while True:
            if content := connection.recv_bytes():
                responder.message = model.Parameters.from_bytes(content)
            tasks = msgspec.msgpack.decode(connection.recv_bytes(), type=prepare_type(list[AppTask]))
            connection.send_bytes(msgspec.msgpack.encode([responder.answer(task) for task in tasks]))
