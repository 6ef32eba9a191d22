"""Evaluation of committed models by the operator's evaluators, in a separate process, one after the other.

A server trainer that has held-out examples is an evaluator too, on the ranks that it trains on (`server_training.py`).
An evaluator is user code with its own framework: in another process it can neither stop the daemon nor fill its
memory, and rounds never wait for it. If it dies or hangs, only one version has no score.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedplat import aggregate, texts
from fedplat.config import user_code
from fedplat.job import JobSpec
from fedplat.model import Parameters
from fedplat.rounds import AttemptKey, Change, JobState, ModelVersion
from fedplat_server import errors, logs, retries
from fedplat_server.child_environment import child_environment
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import EvaluateReply

Note = Callable[[str, int, Mapping[str, float]], Awaitable[None]]
Score = Callable[[str, Path, JobSpec], Awaitable[EvaluateReply]]
MAX_METRICS_BYTES = 32 * 2**10
"""The largest size of a version's metrics as JSON, which the database can read back."""
_NUMBER_BYTES = 30


class Failure(NamedTuple):
    """The error of an evaluator as text: its exceptions may be of classes that only its own process can import."""

    error: str
    traceback: str


def score(reference: str, path: str, rule: aggregate.RuleOptions) -> dict[str, float] | Failure:
    """Load a model, without the values that the rule keeps in it, and evaluate it. Runs in the separate process."""
    try:
        model = rule.build().requirements.reduce(Parameters.open(path))
        metrics: Mapping[str, float] = user_code.load(reference)(model.copy())
        result = {str(name): float(value) for name, value in metrics.items()}
        if bad := [name for name, value in result.items() if not math.isfinite(value)]:
            raise ValueError(f"the metric {bad[0]!r} is {result[bad[0]]}; expected a finite number")
        if (size := sum(len(name.encode()) + _NUMBER_BYTES for name in result)) > MAX_METRICS_BYTES:
            raise ValueError(f"{len(result)} metrics take {size} bytes; at most {MAX_METRICS_BYTES} are stored")
    except BaseException as exc:  # a process boundary: even sys.exit() must not reach the daemon
        return Failure(texts.describe(exc), traceback.format_exc(limit=-20))
    return result


def _prepare(folder: str, path: list[str]) -> None:
    """Set the daemon's folder and import path in the new process, and ignore Ctrl-C, which the daemon handles.

    The daemon's secrets leave the environment.
    """
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end with the daemon", daemon=True).start()
    os.chdir(folder)
    sys.path[:] = path
    for name in os.environ.keys() - child_environment(os.environ).keys():
        del os.environ[name]


def _end_with_parent() -> None:
    """End this process when the daemon was killed; `ProcessPoolExecutor` would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _safe_path() -> Generator[None]:
    """Keep files in the current folder from shadowing modules in a process that is started within the block."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _EvaluationProcess:
    """The process that evaluators run in. It is started on demand, and again after it died or was killed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(
        self, reference: str, path: Path, rule: aggregate.RuleOptions, timeout_s: float
    ) -> dict[str, float] | Failure:
        """Return the metrics or the failure of an evaluator. Kills the process on a timeout or a cancellation.

        Raises `TimeoutError` after `timeout_s`, and `BrokenProcessPool` if the process died.
        """
        loop = asyncio.get_running_loop()
        try:
            # A new pool starts a process for its resources, and its first call that of the evaluator.
            with _safe_path():
                self._pool = self._pool or ProcessPoolExecutor(
                    max_workers=1,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=partial(_prepare, os.getcwd(), list(sys.path)),
                )
                scoring = loop.run_in_executor(self._pool, score, reference, str(path), rule)
            return await asyncio.wait_for(scoring, timeout_s)
        except (BrokenProcessPool, TimeoutError, asyncio.CancelledError):
            self.end()
            raise

    def end(self) -> None:
        """Kill the process: an evaluator that hangs must not keep the daemon from stopping."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())  # pyright: ignore[reportPrivateUsage]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


class _PendingScore(NamedTuple):
    """A version that waits for its evaluation."""

    job_id: str
    version: ModelVersion
    name: str
    spec: JobSpec


class Trainers(NamedTuple):
    """The names of the server trainers that may evaluate, and the function that has one evaluate a model."""

    names: frozenset[str]
    score: Score


class EvaluationScheduler:
    """A queue of versions to evaluate. `note` stores the metrics of a version; `done(job_id)` is called after each.

    If an evaluator and one of the `trainers` have the same name, the evaluator is used.
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
        self._process = _EvaluationProcess()
        self._queue: asyncio.Queue[_PendingScore] = asyncio.Queue()
        self._pending: Counter[str] = Counter()
        self._worker: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the evaluators that jobs may use."""
        return sorted({*self._references, *(self._trainers.names if self._trainers is not None else ())})

    def is_due(self, job: JobState, version: ModelVersion) -> bool:
        """Return whether the server is to evaluate a version."""
        evaluation = job.spec.evaluation
        return evaluation.server in self.names and evaluation.is_due(version.round, job.spec.rounds)

    def schedule(self, job: JobState, version: ModelVersion) -> None:
        """Queue the evaluation of a version."""
        assert job.spec.evaluation.server is not None
        self._pending[job.job_id] += 1
        self._queue.put_nowait(_PendingScore(job.job_id, version, job.spec.evaluation.server, job.spec))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="evaluation")

    def schedule_if_due(self, job: JobState, version: ModelVersion) -> None:
        """Queue the evaluation of a version, unless it is the initial one or the server is not to evaluate it."""
        if version.version > 0 and self.is_due(job, version):
            self.schedule(job, version)

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Queue the evaluations of new versions."""
        for change in changes:
            if change.version is not None:
                self.schedule_if_due(change.job, change.version)

    def is_pending(self, job_id: str) -> bool:
        """Return whether a version of the job is waiting for its evaluation, or is being evaluated."""
        return job_id in self._pending

    async def close(self) -> None:
        """Drop the queue and kill the process."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._process.end()

    async def _work(self) -> None:
        while True:
            pending = await self._queue.get()
            await self._score(pending)
            self._pending[pending.job_id] -= 1
            if not self._pending[pending.job_id]:
                del self._pending[pending.job_id]
            self._done(pending.job_id)

    async def _score(self, pending: _PendingScore) -> None:
        name = self._references.get(pending.name, pending.name)
        attempt = AttemptKey(pending.job_id, pending.version.round, pending.version.attempt)
        log = logs.get().bind(**logs.attempt_fields(attempt), version=pending.version.version, evaluator=name)
        try:
            metrics = await self._compute(pending)
            if isinstance(metrics, Failure):
                log.error("the evaluator failed; the version has no score", **metrics._asdict())
                return
            await self._store(pending, metrics)
        except errors.BlobError as exc:
            log.error("a version could not be read; it has no score", error=str(exc))
        except errors.StoreError as exc:
            log.error("the score of a version could not be stored", error=str(exc))
        except BrokenProcessPool:
            log.error("the evaluation process died; the version has no score")
        except TimeoutError:
            log.error("the evaluator took too long and was stopped; the version has no score", limit_s=self._timeout_s)
        except Exception:  # a task boundary: neither rounds nor the evaluation of later versions may fail
            log.exception("a version could not be scored")
        else:
            log.info("a version was scored", metrics=metrics)

    async def _compute(self, pending: _PendingScore) -> dict[str, float] | Failure:
        async with self._blobs.local(pending.version.digest) as (path,):
            if pending.name in self._references:
                reference, rule = self._references[pending.name], pending.spec.aggregation
                return await self._process.run(reference, path, rule, self._timeout_s)
            assert self._trainers is not None
            reply = await asyncio.wait_for(self._trainers.score(pending.name, path, pending.spec), self._timeout_s)
        return Failure(reply.error, "") if reply.error else reply.metrics

    async def _store(self, pending: _PendingScore, metrics: Mapping[str, float]) -> None:
        note = partial(self._note, pending.job_id, pending.version.version, metrics)
        # Scores are expensive. The runner logs that the database does not answer.
        await retries.retry(note, errors.StoreUnavailableError, itertools.repeat(retries.BACKGROUND_RETRY_S))
