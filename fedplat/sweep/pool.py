"""The workers of a sweep: processes of this machine, or actors of a Ray cluster (extra "ray").

All machines need the same packages, and the sweep's files and its output folder at the same path.
"""

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
from typing import Any

from typing_extensions import override

from fedplat.errors import DataError, EngineError, FedplatError
from fedplat.simulation.engines.ray import Cluster
from fedplat.sweep.worker import (
    DoneReply,
    FailureReply,
    PartRequest,
    SweepWorker,
    WorkerReply,
    WorkerSetup,
    decode_reply,
    decode_request,
    decode_setup,
    encode_line,
)

_READ_BYTES = 1 << 16


class SweepPool(ABC):
    """Computes parts, each on the next free worker."""

    @abstractmethod
    def compute(self, requests: Sequence[PartRequest]) -> Iterator[tuple[PartRequest, WorkerReply]]:
        """Compute parts in parallel; yield reports of progress and the `DoneReply` of each part.

        Raises the error of the first part that fails, and `EngineError` if a worker is lost.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers at once; runs in progress continue from their last checkpoint when they are requested again.

        May be called twice.
        """


class _Worker:
    """A worker process, its current request, and the incomplete line of its replies."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.request: PartRequest | None = None
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
        self._write(encode_line(setup))

    def send(self, request: PartRequest) -> None:
        self.request = request
        self._write(encode_line(request))

    def receive(self) -> list[WorkerReply]:
        """Return the replies that have arrived. Raises `EngineError` if the process has ended."""
        assert self.process.stdout is not None
        content = os.read(self.process.stdout.fileno(), _READ_BYTES)
        if not content:
            raise EngineError(self._describe_exit())
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [decode_reply(line) for line in lines]

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
    def compute(self, requests: Sequence[PartRequest]) -> Iterator[tuple[PartRequest, WorkerReply]]:
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


def check_reply(request: PartRequest, reply: WorkerReply) -> None:
    """Raise the error of a run that has failed, with the run's name."""
    if isinstance(reply, FailureReply):
        kind: type[FedplatError] = DataError if reply.is_usage else EngineError
        raise kind(f"the run {request.folder} ({', '.join(request.changes)}): {reply.text}")


class RayPool(SweepPool):
    """Ray actors; 0 stands for one for each core of the cluster. They report only the ends of runs.

    RAY_ADDRESS names the cluster; without it, a local cluster is started. Raises `MissingExtraError` without Ray, and
    `EngineError` if the cluster does not answer.
    """

    def __init__(self, num_workers: int, setup: WorkerSetup) -> None:
        self._num_workers, self._setup = num_workers, encode_line(setup)
        self._cluster: Cluster | None = None
        self._actors: list[Any] = []

    @override
    def compute(self, requests: Sequence[PartRequest]) -> Iterator[tuple[PartRequest, WorkerReply]]:
        if not requests:
            return
        cluster = self._start(len(requests))
        ray, waiting = cluster.ray, collections.deque(requests)
        idle, sent = list(self._actors), dict[Any, tuple[PartRequest, Any]]()
        while waiting or sent:
            while idle and waiting:
                request, actor = waiting.popleft(), idle.pop()
                sent[actor.run.remote(encode_line(request))] = request, actor
            (reference,), _ = ray.wait(list(sent), num_returns=1)
            request, actor = sent.pop(reference)
            try:
                reply = decode_reply(ray.get(reference))
            except ray.exceptions.RayError as exc:
                raise EngineError(
                    f"the Ray actor of the run {request.folder} was lost ({type(exc).__name__}); it probably ran out "
                    "of memory, or its machine failed; the same command continues the sweep"
                ) from exc
            check_reply(request, reply)
            idle.append(actor)
            yield request, reply

    @override
    def close(self) -> None:
        if self._cluster is not None:
            for actor in self._actors:
                self._cluster.ray.kill(actor)
            self._actors.clear()
            self._cluster.leave()
            self._cluster = None

    def _start(self, num_requests: int) -> Cluster:
        cluster = self._cluster = self._cluster or Cluster(self._num_workers, 0)
        make = cluster.ray.remote(_SweepActor).options(num_cpus=1, scheduling_strategy="SPREAD")
        while len(self._actors) < min(cluster.num_workers, num_requests):
            self._actors.append(make.remote(self._setup, list(sys.path)))
        return cluster


class _SweepActor:
    def __init__(self, setup: bytes, path: Sequence[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]  # where the user's modules are
        self._worker = SweepWorker(decode_setup(setup))

    def run(self, request: bytes) -> bytes:
        reply = self._worker.run(decode_request(request), lambda report: None)
        return encode_line(reply)
