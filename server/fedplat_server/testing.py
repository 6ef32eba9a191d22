"""The store in memory, for tests and simulations: the semantics of `store.sql`, without a database."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fedplat.rounds import (
    Assignment,
    Attempt,
    AttemptKey,
    Change,
    Crew,
    HistoryRow,
    JobState,
    ModelVersion,
    Participation,
    participations_of,
    rebuild_attempt,
)
from fedplat.rounds.states import AttemptKind, AttemptPhase
from fedplat_server.audit import AuditEntry
from fedplat_server.errors import StaleRevisionError, StoreError
from fedplat_server.store import rows, shares, writes
from fedplat_server.store.ledger import LedgerRow
from fedplat_server.store.memory_ledger import MemoryLedger
from fedplat_server.store.port import (
    AttemptRecord,
    HistoryRecord,
    JobRecord,
    Staleness,
    VersionRecord,
)
from fedplat_server.store.retention import BATCH, Keep, Removable


def as_stored(job: JobState, shift_s: float = 0.0) -> JobState:
    """What a store gives back of a job: only assignments keep their moments, on a clock that is ahead by `shift_s`."""
    attempt, carried = job.attempt, job.carried
    if attempt is not None:
        moved = [_moved(assignment, shift_s) for crew in job.crews for assignment in crew.assignments.values()]
        attempt, carried = rebuild_attempt(_bare(attempt), moved)
    return dataclasses.replace(job, attempt=attempt, carried=carried, resume_at=None)


def _bare(attempt: Attempt) -> Attempt:
    return dataclasses.replace(
        attempt,
        opened_at=0.0,
        selection_ends_at=0.0,
        ended_at=None,
        closes_at=None,
        wakeup_at=None,
        assignments={},
        counts={},
    )


def _moved(assignment: Assignment, shift_s: float) -> Assignment:
    assigned_at, deadline_at = assignment.assigned_at + shift_s, assignment.deadline_at + shift_s
    return dataclasses.replace(assignment, assigned_at=assigned_at, deadline_at=deadline_at)


@dataclasses.dataclass
class _Attempt:
    attempt: Attempt  # as of the last change, without its crew
    opened_unix_s: float
    ended_unix_s: float | None = None

    def record(self, counted: Sequence[Assignment]) -> AttemptRecord:
        now = self.attempt
        stale = [each.staleness for each in counted if each.folded_into is not None]
        return AttemptRecord(
            key=now.key,
            kind=now.kind,
            phase=now.phase,
            reason=now.reason,
            base_version=now.base_version,
            goal=now.goal,
            minimum=now.minimum,
            target=now.target,
            opened_unix_s=self.opened_unix_s,
            ended_unix_s=self.ended_unix_s,
            metrics=dict(now.metrics),
            counts=Counter(assignment.state for assignment in counted),
            update_bytes=sum(assignment.update_bytes for assignment in counted),
            staleness=Staleness(sum(stale) / len(stale), max(stale)) if stale else Staleness(),
        )


@dataclasses.dataclass
class _Job:
    state: JobState
    job_file: str
    created_unix_s: float
    versions: list[VersionRecord]
    save_id: str = ""
    attempts: dict[AttemptKey, _Attempt] = dataclasses.field(default_factory=dict[AttemptKey, _Attempt])
    # With their moments on the wall clock.
    assignments: dict[tuple[AttemptKey, str], Assignment] = dataclasses.field(
        default_factory=dict[tuple[AttemptKey, str], Assignment]
    )

    def record(self, epoch_unix_s: float) -> JobRecord:
        attempt = self.state.attempt
        carried = Crew()
        if attempt is not None:
            mine = [
                _moved(each, -epoch_unix_s)
                for each in self.assignments.values()
                if each.is_open or attempt.key in (each.key, each.folded_into)
            ]
            attempt, carried = rebuild_attempt(_bare(attempt), mine)
        state = dataclasses.replace(self.state, attempt=attempt, carried=carried, resume_at=None)
        return JobRecord(state, self.job_file, self.created_unix_s)

    def attempt_records(self) -> list[AttemptRecord]:
        counted: dict[AttemptKey, list[Assignment]] = {}
        for each in self.assignments.values():
            counted.setdefault(each.folded_into or each.key, []).append(each)
        return [kept.record(counted.get(key, [])) for key, kept in self.attempts.items()]


class MemoryStore(MemoryLedger):
    """The adapter of `port.Store` in memory."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._jobs: dict[str, _Job] = {}
        self._job_keys: dict[str, str] = {}
        self._tokens: dict[bytes, tuple[AttemptKey, str]] = {}
        self._history: list[tuple[str, HistoryRecord]] = []
        self._without_history: set[AttemptKey] = set()

    async def close(self) -> None:
        """Lets go of nothing: there are no connections."""

    async def ping(self) -> None:
        """Returns at once."""

    async def fence(self, term: int) -> None:
        """Nobody else can write here."""

    async def sever(self) -> None:
        """Nothing is ever under way."""

    async def create_job(
        self,
        state: JobState,
        job_file: str,
        idempotency_key: str,
        audit: Sequence[AuditEntry] = (),
        expected: int | None = None,
    ) -> JobRecord:
        """Adds a job with its version 0 and a history row; see the port."""
        if idempotency_key not in self._job_keys:
            if state.job_id in self._jobs:
                raise StoreError(f"there is a job {state.job_id} already")
            rows.settled_values(state.spec)
            self._advance(state.spec.population, expected)
            now = self._clock()
            self._job_keys[idempotency_key] = state.job_id
            self._jobs[state.job_id] = _Job(state, job_file, now, [VersionRecord(state.latest, now, {})])
            self._note(state.job_id, HistoryRow("job", "", state.status), now)
            await self.append_audit(audit)
        return self._jobs[self._job_keys[idempotency_key]].record(self._clock())

    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        """The job that was created with this key."""
        job_id = self._job_keys.get(idempotency_key)
        return None if job_id is None else self._jobs[job_id].record(self._clock())

    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        """Every job in the order of creation; see the port."""
        epoch_unix_s = self._clock() - now
        return [job.record(epoch_unix_s) for job in self._jobs.values()]

    async def save(
        self, changes: Sequence[Change], now: float, *, save_id: str = "", audit: Sequence[AuditEntry] = ()
    ) -> None:
        """Writes changes, all or none; see the port."""
        self._check(changes)
        unix_s = self._clock()
        for change in changes:
            self._apply(change, unix_s, unix_s - now)
            self._jobs[change.job.job_id].save_id = save_id
        await self.append_audit(audit)

    async def last_save(self, job_id: str) -> str:
        """The id of the save that changed a job last; see the port."""
        return self._jobs[job_id].save_id

    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        """The assignment with this token, however old."""
        if token_hash not in self._tokens:
            return None
        key, client_id = self._tokens[token_hash]
        found = self._jobs[key.job_id].assignments[key, client_id]
        return dataclasses.replace(found, assigned_at=0.0, deadline_at=0.0)

    async def participations(self, job_id: str, rounds: range) -> list[Participation]:
        """The assignments of a job's attempts to train in these rounds; see the port."""
        job = self._jobs.get(job_id)
        made: dict[AttemptKey, list[Assignment]] = {}
        for each in job.assignments.values() if job is not None else ():
            made.setdefault(each.key, []).append(each)
        return [
            participation
            for key, kept in (job.attempts if job is not None else {}).items()
            if key.round in rounds and kept.attempt.kind is AttemptKind.TRAIN
            for participation in participations_of(made.get(key, ()))
        ]

    async def list_attempts(
        self, job_id: str, *, all_attempts: bool = False, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        """The first attempts after a round and number; see the port."""
        records = self._jobs[job_id].attempt_records() if job_id in self._jobs else []
        wanted = (one for one in records if all_attempts or one.phase is not AttemptPhase.ABANDONED)
        return [one for one in wanted if after is None or one.key[1:] > after][:limit]

    async def last_attempt(self, job_id: str) -> AttemptRecord | None:
        """The newest attempt; see the port."""
        records = await self.list_attempts(job_id, all_attempts=True)
        return records[-1] if records else None

    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        """The version of a job that has this number."""
        known = self._jobs[job_id].versions if job_id in self._jobs else []
        return known[version].version if 0 <= version < len(known) else None

    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        """The first model versions after a number; see the port."""
        return self._jobs[job_id].versions[after + 1 :][:limit] if job_id in self._jobs else []

    async def versions_of_rounds(self, job_id: str, first: int, last: int) -> list[VersionRecord]:
        """The model versions that some rounds have made; see the port."""
        return [record for record in await self.list_versions(job_id) if first <= record.version.round <= last]

    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Notes what the server's evaluator said of a version, and adds a history row; see the port."""
        job = self._jobs.get(job_id)
        if job is None or not 0 <= version < len(job.versions):
            raise StoreError(f"job {job_id} has no version {version}")
        record = job.versions[version]
        if record.metrics == metrics and metrics:
            return
        job.versions[version] = dataclasses.replace(record, metrics=dict(metrics))
        said, number = record.version, str(version)
        row = HistoryRow("version", number, number, said.round, said.attempt, metrics=dict(metrics))
        self._note(job_id, row, self._clock())

    async def history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        """Rows of a job after a sequence number, oldest first."""
        later = self._history[after_sequence:]
        return [record for mine, record in later if mine == job_id][:limit]

    async def populations_of(self, digest: str) -> frozenset[str]:
        """The populations of the jobs that keep a version, or a delta, with this digest."""
        return frozenset(
            job.state.spec.population
            for job in self._jobs.values()
            if any(
                digest in (record.version.digest, record.version.delta_digest) and record.model_removed_unix_s is None
                for record in job.versions
            )
        )

    async def referenced_digests(self) -> frozenset[str]:
        """Digests of all files that are needed; see the port."""
        named: set[str] = set()
        for record in (record for job in self._jobs.values() for record in job.versions):
            if record.model_removed_unix_s is None:
                named |= {record.version.digest, record.version.delta_digest}
            if record.state_removed_unix_s is None:
                named.add(record.version.state_digest)
        return frozenset(named) - {""}

    async def removable(self, job_id: str, keep: Keep, limit: int = BATCH) -> list[Removable]:
        """The oldest versions of which files may go; see the port."""
        found: list[Removable] = []
        for record in self._jobs[job_id].versions if job_id in self._jobs else []:
            number, version = record.version.version, record.version
            model = number < keep.models_from and self._is_spare(job_id, record)
            model = model and not (keep.every and number % keep.every == 0)
            state = number < keep.states_from and bool(version.state_digest) and record.state_removed_unix_s is None
            if model or state:
                found.append(Removable(version, model, state))
        return found[:limit]

    async def give_up(self, job_id: str, found: Collection[Removable]) -> frozenset[str]:
        """Notes that the files of these versions go; see the port."""
        now, versions, digests = self._clock(), self._jobs[job_id].versions, set[str]()
        for one in found:
            number, record = one.version.version, versions[one.version.version]
            if one.model and self._is_spare(job_id, record):
                versions[number] = record = dataclasses.replace(record, model_removed_unix_s=now)
            if one.state:
                versions[number] = dataclasses.replace(record, state_removed_unix_s=now)
            digests |= {one.version.digest, one.version.state_digest, one.version.delta_digest} - {""}
        return frozenset(digests) - await self.referenced_digests()

    async def unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Those of some digests that no row names."""
        return frozenset(digests) - await self.referenced_digests()

    async def old_attempts(self, job_id: str, before_unix_s: float, limit: int = BATCH) -> list[AttemptKey]:
        """The oldest attempts with a history that ended before a moment; see the port."""
        job = self._jobs[job_id]
        at_work = {each.key for each in job.assignments.values() if each.is_open}
        found = [
            key
            for key, kept in job.attempts.items()
            if kept.ended_unix_s is not None and kept.ended_unix_s < before_unix_s
            if key not in at_work and key not in self._without_history
        ]
        return sorted(found)[:limit]

    async def remove_history(self, keys: Collection[AttemptKey], *, metrics: bool) -> int:
        """Removes the rows of the history of attempts; see the port."""
        self._without_history.update(keys)
        gone = [
            index
            for index, (job_id, record) in enumerate(self._history)
            if record.row.entity in ("attempt", "assignment")
            if AttemptKey(job_id, record.row.round, record.row.attempt) in keys
        ]
        for index in gone:
            self._history[index] = ("", self._history[index][1])  # sequence numbers have gaps then
        for job_id in {key.job_id for key in keys} if metrics else ():
            made = self._jobs[job_id].assignments
            for place, each in made.items():
                made[place] = dataclasses.replace(each, metrics={}, text="") if place[0] in keys else each
        return len(gone)

    async def note_seen(self, seen_unix_s: Mapping[str, float]) -> None:
        """Notes nothing: clients are never given up here."""

    def _is_spare(self, job_id: str, record: VersionRecord) -> bool:
        """Whether neither the job nor a client at work for it needs a version's model, which is there."""
        job, number = self._jobs[job_id], record.version.version
        needed = {
            0,
            job.state.latest.version,
            *(each.base_version for each in job.assignments.values() if each.is_open),
        }
        needed |= {each.attempt.base_version for each in job.attempts.values() if each.ended_unix_s is None}
        return number not in needed and record.model_removed_unix_s is None

    def _states(self) -> Iterable[JobState]:
        return (job.state for job in self._jobs.values())

    def _check(self, changes: Sequence[Change]) -> None:
        """Raises whatever a database would refuse the changes for, before any is applied."""
        revisions = {job_id: job.state.revision for job_id, job in self._jobs.items()}
        versions = {job_id: len(job.versions) for job_id, job in self._jobs.items()}
        tokens = dict[bytes, tuple[AttemptKey, str]]()
        for change in changes:
            job_id = change.job.job_id
            if revisions.get(job_id) != change.expected_revision:
                raise StaleRevisionError(f"job {job_id} is not at revision {change.expected_revision} any more")
            revisions[job_id] = change.job.revision
            if change.version is not None:
                if change.version.version != versions[job_id]:
                    raise StoreError(f"job {job_id} cannot have version {change.version.version} now")
                versions[job_id] += 1
                self._require_files(job_id, change.version)
                if (self._jobs[job_id].state.spec.privacy is None) != (change.job.spec.mechanism is None):
                    raise writes.uncharged(job_id, change.version.version)
            for assignment in change.assignments:
                place, token = (assignment.key, assignment.client_id), assignment.token_hash
                if tokens.get(token, self._tokens.get(token, place)) != place:
                    raise StoreError("another assignment has this token")
                tokens[token] = place
        self._check_shares(changes)

    def _require_files(self, job_id: str, version: ModelVersion) -> None:
        """Refuses a rollback to what is not kept any more."""
        records = self._jobs[job_id].versions
        models = {each.version.digest for each in records if each.model_removed_unix_s is None}
        states = {each.version.state_digest for each in records if each.state_removed_unix_s is None} | {""}
        if version.restored_from is not None and (version.digest not in models or version.state_digest not in states):
            raise writes.not_kept(job_id, version.restored_from)

    def _check_shares(self, changes: Sequence[Change]) -> None:
        """Raises `ParticipationError` if a client of a private job would take part too often."""
        begun = {key: share for change in changes for key, share in shares.begun(change)}
        now = [(each.key, each.client_id) for change in changes for each in change.assignments] if begun else []
        for key, share in begun.items():
            places = [place for place in (*self._jobs[key.job_id].assignments, *now) if place[0].job_id == key.job_id]
            rounds: dict[str, set[int]] = {}
            for made_in, client_id in places:
                rounds.setdefault(client_id, set()).add(made_in.round)
            for client_id in [client_id for made_in, client_id in places if made_in == key]:
                mine = rounds[client_id]
                if 0 < share.max_participations < len(mine) or any(share.is_too_near(key.round, one) for one in mine):
                    raise share.refusal(key, client_id, len(mine))

    def _apply(self, change: Change, now: float, epoch_unix_s: float) -> None:
        job = self._jobs[change.job.job_id]
        job.state = change.job
        if change.attempt is not None:
            key = change.attempt.key
            kept = job.attempts.setdefault(key, _Attempt(change.attempt, now))
            kept.attempt = _bare(change.attempt)
            if kept.ended_unix_s is None and not change.attempt.is_open:
                kept.ended_unix_s = now
        for assignment in change.assignments:
            place = (assignment.key, assignment.client_id)
            if (old := job.assignments.get(place)) is not None:
                del self._tokens[old.token_hash]
            job.assignments[place] = _moved(assignment, epoch_unix_s)
            self._tokens[assignment.token_hash] = place
        if change.version is not None:
            job.versions.append(VersionRecord(change.version, now, {}))
            if (mechanism := change.job.spec.mechanism) is not None and change.version.is_aggregate:
                row = LedgerRow(change.version.version, change.version.round, mechanism, now)
                self._ledger.setdefault(change.job.job_id, []).append(row)
        for row in change.history:
            self._note(change.job.job_id, row, now)

    def _note(self, job_id: str, row: HistoryRow, now: float) -> None:
        self._history.append((job_id, HistoryRecord(len(self._history) + 1, now, row)))
