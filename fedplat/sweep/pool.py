"""Worker processes of a sweep. They are kept for all its runs: each imports PyTorch and loads the data once."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from typing_extensions import override

from fedplat.errors import DataError, EngineError, FedplatError
from fedplat.sweep import messages
from fedplat.sweep.messages import DoneReply, FailureReply, StepRequest, WorkerReply, WorkerSetup

_READ_BYTES = 1 << 16


class SweepPool(ABC):
    """Computes steps, each on the next free worker."""

    @abstractmethod
    def compute(self, requests: Sequence[StepRequest]) -> Iterator[tuple[StepRequest, WorkerReply]]:
        """Compute steps in parallel; yield reports of progress and the `DoneReply` of each step.

        Raises the error of the first step that fails, and `EngineError` if a worker is lost.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers at once; runs in progress continue from their last checkpoint when they are requested again.

        May be called twice.
        """


class _Worker:
    """A worker process, its current request, and the incomplete line of its replies."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.request: StepRequest | None = None
        self._rest = b""
        # One thread for arithmetic, also in NumPy, which reads this when it is imported.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A process group of its own: Ctrl-C interrupts only the sweep, which then ends its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedplat.sweep.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            process_group=0,
        )
        self._write(messages.encode_line(setup))

    def send(self, request: StepRequest) -> None:
        self.request = request
        self._write(messages.encode_line(request))

    def receive(self) -> list[WorkerReply]:
        """Return the replies that have arrived. Raises `EngineError` if the process has ended."""
        assert self.process.stdout is not None
        content = os.read(self.process.stdout.fileno(), _READ_BYTES)
        if not content:
            raise EngineError(self._describe_exit())
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [messages.decode_reply(line) for line in lines]

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.kill()
        self.process.wait()

    def _write(self, content: bytes) -> None:
        assert self.process.stdin is not None
        try:
            while content:  # a raw pipe may accept a part
                content = content[self.process.stdin.write(content) :]
        except BrokenPipeError as exc:
            raise EngineError(self._describe_exit()) from exc

    def _describe_exit(self) -> str:
        code = self.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        hint = "; it probably ran out of memory: use fewer processes (--jobs)" if code == -signal.SIGKILL else ""
        about = f" while it computed the run {self.request.folder}" if self.request is not None else ""
        return f"the worker process {self.process.pid} {how}{about}{hint}; the same command continues the sweep"


class ProcessPool(SweepPool):
    """Worker processes on this machine, with one thread each. They start when they are first needed."""

    def __init__(self, num_workers: int, setup: WorkerSetup) -> None:
        self._num_workers, self._setup = num_workers, setup
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    @override
    def compute(self, requests: Sequence[StepRequest]) -> Iterator[tuple[StepRequest, WorkerReply]]:
        waiting, num_left = collections.deque(requests), len(requests)
        self._start(min(self._num_workers, len(requests)))
        while num_left:
            for worker in self._workers:
                if worker.request is None and waiting:
                    worker.send(waiting.popleft())
            for key, _ in self._selector.select():
                worker: _Worker = key.data
                for reply in worker.receive():
                    request = worker.request
                    assert request is not None
                    check_reply(request, reply)
                    if isinstance(reply, DoneReply):
                        worker.request = None
                        num_left -= 1
                    yield request, reply

    @override
    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._selector.close()

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            worker = _Worker(self._setup)
            self._workers.append(worker)
            assert worker.process.stdout is not None
            self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)


def check_reply(request: StepRequest, reply: WorkerReply) -> None:
    """Raise the error of a run that has failed, with the run's name."""
    if isinstance(reply, FailureReply):
        kind: type[FedplatError] = DataError if reply.is_usage else EngineError
        raise kind(f"the run {request.folder} ({', '.join(request.changes)}): {reply.text}")
