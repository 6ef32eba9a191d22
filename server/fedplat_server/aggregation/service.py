"""The service that folds the updates of open attempts as they arrive, and makes new versions durable.

One task per attempt folds its updates in the order of their acceptance, since equal orders give equal bits: after a
crash the same updates are folded again from the spool, in the same order, and give the same version. So they stay in
the spool until the version is stored; updates of jobs in memory are freed as soon as they are folded, unless the job's
rule needs all of them at the end. A version's bytes are on the disk before it is announced. In any case of failure the
end of an attempt is posted to the coordinator: an attempt that never ends would block its job forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from msgspec import structs

from fedplat import codecs, errors
from fedplat.codecs.container import Format
from fedplat.config import loaded_plugins, user_code
from fedplat.model import ModelFile
from fedplat.rounds import AttemptKey, Change, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat_server import crash_points, logs, retries
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.database import sql_contents
from fedplat_server.database.sql_contents import SmallContents
from fedplat_server.errors import BlobError, BlobUnavailableError, StoreUnavailableError, is_lasting
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.storage.segments import FilePart
from fedplat_server.storage.spool import Spool
from fedplat_server.training.server_training import ServerTraining, is_due
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate

FindVersion = Callable[[str, int], Awaitable[ModelVersion | None]]
Post = Callable[[AttemptAggregated | AggregationFailed, SmallContents], None]
"""A function that gets the end of an attempt, with the bytes of its files that become rows."""
OpenBackend = Callable[[JobState, Callable[[], JobState], AttemptInputs, BlobStore], AggregationBackend]
"""A function that opens the backend of an attempt. The second argument returns the job as it is when it commits."""

MAX_FOLDS = 32
"""Maximum number of updates that are folded in one call of a thread."""
MAX_FOLD_BYTES = 64 << 20
"""Approximate maximum of their bytes: a call continues after its attempt has ended."""


class CommandQueue:
    """The commands of an attempt that wait. A restart drops those before it, whose sum it discards."""

    def __init__(self) -> None:
        self._waiting: deque[Fold | Restart | Commit] = deque()
        self._added = asyncio.Event()

    def put(self, command: Fold | Restart | Commit) -> None:
        """Add a command."""
        if isinstance(command, Restart):
            self._waiting.clear()
        self._waiting.append(command)
        self._added.set()

    async def take(self, max_folds: int) -> list[Fold] | Restart | Commit:
        """Wait for a command, and remove it; of folds, up to `max_folds` that have no other command between them."""
        while not self._waiting:
            self._added.clear()
            await self._added.wait()
        first = self._waiting.popleft()
        if not isinstance(first, Fold):
            return first
        folds = [first]
        while len(folds) < max_folds and self._waiting:
            command = self._waiting[0]
            if not isinstance(command, Fold):
                break
            folds.append(command)
            self._waiting.popleft()
        return folds


@dataclasses.dataclass
class _OpenAttempt:
    """An attempt that is being aggregated: its job at the last command, the queue of its commands, and the task."""

    job: JobState
    queue: CommandQueue
    task: asyncio.Task[None]


@dataclasses.dataclass(frozen=True)
class AggregationParts:
    """The backends of all kinds of jobs, the server's trainers, and its plugins, which ranks import.

    Without trainers no job may have server steps.
    """

    open_backend: OpenBackend
    training: ServerTraining | None = None
    plugins: tuple[loaded_plugins.PluginReference, ...] = ()
    stores_rows: Callable[[JobState], bool] = lambda job: False
    """Whether small files of a job's versions become rows of the database."""


class Aggregation:
    """The aggregations of all open attempts. `post` is called with the end of each."""

    def __init__(
        self,
        blobs: BlobStore,
        spool: Spool,
        find_version: FindVersion,
        post: Post,
        parts: AggregationParts,
    ) -> None:
        self.on_leftovers: Callable[[Sequence[str]], None] = lambda digests: None
        """It gets the digests of an attempt's files that the stored version does not name."""
        self._parts = parts
        self._blobs = blobs
        self._spool = spool
        self._find_version = find_version
        self._post = post
        self._open: dict[AttemptKey, _OpenAttempt] = {}
        self._made: dict[AttemptKey, list[str]] = {}

    def submit(self, job: JobState, command: Fold | Restart | Commit) -> None:
        """Queue a command: fold an update, restart the sum, or commit the attempt."""
        attempt = self._open.get(command.key)
        if attempt is None:
            queue = CommandQueue()
            task = asyncio.create_task(self._run(job, command.key, queue), name=f"aggregate {command.key}")
            attempt = self._open[command.key] = _OpenAttempt(job, queue, task)
        attempt.job = job
        attempt.queue.put(command)

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Drop the attempts whose versions are stored."""
        for change in changes:
            if change.committed is not None:
                self.end(change.committed, change.version)

    def end(self, key: AttemptKey, version: ModelVersion | None = None) -> None:
        """Drop an attempt after its end is stored. The `version` names files of it; None: no version ever will."""
        attempt = self._open.pop(key, None)
        if attempt is not None:
            attempt.task.cancel()
        self._settle(self._made.pop(key, []), version)

    async def close(self) -> None:
        """Cancel all aggregations."""
        tasks, self._open = [attempt.task for attempt in self._open.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: JobState, key: AttemptKey, queue: CommandQueue) -> None:
        outcome: AttemptAggregated | AggregationFailed
        logs.bind(**logs.attempt_fields(key))
        blobs = self._blobs.recorder(sql_contents.MAX_BYTES if self._parts.stores_rows(job) else 0)
        try:
            labels = " and ".join(version.label for version in job.plugins)
            with user_code.wrap_errors(f"the aggregation with {labels}") if job.plugins else contextlib.nullcontext():
                outcome = await self._aggregate(job, key, queue, blobs)
        except asyncio.CancelledError:
            self._settle(blobs.made)
            raise
        except (errors.FedplatError, OSError, ValueError) as exc:
            logs.get().error("an attempt could not be aggregated", error=str(exc))
            culprits = exc.clients if isinstance(exc, errors.SecureAggregationError) else ()
            outcome = AggregationFailed(key, str(exc), culprits, is_lasting(exc))
        except Exception as exc:  # a task boundary: out of memory, or a bug; it is logged, and the round is repeated
            logs.get().exception("an attempt could not be aggregated")
            outcome = AggregationFailed(key, type(exc).__name__, is_lasting=is_lasting(exc))
        self._open.pop(key, None)
        self._made[key] = blobs.made
        self._post(outcome, SmallContents(blobs=blobs.contents))

    def _settle(self, made: Sequence[str], version: ModelVersion | None = None) -> None:
        """Settle an attempt's files: either a stored version names them, or no version ever will."""
        if made:
            self._blobs.settle(made)
        named = (version.digest, version.state_digest, version.delta_digest) if version is not None else ()
        if leftovers := [digest for digest in made if digest not in named]:
            self.on_leftovers(leftovers)

    async def _aggregate(
        self, job: JobState, key: AttemptKey, queue: CommandQueue, blobs: BlobStore
    ) -> AttemptAggregated:
        async with contextlib.AsyncExitStack() as stack:  # it keeps the files that are read
            await stack.enter_async_context(blobs.local(job.latest.digest, job.latest.state_digest))
            aggregate, version = await self._fold_and_commit(job, key, queue, blobs, stack)
        if aggregate.model.digest != version.digest:
            blobs.made.append(version.digest)  # the server step has stored this model
        if codec := job.spec.compression.downlink:
            delta = await asyncio.to_thread(self._store_delta, blobs, codec, aggregate)
            version = structs.replace(
                version, delta_digest=delta.digest, delta_size_bytes=delta.size_bytes, delta_base=job.latest.digest
            )
        return AttemptAggregated(key, version, aggregate.published, aggregate.cohort, aggregate.refused)

    async def _fold_and_commit(
        self,
        job: JobState,
        key: AttemptKey,
        queue: CommandQueue,
        blobs: BlobStore,
        stack: contextlib.AsyncExitStack,
    ) -> tuple[Aggregate, ModelVersion]:
        inputs = AttemptInputs.of(job, blobs, self._parts.plugins)
        from_latest = inputs.build_rule().from_latest
        find_job = functools.partial(self._find_job, key)
        backend, paths = self._parts.open_backend(job, find_job, inputs, blobs), list[Path]()
        # An update in memory is dropped before the next one is read.
        max_bytes = MAX_FOLD_BYTES if job.spec.durability == "spool" else 0
        max_folds = max(1, min(MAX_FOLDS, max_bytes // max(1, job.latest.size_bytes)))
        try:
            while not isinstance(folds := await queue.take(max_folds), Commit):
                if isinstance(folds, Restart):
                    await backend.close()
                    backend, paths = self._parts.open_backend(job, find_job, inputs, blobs), []
                    continue
                origins = [await self._find_origin(job, each, stack) if from_latest else "" for each in folds]
                found = await self._find_updates(folds)
                updates = zip(found, folds, origins, strict=True)
                await backend.fold(
                    [
                        SpooledUpdate(str(part.path), each.contribution, origin, part.start, part.size_bytes)
                        for part, each, origin in updates
                    ]
                )
                paths += [part.path for part in found]  # for a server step, which reads no parts of files
                if job.spec.durability == "memory" and not backend.keeps_updates:
                    await asyncio.to_thread(self._spool.discard, folds[0].assignment)
            return await self._commit(job, key, backend, paths)
        finally:
            await backend.close()

    async def _commit(
        self, job: JobState, key: AttemptKey, backend: AggregationBackend, updates: Sequence[Path]
    ) -> tuple[Aggregate, ModelVersion]:
        """Aggregate the attempt; return the aggregate and the version, which a server step has trained if it is due."""
        if not is_due(job, key.round):
            aggregate = await backend.commit()
            return aggregate, _make_version(job, key, aggregate)
        assert self._parts.training is not None
        with self._blobs.temporary() as draft:
            aggregate = await backend.commit(draft)
            version = _make_version(job, key, aggregate)
            return aggregate, await self._parts.training.step(job, version, draft, updates)

    def _find_job(self, key: AttemptKey) -> JobState:
        return self._open[key].job

    async def _find_origin(self, job: JobState, command: Fold, stack: contextlib.AsyncExitStack) -> str:
        """Return the path of the version that the client trained from, or "" if that is the latest."""
        if command.base_version == job.latest.version:
            return ""
        find = functools.partial(self._find_version, job.job_id, command.base_version)
        # The runner logs it; an outage must not fail the attempt.
        version = await retries.retry(find, StoreUnavailableError, itertools.repeat(retries.STORE_RETRY_S))
        assert version is not None
        (path,) = await stack.enter_async_context(self._blobs.local(version.digest))
        return os.path.abspath(path)

    async def _find_updates(self, folds: Sequence[Fold]) -> list[FilePart]:
        def find() -> list[FilePart]:
            return [self._find_update(each) for each in folds]

        # The store's health is logged; an outage must not fail the attempt.
        pauses = itertools.repeat(retries.STORE_RETRY_S)
        return await retries.retry(lambda: asyncio.to_thread(find), BlobUnavailableError, pauses)

    def _find_update(self, command: Fold) -> FilePart:
        part = self._spool.locate(command.assignment, command.digest)
        if part is None:
            raise BlobError(f"the update of {command.assignment.client_id} is missing or damaged")
        return part

    def _store_delta(self, blobs: BlobStore, codec: codecs.CodecOptions, aggregate: Aggregate) -> Blob:
        """Store the step to a version in its own file, which is an orphan until a version names it."""
        model = ModelFile.open(blobs.fetch(aggregate.model.digest))
        with crash_points.step("commit.delta"):
            return blobs.put_chunks(Format(codec, model.schema).frame_payload([aggregate.payload], model))


def _make_version(job: JobState, key: AttemptKey, aggregate: Aggregate) -> ModelVersion:
    return ModelVersion(
        version=job.latest.version + 1,
        round=key.round,
        attempt=key.number,
        digest=aggregate.model.digest,
        size_bytes=aggregate.model.size_bytes,
        state_digest=aggregate.state.digest if aggregate.state else "",
        num_updates=aggregate.num_updates,
        total_weight=aggregate.total_weight,
    )
