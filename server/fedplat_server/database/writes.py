"""The transaction that saves a job: changes flattened into few rows, and the messages of secure aggregations.

A batch of changes may contain several states of one job, attempt or assignment; only the last one is written. So a
save needs the same few statements, however many steps it contains.

The transaction itself enforces the assumptions of privacy accounting (`fedplat.privacy.Mechanism`), whatever the
coordinator has in memory: a version of a private job is written with its ledger row, and no client takes part more
often, or in rounds closer together, than the job allows.

Each message is a row of its own, which is written once: a step of an attempt whose messages have many megabytes writes
only its own messages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import sqlalchemy
from sqlalchemy import Connection, distinct, func, or_, select

from fedplat.job import JobSpec
from fedplat.rounds import Attempt, AttemptKey, Change, JobState
from fedplat.rounds.changes import MESSAGE_KINDS, SentMessage
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.secure_phases import MAX_BARRED
from fedplat.rounds.states import Reason
from fedplat_server import crash_points, errors
from fedplat_server.database import rows, tables
from fedplat_server.database.rows import Values
from fedplat_server.database.tables import assignments, secure_messages
from fedplat_server.records.events import EventEntry, list_events

_MUTABLE_OF_ATTEMPTS = tuple(name for name in rows.ATTEMPT_COLUMNS if name not in ("kind", "base_version"))
_FIRST_KEPT = ("reported_revision", "uploading_unix_s", "ended_unix_s")
"""Columns of an assignment whose first value is kept."""
# Sets the columns of the values that it is executed with.
_COMPARE_AND_SET = tables.jobs.update().where(
    tables.jobs.c.job_id == sqlalchemy.bindparam("this_job"),
    tables.jobs.c.revision == sqlalchemy.bindparam("expected_revision"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ParticipationLimits:
    """The limits on a client's rounds: their least distance, and their greatest number (0: no limit).

    A client that takes part in round r may not take part in rounds r - `min_separation` to r + `min_separation`. Every
    assignment counts, whatever its outcome; those of one round count once, because at most one of its attempts is
    released.
    """

    min_separation: int
    max_participations: int

    @classmethod
    def of(cls, spec: JobSpec) -> ParticipationLimits | None:
        """Return the limits of a job; None if it has none."""
        limits = cls(spec.selection.min_separation, spec.max_participations)
        return limits if limits != cls(0, 0) else None

    def refusal(self, key: AttemptKey, client_id: str, num_rounds: int) -> errors.ParticipationError:
        """Return the error for an assignment of the client, which would then take part in `num_rounds` rounds."""
        limit = self.max_participations
        if 0 < limit < num_rounds:
            reason = f"it would take part in {num_rounds} rounds (privacy.max_participations = {limit})"
        else:
            reason = f"it takes part in a round too near by (selection.min_separation = {self.min_separation})"
        return errors.ParticipationError(f"{key} must not have client {client_id}: {reason}; nothing was written")


@dataclasses.dataclass
class Batch:
    """The rows of a sequence of changes, at `unix_s` on the wall clock, which is `now` on the clock of their times.

    `expected` is the revision that each job must have before, `limits` those of the attempts of private jobs with new
    assignments. The messages of the attempts in `ended` are removed.
    """

    unix_s: float
    now: float
    save_id: str
    expected: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    jobs: dict[str, Values] = dataclasses.field(default_factory=dict[str, Values])
    attempts: dict[AttemptKey, Values] = dataclasses.field(default_factory=dict[AttemptKey, Values])
    assignments: dict[tuple[AttemptKey, str], Values] = dataclasses.field(
        default_factory=dict[tuple[AttemptKey, str], Values]
    )
    messages: list[SentMessage] = dataclasses.field(default_factory=list[SentMessage])
    ended: set[AttemptKey] = dataclasses.field(default_factory=set[AttemptKey])
    limits: dict[AttemptKey, ParticipationLimits] = dataclasses.field(
        default_factory=dict[AttemptKey, ParticipationLimits]
    )
    versions: list[Values] = dataclasses.field(default_factory=list[Values])
    ledger: list[Values] = dataclasses.field(default_factory=list[Values])
    history: list[Values] = dataclasses.field(default_factory=list[Values])
    events: list[EventEntry] = dataclasses.field(default_factory=list[EventEntry])

    @classmethod
    def flatten(cls, changes: Iterable[Change], unix_s: float, now: float, save_id: str) -> Batch:
        """Return changes as rows. Raises `StaleRevisionError` if those of one job do not follow each other."""
        batch = cls(unix_s, now, save_id)
        jobs, attempts = dict[str, JobState](), dict[AttemptKey, Attempt]()
        for change in changes:
            job_id = change.job.job_id
            if job_id in jobs and jobs[job_id].revision != change.expected_revision:
                raise _stale_revision(job_id, change.expected_revision)
            jobs[job_id] = change.job
            if change.attempt is not None:
                attempts[change.attempt.key] = change.attempt
            batch._add(change)
        # Only the last states become rows.
        batch.jobs = {job_id: rows.job_values(job) | {"save_id": save_id} for job_id, job in jobs.items()}
        batch.attempts = {key: rows.attempt_values(attempt, unix_s) for key, attempt in attempts.items()}
        return batch

    def _add(self, change: Change) -> None:
        job_id, unix_s = change.job.job_id, self.unix_s
        self.expected.setdefault(job_id, change.expected_revision)
        if change.attempt is not None and not change.attempt.is_open:
            self.ended.add(change.attempt.key)
        self.messages.extend(change.messages)
        self._add_limits(change)
        for assignment in change.assignments:
            values = rows.assignment_values(assignment, change.job.revision, unix_s - self.now, unix_s)
            place = (assignment.key, assignment.client_id)
            if (earlier := self.assignments.get(place)) is not None:
                values |= {name: earlier[name] for name in _FIRST_KEPT if earlier[name] is not None}
            self.assignments[place] = values
        if change.version is not None:
            self.versions.append(rows.version_values(job_id, change.version, unix_s))
            if (charge := rows.ledger_values(change.job, change.version, unix_s)) is not None:
                self.ledger.append(charge)
        self.history.extend(rows.history_values(job_id, row, unix_s) for row in change.history)
        self.events.extend(list_events(change))

    def _add_limits(self, change: Change) -> None:
        limits = ParticipationLimits.of(change.job.spec) if disclosure_of(change.job.spec).is_charged else None
        if limits is not None:
            for row in change.history:
                if row.entity == "assignment" and not row.from_state:
                    self.limits[AttemptKey(change.job.job_id, row.round, row.attempt)] = limits


def write(connection: Connection, batch: Batch) -> None:
    """Write a batch. The rows of jobs are written first: their locks keep other transactions from writing to the jobs.

    Raises `StaleRevisionError`, `ParticipationError` or `StoreError`; then the transaction must be rolled back.
    """
    # In the same order for all writers, so that two of them cannot deadlock.
    for job_id in sorted(batch.jobs):
        names = {"this_job": job_id, "expected_revision": batch.expected[job_id]}
        result = connection.execute(_COMPARE_AND_SET, names | batch.jobs[job_id])
        if result.rowcount != 1:
            raise _stale_revision(job_id, batch.expected[job_id])
    dialect = connection.dialect.name
    _execute(connection, _upsert_attempts(dialect), list(batch.attempts.values()))
    _execute(connection, _upsert_assignments(dialect), list(batch.assignments.values()))
    write_messages(connection, batch.messages, batch.ended)
    for key, limits in batch.limits.items():
        _require_limits(connection, key, limits)
    _add_versions(connection, batch)
    _execute(connection, tables.history.insert(), batch.history)
    crash_points.point("save.uncommitted")


def _stale_revision(job_id: str, expected: int) -> errors.StaleRevisionError:
    return errors.StaleRevisionError(f"job {job_id} is not at revision {expected} any more: read it again")


def _require_limits(connection: Connection, key: AttemptKey, limits: ParticipationLimits) -> None:
    """Raise `ParticipationError` if a client of the attempt takes part too often. Its rows must be written before."""
    mine, other = tables.assignments.alias("mine"), tables.assignments.alias("other")
    # Subqueries for each client, so that the planner does not join all assignments of a long job.
    same = (other.c.job_id == key.job_id) & (other.c.client_id == mine.c.client_id)
    near = other.c.round.between(key.round - limits.min_separation, key.round + limits.min_separation)
    num_near = select(func.count()).where(same, near, other.c.round != key.round).scalar_subquery()
    num_rounds = select(func.count(distinct(other.c.round))).where(same).scalar_subquery()
    violations = [num_near > 0] if limits.min_separation else []
    violations += [num_rounds > limits.max_participations] if limits.max_participations else []
    in_attempt = (mine.c.job_id == key.job_id) & (mine.c.round == key.round) & (mine.c.number == key.number)
    query = select(mine.c.client_id, num_rounds).where(in_attempt, or_(*violations)).limit(1)
    violation = connection.execute(query).one_or_none()
    if violation is not None:
        raise limits.refusal(key, *violation)


def _add_versions(connection: Connection, batch: Batch) -> None:
    """Insert versions with their ledger rows.

    Rejects a private round's version without one, and other versions with one. Which jobs are private is read from
    `jobs`, not from the caller.
    """
    if not batch.versions:
        return
    named = {version["job_id"] for version in batch.versions}
    is_private = tables.jobs.c.privacy.is_not(sqlalchemy.null())
    query = select(tables.jobs.c.job_id).where(tables.jobs.c.job_id.in_(named), is_private)
    private = {row.job_id for row in connection.execute(query)}
    charged = {(row["job_id"], row["version"]) for row in batch.ledger}
    for version in batch.versions:
        job_id, number = version["job_id"], version["version"]
        is_release = job_id in private and version["round"] > 0
        if is_release != ((job_id, number) in charged):
            raise errors.StoreError(f"job {job_id}: version {number} and the ledger do not agree; nothing was stored")
        if version["restored_from"] is not None:
            _require_files(connection, version)
    _execute(connection, tables.model_versions.insert(), batch.versions)
    crash_points.point("save.uncharged")
    _execute(connection, tables.ledger.insert(), batch.ledger)


def _require_files(connection: Connection, restored: Values) -> None:
    """Raise `StoreError` for a rollback to removed files. The lock on the job's row prevents a concurrent removal."""
    exists, columns = [], tables.model_versions.c
    for digest, removed in (("digest", "model_removed_unix_s"), ("state_digest", "state_removed_unix_s")):
        kept = (
            (columns.job_id == restored["job_id"]) & (columns[digest] == restored[digest]) & columns[removed].is_(None)
        )
        exists.append(connection.execute(select(columns.version).where(kept).limit(1)).first() is not None)
    if not exists[0] or (restored["state_digest"] and not exists[1]):
        raise errors.StoreError(
            f"job {restored['job_id']}: the files of version {restored['restored_from']} are not kept any more; "
            "nothing was stored"
        )


def _execute(connection: Connection, statement: sqlalchemy.Executable, values: Sequence[Values]) -> None:
    if values:
        connection.execute(statement, values)


@functools.cache
def _upsert_attempts(dialect: str) -> sqlalchemy.Executable:
    """Return the statement that adds attempts, or changes their mutable columns. The first stored end is kept."""
    statement = rows.insert(dialect, tables.attempts)
    new, old = statement.excluded, tables.attempts.c
    changed: dict[str, sqlalchemy.ColumnElement[object]] = {name: new[name] for name in _MUTABLE_OF_ATTEMPTS}
    changed["ended_unix_s"] = func.coalesce(old.ended_unix_s, new.ended_unix_s)
    return statement.on_conflict_do_update(index_elements=["job_id", "round", "number"], set_=changed)


@functools.cache
def _upsert_assignments(dialect: str) -> sqlalchemy.Executable:
    """Return the statement that adds or replaces assignments. The revision and the times of the first steps are kept.

    `downloaded_unix_s` is written by `AssignmentStore.record_downloads` alone.
    """
    statement = rows.insert(dialect, tables.assignments)
    new, old = statement.excluded, tables.assignments.c
    keys = ["job_id", "round", "number", "client_id"]
    changed: dict[str, sqlalchemy.ColumnElement[object]] = {
        column.name: new[column.name] for column in old if column.name not in (*keys, "downloaded_unix_s")
    }
    for name in _FIRST_KEPT:
        changed[name] = func.coalesce(old[name], new[name])
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


_C = secure_messages.c
_DELETE = secure_messages.delete().where(
    _C.job_id == sqlalchemy.bindparam("this_job"),
    _C.round == sqlalchemy.bindparam("this_round"),
    _C.number == sqlalchemy.bindparam("this_number"),
)


def write_messages(connection: Connection, messages: Sequence[SentMessage], ended: Collection[AttemptKey]) -> None:
    """Add or replace messages, and remove those of attempts that end in the same transaction."""
    latest = {(each.id, each.kind): each.content for each in messages if each.id.attempt not in ended}
    values = [
        {
            "job_id": id_.attempt.job_id,
            "round": id_.attempt.round,
            "number": id_.attempt.number,
            "client_id": id_.client_id,
            "kind": kind,
            "content": content,
        }
        for (id_, kind), content in latest.items()
    ]
    if values:
        connection.execute(_upsert(connection.dialect.name), values)
    if ended:
        keys = [{"this_job": key.job_id, "this_round": key.round, "this_number": key.number} for key in sorted(ended)]
        connection.execute(_DELETE, keys)


def load_messages(connection: Connection, key: AttemptKey) -> Mapping[str, Mapping[str, bytes]]:
    """Return the messages of the clients of an attempt: their contents by client and kind."""
    mine = (_C.job_id == key.job_id) & (_C.round == key.round) & (_C.number == key.number)
    query = select(_C.client_id, _C.kind, _C.content).where(mine, _C.kind.in_(MESSAGE_KINDS))
    found: dict[str, dict[str, bytes]] = {}
    for client_id, kind, content in connection.execute(query):
        found.setdefault(client_id, {})[kind] = content
    return found


@functools.cache
def _upsert(dialect: str) -> sqlalchemy.Executable:
    statement = rows.insert(dialect, secure_messages)
    keys = ["job_id", "round", "number", "client_id", "kind"]
    return statement.on_conflict_do_update(index_elements=keys, set_={"content": statement.excluded.content})


def list_barred(connection: Connection, job_id: str, last: Attempt | None) -> tuple[str, ...]:
    """Return the clients whose messages were invalid in an attempt of a job before its last one."""
    columns = assignments.c
    query = select(columns.client_id).where(columns.job_id == job_id, columns.reason == Reason.REJECTED_MESSAGE)
    if last is not None:
        query = query.where(or_(columns.round != last.key.round, columns.number != last.key.number))
    return tuple(sorted(connection.execute(query.distinct()).scalars())[:MAX_BARRED])
