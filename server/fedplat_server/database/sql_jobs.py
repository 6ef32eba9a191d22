"""Jobs, attempts, assignments, versions and history in a SQL database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, and_, func, select, tuple_
from typing_extensions import override

from fedplat.rounds import (
    Assignment,
    AssignmentSet,
    Attempt,
    Change,
    HistoryRow,
    JobState,
    ModelVersion,
    Participation,
    rebuild_attempt,
)
from fedplat.rounds.influence import MAX_CLAIMS
from fedplat.rounds.records import Claim
from fedplat.rounds.states import AttemptKind, AttemptPhase
from fedplat.rounds.sync import MAX_DURATIONS
from fedplat_server import crash_points
from fedplat_server.database import rows, sql_ledger, writes
from fedplat_server.database.jobs import AttemptRecord, HistoryRecord, JobRecord, VersionRecord
from fedplat_server.database.ports import JobStore
from fedplat_server.database.sql_audit import append_entries
from fedplat_server.database.tables import OF_ROUNDS, STILL_OPEN, assignments, attempts, history, jobs, model_versions
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.errors import StoreError
from fedplat_server.records.audit import AuditEntry

# Built once: each watch runs it after each transaction of its job, and building it costs more than running it.
_LATER = (
    select(history)
    .where(history.c.job_id == sqlalchemy.bindparam("this_job"), history.c.sequence > sqlalchemy.bindparam("after"))
    .order_by(history.c.sequence)
    .limit(sqlalchemy.bindparam("most"))
)


class SqlJobs(JobStore):
    """The adapter of `ports.JobStore`."""

    def __init__(self, database: Database, clock: Clock, files: rows.JobFileReader) -> None:
        self._database = database
        self._clock = clock
        self._files = files

    @override
    async def create_job(
        self,
        state: JobState,
        job_file: str,
        idempotency_key: str,
        audit: Sequence[AuditEntry] = (),
        expected: int | None = None,
    ) -> JobRecord:
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

        def transaction(connection: Connection) -> JobRecord:
            if connection.execute(insert).rowcount == 1:
                sql_ledger.advance_revision(connection, state.spec.population, expected)
                version = rows.version_values(state.job_id, state.latest, now)
                connection.execute(model_versions.insert().values(version))
                connection.execute(history.insert().values(row))
                append_entries(connection, audit, now)
            return self._load_jobs(connection, now, jobs.c.idempotency_key == idempotency_key)[0]

        with crash_points.step("create_job"):
            return await self._database.write(transaction)

    @override
    async def find_job(self, idempotency_key: str) -> JobRecord | None:
        now, mine = self._clock(), jobs.c.idempotency_key == idempotency_key
        found = await self._database.read(lambda connection: self._load_jobs(connection, now, mine))
        return found[0] if found else None

    @override
    async def load_jobs(self, now: float = 0.0) -> list[JobRecord]:
        epoch_unix_s = self._clock() - now
        return await self._database.read(lambda connection: self._load_jobs(connection, epoch_unix_s))

    @override
    async def save(
        self, changes: Sequence[Change], now: float, *, save_id: str = "", audit: Sequence[AuditEntry] = ()
    ) -> None:
        batch = writes.Batch.flatten(changes, self._clock(), now, save_id)

        def transaction(connection: Connection) -> None:
            writes.write(connection, batch)
            append_entries(connection, audit, batch.unix_s)

        if batch.jobs or audit:
            with crash_points.step("save"):
                await self._database.write(transaction)

    @override
    async def find_last_save(self, job_id: str) -> str:
        # A save holds the lock on its jobs' rows until its outcome is certain, even if its caller is gone.
        locked = select(jobs.c.save_id).where(jobs.c.job_id == job_id).with_for_update()

        def transaction(connection: Connection) -> str:
            return connection.execute(locked).scalar_one()

        return await self._database.write(transaction)

    # --- attempts and assignments ----------------------------------------------------------------------------

    @override
    async def find_assignment(self, token_hash: bytes) -> Assignment | None:
        found = await self._database.fetch(_with_kind().where(assignments.c.token_hash == token_hash))
        return rows.assignment(found[0]) if found else None

    @override
    async def list_attempts(
        self, job_id: str, *, all_attempts: bool = False, after: tuple[int, int] | None = None, limit: int | None = None
    ) -> list[AttemptRecord]:
        query = select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.round, attempts.c.number)
        query = query.limit(limit)
        if not all_attempts:
            query = query.where(attempts.c.phase != AttemptPhase.ABANDONED)
        if after is not None:
            query = query.where(tuple_(attempts.c.round, attempts.c.number) > after)
        page = query.with_only_columns(attempts.c.round, attempts.c.number).subquery("page")

        def transaction(connection: Connection) -> list[AttemptRecord]:
            found = connection.execute(query).all()
            tallies: dict[tuple[int, int], list[rows.Row]] = {}
            for tally in _tallies(job_id, page) if found else ():
                for row in connection.execute(tally):
                    tallies.setdefault((row.round, row.number), []).append(row)
            return [rows.attempt_record(row, tallies.get((row.round, row.number), ())) for row in found]

        return await self._database.read(transaction)

    @override
    async def find_last_attempt(self, job_id: str) -> AttemptRecord | None:
        def transaction(connection: Connection) -> AttemptRecord | None:
            row = _newest(connection, job_id)
            if row is None:
                return None
            counted = (_made_in(row) & assignments.c.into_round.is_(None)) | _folded_into(row)
            tally = _tally(assignments.c.state).where(counted)
            return rows.attempt_record(row, connection.execute(tally).all())

        return await self._database.read(transaction)

    @override
    async def list_participations(self, job_id: str, rounds: range) -> list[Participation]:
        mine = assignments.c
        query = (
            select(mine.client_id, mine.round, mine.number, mine.num_examples, mine.took_s, mine.metrics)
            .join(attempts, _same_attempt())
            .where(mine.job_id == job_id, mine.round >= rounds.start, mine.round < rounds.stop)
            .where(attempts.c.kind == AttemptKind.TRAIN)
            .order_by(mine.round, mine.number, mine.reported_revision.is_(None), mine.reported_revision, mine.client_id)
        )

        def transaction(connection: Connection) -> list[Participation]:
            return [Participation(*row) for row in connection.execute(query)]

        return await self._database.read(transaction)

    # --- versions and history --------------------------------------------------------------------------------

    @override
    async def find_version(self, job_id: str, version: int) -> ModelVersion | None:
        mine = (model_versions.c.job_id == job_id) & (model_versions.c.version == version)
        found = await self._database.fetch(select(model_versions).where(mine))
        return rows.to_record(found[0], ModelVersion) if found else None

    @override
    async def list_versions(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[VersionRecord]:
        later = (model_versions.c.job_id == job_id) & (model_versions.c.version > after)
        query = select(model_versions).where(later).order_by(model_versions.c.version).limit(limit)
        return [rows.version_record(row) for row in await self._database.fetch(query)]

    @override
    async def list_versions_of_rounds(self, job_id: str, first: int, last: int) -> list[VersionRecord]:
        mine = (model_versions.c.job_id == job_id) & model_versions.c.round.between(first, last)
        if first > 0:
            mine &= OF_ROUNDS  # else the index is not used
        query = select(model_versions).where(mine).order_by(model_versions.c.version)
        return [rows.version_record(row) for row in await self._database.fetch(query)]

    @override
    async def set_version_metrics(self, job_id: str, version: int, metrics: Mapping[str, float]) -> None:
        now = self._clock()
        # Locked, so that the rows of a job's history become visible in the order of their numbers.
        lock = select(jobs.c.job_id).where(jobs.c.job_id == job_id).with_for_update()
        mine = (model_versions.c.job_id == job_id) & (model_versions.c.version == version)

        def transaction(connection: Connection) -> None:
            connection.execute(lock)
            row = connection.execute(select(model_versions).where(mine)).one_or_none()
            if row is None:
                raise StoreError(f"job {job_id} has no version {version}")
            if row.metrics == metrics and metrics:
                return  # stored by an earlier call whose reply was lost
            connection.execute(model_versions.update().where(mine).values(metrics=metrics))
            number = str(version)
            scored = HistoryRow("version", number, number, row.round, row.attempt, metrics=metrics)
            connection.execute(history.insert().values(rows.history_values(job_id, scored, now)))

        with crash_points.step("metrics"):
            await self._database.write(transaction)

    @override
    async def list_history(self, job_id: str, after_sequence: int = 0, limit: int = 250) -> list[HistoryRecord]:
        values = {"this_job": job_id, "after": after_sequence, "most": limit}
        found = await self._database.read(lambda connection: connection.execute(_LATER, values).all())
        return [rows.history_record(row) for row in found]

    @override
    async def find_populations(self, digest: str) -> frozenset[str]:
        named = (model_versions.c.digest == digest) | (model_versions.c.delta_digest == digest)
        mine = (model_versions.c.job_id == jobs.c.job_id) & named & model_versions.c.model_removed_unix_s.is_(None)
        found = await self._database.fetch(select(jobs.c.population).where(mine).distinct())
        return frozenset(row.population for row in found)

    # --- reading jobs ----------------------------------------------------------------------------------------

    def _load_jobs(
        self, connection: Connection, epoch_unix_s: float, which: sqlalchemy.ColumnElement[bool] | None = None
    ) -> list[JobRecord]:
        query = select(jobs).order_by(jobs.c.sequence)
        if which is not None:
            query = query.where(which)
        return [self._load_job(connection, row, epoch_unix_s) for row in connection.execute(query).all()]

    def _load_job(self, connection: Connection, row: rows.Row, epoch_unix_s: float) -> JobRecord:
        latest = select(model_versions).where(
            model_versions.c.job_id == row.job_id, model_versions.c.version == row.latest_version
        )
        version = rows.to_record(connection.execute(latest).one(), ModelVersion)
        last = _last_attempt(connection, row.job_id, epoch_unix_s)
        past = rows.ReportHistory(_durations(connection, row.job_id), _claims(connection, row.job_id))
        return rows.job_record(row, self._files, version, last, past)


def _newest(connection: Connection, job_id: str) -> rows.Row | None:
    newest = (attempts.c.round.desc(), attempts.c.number.desc())
    query = select(attempts).where(attempts.c.job_id == job_id).order_by(*newest).limit(1)
    return connection.execute(query).one_or_none()


def _tally(*group: sqlalchemy.ColumnElement[Any]) -> sqlalchemy.Select[Any]:
    """Return a query that counts assignments by group, with the bytes, norms and staleness of their updates."""
    update_bytes = func.sum(assignments.c.update_bytes).label("update_bytes")
    staleness = [
        func.sum(assignments.c.staleness).label("staleness"),
        func.count(assignments.c.staleness).label("num_stale"),
        func.max(assignments.c.staleness).label("max_staleness"),
    ]
    largest_norm = func.max(assignments.c.norm).label("largest_norm")
    return select(*group, func.count().label("total"), update_bytes, largest_norm, *staleness).group_by(*group)


def _tallies(job_id: str, page: sqlalchemy.Subquery) -> Iterator[sqlalchemy.Select[Any]]:
    """Yield the queries for a page of attempts: own assignments, and updates folded from earlier attempts."""
    own, into = (assignments.c.round, assignments.c.number), (assignments.c.into_round, assignments.c.into_number)
    for place, which in ((own, into[0].is_(None)), (into, into[0].is_not(None))):
        group = [column.label(name) for column, name in zip(place, ("round", "number"), strict=True)]
        theirs = (place[0] == page.c.round) & (place[1] == page.c.number)
        tally = _tally(*group, assignments.c.state).select_from(assignments.join(page, theirs))
        yield tally.where(assignments.c.job_id == job_id, which)


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
    same = [assignments.c[name] == attempts.c[name] for name in ("job_id", "round", "number")]
    return select(assignments, attempts.c.kind).join(attempts, sqlalchemy.and_(*same))


def _last_attempt(connection: Connection, job_id: str, epoch_unix_s: float) -> tuple[Attempt | None, AssignmentSet]:
    row = _newest(connection, job_id)
    if row is None:
        return None, AssignmentSet()
    still_open = (assignments.c.job_id == job_id) & STILL_OPEN
    query = _with_kind().where(_made_in(row) | _folded_into(row) | still_open).order_by(assignments.c.client_id)
    records = [rows.assignment(assignment, epoch_unix_s) for assignment in connection.execute(query)]
    return rebuild_attempt(rows.attempt(row), records)


def _durations(connection: Connection, job_id: str) -> tuple[float, ...]:
    query = (
        select(assignments.c.took_s)
        .join(attempts, _same_attempt())
        .where(assignments.c.job_id == job_id, assignments.c.reported_revision.is_not(None))
        .where(attempts.c.kind == AttemptKind.TRAIN)
        .order_by(assignments.c.reported_revision.desc())
        .limit(MAX_DURATIONS)
    )
    newest_first = [row.took_s for row in connection.execute(query)]
    return tuple(reversed(newest_first))


def _claims(connection: Connection, job_id: str) -> tuple[Claim, ...]:
    """Return the last training report of each of the `MAX_CLAIMS` clients that reported last, oldest first."""
    last = (
        select(assignments.c.client_id, func.max(assignments.c.reported_revision).label("revision"))
        .join(attempts, _same_attempt())
        .where(assignments.c.job_id == job_id, assignments.c.reported_revision.is_not(None))
        .where(attempts.c.kind == AttemptKind.TRAIN)
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


def _same_attempt() -> sqlalchemy.ColumnElement[bool]:
    """Return the condition that joins assignments to the attempts that created them."""
    return and_(*(assignments.c[name] == attempts.c[name] for name in ("job_id", "round", "number")))
