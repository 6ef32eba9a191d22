"""Training on the server's own data: warm starts, server steps, and scores of what came of it.

The operator's trainers are foreign code with PyTorch in it. So they run in the ranks of the pool, if the job has one
and it is there, or in one rank that the daemon starts itself; the daemon only sees files. Ranks that die cost time: a
warm start goes on from its last checkpoint, everything else is done again, and the same bits come out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import structs

from fedplat.errors import FedplatError
from fedplat.job import JobSpec, PoolOptions
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import RunWarmStart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat_server import logs
from fedplat_server.errors import ConfigError, PoolBrokenError, PoolMemoryError, PoolUnavailableError, PoolWorkError
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.workers.client import RunningTask, WorkerPool
from fedplat_server.workers.local_rank import LocalRank
from fedplat_server.workers.messages import (
    EvaluateReply,
    EvaluateRequest,
    TeacherModels,
    TrainerReference,
    TrainProgress,
    TrainReply,
    TrainRequest,
)

TRIES = 3
"""How often a work is begun whose ranks died, before its attempt fails."""
PATIENCE_S = 20.0
"""How long a pool whose ranks died has to be back."""
LOG_EVERY_S = 10.0

Post = Callable[[AttemptAggregated | AggregationFailed], None]
_Result = TypeVar("_Result", bound=msgspec.Struct)


def is_due(job: JobState, round_: int) -> bool:
    """Whether a round of a job ends with a server step."""
    step = job.spec.server_step
    return step is not None and round_ % step.every == 0


class _TaskRequest(NamedTuple):
    """What ranks are asked for, and where; `on_note` hears what they tell meanwhile."""

    name: str
    request: msgspec.Struct
    pool: PoolOptions | None
    on_note: Callable[[bytes], None] = lambda content: None
    on_cpu: bool = False


class ServerTraining:
    """The server's trainers by name, and what they are at. `post` hears how warm starts ended."""

    def __init__(self, trainers: Mapping[str, str], data_dir: Path, blobs: BlobStore, post: Post) -> None:
        self._trainers = {name: TrainerReference(reference, os.getcwd()) for name, reference in trainers.items()}
        self._data_dir = data_dir
        self._blobs = blobs
        self._post = post
        self._pool = WorkerPool.at(data_dir)
        self._own = LocalRank()
        self._cpu = LocalRank("gloo")
        self._had_pool = False
        self._open: dict[AttemptKey, asyncio.Task[None]] = {}
        self._removing: set[asyncio.Task[None]] = set()

    # --- warm starts -----------------------------------------------------------------------------------------

    def begin(self, job: JobState, command: RunWarmStart) -> None:
        """Begins a warm start, or goes on with it."""
        self._open[command.key] = asyncio.create_task(self._run(job, command.key), name=f"warm start {command.key}")

    def end(self, key: AttemptKey) -> None:
        """Stops a warm start whose attempt has ended; how far it is stays, for the next attempt."""
        if (task := self._open.pop(key, None)) is not None:
            task.cancel()

    def forget(self, job_id: str) -> None:
        """Removes what was kept of a job that needs no warm start any more."""
        if (folder := self._folder(job_id)).exists():
            task = asyncio.create_task(_remove(folder), name=f"remove {folder.name}")
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    def keep(self, jobs: Collection[str]) -> None:
        """Removes what an earlier process kept of all jobs but these. Blocks."""
        for folder in (self._data_dir / "warm_start").glob("*"):
            if folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Stops all that is under way, and ends the daemon's own rank."""
        tasks, self._open = [*self._open.values(), *self._removing], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._own.close()
        await self._cpu.close()

    async def _run(self, job: JobState, key: AttemptKey) -> None:
        outcome: AttemptAggregated | AggregationFailed
        try:
            outcome = await self._warm_start(job, key)
        except (FedplatError, OSError) as exc:
            logs.get().error("a warm start failed", attempt=str(key), error=str(exc))
            outcome = AggregationFailed(key, _in_one_line(exc))
        except Exception as exc:  # a task boundary: a bug; the attempt is tried again, and seen
            logs.get().exception("a warm start failed", attempt=str(key))
            outcome = AggregationFailed(key, type(exc).__name__)
        self._open.pop(key, None)
        self._post(outcome)

    async def _warm_start(self, job: JobState, key: AttemptKey) -> AttemptAggregated:
        table, folder = job.spec.warm_start, self._folder(job.job_id)
        assert table is not None
        asked = TrainRequest(
            trainer=self._trainer(table.trainer),
            rule=job.spec.aggregation,
            num_ranks=job.spec.num_ranks,
            model=str(self._blobs.path(job.latest.digest)),
            result="",
            warm_start=table,
            checkpoints=str(folder),
            traces=str(self._data_dir / "traces" / job.job_id / "warm_start"),
        )
        moves: list[TrainProgress] = []
        try:
            learned, blob = await self._train(asked, f"warm start of {job.job_id}", job.spec.pool, moves.append)
        except PoolWorkError:
            if not moves:  # a checkpoint may be of no use any more: the trainer has other data now
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        version = ModelVersion(1, key.round, key.number, blob.digest, blob.size_bytes)
        return AttemptAggregated(key, version, _metrics(learned))

    # --- server steps ----------------------------------------------------------------------------------------

    async def step(self, job: JobState, version: ModelVersion, model: Path, updates: Iterable[Path]) -> ModelVersion:
        """Trains the aggregate in the file `model` further, and stores it: that is the version. `updates` made it."""
        table, round_ = job.spec.server_step, version.round
        assert table is not None
        teachers = None
        if table.method == "distill":
            base = str(self._blobs.path(job.latest.digest))
            teachers = TeacherModels(base, tuple(map(str, updates)), job.spec.compression.uplink)
        asked = TrainRequest(
            trainer=self._trainer(table.trainer),
            rule=job.spec.aggregation,
            num_ranks=job.spec.num_ranks,
            model=str(model),
            result="",
            server_step=table,
            round_number=round_,
            traces=str(self._data_dir / "traces" / job.job_id / f"round_{round_}"),
            teachers=teachers,
        )
        try:
            _, blob = await self._train(asked, f"server step of {job.job_id} round {round_}", job.spec.pool)
        except FedplatError as exc:
            raise PoolWorkError(f"the server step failed: {_in_one_line(exc)}") from exc
        return structs.replace(version, digest=blob.digest, size_bytes=blob.size_bytes)

    # --- scores ----------------------------------------------------------------------------------------------

    async def score(self, name: str, model: Path, spec: JobSpec) -> EvaluateReply:
        """Scores a version of a job on a trainer's held-out examples."""
        asked = EvaluateRequest(trainer=self._trainer(name), rule=spec.aggregation, model=str(model))
        try:
            return await self._run_task(_TaskRequest("evaluate", asked, spec.pool), EvaluateReply)
        except FedplatError as exc:
            return EvaluateReply(error=str(exc))

    # --- works -----------------------------------------------------------------------------------------------

    async def _train(
        self,
        asked: TrainRequest,
        what: str,
        pool: PoolOptions | None,
        moved: Callable[[TrainProgress], object] = lambda _: None,
    ) -> tuple[TrainReply, Blob]:
        """Has a training done, and stores the model; `moved` hears how far it is.

        Raises `PoolError` with the reason if it cannot be done.
        """
        journal = _Journal(what, moved)
        with self._blobs.temporary() as result:
            asked = msgspec.structs.replace(asked, result=str(result))
            work = _TaskRequest("train", asked, pool, journal.note)
            learned = await self._run_task(work, TrainReply)
            if learned.error:
                raise PoolWorkError(learned.error)
            blob = await asyncio.to_thread(self._blobs.take, result)
        logs.get().info(f"{what}: the model is trained", steps=learned.num_steps, **_metrics(learned))
        return learned, blob

    async def _run_task(self, work: _TaskRequest, kind: type[_Result]) -> _Result:
        """Has a work done: begun again if its ranks died, and on the CPU if it is too large for an accelerator."""
        turn = 1
        while True:
            try:
                async with self._start_task(work, again=turn > 1) as session:
                    return await session.result(kind)
            except (PoolBrokenError, PoolUnavailableError) as exc:  # they died just now, or a moment before
                if turn == TRIES:
                    raise
                logs.get().warning("ranks died; the work is begun again", work=work.name, error=str(exc))
                turn += 1
            except PoolMemoryError as exc:
                if work.on_cpu:
                    raise
                logs.get().warning("the work goes on on the CPU", work=work.name, error=str(exc))
                work = work._replace(on_cpu=True)

    @contextlib.asynccontextmanager
    async def _start_task(self, work: _TaskRequest, *, again: bool) -> AsyncGenerator[RunningTask]:
        """A session with the pool, if the job has one and it is there, or else with the daemon's own rank."""
        ranks = self._cpu if work.on_cpu else self._own
        if work.pool is not None and not work.on_cpu:
            pool = self._pool.with_backend(work.pool.backend)
            self._had_pool = await pool.is_ready(PATIENCE_S if again and self._had_pool else 0.0)
            ranks = pool if self._had_pool else self._own
        async with ranks.start_task(work.name, work.request, work.on_note) as session:
            yield session

    def _trainer(self, name: str) -> TrainerReference:
        if name not in self._trainers:  # a job of an earlier run of the daemon
            raise ConfigError(f"the server has no trainer {name!r} any more; start it with --trainer {name}=...")
        return self._trainers[name]

    def _folder(self, job_id: str) -> Path:
        return self._data_dir / "warm_start" / job_id


class _Journal:
    """Writes into the log now and then how far a training is."""

    def __init__(self, what: str, moved: Callable[[TrainProgress], object]) -> None:
        self._what, self._moved = what, moved
        self._now = asyncio.get_running_loop().time
        self._logged_at = self._now()

    def note(self, content: bytes) -> None:
        """To be told what the ranks tell."""
        progress = msgspec.msgpack.decode(content, type=TrainProgress)
        self._moved(progress)
        if self._now() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._now()
            logs.get().info(f"{self._what}: the model is being trained", step=progress.done, steps=progress.total)


async def _remove(folder: Path) -> None:
    """Removes a folder, and again until the ranks have noticed that nobody wants their work any more."""
    for pause_s in (0.0, 1.0, 10.0):
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _metrics(learned: TrainReply) -> dict[str, float]:
    """What is shown of a training; a loss that is not finite cannot be."""
    found = {"first_loss": learned.first_loss, "loss": learned.last_loss}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _in_one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:1000] or type(exc).__name__
