"""Worker processes, the queue that they take requests from, and the line on which they answer."""

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
"""What a worker does with the queue, the line for answers, and the place for what it is about."""


class ForkedWorkers:
    """Workers that are forked here, and end with this process at the latest.

    Both lines are sockets that keep the borders of messages, so all workers may read and write the same one, and who
    is free takes the next request.
    """

    def __init__(self, num_workers: int, serve: Serve) -> None:
        self._queue, queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._doing = memoryview(mmap.mmap(-1, 8 * num_workers)).cast("q")
        self._failure = ""
        context = multiprocessing.get_context("fork")
        self._processes: list[BaseProcess] = []
        for number in range(num_workers):
            self._doing[number] = IDLE
            arguments = (serve, queue, answers, self._doing[number : number + 1])
            process = context.Process(target=self._work, args=arguments, name=f"trainer-{number}", daemon=True)
            process.start()
            self._processes.append(process)
        queue.close()
        answers.close()

    def __len__(self) -> int:
        return len(self._processes)

    def send(self, request: TrainTask | ScoreRequest) -> bool:
        """Puts a request into the queue; False if that is full."""
        try:
            self._queue.send(messages.encode(request), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except BrokenPipeError as exc:
            raise EngineError("all worker processes have ended; their own messages say why") from exc
        return True

    def receive(self) -> list[Done]:
        """Waits for answers. Raises `EngineError` when a worker has died, from then on each time."""
        while not self._failure:
            sentinels = {process.sentinel: process for process in self._processes}
            ready = connection.wait([self._answers, *sentinels])
            if self._answers in ready:
                return self._read()
            died = next(number for number, process in enumerate(self._processes) if process.sentinel in ready)
            self._failure = _describe_death(self._processes[died], self._doing[died])
        raise EngineError(self._failure)

    def close(self) -> None:
        """Ends all workers at once, whatever they are about."""
        self._queue.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
            process.close()
        self._answers.close()

    def _read(self) -> list[Done]:
        found: list[Done] = []
        while True:
            try:
                content = self._answers.recv(messages.MAX_BYTES, 0 if not found else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not content:
                return found
            found.append(messages.replies.decode(content))

    def _work(self, serve: Serve, queue: socket.socket, answers: socket.socket, doing: memoryview) -> None:
        # Else a worker would hold the parent's ends open, and nobody would notice that the parent is gone.
        self._queue.close()
        self._answers.close()
        serve(queue, answers, doing)


def _describe_death(process: BaseProcess, doing: int) -> str:
    process.join()
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    about = {IDLE: "while it waited", NO_CLIENT: "while it scored a model"}.get(
        doing, f"while it trained client {doing}"
    )
    why = "; mostly memory runs out then: use fewer workers, or smaller batches" if code == -signal.SIGKILL else ""
    return f"the worker process {process.pid} {how} {about}{why}"
