"""The handlers of the service `Jobs` for what happens in jobs: rounds, their assignments, and streams of events."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from typing_extensions import override

from fedplat.rounds import AttemptKey, JobState, privacy_rules, states
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import AttemptFilter, AttemptRecord
from fedplat_server.database.sql_assignments import AssignmentRecord
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.rpc import job_registry, job_view, pages
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.job_view import ProgressEvents
from fedplat_server.training.evaluation import EvaluationScheduler

HISTORY_PAGE = 250
"""Maximum number of events that a watcher reads at a time."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class JobRoundsService(admin_pb2_grpc.JobsServicer):
    """The methods that show the rounds of jobs."""

    jobs: job_registry.JobRegistry
    view: job_view.JobView
    store: Store
    runner: Runner
    progress: ProgressTracker
    evaluation: EvaluationScheduler
    draining: asyncio.Event
    """It is set when the daemon stops: watchers get an error that they retry."""

    @override
    async def WatchJob(self, request: admin_pb2.WatchJobRequest, context: Context) -> AsyncIterator[admin_pb2.JobEvent]:
        job_id = self.jobs.find(request.job).state.job_id
        progress = ProgressEvents(
            job_id,
            validation.progress_every_s(request.progress_every_s),
            self.runner.coordinator,
            self.progress,
            self.view,
        )
        sequence = min(request.after_sequence, 2**62)  # above all sequence numbers, but within the database's range
        if request.only_new:
            if request.after_sequence:
                raise RefusedError(Code.INVALID_REQUEST, "only_new and after_sequence exclude each other")
            sequence = await self.store.jobs.last_sequence(job_id)
        while True:
            changed = self.jobs.next_change(job_id)
            # The last version may still be evaluated when the job has ended.
            is_over = self.jobs.state(job_id).status in states.ENDED_JOBS and not self.evaluation.is_pending(job_id)
            rows = await self.store.jobs.list_history(job_id, sequence, limit=HISTORY_PAGE)
            for record in rows:
                sequence = record.sequence
                yield convert.event(record)
            if (event := progress.next_event(sequence)) is not None:
                yield event
            if len(rows) == HISTORY_PAGE or changed.is_set():  # else there was nothing more to read
                continue
            if is_over or request.until_now:
                return
            if self.draining.is_set():  # to the caller, the end of the stream means that the job has ended
                raise RefusedError(Code.DRAINING)
            await progress.wait(changed)

    @override
    async def ListRounds(self, request: admin_pb2.ListRoundsRequest, context: Context) -> admin_pb2.ListRoundsResponse:
        store, job_id = self.store.jobs, self.jobs.find(request.job).state.job_id
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.PAIR)
        if request.num_samples:
            attempts, total = await store.sample_attempts(job_id, min(request.num_samples, pages.MAX_ROWS))
            rounds = pages.thin_out(await self.view.rounds(job_id, attempts))
            return admin_pb2.ListRoundsResponse(rounds=rounds, total=total)
        after = (last[0], last[1]) if last is not None else None
        number = validation.number(request.round, "round")
        which = AttemptFilter(job_id, request.all_attempts, number, request.newest_first)
        attempts = await store.list_attempts(which, after=after, limit=size + 1)
        rounds, token = pages.cut(
            await self.view.rounds(job_id, attempts),
            size,
            lambda round_: round_,
            lambda last: f"{last.round}.{last.attempt}",
        )
        total = await store.count_attempts(which)
        return admin_pb2.ListRoundsResponse(rounds=rounds, next_page_token=token, total=total)

    @override
    async def ShowRound(self, request: admin_pb2.ShowRoundRequest, context: Context) -> admin_pb2.RoundDetails:
        job, store = self.jobs.find(request.job).state, self.store
        last, record = await self._find_attempt(job, request)
        (message,) = await self.view.rounds(job.job_id, [record])
        outcomes = await store.assignments.list_outcomes(record.key)
        groups = await store.assignments.count_labels(record.key, job_view.MAX_LABEL_SETS)
        is_private = not privacy_rules.disclosure_of(job.spec).shows_clients
        return admin_pb2.RoundDetails(
            round=message,
            reasons=job_view.show_reasons(outcomes),
            labels=await asyncio.to_thread(job_view.show_labels, groups, is_private=is_private),
            num_attempts=last.key.number,
        )

    @override
    async def ListAssignments(
        self, request: admin_pb2.ListAssignmentsRequest, context: Context
    ) -> admin_pb2.ListAssignmentsResponse:
        store = self.store.assignments
        size, after = pages.size(request.page_size), job_view.parse_place(request.page_token)
        which = job_view.parse_filter(request, self.jobs)
        records = await store.list_assignments(which, after=after, limit=size + 1)

        def encode(record: AssignmentRecord) -> admin_pb2.AssignmentDetails:
            current = self.runner.coordinator.find(*record.assignment.id)
            progress = self.progress.get(current) if current is not None else None
            return job_view.show_assignment(record, self.jobs.state(record.place.job_id).spec, progress)

        page, token = pages.cut(records, size, encode, lambda record: job_view.format_place(record.place))
        total = len(page) if not (after or token) else await store.count_assignments(which)
        return admin_pb2.ListAssignmentsResponse(assignments=page, next_page_token=token, total=total)

    async def _find_attempt(
        self, job: JobState, request: admin_pb2.ShowRoundRequest
    ) -> tuple[AttemptRecord, AttemptRecord]:
        """Return the last attempt at a round, and the one of the request. Raises `RefusedError` if it is unknown."""
        round_, number = validation.number(request.round, "round"), validation.number(request.attempt, "attempt")
        store, latest_first = self.store.jobs, AttemptFilter(job.job_id, all_attempts=True, newest_first=True)
        found = await store.list_attempts(latest_first, after=(round_ + 1, 0), limit=1)
        if not found or found[0].key.round != round_:
            current = f"; the last one is {job.attempt.key.round}" if job.attempt is not None else ""
            raise RefusedError(Code.NO_SUCH_ROUND, f"{round_}{current}")
        last = found[0]
        if number in (0, last.key.number):
            return last, last
        key = AttemptKey(job.job_id, round_, number)
        records = await store.find_attempts([key])
        if key not in records:
            raise RefusedError(Code.NO_SUCH_ROUND, f"attempt {number} at round {round_}; it has {last.key.number}")
        return last, records[key]
