"""Training on the server's own data: warm starts, server steps, and the evaluation of their models.

The operator's trainers are user code that uses PyTorch. So they run on the ranks of the worker pool, if the job has
one and it is available, or on one rank that the daemon starts itself; the daemon only reads files. If ranks die, a warm
start resumes from its last checkpoint, and other tasks are repeated, with the same result bit for bit.
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

from fedplat import texts
from fedplat.config import decoding, loaded_plugins
from fedplat.config.plugins import name_of
from fedplat.errors import FedplatError
from fedplat.job import JobSpec, PoolOptions
from fedplat.local_options import Pins
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import RunWarmStart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat_server import errors, logs
from fedplat_server.storage import files
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.workers import client, task_inputs

TRIES = 3
"""How often a task whose ranks die is started before its attempt fails."""
PATIENCE_S = 20.0
"""The time for a pool to come back after its ranks died."""
LOG_EVERY_S = 10.0

Post = Callable[[AttemptAggregated | AggregationFailed], None]
_Result = TypeVar("_Result", bound=msgspec.Struct)


def is_due(job: JobState, round_: int) -> bool:
    """Return whether a round of a job ends with a server step."""
    step = job.spec.server_step
    return step is not None and round_ % step.every == 0


class _TaskRequest(NamedTuple):
    """A task for ranks, and where it runs; `on_note` is called with the messages that they send meanwhile."""

    name: str
    request: msgspec.Struct
    pool: PoolOptions | None
    on_note: Callable[[bytes], None] = lambda content: None
    on_cpu: bool = False


class ServerTraining:
    """The server's trainers by name, and their running tasks. `post` is called with the results of warm starts.

    `plugins` are those of the server.
    """

    def __init__(
        self,
        trainers: Mapping[str, str],
        data_dir: Path,
        blobs: BlobStore,
        post: Post,
        plugins: tuple[loaded_plugins.PluginReference, ...] = (),
    ) -> None:
        self._plugins = plugins
        self._trainers = {
            name: task_inputs.TrainerReference(reference, os.getcwd()) for name, reference in trainers.items()
        }
        self._data_dir = data_dir
        self._blobs = blobs
        self._post = post
        self._pool = client.WorkerPool.at(data_dir)
        self._own = client.LocalRank()
        self._cpu = client.LocalRank("gloo")
        self._had_pool = False
        self._open: dict[AttemptKey, asyncio.Task[None]] = {}
        self._removing: set[asyncio.Task[None]] = set()

    def begin(self, job: JobState, command: RunWarmStart) -> None:
        """Start or resume a warm start."""
        self._open[command.key] = asyncio.create_task(self._run(job, command.key), name=f"warm start {command.key}")

    def end(self, key: AttemptKey) -> None:
        """Stop the warm start of an attempt that has ended; its checkpoints are kept for the next attempt."""
        if (task := self._open.pop(key, None)) is not None:
            task.cancel()

    def forget(self, job_id: str) -> None:
        """Remove the checkpoints of a job that does not need a warm start any more."""
        if (folder := self._folder(job_id)).exists():
            task = asyncio.create_task(_remove(folder), name=f"remove {folder.name}")
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

    def keep(self, jobs: Collection[str], known: Collection[str]) -> None:
        """Remove the checkpoints of known jobs that need none, and set those of unknown jobs aside. Blocks."""
        folder = self._data_dir / "warm_start"
        self.expire()
        if folder.is_dir():
            with files.translate_os_errors("clearing the checkpoints"):
                files.clear_set_aside(folder, jobs, known, lambda name: name != files.SET_ASIDE_FOLDER)

    def expire(self) -> None:
        """Remove the checkpoints that were set aside long enough ago. Blocks."""
        files.expire_set_aside(self._data_dir / "warm_start")

    async def close(self) -> None:
        """Cancel all tasks, and end the daemon's own ranks."""
        tasks, self._open = [*self._open.values(), *self._removing], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._own.close()
        await self._cpu.close()

    async def _run(self, job: JobState, key: AttemptKey) -> None:
        outcome: AttemptAggregated | AggregationFailed
        logs.bind(**logs.attempt_fields(key))
        try:
            outcome = await self._warm_start(job, key)
        except (FedplatError, OSError) as exc:
            logs.get().error("a warm start failed", error=str(exc))
            outcome = AggregationFailed(key, _in_one_line(exc), is_lasting=errors.is_lasting(exc))
        except Exception as exc:  # a task boundary: a bug, which is logged; the attempt is repeated
            logs.get().exception("a warm start failed")
            outcome = AggregationFailed(key, type(exc).__name__, is_lasting=errors.is_lasting(exc))
        self._open.pop(key, None)
        self._post(outcome)

    async def _warm_start(self, job: JobState, key: AttemptKey) -> AttemptAggregated:
        table, folder = job.spec.warm_start, self._folder(job.job_id)
        assert table is not None
        request = task_inputs.TrainRequest(
            trainer=self._trainer(table.trainer),
            rule=job.spec.aggregation,
            num_ranks=job.spec.num_ranks,
            parallel=job.spec.parallel,
            model=str(self._blobs.path(job.latest.digest)),
            result="",
            warm_start=table,
            checkpoints=str(folder),
            traces=str(self._data_dir / "traces" / job.job_id / "warm_start"),
            plugins=loaded_plugins.select_references(self._plugins, job.plugins),
            pins=Pins.from_config(job.spec.config),
        )
        progress: list[task_inputs.TrainProgress] = []
        try:
            async with self._blobs.local(job.latest.digest):
                reply, blob = await self._train(request, f"warm start of {job.job_id}", job.spec.pool, progress.append)
        except errors.PoolWorkError:
            if not progress:  # the checkpoint may be unusable, if the trainer has other data now
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        version = ModelVersion(1, key.round, key.number, blob.digest, blob.size_bytes)
        return AttemptAggregated(key, version, _metrics(reply))

    async def step(self, job: JobState, version: ModelVersion, model: Path, updates: Iterable[Path]) -> ModelVersion:
        """Train the aggregate in the file `model` further, store it, and return it as the version.

        `updates` are the paths of the updates that were aggregated. Raises `PoolWorkError` if the step fails.
        """
        table, round_ = job.spec.server_step, version.round
        assert table is not None
        teachers = None
        if table.method == "distill":
            base = str(self._blobs.path(job.latest.digest))
            teachers = task_inputs.TeacherModels(base, tuple(map(str, updates)), job.spec.compression.uplink)
        request = task_inputs.TrainRequest(
            trainer=self._trainer(table.trainer),
            rule=job.spec.aggregation,
            num_ranks=job.spec.num_ranks,
            parallel=job.spec.parallel,
            model=str(model),
            result="",
            server_step=table,
            round_number=round_,
            traces=str(self._data_dir / "traces" / job.job_id / f"round_{round_}"),
            teachers=teachers,
            plugins=loaded_plugins.select_references(self._plugins, job.plugins),
            pins=Pins.from_config(job.spec.config),
        )
        try:
            async with self._blobs.local(job.latest.digest):
                _, blob = await self._train(request, f"server step of {job.job_id} round {round_}", job.spec.pool)
        except FedplatError as exc:
            raise errors.PoolWorkError(f"the server step failed: {_in_one_line(exc)}") from exc
        return structs.replace(version, digest=blob.digest, size_bytes=blob.size_bytes)

    async def score(self, name: str, model: Path, spec: JobSpec) -> task_inputs.EvaluateReply:
        """Evaluate a version of a job on a trainer's held-out examples. Errors are in the reply."""
        wanted = loaded_plugins.PluginVersion("rules", name_of(spec.aggregation))
        plugins = loaded_plugins.select_references(self._plugins, [wanted])
        trainer, rule = self._trainer(name), spec.aggregation
        request = task_inputs.EvaluateRequest(
            trainer=trainer,
            rule=rule,
            model=str(model),
            parallel=spec.parallel,
            plugins=plugins,
            pins=Pins.from_config(spec.config),
        )
        try:
            return await self._run_task(_TaskRequest("evaluate", request, spec.pool), task_inputs.EvaluateReply)
        except FedplatError as exc:
            return task_inputs.EvaluateReply(error=str(exc))

    async def _train(
        self,
        request: task_inputs.TrainRequest,
        title: str,
        pool: PoolOptions | None,
        on_progress: Callable[[task_inputs.TrainProgress], object] = lambda _: None,
    ) -> tuple[task_inputs.TrainReply, Blob]:
        """Run a training on ranks and store the model. Raises `PoolError` with the reason if it fails."""
        log = _ProgressLog(title, on_progress)
        with self._blobs.temporary() as result:
            request = msgspec.structs.replace(request, result=str(result))
            reply = await self._run_task(_TaskRequest("train", request, pool, log.note), task_inputs.TrainReply)
            if reply.error:
                raise errors.PoolWorkError(reply.error)
            blob = await asyncio.to_thread(self._blobs.adopt_file, result)
        logs.get().info(f"{title}: the model is trained", steps=reply.num_steps, **_metrics(reply))
        return reply, blob

    async def _run_task(self, task: _TaskRequest, kind: type[_Result]) -> _Result:
        """Run a task; repeat it if its ranks die, and on the CPU if an accelerator does not have enough memory."""
        num_tries = 1
        while True:
            try:
                async with self._start_task(task, is_retry=num_tries > 1) as session:
                    return await session.result(kind)
            except (
                errors.PoolBrokenError,
                errors.PoolUnavailableError,
            ) as exc:  # the ranks died during the task, or just before
                if num_tries == TRIES:
                    raise
                logs.get().warning("ranks died; the task is repeated", work=task.name, error=str(exc))
                num_tries += 1
            except errors.PoolMemoryError as exc:
                if task.on_cpu:
                    raise
                logs.get().warning("the task is repeated on the CPU", work=task.name, error=str(exc))
                task = task._replace(on_cpu=True)

    @contextlib.asynccontextmanager
    async def _start_task(self, task: _TaskRequest, *, is_retry: bool) -> AsyncGenerator[client.RunningTask]:
        """Start a task on the pool, if the job has one and it is available, or else on the daemon's own rank."""
        ranks = self._cpu if task.on_cpu else self._own
        if task.pool is not None and not task.on_cpu:
            pool = self._pool.with_backend(task.pool.backend)
            self._had_pool = await pool.is_ready(PATIENCE_S if is_retry and self._had_pool else 0.0)
            ranks = pool if self._had_pool else self._own
        # Ranks of an older release would ignore the layout, but refuse a task that they do not have.
        in_layout = task.pool is not None and task.pool.parallel is not None
        name = f"{task.name} in a layout" if in_layout else task.name
        async with ranks.start_task(name, task.request, task.on_note) as session:
            yield session

    def _trainer(self, name: str) -> task_inputs.TrainerReference:
        if name not in self._trainers:  # the job was created when the daemon ran with another configuration
            raise errors.ConfigError(f"the server has no trainer {name!r} any more; start it with --trainer {name}=...")
        return self._trainers[name]

    def _folder(self, job_id: str) -> Path:
        return self._data_dir / "warm_start" / job_id


class _ProgressLog:
    """The log of a training's progress, with a line every `LOG_EVERY_S` seconds at most."""

    def __init__(self, title: str, on_progress: Callable[[task_inputs.TrainProgress], object]) -> None:
        self._title, self._on_progress = title, on_progress
        self._now = asyncio.get_running_loop().time
        self._logged_at = self._now()

    def note(self, content: bytes) -> None:
        """Handle a progress message of the ranks."""
        progress = msgspec.msgpack.decode(content, type=decoding.prepare_type(task_inputs.TrainProgress))
        self._on_progress(progress)
        if self._now() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._now()
            logs.get().info(f"{self._title}: the model is being trained", step=progress.done, steps=progress.total)


async def _remove(folder: Path) -> None:
    """Remove a folder, repeatedly: ranks may write to it until they notice that their task was cancelled."""
    for pause_s in (0.0, 1.0, 10.0):
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _metrics(reply: task_inputs.TrainReply) -> dict[str, float]:
    """Return the metrics of a training, with the profile of its steps. Values that are not finite are left out."""
    metrics = {"first_loss": reply.first_loss, "loss": reply.last_loss, **reply.step_profile}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _in_one_line(exc: Exception) -> str:
    return " ".join(texts.repair(str(exc)).split())[:1000] or type(exc).__name__
