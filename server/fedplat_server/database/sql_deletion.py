"""The deletion of jobs in a SQL database.

One transaction marks a job, and nothing shows it from then on. Its rows are removed in parts, each in a transaction
of limited size, until the row of the job itself goes in the last one. A crash in between leaves a marked job, whose
removal continues at the next start. What clients have spent on private releases is computed from rows of the job, so a
job with releases keeps those.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from fedplat.rounds.states import ENDED_JOBS
from fedplat_server import crash_points, errors
from fedplat_server.database import sql_audit, sql_ledger, sql_retention, transactions
from fedplat_server.database.tables import (
    assignments,
    attempts,
    history,
    jobs,
    ledger,
    model_versions,
    secure_messages,
    update_contents,
)
from fedplat_server.records.audit import AuditEntry

BATCH = 1000
"""Maximum number of rows of the history, or of versions whose files go, in one transaction."""
ATTEMPTS = 20
"""Maximum number of attempts whose assignments are removed in one transaction."""
_NO_FILES = frozenset[str]()


class DeletionStore:
    """The deletion of ended jobs: marked at once, removed in parts."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def delete_job(self, job_id: str, audit: Sequence[AuditEntry]) -> None:
        """Mark a job as deleted, with its audit entries; a repetition has no effect.

        Raises `StoreError` if there is no such job, or it has not ended.
        """
        now, mine = self._clock(), jobs.c.job_id == job_id
        # The key is free again, as if the row were gone already.
        values = {"deleted_unix_s": now, "idempotency_key": f"deleted {job_id}"}

        def transaction(connection: Connection) -> None:
            row = connection.execute(select(jobs).where(mine).with_for_update()).one_or_none()
            if row is None or row.status not in ENDED_JOBS:
                raise errors.StoreError(f"there is no job {job_id} that has ended")
            if row.deleted_unix_s is not None:
                return
            connection.execute(jobs.update().where(mine).values(values))
            sql_ledger.advance_revision(connection, row.population, None)
            sql_audit.append_entries(connection, audit, now)

        with crash_points.step("delete.mark"):
            await self._database.write(transaction)

    async def count_releases(self, job_id: str) -> int:
        """Return the number of a job's private releases, which stay in the ledger."""
        return await self._database.read(lambda connection: _count_releases(connection, job_id))

    async def list_deleted(self) -> list[str]:
        """Return the jobs that are marked as deleted."""
        query = select(jobs.c.job_id).where(jobs.c.deleted_unix_s.is_not(None)).order_by(jobs.c.sequence)
        return [row.job_id for row in await self._database.fetch(query)]

    async def remove_part(self, job_id: str) -> frozenset[str] | None:
        """Remove the next rows of a deleted job; return the digests of files that nothing references any more.

        None if only what must stay is left, or the job is not deleted.
        """
        mark = select(jobs.c.deleted_unix_s).where(jobs.c.job_id == job_id).with_for_update()
        now = self._clock()

        def transaction(connection: Connection) -> frozenset[str] | None:
            if connection.execute(mark).scalar_one_or_none() is None:
                return None
            if _remove_history(connection, job_id) or _remove_assignments(connection, job_id):
                return _NO_FILES
            given_up = sql_retention.give_up_all(connection, job_id, BATCH, now)
            if given_up is None:
                _remove_rest(connection, job_id)
            return given_up

        with crash_points.step("delete.part"):
            return await self._database.write(transaction)


def _remove_history(connection: Connection, job_id: str) -> bool:
    """Remove some rows of the history; return whether there were any."""
    some = select(history.c.sequence).where(history.c.job_id == job_id).limit(BATCH)
    return connection.execute(history.delete().where(history.c.sequence.in_(some))).rowcount > 0


def _remove_assignments(connection: Connection, job_id: str) -> bool:
    """Remove the assignments of some attempts, with what depends on them; return whether there were any."""
    columns = (assignments.c.round, assignments.c.number)
    some = select(*columns).where(assignments.c.job_id == job_id).distinct().limit(ATTEMPTS)
    found = connection.execute(some).all()
    for round_, number in found:
        for table in (secure_messages, update_contents, assignments):
            its = table.c
            these = (its.job_id == job_id) & (its.round == round_) & (its.number == number)
            connection.execute(table.delete().where(these))
    return bool(found)


def _remove_rest(connection: Connection, job_id: str) -> None:
    """Remove the attempts, the versions and the job; of a job with releases, only what the ledger does not need."""
    if not _count_releases(connection, job_id):
        for table in (attempts, model_versions, jobs):
            connection.execute(table.delete().where(table.c.job_id == job_id))
        return
    for table in (attempts, model_versions):
        connection.execute(table.update().where(table.c.job_id == job_id).values(metrics={}))
    connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(reason="", cohort=None, protocol=None))


def _count_releases(connection: Connection, job_id: str) -> int:
    """Return the number of private releases: versions, and sums that were unmasked without becoming one."""
    released = connection.execute(select(func.count()).where(ledger.c.job_id == job_id)).scalar_one()
    return max(released, len(sql_ledger.list_unmasked(connection, job_id)))
