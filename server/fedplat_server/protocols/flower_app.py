"""The server's half of jobs with a Flower app, whose process is its own and outlives attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from fedplat import report_validation
from fedplat.job import JobSpec
from fedplat.job.tables import require_flower
from fedplat.rounds import Assignment, AttemptKey, Change, JobState, commands, states
from fedplat.wire.v1 import admin_pb2
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.coordination.job_checks import list_names
from fedplat_server.errors import Code, RefusedError
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.protocols.half import HalfParts, ServerHalf, Validate
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate


class FlowerAppHalf(ServerHalf):
    """Jobs with a Flower app: it makes the versions of the replies, and how many rounds there are."""

    def __init__(self, parts: HalfParts, runs: FlowerRuns) -> None:
        super().__init__(parts)
        self._runs = runs

    @override
    async def check_job(self, spec: JobSpec) -> None:
        app, apps = require_flower(spec).app, self._runs.names
        if app not in apps:
            raise RefusedError(
                Code.INVALID_JOB_FILE,
                f"flower.app = {app!r}: the server has no such Flower app; {list_names(apps)}. Start it with "
                f"--flower-app {app}=FOLDER",
            )

    @override
    async def size_limit(self, job: JobState, assignment: Assignment) -> int:
        return require_flower(job.spec).max_reply_bytes(job.latest.size_bytes)

    @override
    async def validator(self, job: JobState, assignment: Assignment, base: Path) -> Validate:
        array_types = require_flower(job.spec).array_types
        return lambda part, _: report_validation.validate_message(part.path, array_types)

    @override
    async def running_norm(self, job: JobState, assignment: Assignment) -> None:
        return None  # the arrays of a reply are those of the app, not of a version

    @override
    def stores_rows(self, job: JobState) -> bool:
        return False  # the process of the app reads the updates

    @override
    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> AppAggregation:
        return AppAggregation(find_job, self._runs, blobs)

    @override
    def begin_alone(self, job: JobState, command: commands.RunWarmStart) -> None:
        self._runs.begin(job, command)

    @override
    def end(self, key: AttemptKey) -> None:
        self._runs.end(key)

    @override
    def on_stored(self, change: Change) -> None:
        if change.job.status in states.ENDED_JOBS:
            self._runs.forget(change.job.job_id)

    @override
    async def close(self) -> None:
        await self._runs.close()

    @override
    def show(self, job: JobState) -> admin_pb2.Job:
        return admin_pb2.Job()


class AppAggregation(AggregationBackend):
    """A backend that passes the updates of an attempt to the job's app.

    `find_job` returns the job with the assignments as they are when the attempt commits.
    """

    def __init__(self, find_job: Callable[[], JobState], runs: FlowerRuns, blobs: BlobStore) -> None:
        self._find_job, self._runs, self._blobs = find_job, runs, blobs
        self._updates: list[SpooledUpdate] = []

    @property
    @override
    def keeps_updates(self) -> bool:
        return True

    @override
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        self._updates.extend(updates)

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        replies = {update.contribution.client_id: Path(update.path) for update in self._updates}
        job = self._find_job()
        failures = job.open_attempt.failures if job.open_attempt is not None else {}
        step = await self._runs.advance(job, self._blobs, replies, failures)
        used = [
            update.contribution.weight for update in self._updates if update.contribution.client_id not in step.refused
        ]
        return Aggregate(
            model=step.message,
            state=step.state,
            num_updates=len(used),
            total_weight=sum(used),
            published=step.metrics,
            cohort=step.cohort,
            refused=step.refused,
        )

    @override
    async def close(self) -> None:
        pass
