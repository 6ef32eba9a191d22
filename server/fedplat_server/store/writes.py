"""What `Store.save` writes: changes flattened into few rows, and the statements for them.

A batch of changes names the same job, attempt and assignments again and again; only their last state counts. So a
save costs the same handful of statements, however many steps it holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import sqlalchemy
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from fedplat.rounds import AttemptKey, Change
from fedplat_server import crash
from fedplat_server.errors import StaleRevisionError, StoreError
from fedplat_server.store import rows, shares, tables
from fedplat_server.store.rows import Values

# The columns to be set are those that a row of values has.
_COMPARE_AND_SET = tables.jobs.update().where(
    tables.jobs.c.job_id == sqlalchemy.bindparam("this_job"),
    tables.jobs.c.revision == sqlalchemy.bindparam("expected_revision"),
)


@dataclasses.dataclass
class Batch:
    """The rows of a sequence of changes, made at `unix_s` on the wall clock and at `now` on the clock of their moments.

    `expected` holds the revision that each job must have before, `shares` what must hold of the attempts of private
    jobs that assignments are made in.
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
    shares: dict[AttemptKey, shares.Share] = dataclasses.field(default_factory=dict[AttemptKey, shares.Share])
    versions: list[Values] = dataclasses.field(default_factory=list[Values])
    ledger: list[Values] = dataclasses.field(default_factory=list[Values])
    history: list[Values] = dataclasses.field(default_factory=list[Values])

    def add(self, change: Change) -> None:
        """Takes a change in. Raises `StaleRevisionError` if it does not follow the last."""
        job_id, unix_s = change.job.job_id, self.unix_s
        if job_id in self.jobs and self.jobs[job_id]["revision"] != change.expected_revision:
            raise stale(job_id, change.expected_revision)
        self.expected.setdefault(job_id, change.expected_revision)
        self.jobs[job_id] = rows.job_values(change.job) | {"save_id": self.save_id}
        if change.attempt is not None:
            self.attempts[change.attempt.key] = rows.attempt_values(change.attempt, unix_s)
        self.shares.update(shares.begun(change))
        for assignment in change.assignments:
            values = rows.assignment_values(assignment, change.job.revision, unix_s - self.now)
            place = (assignment.key, assignment.client_id)
            earlier = self.assignments.get(place)
            if earlier is not None and earlier["reported_revision"] is not None:
                values["reported_revision"] = earlier["reported_revision"]
            self.assignments[place] = values
        if change.version is not None:
            self.versions.append(rows.version_values(job_id, change.version, unix_s))
            if (charge := rows.ledger_values(change.job, change.version, unix_s)) is not None:
                self.ledger.append(charge)
        self.history.extend(rows.history_values(job_id, row, unix_s) for row in change.history)


def stale(job_id: str, expected: int) -> StaleRevisionError:
    """The error of a compare-and-set that failed."""
    return StaleRevisionError(f"job {job_id} is not at revision {expected} any more: read it again")


def flatten(changes: Iterable[Change], batch: Batch) -> Batch:
    """Changes as rows. Raises `StaleRevisionError` if those of one job do not follow each other."""
    for change in changes:
        batch.add(change)
    return batch


def write(connection: Connection, batch: Batch) -> None:
    """Writes a batch. The jobs come first: their rows stay locked, so nobody else writes to these jobs meanwhile.

    Raises `StaleRevisionError`, and `ParticipationError`, with which the transaction must end.
    """
    # In one order for everybody, else two writers of the same jobs may wait for each other.
    for job_id in sorted(batch.jobs):
        names = {"this_job": job_id, "expected_revision": batch.expected[job_id]}
        result = connection.execute(_COMPARE_AND_SET, names | batch.jobs[job_id])
        if result.rowcount != 1:
            raise stale(job_id, batch.expected[job_id])
    dialect = connection.dialect.name
    _execute(connection, upsert_attempts(dialect), list(batch.attempts.values()))
    _execute(connection, upsert_assignments(dialect), list(batch.assignments.values()))
    for key, share in batch.shares.items():
        shares.require(connection, key, share)
    _add_versions(connection, batch)
    _execute(connection, tables.history.insert(), batch.history)
    crash.point("save.uncommitted")


def _add_versions(connection: Connection, batch: Batch) -> None:
    """Adds versions, each that a round of a private job made with its row of the ledger; none without the other.

    Whether a job is private, its row says, and not what somebody has in memory of it.
    """
    if not batch.versions:
        return
    named = {version["job_id"] for version in batch.versions}
    has_terms = tables.jobs.c.privacy.is_not(sqlalchemy.null())
    query = sqlalchemy.select(tables.jobs.c.job_id).where(tables.jobs.c.job_id.in_(named), has_terms)
    private = {row.job_id for row in connection.execute(query)}
    charged = {(row["job_id"], row["version"]) for row in batch.ledger}
    for version in batch.versions:
        is_release = version["job_id"] in private and version["round"] > 0
        if is_release != ((version["job_id"], version["version"]) in charged):
            raise uncharged(version["job_id"], version["version"])
        if version["restored_from"] is not None:
            _require_files(connection, version)
    _execute(connection, tables.model_versions.insert(), batch.versions)
    crash.point("save.uncharged")
    _execute(connection, tables.ledger.insert(), batch.ledger)


def _require_files(connection: Connection, restored: Values) -> None:
    """Refuses a rollback to what is not kept any more. The job's row is locked, so it stays as it is."""
    known, columns = [], tables.model_versions.c
    for digest, removed in (("digest", "model_removed_unix_s"), ("state_digest", "state_removed_unix_s")):
        kept = (
            (columns.job_id == restored["job_id"]) & (columns[digest] == restored[digest]) & columns[removed].is_(None)
        )
        known.append(connection.execute(sqlalchemy.select(columns.version).where(kept).limit(1)).first() is not None)
    if not known[0] or (restored["state_digest"] and not known[1]):
        raise not_kept(restored["job_id"], restored["restored_from"])


def not_kept(job_id: str, version: int) -> StoreError:
    """The error of a rollback to a version whose files were given up in this moment."""
    return StoreError(f"job {job_id}: the files of version {version} are not kept any more; nothing was stored")


def uncharged(job_id: str, version: int) -> StoreError:
    """The error of a version whose row of the ledger is missing, or is one too many."""
    return StoreError(f"job {job_id}: version {version} and the ledger do not agree; nothing was stored")


def _execute(connection: Connection, statement: sqlalchemy.Executable, values: Sequence[Values]) -> None:
    if values:
        connection.execute(statement, values)


def insert(dialect: str, table: sqlalchemy.Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that knows ON CONFLICT, which both databases spell alike but SQLAlchemy keeps by dialect."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@functools.cache
def upsert_attempts(dialect: str) -> sqlalchemy.Executable:
    """Adds attempts; of those that are there it changes what can change. An end that was noted stays."""
    statement = insert(dialect, tables.attempts)
    new, old = statement.excluded, tables.attempts.c
    changed: dict[str, sqlalchemy.ColumnElement[object]] = {
        name: new[name] for name in ("phase", "reason", "goal", "minimum", "target", "metrics")
    }
    changed["ended_unix_s"] = sqlalchemy.func.coalesce(old.ended_unix_s, new.ended_unix_s)
    return statement.on_conflict_do_update(index_elements=["job_id", "round", "number"], set_=changed)


@functools.cache
def upsert_assignments(dialect: str) -> sqlalchemy.Executable:
    """Adds or replaces assignments. When one was first reported stays."""
    statement = insert(dialect, tables.assignments)
    new, old = statement.excluded, tables.assignments.c
    keys = ["job_id", "round", "number", "client_id"]
    changed: dict[str, sqlalchemy.ColumnElement[object]] = {
        column.name: new[column.name] for column in old if column.name not in keys
    }
    changed["reported_revision"] = sqlalchemy.func.coalesce(old.reported_revision, new.reported_revision)
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)
