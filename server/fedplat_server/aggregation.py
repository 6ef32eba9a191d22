"""Folds the updates of open attempts as they arrive, in threads, and makes new versions durable.

One task per attempt takes its updates in the order in which they were accepted, so that equal orders give equal
bits: after a crash the same updates come again in the same order, out of the spool, and give the same version. So they
stay there until the version is stored; those of jobs in memory are freed as soon as they are folded, unless the job's
rule needs all of them at the end. A version's bytes are on the disk before anybody hears of it. Whatever goes wrong,
the coordinator hears how the attempt ended: an attempt that nobody ends would stop its job for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedplat.aggregate import (
    Accumulator,
    Rule,
    compress_step,
    first_columns,
    read_columns,
    read_scalars,
    rebased,
    scalars_to_bytes,
    seed_of,
    state_schema,
)
from fedplat.errors import FedplatError
from fedplat.model import ModelFile
from fedplat.privacy import KEY_BYTES, Noise
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat.updates import Format
from fedplat_server import crash, intake, logs
from fedplat_server.blobs import Blob, BlobStore, BlobWriter
from fedplat_server.errors import BlobError, StoreUnavailableError
from fedplat_server.training import ServerTraining, is_due
from fedplat_server.uploads import UploadKey, UploadStore

STORE_RETRY_S = 0.5
FindVersion = Callable[[str, int], Awaitable[ModelVersion | None]]
Post = Callable[[AttemptAggregated | AggregationFailed], None]


@dataclasses.dataclass(frozen=True)
class _Work:
    """An attempt that is being aggregated, and the task that does it."""

    queue: asyncio.Queue[Fold | Commit]
    task: asyncio.Task[None]


class Aggregation:
    """All open attempts. `post` hears how each of them ended."""

    def __init__(
        self,
        blobs: BlobStore,
        uploads: UploadStore,
        find_version: FindVersion,
        post: Post,
        training: ServerTraining | None = None,
    ) -> None:
        """Without a `training` no job may have server steps."""
        self._training = training
        self._blobs = blobs
        self._uploads = uploads
        self._find_version = find_version
        self._post = post
        self._open: dict[AttemptKey, _Work] = {}
        self._kept: dict[str, set[AttemptKey]] = {}
        self._discarding: set[asyncio.Task[None]] = set()

    def take(self, job: JobState, command: Fold | Commit) -> None:
        """Queues an update to be folded, or the end of the attempt."""
        work = self._open.get(command.key)
        if work is None:
            queue: asyncio.Queue[Fold | Commit] = asyncio.Queue()
            task = asyncio.create_task(self._run(job, command.key, queue), name=f"aggregate {command.key}")
            work = self._open[command.key] = _Work(queue, task)
        work.queue.put_nowait(command)

    def keep(self, attempts: Iterable[AttemptKey]) -> None:
        """Says what an earlier process received; what is not needed any more goes with the job's next attempt."""
        for key in attempts:
            self._kept.setdefault(key.job_id, set()).add(key)

    def end(self, key: AttemptKey, needed: Collection[AttemptKey] = ()) -> None:
        """Forgets an attempt that has ended, and what was received for it; but not for the attempts that are needed.

        Those are forgotten when a later attempt of their job ends.
        """
        work = self._open.pop(key, None)
        if work is not None:
            work.task.cancel()
        ended = {key} | self._kept.pop(key.job_id, set())
        if still := ended.intersection(needed):
            self._kept[key.job_id] = still
        for each in sorted(ended - still):
            self._in_background(self._uploads.discard_attempt, *each, name=f"discard {each}")

    def release(self, uploads: Sequence[UploadKey]) -> None:
        """Forgets updates of assignments that have ended, while others of their attempts go on."""
        if uploads:
            self._in_background(self._release, *uploads, name="release uploads")

    async def close(self) -> None:
        """Cancels all that is under way."""
        works, self._open = list(self._open.values()), {}
        for work in works:
            work.task.cancel()
        await asyncio.gather(*(work.task for work in works), *self._discarding, return_exceptions=True)

    async def _run(self, job: JobState, key: AttemptKey, queue: asyncio.Queue[Fold | Commit]) -> None:
        outcome: AttemptAggregated | AggregationFailed
        try:
            outcome = await self._aggregate(job, key, queue)
        except (FedplatError, OSError, ValueError) as exc:
            logs.get().error("an attempt could not be aggregated", attempt=str(key), error=str(exc))
            outcome = AggregationFailed(key, str(exc))
        except Exception as exc:  # a task boundary: out of memory, or a bug; the round is tried again, and seen
            logs.get().exception("an attempt could not be aggregated", attempt=str(key))
            outcome = AggregationFailed(key, type(exc).__name__)
        self._open.pop(key, None)
        self._post(outcome)

    async def _aggregate(
        self, job: JobState, key: AttemptKey, queue: asyncio.Queue[Fold | Commit]
    ) -> AttemptAggregated:
        base = await asyncio.to_thread(ModelFile.open, self._blobs.path(job.latest.digest))
        payloads: list[bytes] = []
        rule = _rule(job, payloads.append)
        accumulator = Accumulator(base.schema, rule, await asyncio.to_thread(self._scalars, job, rule, base))
        folds: list[Fold] = []
        while isinstance(command := await queue.get(), Fold):
            folds.append(command)
            origin = await self._origin(job, command) if rule.from_latest else None
            await asyncio.to_thread(self._fold, job, base, accumulator, command, origin)
        if is_due(job, key.round):
            assert self._training is not None
            with self._blobs.temporary() as draft:
                aggregate = await asyncio.to_thread(self._commit, job, key, accumulator, base, draft)
                version = await self._training.step(job, aggregate, draft, (self._update(each) for each in folds))
        else:
            version = await asyncio.to_thread(self._commit, job, key, accumulator, base)
        if codec := job.spec.compression.downlink:
            delta = await asyncio.to_thread(self._keep_delta, Format(codec, base.schema), payloads[-1], version.digest)
            version = dataclasses.replace(
                version, delta_digest=delta.digest, delta_size_bytes=delta.size_bytes, delta_base=job.latest.digest
            )
        return AttemptAggregated(key, version, accumulator.published)

    def _scalars(self, job: JobState, rule: Rule, base: ModelFile) -> Mapping[str, float]:
        """The numbers that the job's rule remembers; none before its first version."""
        digest = job.latest.state_digest
        return read_scalars(self._blobs.path(digest), rule, base.schema.num_floating) if digest else {}

    async def _origin(self, job: JobState, command: Fold) -> ModelFile | None:
        """The version that a client began with, if it is not the latest."""
        if command.base_version == job.latest.version:
            return None
        while True:
            try:
                found = await self._find_version(job.job_id, command.base_version)
            except StoreUnavailableError:  # the runner logs it; an outage costs no attempt
                await asyncio.sleep(STORE_RETRY_S)
            else:
                assert found is not None
                return await asyncio.to_thread(ModelFile.open, self._blobs.path(found.digest))

    def _fold(
        self, job: JobState, base: ModelFile, accumulator: Accumulator, command: Fold, origin: ModelFile | None
    ) -> None:
        update = intake.open_update(self._update(command), base, job.spec.compression.uplink)
        with np.errstate(over="ignore", invalid="ignore"):  # the end looks at the sum
            accumulator.fold(rebased(update, origin, base) if origin else update, command.contribution)
        if job.spec.durability == "memory" and not accumulator.keeps_updates:
            self._uploads.discard(UploadKey(*command.origin, command.client_id))

    def _update(self, command: Fold) -> Path:
        """The file of an update."""
        path = self._uploads.complete(UploadKey(*command.origin, command.client_id), command.digest)
        if path is None:
            raise BlobError(f"the update of {command.client_id} is gone or damaged")
        return path

    def _commit(
        self, job: JobState, key: AttemptKey, accumulator: Accumulator, base: ModelFile, draft: Path | None = None
    ) -> ModelVersion:
        """Writes the aggregate and the rule's state; with a `draft`, the aggregate is no blob yet."""
        digest, rule = job.latest.state_digest, accumulator.rule
        size = base.schema.num_floating
        state = read_columns(self._blobs.path(digest), rule, size) if digest else first_columns(rule, size)
        with contextlib.ExitStack() as stack:
            stack.enter_context(crash.step("commit.model"))
            model = stack.enter_context(self._blobs.writer() if draft is None else self._blobs.draft(draft))
            model.write(base.schema.header)
            state_writer: BlobWriter | None = None
            names, scalars = rule.init(0), accumulator.scalars
            if names or scalars:
                stack.enter_context(crash.step("commit.state"))
                state_writer = stack.enter_context(self._blobs.writer())
                state_writer.write(state_schema(names, size, scalars).header)
                state_writer.write(scalars_to_bytes(scalars))
            for part in accumulator.parts(base, state):
                model.write(part.model.view(np.uint8).data)
                if state_writer and part.state:
                    for vector in part.state.values():
                        state_writer.write(vector.data)
        return ModelVersion(
            version=job.latest.version + 1,
            round=key.round,
            attempt=key.number,
            digest=model.blob.digest,
            size_bytes=model.blob.size_bytes,
            state_digest=state_writer.blob.digest if state_writer else "",
            num_updates=accumulator.num_updates,
            total_weight=accumulator.total_weight,
        )

    def _keep_delta(self, format: Format, payload: bytes, digest: str) -> Blob:
        """Stores the step to a version as a file of its own; without a version that names it, it is an orphan."""
        model = ModelFile.open(self._blobs.path(digest))
        with crash.step("commit.delta"):
            return self._blobs.put_chunks(format.framed([payload], model))

    def _release(self, *uploads: UploadKey) -> None:
        for key in uploads:
            self._uploads.discard(key)

    def _in_background(self, discard: Callable[..., None], *arguments: object, name: str) -> None:
        async def work() -> None:
            try:
                # In a thread: unlinking gigabytes must not hold up the event loop.
                await asyncio.to_thread(discard, *arguments)
            except BlobError as exc:  # no harm to the round; the next start clears the folder
                logs.get().error("updates could not be thrown away", what=name, error=str(exc))

        task = asyncio.create_task(work(), name=name)
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)


def _rule(job: JobState, keep: Callable[[bytes], None]) -> Rule:
    """The job's rule; if the job has a downlink, with steps that are encoded, and `keep` is given what they become."""
    seed = seed_of(job.job_id, job.latest.version + 1)
    # Noise that nobody can make again: a release that was thrown away tells nothing of the next one.
    noise = Noise(os.urandom(KEY_BYTES)) if job.spec.privacy is not None else None
    rule, codec = job.spec.rule(seed, noise), job.spec.compression.downlink
    return rule if codec is None else compress_step(codec.build(), seed, keep)(rule)
