"""Jobs, rounds and attempts as operators see them: what is stored, and the progress of what is open."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedplat.job import JobSpec
from fedplat.rounds import Attempt, Coordinator, selection
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import find_training
from fedplat.rounds.states import OPEN_PHASES, REASON_TEXTS, AssignmentState, AttemptPhase
from fedplat.texts import shorten
from fedplat.wire.v1 import admin_pb2
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination.approvals import ApprovalBoards, JobDecisions
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import records, sql_assignments, sql_jobs
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.rpc import pages
from fedplat_server.rpc.job_registry import JobRegistry

MAX_NAMED = 5
SILENT_S = 45.0
_WORKING = OPEN_PHASES - {AttemptPhase.SELECTING, AttemptPhase.COMMITTING}


@dataclasses.dataclass(eq=False, repr=False)
class JobView:
    """Encodes jobs and attempts."""

    jobs: JobRegistry
    store: sql_jobs.JobStore
    halves: ServerHalves
    progress: ProgressTracker
    clients: ClientDirectory
    runner: Runner
    boards: ApprovalBoards

    async def show(self, record: records.JobRecord) -> admin_pb2.Job:
        """Return a job with its last attempt, as the database has it."""
        attempt = record.state.attempt
        found = await self.store.find_attempts([attempt.key] if attempt is not None else [])
        shown = self.encode(record, next(iter(found.values()), None))
        if record.state.spec.needs_approval:
            shown.approvals.CopyFrom(_show_decisions(await self.boards.list(record.state)))
        return shown

    def encode(self, record: records.JobRecord, last: records.AttemptRecord | None) -> admin_pb2.Job:
        """Encode a job with its last attempt."""
        shown = self.halves.training_of(record.state.spec).show(record.state)
        return convert.job(record, self._round(last, {}) if last is not None else None, shown)

    async def rounds(self, job_id: str, attempts: Sequence[records.AttemptRecord]) -> list[admin_pb2.Round]:
        """Encode attempts of a job, with the metrics of the versions that they committed."""
        rounds = {attempt.key.round for attempt in attempts}
        versions = await self.store.list_versions_of_rounds(job_id, rounds) if rounds else ()
        metrics = {(record.version.round, record.version.attempt): record.metrics for record in versions}
        return [self._round(attempt, metrics.get(attempt.key[1:], {})) for attempt in attempts]

    def _round(self, record: records.AttemptRecord, server_metrics: Mapping[str, float]) -> admin_pb2.Round:
        job = self.jobs.state(record.key.job_id)
        attempt = job.open_attempt
        if attempt is None or attempt.key != record.key:
            return convert.round_(record, server_metrics)
        found = convert.round_(record, server_metrics, self.progress.summarize(job, attempt))
        if (waits := self.find_wait(attempt)) is not None:
            found.waiting.CopyFrom(waits)
        return found

    def find_wait(self, attempt: Attempt) -> admin_pb2.AttemptWait | None:
        """Return what an open attempt waits for; None if it waits for no client."""
        return find_wait(attempt, self.runner.now, self.clients.last_seen_unix_s)


MAX_DECISIONS = 100
"""Maximum number of clients of each decision that are named."""


def _show_decisions(found: JobDecisions) -> admin_pb2.JobApprovals:
    rejected = list(found.rejected.items())[:MAX_DECISIONS]
    return admin_pb2.JobApprovals(
        num_approved=len(found.approved),
        num_rejected=len(found.rejected),
        num_silent=len(found.silent),
        approved=found.approved[:MAX_DECISIONS],
        rejected=[admin_pb2.JobApprovals.Rejection(client_id=name, text=text) for name, text in rejected],
        silent=found.silent[:MAX_DECISIONS],
    )


def find_wait(attempt: Attempt, now: float, last_seen_unix_s: Mapping[str, float]) -> admin_pb2.AttemptWait | None:
    """Return what an attempt waits for; None if it waits for no client. `now` is on the coordinator's clock."""
    if attempt.phase is AttemptPhase.SELECTING:
        return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(attempt.selection_ends_at, now))
    busy = sorted(attempt.busy, key=lambda each: (each.assigned_at, each.client_id))
    if attempt.phase not in _WORKING or not busy:
        return None
    ends_at = max(each.deadline_at for each in busy)
    if attempt.closes_at is not None:
        ends_at = min(ends_at, attempt.closes_at)
    named = [each.client_id for each in busy[:MAX_NAMED]]
    earliest = time.time() - SILENT_S
    silent = [client_id for client_id in named if last_seen_unix_s.get(client_id, earliest) < earliest]
    return admin_pb2.AttemptWait(until_unix_s=_to_unix_s(ends_at, now), client_ids=named, silent_client_ids=silent)


def _to_unix_s(moment: float, now: float) -> float:
    """Convert a moment of the coordinator to whole seconds of the calendar: the two clocks never agree exactly."""
    return float(round(time.time() + moment - now))


MAX_LABELS = 20
MAX_VALUES = 20
"""Maximum number of values of a label that is shown: one with more values does not divide clients into groups."""
MIN_GROUP = 5
"""Least number of clients of a group in a private job: a smaller one would say something about single clients."""
MAX_LABEL_SETS = 20_000
"""Maximum number of combinations of labels and states that are read for one attempt."""
_PLACE = re.compile(
    rf"([0-9]{{1,12}}(?:\.[0-9]{{1,20}})?)/({pages.ID.pattern})/{pages.PAIR.pattern}/({pages.ID.pattern})"
)
_STATES = {state.value: state for state in AssignmentState}
_REPORTED = frozenset({AssignmentState.REPORTED, AssignmentState.MERGED})


def show_reasons(outcomes: Iterable[sql_assignments.OutcomeCount]) -> list[admin_pb2.ReasonCount]:
    """Encode how assignments ended, with a description of each reason."""
    return [
        convert.encode(
            admin_pb2.ReasonCount, outcome, text=REASON_TEXTS[outcome.reason] if outcome.reason is not None else ""
        )
        for outcome in outcomes
    ]


def show_labels(found: Iterable[sql_assignments.LabelledCount], *, is_private: bool) -> list[admin_pb2.LabelCount]:
    """Return the outcomes by label, sorted by name, the most frequent value first."""
    assigned, reported, merged = (Counter[tuple[str, str]]() for _ in range(3))
    for group in found:
        for place in group.labels.items():
            assigned[place] += group.count
            reported[place] += group.count * (group.state in _REPORTED)
            merged[place] += group.count * (group.state is AssignmentState.MERGED)
    num_values = Counter(name for name, _ in assigned)
    shown = sorted(name for name, number in num_values.items() if number <= MAX_VALUES)[:MAX_LABELS]
    minimum = MIN_GROUP if is_private else 1
    places = [place for place in assigned if place[0] in frozenset(shown) and assigned[place] >= minimum]
    return [
        admin_pb2.LabelCount(
            name=place[0], value=place[1], assigned=assigned[place], reported=reported[place], merged=merged[place]
        )
        for place in sorted(places, key=lambda place: (place[0], -assigned[place], place[1]))
    ]


def show_assignment(
    record: sql_assignments.AssignmentRecord, spec: JobSpec, progress: float | None
) -> admin_pb2.AssignmentDetails:
    """Encode an assignment; in a private job without the claims of the client."""
    mine = record.assignment
    into, is_reported = mine.folded_into, mine.took_s is not None
    shows_clients = disclosure_of(spec).shows_clients
    message = admin_pb2.AssignmentDetails(
        job_id=mine.key.job_id,
        job_name=spec.name,
        round=mine.key.round,
        attempt=mine.key.number,
        kind=convert.KINDS[mine.kind],
        client_id=mine.client_id,
        state=mine.state,
        reason=mine.reason or "",
        text=shorten(mine.text),
        base_version=mine.base_version,
        assigned_unix_s=record.assigned_unix_s,
        deadline_unix_s=record.deadline_unix_s,
        downloaded_unix_s=record.downloaded_unix_s or 0.0,
        uploading_unix_s=record.uploading_unix_s or 0.0,
        ended_unix_s=record.ended_unix_s or 0.0,
        update_bytes=mine.update_bytes,
        staleness=mine.staleness if into is not None else None,
        progress=progress if mine.is_busy else None,
    )
    if into is not None and into != mine.key:
        message.into_round, message.into_attempt = into.round, into.number
    if shows_clients and is_reported:
        message.num_examples = mine.num_examples
        message.metrics.update(mine.metrics)
    if shows_clients and mine.norm is not None:
        message.norm = mine.norm
    return message


def parse_filter(request: admin_pb2.ListAssignmentsRequest, jobs: JobRegistry) -> sql_assignments.AssignmentFilter:
    """Return the filter of a request. Raises `RefusedError` if it is not valid."""
    if not (request.job or request.client_id):
        raise RefusedError(Code.INVALID_REQUEST, "expected a job, a client_id, or both")
    if not request.job and (request.round or request.attempt):
        raise RefusedError(Code.INVALID_REQUEST, "a round or an attempt is one of a job: expected a job, too")
    unknown = [state for state in request.states if state not in _STATES]
    if unknown:
        text = f"the state {unknown[0][:80]!r} is unknown; expected {', '.join(AssignmentState)}"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return sql_assignments.AssignmentFilter(
        job_id=jobs.find(request.job).state.job_id if request.job else "",
        round=validation.number(request.round, "round") or None,
        number=validation.number(request.attempt, "attempt") or None,
        client_id=validation.client_id(request.client_id, Code.NO_SUCH_CLIENT) if request.client_id else "",
        states=frozenset(_STATES[state] for state in request.states),
    )


def parse_place(token: str) -> sql_assignments.AssignmentPlace | None:
    """Return the position in a page token; None for the first page. Raises `RefusedError` if it is invalid."""
    match = _PLACE.fullmatch(pages.token(token, _PLACE))
    if match is None:
        return None
    unix_s, job_id, round_, number, client_id = match.groups()
    return sql_assignments.AssignmentPlace(float(unix_s), job_id, int(round_), int(number), client_id)


def format_place(place: sql_assignments.AssignmentPlace) -> str:
    """Return a position as a page token."""
    return f"{place.assigned_unix_s!r}/{place.job_id}/{place.round}.{place.number}/{place.client_id}"


WAITING_AFTER_S = 3.0
"""A watch is told that an attempt waits for clients after this time, if its other events are more seldom."""


class ProgressEvents:
    """The progress events of one watch of a job: at most one in `every_s` seconds; 0 disables them."""

    def __init__(
        self, job_id: str, every_s: float, coordinator: Coordinator, progress: ProgressTracker, view: JobView
    ) -> None:
        self._coordinator = coordinator
        self._progress = progress
        self._view = view
        self._job_id = job_id
        self._every_s = every_s or math.inf
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._due_at = now + (min(every_s, WAITING_AFTER_S) or math.inf)
        self._progress_due_at = now + self._every_s
        self._last: tuple[object, object] | None = None

    def next_event(self, sequence: int) -> admin_pb2.JobEvent | None:
        """Return an event if one is due and the progress has changed; `sequence` is that of the previous event."""
        now = self._clock()
        if now < self._due_at:
            return None
        attempt = self._coordinator.jobs[self._job_id].open_attempt
        start = self._describe_start(attempt)
        problem = self._view.runner.problem
        is_waiting = attempt is not None and (attempt.phase is AttemptPhase.SELECTING or bool(start or problem))
        if not is_waiting and now < self._progress_due_at:
            self._due_at = self._progress_due_at
            return None
        self._due_at = self._progress_due_at = now + self._every_s
        if attempt is None:
            return None
        event = admin_pb2.JobEvent(
            sequence=sequence,
            unix_s=time.time(),
            entity="progress",
            round=attempt.key.round,
            attempt=attempt.key.number,
            kind=convert.KINDS[attempt.kind],
        )
        if (waits := self._view.find_wait(attempt)) is not None:
            event.waiting.CopyFrom(waits)
        if reason := f"nothing can be stored: {problem}; see fedplat status" if problem else start:
            event.reason = reason
            return event if self._is_new(attempt.key.round, reason) else None
        return self._describe_waiting(event, attempt) if is_waiting else self._add_progress(event, attempt)

    def _describe_start(self, attempt: Attempt | None) -> str:
        if attempt is None or attempt.key.round > 0:
            return ""
        job, room = self._coordinator.jobs[self._job_id], self._coordinator.room
        return find_training(job.spec).describe_start(len(selection.list_able(room, job)))

    def _describe_waiting(self, event: admin_pb2.JobEvent, attempt: Attempt) -> admin_pb2.JobEvent | None:
        room = self._coordinator.room
        if self._job_id not in room.demands:
            return None
        unlike = room.describe_unlike(self._job_id)
        event.reason = f"waits for clients: {room.num_eligible(self._job_id)} of {attempt.target} can be drawn now"
        event.reason += f"; {unlike}" if unlike else ""
        return event if self._is_new(attempt.key.round, event.reason) else None

    def _add_progress(self, event: admin_pb2.JobEvent, attempt: Attempt) -> admin_pb2.JobEvent | None:
        job = self._coordinator.jobs[self._job_id]
        summary = self._progress.summarize(job, attempt)
        if summary is None or not self._is_new(attempt.key, (summary, *event.waiting.silent_client_ids)):
            return None
        event.progress.CopyFrom(convert.progress(summary))
        return event

    def _is_new(self, place: object, content: object) -> bool:
        before, self._last = self._last, (place, content)
        return self._last != before

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait until the job has changed or an event is due."""
        timeout_s = self._due_at - self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), None if math.isinf(timeout_s) else timeout_s)
