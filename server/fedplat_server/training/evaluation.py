"""Scores committed models with the operator's evaluators, in a process of their own, one after the other.

A trainer that has examples to evaluate on is an evaluator too, on the ranks that it trains on (`training.py`).
An evaluator is foreign code with a framework of its own: in another process it can neither stop the daemon nor
fill its memory, and rounds never wait for it. One that dies or hangs costs the score of one version.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedplat import aggregate, user_code
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.rounds import JobState, ModelVersion
from fedplat_server import logs
from fedplat_server.errors import StoreError, StoreUnavailableError
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.messages import EvaluateReply

Note = Callable[[str, int, Mapping[str, float]], Awaitable[None]]
Score = Callable[[str, Path, JobSpec], Awaitable[EvaluateReply]]
NOTE_RETRY_S = 1.0
MAX_METRICS_BYTES = 32 * 2**10
"""The most that the metrics of a version take as JSON: a database that has more of them does not give them back."""
_NUMBER_BYTES = 30


class Failure(NamedTuple):
    """What an evaluator died of, in words: its exceptions may be of classes that only its own process knows."""

    error: str
    traceback: str


def score(reference: str, path: str, rule: aggregate.Options) -> dict[str, float] | Failure:
    """Runs in the evaluation process: loads the model, without what the rule keeps in it, and calls the evaluator."""
    try:
        model = rule.build().counterpart.reduce(Parameters.open(path))
        metrics: Mapping[str, float] = user_code.load(reference)(model.copy())
        result = {str(name): float(value) for name, value in metrics.items()}
        if bad := [name for name, value in result.items() if not math.isfinite(value)]:
            raise ValueError(f"the metric {bad[0]!r} is {result[bad[0]]}; expected a finite number")
        if (size := sum(len(name.encode()) + _NUMBER_BYTES for name in result)) > MAX_METRICS_BYTES:
            raise ValueError(f"{len(result)} metrics take {size} bytes; at most {MAX_METRICS_BYTES} are stored")
    except BaseException as exc:  # a process boundary: also sys.exit() must not travel into the daemon
        return Failure(f"{type(exc).__name__}: {exc}", traceback.format_exc(limit=-20))
    return result


def _prepare(folder: str, path: list[str]) -> None:
    """Gives the new process the folder and import path of the daemon; Ctrl-C is the daemon's business."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end with the daemon", daemon=True).start()
    os.chdir(folder)
    sys.path[:] = path


def _end_with_parent() -> None:
    """Ends this process when the daemon was killed; the pool alone would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Process:
    """The process that evaluators run in. Started when it is needed; a new one after it died or was ended."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(
        self, reference: str, path: Path, rule: aggregate.Options, timeout_s: float
    ) -> dict[str, float] | Failure:
        """Calls the evaluator. Whatever goes wrong but the evaluator's own exceptions ends the process."""
        if self._pool is None:
            # As the process begins, what lies in the current folder must not stand for a module of Python's or ours.
            os.environ["PYTHONSAFEPATH"] = "1"
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=partial(_prepare, os.getcwd(), list(sys.path)),
            )
        loop = asyncio.get_running_loop()
        try:
            scoring = loop.run_in_executor(self._pool, score, reference, str(path), rule)
            return await asyncio.wait_for(scoring, timeout_s)
        except (BrokenProcessPool, TimeoutError, asyncio.CancelledError):
            self.end()
            raise

    def end(self) -> None:
        """Kills the process: an evaluator that hangs must not keep the daemon from stopping."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())  # pyright: ignore[reportPrivateUsage]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


class _PendingScore(NamedTuple):
    """A version that waits for its score."""

    job_id: str
    version: ModelVersion
    name: str
    spec: JobSpec


class Trainers(NamedTuple):
    """The server's trainers that may score, by name, and how one does so."""

    names: frozenset[str]
    score: Score


class EvaluationScheduler:
    """Evaluators by name. `note` stores what they say of a version; `done` hears that a job's version had its turn.

    A name that `trainers` has too is an evaluator's.
    """

    def __init__(
        self,
        references: Mapping[str, str],
        timeout_s: float,
        blobs: BlobStore,
        note: Note,
        done: Callable[[str], None],
        trainers: Trainers | None = None,
    ) -> None:
        self._references = dict(references)
        self._timeout_s = timeout_s
        self._blobs = blobs
        self._note = note
        self._done = done
        self._trainers = trainers
        self._process = _Process()
        self._queue: asyncio.Queue[_PendingScore] = asyncio.Queue()
        self._pending: Counter[str] = Counter()
        self._worker: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        """The evaluators that jobs may name."""
        return sorted({*self._references, *(self._trainers.names if self._trainers is not None else ())})

    def is_due(self, job: JobState, version: ModelVersion) -> bool:
        """Return whether a version is to be scored by the server."""
        evaluation = job.spec.evaluation
        return evaluation.server in self.names and evaluation.is_due(version.round, job.spec.rounds)

    def schedule(self, job: JobState, version: ModelVersion) -> None:
        """Scores a version when its turn comes."""
        assert job.spec.evaluation.server is not None
        self._pending[job.job_id] += 1
        self._queue.put_nowait(_PendingScore(job.job_id, version, job.spec.evaluation.server, job.spec))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="evaluation")

    def is_pending(self, job_id: str) -> bool:
        """Whether some version of a job still waits for its score."""
        return job_id in self._pending

    async def close(self) -> None:
        """Forgets what waits and ends the process."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._process.end()

    async def _work(self) -> None:
        while True:
            turn = await self._queue.get()
            await self._score(turn)
            self._pending[turn.job_id] -= 1
            if not self._pending[turn.job_id]:
                del self._pending[turn.job_id]
            self._done(turn.job_id)

    async def _score(self, turn: _PendingScore) -> None:
        name = self._references.get(turn.name, turn.name)
        log = logs.get().bind(job=turn.job_id, version=turn.version.version, evaluator=name)
        try:
            metrics = await self._compute(turn)
            if isinstance(metrics, Failure):
                log.error("the evaluator failed; the version has no score", **metrics._asdict())
                return
            await self._store(turn, metrics)
        except StoreError as exc:
            log.error("the score of a version could not be stored", error=str(exc))
        except BrokenProcessPool:
            log.error("the evaluation process died; the version has no score")
        except TimeoutError:
            log.error("the evaluator took too long and was ended; the version has no score", limit_s=self._timeout_s)
        except Exception:  # a task boundary: a round never fails by it, nor do later versions
            log.exception("a version could not be scored")
        else:
            log.info("a version was scored", metrics=metrics)

    async def _compute(self, turn: _PendingScore) -> dict[str, float] | Failure:
        path = self._blobs.path(turn.version.digest)
        if turn.name in self._references:
            reference, rule = self._references[turn.name], turn.spec.aggregation
            return await self._process.run(reference, path, rule, self._timeout_s)
        assert self._trainers is not None
        scored = await asyncio.wait_for(self._trainers.score(turn.name, path, turn.spec), self._timeout_s)
        return Failure(scored.error, "") if scored.error else scored.metrics

    async def _store(self, turn: _PendingScore, metrics: Mapping[str, float]) -> None:
        while True:
            try:
                return await self._note(turn.job_id, turn.version.version, metrics)
            except StoreUnavailableError:
                # The runner logs that the database does not answer; a score was too much work to be lost by that.
                await asyncio.sleep(NOTE_RETRY_S)
