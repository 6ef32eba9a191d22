"""Jobs and their attempts as operators see them: what is stored, with what the server knows at the moment."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from fedplat.rounds import Attempt
from fedplat.rounds.states import OPEN_PHASES, AttemptPhase
from fedplat.wire.v1 import admin_pb2
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.jobs import AttemptRecord, JobRecord
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.messages import convert
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.rpc.job_registry import JobRegistry

MAX_NAMED = 5
SILENT_S = 45.0
_WORKING = OPEN_PHASES - {AttemptPhase.SELECTING, AttemptPhase.COMMITTING}


@dataclasses.dataclass(eq=False, repr=False)
class JobView:
    """Encodes jobs and attempts."""

    jobs: JobRegistry
    store: JobStore
    halves: ServerHalves
    progress: ProgressTracker
    clients: ClientDirectory
    runner: Runner

    async def show(self, record: JobRecord) -> admin_pb2.Job:
        """Return a job with its last attempt, as the database has it."""
        attempt = record.state.attempt
        found = await self.store.find_attempts([attempt.key] if attempt is not None else [])
        return self.encode(record, next(iter(found.values()), None))

    def encode(self, record: JobRecord, last: AttemptRecord | None) -> admin_pb2.Job:
        """Encode a job with its last attempt."""
        shown = self.halves.training_of(record.state.spec).show(record.state)
        return convert.job(record, self._round(last, {}) if last is not None else None, shown)

    async def rounds(self, job_id: str, attempts: Sequence[AttemptRecord]) -> list[admin_pb2.Round]:
        """Encode attempts of a job, with the metrics of the versions that they committed."""
        rounds = {attempt.key.round for attempt in attempts}
        versions = await self.store.list_versions_of_rounds(job_id, rounds) if rounds else ()
        metrics = {(record.version.round, record.version.attempt): record.metrics for record in versions}
        return [self._round(attempt, metrics.get(attempt.key[1:], {})) for attempt in attempts]

    def _round(self, record: AttemptRecord, server_metrics: Mapping[str, float]) -> admin_pb2.Round:
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
