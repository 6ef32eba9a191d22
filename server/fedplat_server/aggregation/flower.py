"""The aggregation of a job with a Flower app: the app gets the replies of a round, and sends its next messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from fedplat.rounds import JobState
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend
from fedplat_server.flower.runs import FlowerRuns
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import SpooledUpdate


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
    async def fold(self, update: SpooledUpdate) -> None:
        self._updates.append(update)

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
