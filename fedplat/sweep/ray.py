"""A sweep on a Ray cluster (extra "ray"): an actor for each run in progress, with one thread.

All machines need the same packages, and the sweep's files and its output folder at the same path.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from fedplat.errors import EngineError
from fedplat.simulation.engines.ray.cluster import Cluster
from fedplat.sweep import messages
from fedplat.sweep.messages import StepRequest, WorkerReply, WorkerSetup
from fedplat.sweep.pool import SweepPool, check_reply
from fedplat.sweep.worker import SweepWorker


class RayPool(SweepPool):
    """Ray actors; 0 stands for one for each core of the cluster. They report only the ends of runs.

    RAY_ADDRESS names the cluster; without it, a local cluster is started. Raises `MissingExtraError` without Ray, and
    `EngineError` if the cluster does not answer.
    """

    def __init__(self, num_workers: int, setup: WorkerSetup) -> None:
        self._num_workers, self._setup = num_workers, messages.encode_line(setup)
        self._cluster: Cluster | None = None
        self._actors: list[Any] = []

    @override
    def compute(self, requests: Sequence[StepRequest]) -> Iterator[tuple[StepRequest, WorkerReply]]:
        if not requests:
            return
        cluster = self._start(len(requests))
        ray, waiting = cluster.ray, collections.deque(requests)
        idle, sent = list(self._actors), dict[Any, tuple[StepRequest, Any]]()
        while waiting or sent:
            while idle and waiting:
                request, actor = waiting.popleft(), idle.pop()
                sent[actor.run.remote(messages.encode_line(request))] = request, actor
            (reference,), _ = ray.wait(list(sent), num_returns=1)
            request, actor = sent.pop(reference)
            try:
                reply = messages.decode_reply(ray.get(reference))
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
        self._worker = SweepWorker(messages.decode_setup(setup))

    def run(self, request: bytes) -> bytes:
        reply = self._worker.run(messages.decode_request(request), lambda report: None)
        return messages.encode_line(reply)
