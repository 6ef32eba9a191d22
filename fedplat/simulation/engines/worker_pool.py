"""Worker processes, the socket of their request queue, and the socket for their answers."""

from __future__ import annotations

import mmap
import multiprocessing
import signal
import socket
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from fedplat.errors import EngineError
from fedplat.simulation.engines import messages
from fedplat.simulation.engines.messages import Done, ScoreRequest, TrainTask
from fedplat.simulation.engines.worker import IDLE, NO_CLIENT

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
            self._queue.send(messages.encode(request), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except BrokenPipeError as exc:
            raise EngineError("all worker processes have ended; see their messages on stderr") from exc
        return True

    def receive(self) -> list[Done]:
        """Wait for answers and return them. Raises `EngineError` in every call after a worker has died."""
        while not self._failure:
            sentinels = {process.sentinel: process for process in self._processes}
            ready = connection.wait([self._answers, *sentinels])
            if self._answers in ready:
                return self._read()
            died = next(number for number, process in enumerate(self._processes) if process.sentinel in ready)
            activity = _describe_activity(self._current[died])
            self._failure = describe_exit(self._processes[died], activity, "use fewer workers or smaller batches")
        raise EngineError(self._failure)

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
                content = self._answers.recv(messages.MAX_BYTES, 0 if not replies else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return replies
            if not content:
                return replies
            replies.append(messages.replies.decode(content))

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


def _describe_activity(current: int) -> str:
    activities = {IDLE: "while it was idle", NO_CLIENT: "while it scored a model"}
    return activities.get(current, f"while it trained client {current}")
