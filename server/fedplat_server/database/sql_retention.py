"""Removal of old files and history in a SQL database."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy
from sqlalchemy import Connection, func, select

from fedplat.rounds import AttemptKey, ModelVersion
from fedplat_server import crash_points
from fedplat_server.database import rows, sql_contents, transactions
from fedplat_server.database.records import Removable, RetainedVersions
from fedplat_server.database.tables import (
    SAME_ATTEMPT,
    STILL_OPEN,
    assignments,
    attempts,
    database_identity,
    history,
    jobs,
    model_versions,
)
from fedplat_server.storage.blob_folder import StoredDigests

_V = model_versions.c
_KEEPS_MODEL = _V.model_removed_unix_s.is_(None) & ~_V.is_held_by_clients
_KEEPS_STATE = (_V.state_digest != "") & _V.state_removed_unix_s.is_(None)

BATCH = 1000
"""Maximum number of versions, attempts or digests in one transaction of the retention."""


class RetentionStore:
    """Removal of old files and history. A row records that its files are removed before they are removed."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def list_removable(self, job_id: str, keep: RetainedVersions, limit: int = BATCH) -> list[Removable]:
        """Return the oldest versions with files to remove."""
        return await self._database.read(lambda connection: _removable(connection, job_id, keep, limit))

    async def mark_removed(self, job_id: str, found: Collection[Removable]) -> frozenset[str]:
        """Record that the files of these versions are removed; return their digests that are no longer referenced.

        The rows of the latter are removed, too. Skips files that have become needed since `list_removable`.
        """
        now = self._clock()
        # The lock serializes this with a rollback to one of these versions.
        lock = select(jobs.c.job_id).where(jobs.c.job_id == job_id).with_for_update()
        models = [one.version.version for one in found if one.model]
        states = [one.version.version for one in found if one.state]

        def transaction(connection: Connection) -> frozenset[str]:
            connection.execute(lock)
            mine = model_versions.update().where(_V.job_id == job_id)
            connection.execute(
                mine.where(_V.version.in_(models), _KEEPS_MODEL, _is_spare(job_id)).values(model_removed_unix_s=now)
            )
            connection.execute(mine.where(_V.version.in_(states), _KEEPS_STATE).values(state_removed_unix_s=now))
            return _give_up(connection, [one.version for one in found])

        with crash_points.step("retention.give_up"):
            return await self._database.write(transaction)

    async def list_referenced(self) -> frozenset[str]:
        """Return the digests of all kept models, deltas and server optimizer states."""
        models = select(_V.digest.label("digest")).where(_KEEPS_MODEL)
        deltas = select(_V.delta_digest).where(_V.delta_digest != "", _KEEPS_MODEL)
        states = select(_V.state_digest).where(_KEEPS_STATE)
        return frozenset(row.digest for row in await self._database.fetch(models.union(states, deltas)))

    async def list_digests(self) -> StoredDigests:
        """Return the digests of all models, deltas and server optimizer states, also of those that were given up."""
        referenced, all_of = await self.list_referenced(), (_V.digest, _V.delta_digest, _V.state_digest)
        found = await self._database.fetch(sqlalchemy.union(*(select(each.label("digest")) for each in all_of)))
        return StoredDigests(referenced, frozenset(row.digest for row in found if row.digest) - referenced)

    async def list_recent_attempts(self, since_unix_s: float) -> list[AttemptKey]:
        """Return the attempts that are open or have ended since a time."""
        ended = attempts.c.ended_unix_s
        query = select(attempts.c.job_id, attempts.c.round, attempts.c.number)
        found = await self._database.fetch(query.where(ended.is_(None) | (ended >= since_unix_s)))
        return [AttemptKey(row.job_id, row.round, row.number) for row in found]

    async def read_database_id(self) -> str:
        """Return the id of this database. A copy of a database has the same id."""
        (row,) = await self._database.fetch(select(database_identity.c.database_id))
        return row.database_id

    async def find_unreferenced(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of the digests that no version references."""
        # A write transaction, which is fenced: a former leader must not remove what the next leader has written.
        return await self._database.write(lambda connection: _find_unreferenced(connection, digests))

    async def list_old_attempts(self, job_id: str, before_unix_s: float, limit: int = BATCH) -> list[AttemptKey]:
        """Return the oldest attempts that still have a history, ended before a time and have no open assignment."""
        busy = select(assignments.c.client_id).where(SAME_ATTEMPT, STILL_OPEN)
        query = (
            select(attempts.c.round, attempts.c.number)
            .where(attempts.c.job_id == job_id, attempts.c.ended_unix_s < before_unix_s)
            .where(attempts.c.history_removed_unix_s.is_(None), ~busy.exists())
            .order_by(attempts.c.round, attempts.c.number)
            .limit(limit)
        )
        found = await self._database.fetch(query)
        return [AttemptKey(job_id, row.round, row.number) for row in found]

    async def remove_history(self, keys: Collection[AttemptKey], *, metrics: bool) -> int:
        """Remove the history rows of attempts and their assignments, and record that; return the number of rows.

        With `metrics`, also clear the metrics and texts of their assignments.
        """
        now = self._clock()

        def transaction(connection: Connection) -> int:
            num_rows = 0
            for job_id, round_, number in keys:
                mine = (history.c.job_id == job_id) & (history.c.round == round_) & (history.c.attempt == number)
                of_attempt = history.c.entity.in_(("attempt", "assignment"))
                num_rows += connection.execute(history.delete().where(mine, of_attempt)).rowcount
                this = (attempts.c.job_id == job_id) & (attempts.c.round == round_) & (attempts.c.number == number)
                connection.execute(attempts.update().where(this).values(history_removed_unix_s=now))
                if metrics:
                    made = (assignments.c.job_id == job_id) & (assignments.c.round == round_)
                    these = assignments.update().where(made, assignments.c.number == number)
                    connection.execute(these.values(metrics={}, text=""))
            return num_rows

        with crash_points.step("retention.history"):
            return await self._database.write(transaction)


def give_up_all(connection: Connection, job_id: str, limit: int, now: float) -> frozenset[str] | None:
    """Record that the files of the oldest versions of a job are removed, whatever needs them; None: no version has any.

    Returns as `RetentionStore.mark_removed`.
    """
    query = select(model_versions).where(_V.job_id == job_id, _KEEPS_MODEL | _KEEPS_STATE)
    found = [rows.to_record(row, ModelVersion) for row in connection.execute(query.order_by(_V.version).limit(limit))]
    mine = model_versions.update().where(_V.job_id == job_id, _V.version.in_([one.version for one in found]))
    connection.execute(mine.where(_KEEPS_MODEL).values(model_removed_unix_s=now))
    connection.execute(mine.where(_KEEPS_STATE).values(state_removed_unix_s=now))
    return _give_up(connection, found) if found else None


def _give_up(connection: Connection, versions: Collection[ModelVersion]) -> frozenset[str]:
    """Return the digests of versions that are no longer referenced, and remove their rows."""
    digests = {each for one in versions for each in (one.digest, one.state_digest, one.delta_digest) if each}
    sql_contents.lock_blobs(connection, digests)
    unreferenced = _find_unreferenced(connection, digests)
    sql_contents.delete_blobs(connection, unreferenced)
    return unreferenced


def _find_unreferenced(connection: Connection, digests: Collection[str]) -> frozenset[str]:
    referenced: set[str] = set()
    ordered = sorted(digests)
    for start in range(0, len(ordered), BATCH):
        part = ordered[start : start + BATCH]
        for column, kept in (
            (_V.digest, _KEEPS_MODEL),
            (_V.delta_digest, _KEEPS_MODEL),
            (_V.state_digest, _KEEPS_STATE),
        ):
            referenced.update(row[0] for row in connection.execute(select(column).where(column.in_(part), kept)))
    return frozenset(digests) - referenced


def _is_spare(job_id: str) -> sqlalchemy.ColumnElement[bool]:
    """Return the condition for models that neither the job, nor its open assignments and attempts need."""
    latest = select(jobs.c.latest_version).where(jobs.c.job_id == job_id).scalar_subquery()
    assigned = select(assignments.c.base_version).where(assignments.c.job_id == job_id, STILL_OPEN)
    open_ = select(attempts.c.base_version).where(attempts.c.job_id == job_id, attempts.c.ended_unix_s.is_(None))
    return (_V.version > 0) & (_V.version != latest) & _V.version.not_in(assigned) & _V.version.not_in(open_)


def _removable(connection: Connection, job_id: str, keep: RetainedVersions, limit: int) -> list[Removable]:
    model = _KEEPS_MODEL & (_V.version < keep.models_from) & _is_spare(job_id)
    if keep.every:
        model &= func.mod(_V.version, keep.every) != 0
    state = _KEEPS_STATE & (_V.version < keep.states_from)
    columns = (model_versions, model.label("spare_model"), state.label("spare_state"))
    query = select(*columns).where(_V.job_id == job_id, model | state).order_by(_V.version).limit(limit)
    return [
        Removable(rows.to_record(row, ModelVersion), bool(row.spare_model), bool(row.spare_state))
        for row in connection.execute(query)
    ]
