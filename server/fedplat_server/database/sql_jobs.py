"""Jobs, attempts, assignments, versions and history in a SQL database."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, and_, func, select, tuple_

from fedplat.rounds import (
    Assignment,
    AttemptKey,
    Change,
    HistoryRow,
    JobState,
    ModelVersion,
    Participation,
    rebuild_attempt,
    rounds_to_recall,
)
from fedplat.rounds.closing import MAX_DURATIONS
from fedplat.rounds.influence import MAX_CLAIMS
from fedplat.rounds.records import Claim
from fedplat.rounds.states import HAVE_UPDATES, AttemptPhase
from fedplat_server import crash_points, errors
from fedplat_server.database import rows, sql_assignments, sql_audit, sql_ledger, transactions, writes
from fedplat_server.database.records import (
    AttemptFilter,
    AttemptRecord,
    HistoryRecord,
    JobFileReader,
    JobRecord,
    VersionRecord,
    spaced_positions,
)
from fedplat_server.database.sql_contents import NO_CONTENTS, ContentRows, SmallContents
from fedplat_server.database.tables import (
    NOT_DELETED,
    OF_ROUNDS,
    ONE_COMMIT,
    SAME_ATTEMPT,
    STILL_OPEN,
    assignments,
    attempts,
    history,
    jobs,
    model_versions,
)
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import EventEntry, EventType

MAX_TALLIED = 20_000
"""Maximum number of assignments, more or less, whose outcomes one sample of rounds counts."""
ROUNDS_PER_QUERY = 50
"""Number of rounds in one query for participations, which limits the memory for a job with many large rounds."""

# Built once: each watch runs it after each transaction of its job, and building it costs more than running it.
_LATER = (
    select(history)
    .where(history.c.job_id == sqlalchemy.bindparam("this_job"), history.c.sequence > sqlalchemy.bindparam("after"))
    .order_by(history.c.sequence)
    .limit(sqlalchemy.bindparam("most"))
)


class JobStore:
    """Jobs with their attempts, assignments, model versions and append-only history."""

    def __init__(self, database: Database, clock: Clock, files: JobFileReader) -> None:
        self._database = database
        self._clock = clock
        self._files = files

    async def create_job(
        self,
        state: JobState,
        job_file: str,
        idempotency_key: str,
        audit: Sequence[AuditEntry] = (),
        expected: int | None = None,
    ) -> JobRecord:
        """Add a job (status DRAFT, version 0) with a history row and, if it is private, its calibrated `[privacy]`.

        If a job was created with this idempotency key, returns that job unchanged, and appends no entries. Raises
        `StoreError` if the `[privacy]` of a private job is not calibrated, and `PopulationChangedError` if its
        population is not at the `expected` revision (None: any).
        """
        now = self._clock()
        values = {
            **rows.job_values(state),
            **rows.privacy_values(state.spec),
            "job_id": state.job_id,
            "population": state.spec.population,
            "job_file": job_file,
            "idempotency_key": idempotency_key,
            "created_unix_s": now,
        }
        insert = rows.insert(self._database.dialect, jobs).values(values)
        insert = insert.on_conflict_do_nothing(index_elements=["idempotency_key"])
        row = rows.history_values(state.job_id, HistoryRow("job", "", state.status), now)
        created = EventEntry(EventType.JOB_CREATED, state.job_id, state.spec.name, state.spec.population)

        def transaction(connection: Connection) -> JobRecord:
            if connection.execute(insert).rowcount == 1:
                sql_ledger.advance_revision(connection, state.spec.population, expected)
                version = rows.version_values(state.job_id, state.latest, now)
                connection.execute(model_versions.insert().values(version))
                connection.execute(history.insert().values(row))
                sql_audit.append_events(connection, [created], now)
                sql_audit.append_entries(connection, audit, now)
            return self._load_jobs(connection, now, jobs.c.idempotency_key == idempotency_key)[0]

        with crash_points.step("create_job"):
            return await self._database.write(transaction)

    async def change_job_file(self, job_id: str, job_file: str, audit: Sequence[AuditEntry] = ()) -> None:
        """Replace the file of an existing job, with its audit entries."""
        update = jobs.update().where(jobs.c.job_id == job_id).values(job_file=job_file)

        def transaction(connection: Connection) -> None:
            if connection.execute(update).rowcount != 1:
                raise errors.StoreError(f"there is no job {job_id}")
            sql_audit.append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        """Return the job that was created with this key."""
        now, mine = self._clock(), jobs.c.idempotency_key == idempotency_key
        found = await self._database.read(lambda connection: self._load_jobs(connection, now, mine))
        return found[0] if found else None

    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        """Return every job in the order of creation, in its last state.

        It has its last attempt, the assignments of that attempt, those carried over (`rounds.rebuild_attempt`), its
        latest version, and the durations (`took_s`, oldest first, at most `closing.MAX_DURATIONS`) of its
        assignments that were reported in attempts of kind TRAIN. The times of assignments (`…_at`) are on a clock whose
        current time is `now`, as accurate as the wall clock; all other times are zero or None.
        """
        epoch_unix_s = self._clock() - now
        return await self._database.read(lambda connection: self._load_jobs(connection, epoch_unix_s))

    async def save(
        self,
        changes: Sequence[Change],
        now: float,
        *,
        save_id: str = "",
        audit: Sequence[AuditEntry] = (),
        contents: SmallContents = NO_CONTENTS,
    ) -> None:
        """Write changes in order, all or none: job, attempt, assignments, version, ledger and history.

        `contents` are the bytes of small updates and blobs, which become rows if the changes accept or commit them.
        `now` is the current time on their clock. Raises `StoreError` if a version of a private job has no ledger
        row or if a rollback refers to removed files, `StaleRevisionError` if a job is not at the expected revision, and
        `ParticipationError` if a client of a private job would take part too often according to the stored assignments.
        After `StoreUnavailableError` the outcome is unknown until `find_last_save` answers.
        """
        batch = writes.Batch.flatten(changes, self._clock(), now, save_id)
        content_rows = ContentRows.of(changes, contents)

        def transaction(connection: Connection) -> None:
            writes.write(connection, batch)
            content_rows.write(connection)
            sql_audit.append_events(connection, batch.events, batch.unix_s)
            sql_audit.append_entries(connection, audit, batch.unix_s)

        if batch.jobs or audit:
            with crash_points.step("save"):
                await self._database.write(transaction)

    async def find_last_save(self, job_id: str) -> str:
        """Return the id of the last save of a job. Waits for a save in progress, of any process."""
        # A save holds the lock on its jobs' rows until its outcome is certain, even if its caller is gone.
        locked = select(jobs.c.save_id).where(jobs.c.job_id == job_id).with_for_update()

        def transaction(connection: Connection) -> str:
            return connection.execute(locked).scalar_one()

        return await self._database.write(transaction)

    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        """Return the assignment with this token, however old, with times of zero."""
        found = await self._database.fetch(_with_kind().where(assignments.c.token_hash == token_hash))
        return rows.assignment(found[0]) if found else None

    async def list_attempts(
        self, which: AttemptFilter, *, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        """Return the first `limit` attempts after a round and number, in the order of the filter."""
        place = (attempts.c.round, attempts.c.number)
        query = select(attempts).where(*_matches(which)).limit(limit)
        if after is not None:
            query = query.where(tuple_(*place) < after if which.newest_first else tuple_(*place) > after)
        query = query.order_by(*(column.desc() if which.newest_first else column for column in place))
        return await self._database.read(lambda connection: _with_counts(connection, connection.execute(query).all()))

    async def count_attempts(self, which: AttemptFilter) -> int:
        """Return the number of attempts that satisfy a filter."""
        query = select(func.count()).select_from(attempts).where(*_matches(which))
        return (await self._database.fetch(query))[0][0]

    async def find_attempts(self, keys: Collection[AttemptKey]) -> dict[AttemptKey, AttemptRecord]:
        """Return the attempts with these keys, by key; unknown ones are left out."""
        query, values = _attempts_of_keys(self._database.dialect), transactions.json_key_values(keys)

        def transaction(connection: Connection) -> dict[AttemptKey, AttemptRecord]:
            records = _with_counts(connection, connection.execute(query, values).all())
            return {record.key: record for record in records}

        return await self._database.read(transaction) if keys else {}

    async def sample_attempts(self, job_id: str, most: int) -> tuple[list[AttemptRecord], int]:
        """Return evenly spaced committed rounds of training, with the first and the last one, and their whole number.

        At most `most`, and fewer if their cohorts are so large that more than `MAX_TALLIED` assignments would be read.
        """
        mine = (attempts.c.job_id == job_id, ONE_COMMIT, attempts.c.round > 0)
        size = select(func.count(), func.max(attempts.c.target)).where(*mine)
        position = func.row_number().over(order_by=attempts.c.round).label("position")
        numbered = select(attempts.c.round, position).where(*mine).subquery("numbered")

        def transaction(connection: Connection) -> tuple[list[AttemptRecord], int]:
            total, target = connection.execute(size).one()
            if not total:
                return [], 0
            positions = spaced_positions(total, min(most, max(2, MAX_TALLIED // max(target, 1))))
            rounds = select(numbered.c.round).where(numbered.c.position.in_(positions))
            sample = select(attempts).where(*mine, attempts.c.round.in_(connection.execute(rounds).scalars().all()))
            return _with_counts(connection, connection.execute(sample.order_by(attempts.c.round)).all()), total

        return await self._database.read(transaction)

    async def list_participations(self, job_id: str, rounds: range) -> list[Participation]:
        """Return the assignments of a job's attempts to train in these rounds.

        They are ordered by round and attempt; within an attempt, by report, then those without a report.
        """
        mine = assignments.c
        query = (
            select(mine.client_id, mine.round, mine.number, mine.num_examples, mine.took_s, mine.metrics)
            .join(attempts, SAME_ATTEMPT)
            .where(mine.job_id == job_id, mine.round >= rounds.start, mine.round < rounds.stop)
            .where(attempts.c.kind.in_(HAVE_UPDATES))
            .order_by(mine.round, mine.number, mine.reported_revision.is_(None), mine.reported_revision, mine.client_id)
        )

        def transaction(connection: Connection) -> list[Participation]:
            return [Participation(*row) for row in connection.execute(query)]

        return await self._database.read(transaction)

    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        """Return the version of a job that has this number."""
        mine = (model_versions.c.job_id == job_id) & (model_versions.c.version == version)
        found = await self._database.fetch(select(model_versions).where(mine))
        return rows.to_record(found[0], ModelVersion) if found else None

    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        """Return the first `limit` model versions after a number, oldest first."""
        later = (model_versions.c.job_id == job_id) & (model_versions.c.version > after)
        query = select(model_versions).where(later).order_by(model_versions.c.version).limit(limit)
        return [rows.version_record(row) for row in await self._database.fetch(query)]

    async def list_versions_of_rounds(self, job_id: str, rounds: Collection[int]) -> list[VersionRecord]:
        """Return the model versions that these rounds made, oldest first."""
        mine = (model_versions.c.job_id == job_id) & model_versions.c.round.in_(rounds)
        if 0 not in rounds:
            mine &= OF_ROUNDS  # else the index is not used
        query = select(model_versions).where(mine).order_by(model_versions.c.version)
        return [rows.version_record(row) for row in await self._database.fetch(query)]

    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a version by the server's evaluator, with a history row.

        The row has the entity "version", the version's number as both states, its round and attempt, and the metrics.
        Repetition with the same metrics has no effect.
        """
        now = self._clock()
        # Locked, so that the rows of a job's history become visible in the order of their numbers.
        lock = select(jobs).where(jobs.c.job_id == job_id).with_for_update()
        mine = (model_versions.c.job_id == job_id) & (model_versions.c.version == version)

        def transaction(connection: Connection) -> None:
            job = connection.execute(lock).one_or_none()
            row = connection.execute(select(model_versions).where(mine)).one_or_none()
            if job is None or row is None:
                raise errors.StoreError(f"job {job_id} has no version {version}")
            if row.metrics == metrics and metrics:
                return  # stored by an earlier call whose reply was lost
            connection.execute(model_versions.update().where(mine).values(metrics=metrics))
            number = str(version)
            scored = HistoryRow("version", number, number, row.round, row.attempt, metrics=metrics)
            connection.execute(history.insert().values(rows.history_values(job_id, scored, now)))
            spec, _ = self._files.read(job)
            text = f"version {version} was evaluated by the server"
            place = (job_id, spec.name, spec.population, "", row.round, row.attempt)
            sql_audit.append_events(connection, [EventEntry(EventType.EVALUATION_COMPLETED, *place, text=text)], now)

        with crash_points.step("metrics"):
            await self._database.write(transaction)

    async def list_history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        """Return history rows after a sequence number, oldest first. `tables.Words` and `Metrics` limit their size."""
        values = {"this_job": job_id, "after": after_sequence, "most": limit}
        found = await self._database.read(lambda connection: connection.execute(_LATER, values).all())
        return [rows.history_record(row) for row in found]

    async def last_sequence(self, job_id: str) -> int:
        """Return the sequence number of a job's last history row; 0 without rows."""
        query = select(func.max(history.c.sequence).label("last")).where(history.c.job_id == job_id)
        (row,) = await self._database.fetch(query)
        return row.last or 0

    async def find_populations(self, digest: str) -> frozenset[str]:
        """Return the populations of the jobs that keep a version, or a delta, with this digest."""
        named = (model_versions.c.digest == digest) | (model_versions.c.delta_digest == digest)
        has_file = model_versions.c.model_removed_unix_s.is_(None) & ~model_versions.c.is_held_by_clients
        mine = (model_versions.c.job_id == jobs.c.job_id) & named & has_file
        found = await self._database.fetch(select(jobs.c.population).where(mine).distinct())
        return frozenset(row.population for row in found)

    def _load_jobs(
        self, connection: Connection, epoch_unix_s: float, which: sqlalchemy.ColumnElement[bool] | None = None
    ) -> list[JobRecord]:
        query = select(jobs).where(NOT_DELETED).order_by(jobs.c.sequence)
        if which is not None:
            query = query.where(which)
        return [self._load_job(connection, row, epoch_unix_s) for row in connection.execute(query).all()]

    def _load_job(self, connection: Connection, row: rows.Row, epoch_unix_s: float) -> JobRecord:
        latest = select(model_versions).where(
            model_versions.c.job_id == row.job_id, model_versions.c.version == row.latest_version
        )
        version = rows.to_record(connection.execute(latest).one(), ModelVersion)
        last = _last_attempt(connection, row.job_id, epoch_unix_s)
        unmasked = sql_ledger.list_unmasked(connection, row.job_id) if rows.adds_own_noise(row) else ()
        barred = writes.list_barred(connection, row.job_id, last.attempt) if rows.may_be_secure(row) else ()
        past = rows.ReportHistory(_durations(connection, row.job_id), _claims(connection, row.job_id), unmasked, barred)
        return rows.job_record(row, self._files, version, last, past)


async def recall_participations(store: JobStore, job: JobState) -> list[Participation]:
    """Return the participations in a job that the coordinator needs after a restart."""
    rounds = rounds_to_recall(job)
    participations: list[Participation] = []
    for start in range(0, len(rounds), ROUNDS_PER_QUERY):
        participations += await store.list_participations(job.job_id, rounds[start : start + ROUNDS_PER_QUERY])
    return participations


@functools.cache  # to build it takes longer than to run it
def _attempts_of_keys(dialect: str) -> sqlalchemy.Executable:
    wanted = transactions.json_attempt_keys(dialect)
    these = and_(*(attempts.c[name] == wanted.c[name] for name in AttemptKey._fields))
    return select(attempts).select_from(wanted.join(attempts, these))


def _matches(which: AttemptFilter) -> list[sqlalchemy.ColumnElement[bool]]:
    conditions = [attempts.c.job_id == which.job_id]
    if not which.all_attempts:
        conditions.append(attempts.c.phase != AttemptPhase.ABANDONED)
    if which.round:
        conditions.append(attempts.c.round == which.round)
    return conditions


def _with_counts(connection: Connection, found: Sequence[rows.Row]) -> list[AttemptRecord]:
    keys = [AttemptKey(row.job_id, row.round, row.number) for row in found]
    counts = sql_assignments.tally(connection, keys)
    return [rows.attempt_record(row, counts.get(key, ())) for row, key in zip(found, keys, strict=True)]


def _newest(connection: Connection, job_id: str) -> rows.Row | None:
    newest = (attempts.c.round.desc(), attempts.c.number.desc())
    query = select(attempts).where(attempts.c.job_id == job_id).order_by(*newest).limit(1)
    return connection.execute(query).one_or_none()


def _made_in(row: rows.Row) -> sqlalchemy.ColumnElement[bool]:
    """Return the condition for assignments that were created in an attempt."""
    return _are((assignments.c.job_id, assignments.c.round, assignments.c.number), row)


def _folded_into(row: rows.Row) -> sqlalchemy.ColumnElement[bool]:
    """Return the condition for assignments of earlier attempts whose updates were folded into an attempt."""
    return _are((assignments.c.job_id, assignments.c.into_round, assignments.c.into_number), row)


def _are(columns: Sequence[sqlalchemy.ColumnElement[Any]], row: rows.Row) -> sqlalchemy.ColumnElement[bool]:
    return and_(*(c == v for c, v in zip(columns, (row.job_id, row.round, row.number), strict=True)))


def _with_kind() -> sqlalchemy.Select[Any]:
    """Return a query for assignments, each with the kind of the attempt that created it."""
    return select(assignments, attempts.c.kind).join(attempts, SAME_ATTEMPT)


def _last_attempt(connection: Connection, job_id: str, epoch_unix_s: float) -> rows.LastAttempt:
    row = _newest(connection, job_id)
    if row is None:
        return rows.LastAttempt()
    still_open = (assignments.c.job_id == job_id) & STILL_OPEN
    query = _with_kind().where(_made_in(row) | _folded_into(row) | still_open).order_by(assignments.c.client_id)
    attempt = rows.attempt(row)
    messages = writes.load_messages(connection, attempt.key) if attempt.is_open else {}
    found = connection.execute(query).all()
    records = [rows.assignment(each, epoch_unix_s, messages.get(each.client_id, {})) for each in found]
    return rows.LastAttempt(*rebuild_attempt(attempt, records), rows.describe_unknown(row, found))


def _durations(connection: Connection, job_id: str) -> tuple[float, ...]:
    query = (
        select(assignments.c.took_s)
        .join(attempts, SAME_ATTEMPT)
        .where(assignments.c.job_id == job_id, assignments.c.reported_revision.is_not(None))
        .where(attempts.c.kind.in_(HAVE_UPDATES))
        .order_by(assignments.c.reported_revision.desc())
        .limit(MAX_DURATIONS)
    )
    newest_first = [row.took_s for row in connection.execute(query)]
    return tuple(reversed(newest_first))


def _claims(connection: Connection, job_id: str) -> tuple[Claim, ...]:
    """Return the last training report of each of the `MAX_CLAIMS` clients that reported last, oldest first."""
    last = (
        select(assignments.c.client_id, func.max(assignments.c.reported_revision).label("revision"))
        .join(attempts, SAME_ATTEMPT)
        .where(assignments.c.job_id == job_id, assignments.c.reported_revision.is_not(None))
        .where(attempts.c.kind.in_(HAVE_UPDATES))
        .group_by(assignments.c.client_id)
        .order_by(func.max(assignments.c.reported_revision).desc())
        .limit(MAX_CLAIMS)
        .subquery()
    )
    is_last = (assignments.c.client_id == last.c.client_id) & (assignments.c.reported_revision == last.c.revision)
    query = (
        select(assignments.c.client_id, assignments.c.norm, assignments.c.num_examples)
        .join(last, is_last)
        .where(assignments.c.job_id == job_id)
        .order_by(assignments.c.reported_revision)
    )
    return tuple(Claim(*row) for row in connection.execute(query))
