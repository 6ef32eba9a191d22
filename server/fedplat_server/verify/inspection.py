"""The whole verification: one snapshot of the database, one job or attempt at a time, then the files.

The fields of the records are the columns that are read. Values are not converted: the checks find invalid ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from fedplat.job import JobSpec, is_unreadable
from fedplat.rounds import AssignmentId
from fedplat.rounds.invariants import attempts, records
from fedplat.rounds.invariants.records import Location, StoredAttempt, StoredJob, StrayHistory
from fedplat.rounds.states import ENDED_JOBS, HAVE_UPDATES
from fedplat_server.database import rows, schema, tables, writes
from fedplat_server.database.engine import async_url, create_engine, translate_errors
from fedplat_server.database.records import JobFileReader
from fedplat_server.errors import StoreError
from fedplat_server.records.audit import AuditHead, AuditRow, head_after
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.verify import checks, contents, files
from fedplat_server.verify.checks import AuditEnd, AuditPart, Finding, Report, Unit

_Record = TypeVar("_Record")
_files = JobFileReader()  # imports no plugins: their options are not checked
_Number = tuple[int, int]
CLIENTS = 1000
"""Number of clients whose rounds are read at a time."""
AUDIT_ROWS = 1000
"""Number of rows of the audit log that are read at a time."""


@contextlib.asynccontextmanager
async def snapshot(database: str) -> AsyncGenerator[AsyncConnection]:
    """Open a read-only connection with a snapshot of the database, while a daemon may be writing.

    Raises the errors of `open_store`.
    """
    url = async_url(database)
    await schema.require_usable(url)
    engine = create_engine(url)
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    with translate_errors(url):
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()


async def units(connection: AsyncConnection, now_unix_s: float = 0.0) -> AsyncIterator[Unit]:
    """Yield the jobs in the order of creation, each followed by its attempts and stray history, then the audit log.

    Only one attempt, and the rows of a job's versions and attempts, are in memory at a time. Deleted jobs, whose rows
    are removed in parts, are left out.
    """
    query = _query(records.JobRow, tables.jobs, {}, ("sequence",)).where(tables.NOT_DELETED)
    for row in [records.JobRow(*values) for values in await connection.execute(query)]:
        job = await _job(connection, row)
        yield job
        async for unit in _attempts(connection, job, now_unix_s):
            yield unit
        async for participations in _participations(connection, job):
            yield participations
    async for part in _audit(connection):
        yield part


async def _audit(connection: AsyncConnection) -> AsyncIterator[AuditPart | AuditEnd]:
    query = _query(AuditRow, tables.audit_log, {}, ("sequence",))
    at = AuditHead()
    async with connection.stream(query) as result:
        async for part in result.partitions(AUDIT_ROWS):
            rows = tuple(AuditRow(*values) for values in part)
            yield AuditPart(at, rows)
            at = head_after(rows[-1])
    heads = await _rows(connection, AuditHead, tables.audit_head)
    yield AuditEnd(at, heads[0] if len(heads) == 1 else None)


async def _job(connection: AsyncConnection, row: records.JobRow) -> records.StoredJob:
    mine = {"job_id": row.job_id}
    spec, unreadable, is_foreign = _spec(row)
    history = _query(records.StepRow, tables.history, mine, ("sequence",))
    history = history.where(tables.history.c.entity.in_(("job", "version")))
    return records.StoredJob(
        row=row,
        spec=spec,
        unreadable=unreadable,
        is_foreign=is_foreign,
        versions=tuple(await _rows(connection, records.VersionRow, tables.model_versions, mine, ("version",))),
        ledger=tuple(await _rows(connection, records.ReleaseRow, tables.ledger, mine, ("version",))),
        attempts=tuple(await _rows(connection, records.AttemptRow, tables.attempts, mine, ("round", "number"))),
        history=tuple(records.StepRow(*one) for one in await connection.execute(history)),
    )


def _spec(row: records.JobRow) -> tuple[JobSpec | None, str, bool]:
    """Return the job, or why its file cannot be read and whether that of another release may be."""
    try:
        spec, problem = _files.read(row)
    except StoreError as exc:
        return None, f"its job file cannot be read ({str(exc.__cause__).splitlines()[0]})", False
    if not is_unreadable(spec):
        return spec, "", False
    return None, f"its job file cannot be read ({problem})", True


async def _attempts(connection: AsyncConnection, job: records.StoredJob, now_unix_s: float) -> AsyncIterator[Unit]:
    made = {(version.round, version.attempt): version for version in job.versions if version.is_made}
    history = _History(connection, job.row)
    messages = await _count_messages(connection, job.row.job_id)
    async with contextlib.aclosing(history.groups()) as groups:
        key, rows = await anext(groups)
        for attempt in job.attempts:
            number = (attempt.round, attempt.number)
            while key is not None and key < number:
                yield records.StrayHistory(job.row, tuple(rows))
                key, rows = await anext(groups)
            mine = tuple(rows) if key == number else ()
            if key == number:
                key, rows = await anext(groups)
            cohort = await _cohort(connection, job.row.job_id, number)
            own = tuple(one for one in cohort if (one.round, one.number) == number)
            counted = tuple(one for one in cohort if one.counted_in == number)
            yield records.StoredAttempt(
                job.row,
                job.spec,
                attempt,
                made.get(number),
                own,
                counted,
                mine,
                now_unix_s,
                num_messages=messages.get(number, 0),
            )
        while key is not None:
            yield records.StrayHistory(job.row, tuple(rows))
            key, rows = await anext(groups)


async def _cohort(connection: AsyncConnection, job_id: str, number: _Number) -> list[records.AssignmentRow]:
    """Return the assignments that were created in an attempt, and those that were carried over into it."""
    rows = tables.assignments.c
    made = (rows.job_id == job_id) & (rows.round == number[0]) & (rows.number == number[1])
    taken = (rows.job_id == job_id) & (rows.into_round == number[0]) & (rows.into_number == number[1])
    query = _query(records.AssignmentRow, tables.assignments, {}, ("client_id", "round", "number")).where(made | taken)
    return [records.AssignmentRow(*row) for row in await connection.execute(query)]


async def _count_messages(connection: AsyncConnection, job_id: str) -> dict[_Number, int]:
    """Return how many messages of secure aggregation the attempts of a job have."""
    columns = tables.secure_messages.c
    place = (columns.round, columns.number)
    query = select(*place, sqlalchemy.func.count()).where(columns.job_id == job_id).group_by(*place)
    return {(round_, number): count for round_, number, count in await connection.execute(query)}


async def _participations(
    connection: AsyncConnection, job: records.StoredJob
) -> AsyncIterator[records.ParticipationRounds]:
    """Yield the rounds in which clients took part in a job that limits them, `CLIENTS` clients at a time."""
    if job.spec is None or writes.ParticipationLimits.of(job.spec) is None:
        return
    rows, made_in = tables.assignments.c, tables.attempts.c
    same = [rows[name] == made_in[name] for name in ("job_id", "round", "number")]
    query = (
        select(rows.client_id, rows.round)
        .distinct()
        .join(tables.attempts, sqlalchemy.and_(*same))
        .where(rows.job_id == job.row.job_id, made_in.kind.in_(HAVE_UPDATES))
        .order_by(rows.client_id, rows.round)
    )
    rounds: dict[str, tuple[int, ...]] = {}
    async with connection.stream(query) as result:
        async for client_id, round_ in result:
            if client_id not in rounds and len(rounds) >= CLIENTS:
                yield records.ParticipationRounds(job.row, job.spec, rounds)
                rounds = {}
            rounds[client_id] = (*rounds.get(client_id, ()), round_)
    yield records.ParticipationRounds(job.row, job.spec, rounds)


class _History:
    """The history of a job's attempts and assignments, attempt by attempt."""

    def __init__(self, connection: AsyncConnection, job: records.JobRow) -> None:
        self._connection = connection
        order = ("round", "attempt", "sequence")
        query = _query(records.StepRow, tables.history, {"job_id": job.job_id}, order)
        self._query = query.where(tables.history.c.entity.not_in(("job", "version")))

    async def groups(self) -> AsyncGenerator[tuple[_Number | None, list[records.StepRow]]]:
        """Yield (round, attempt) with its rows, in order; then None with no rows, without end."""
        group: list[records.StepRow] = []
        async with self._connection.stream(self._query) as result:
            async for values in result:
                row = records.StepRow(*values)
                if group and (group[0].round, group[0].attempt) != (row.round, row.attempt):
                    yield (group[0].round, group[0].attempt), group
                    group = []
                group.append(row)
        if group:
            yield (group[0].round, group[0].attempt), group
        while True:
            yield None, []


def _query(
    record: type[Any], table: sqlalchemy.Table, where: dict[str, Any], order: tuple[str, ...]
) -> sqlalchemy.Select[Any]:
    """Return a query for the fields of a record, in their order."""
    columns = [table.c[name] for name in rows.field_names(record)]
    conditions = [table.c[name] == value for name, value in where.items()]
    return select(*columns).where(*conditions).order_by(*(table.c[name] for name in order))


async def _rows(
    connection: AsyncConnection,
    record: type[_Record],
    table: sqlalchemy.Table,
    where: dict[str, Any] | None = None,
    order: tuple[str, ...] = (),
) -> list[_Record]:
    return [record(*row) for row in await connection.execute(_query(record, table, where or {}, order))]


_REMOVED = {
    False: "the next start of the daemon removes them, or sets them aside if the database never had them",
    True: "the daemon removes them, or sets aside those that the database never had, when they are an hour old",
}


def _no_progress(done: int, total: int) -> None:
    pass


async def verify(
    database: str,
    data_dir: Path,
    progress: files.Progress = _no_progress,
    *,
    live: bool = False,
    blobs: BlobPlace | None = None,
    uploads: str = "",
) -> Report:
    """Check the database and its files. A daemon may be running; with `live` one is running.

    Without `blobs` they are in the data folder. `uploads` is the daemons' `--spool`: a folder, the URL of an object
    store, or "" for the default folder. `progress` is called from a thread. Raises the errors of `open_store` if the
    database cannot be read, and `BlobError` if the blobs or the updates cannot be listed.
    """
    place, updates = blobs or BlobPlace(data_dir), files.open_place(data_dir, uploads)
    stored = files.stored_blobs(place)
    # First, so that the files of a version that a running daemon commits meanwhile are not reported as orphans.
    folder = await asyncio.to_thread(stored.list)
    await asyncio.to_thread(updates.list_updates)
    report, needed, spooled = Report(), dict[str, files.ReferencedFiles](), files.ExpectedUpdates()
    num_overdue = 0
    now = time.time()
    async with snapshot(database) as connection:
        async for unit in units(connection, now):
            report.findings.extend(checks.findings(unit, live=live))
            _count(report, unit)
            spooled.add(unit)
            if isinstance(unit, StoredJob):
                _add_references(needed, unit)
                if unit.is_foreign and unit.row.status in ENDED_JOBS:
                    what = f"job {unit.row.job_id} has ended, and {unit.unreadable}"
                    report.notes.append(f"{what}; another version made it, and its models are complete")
            if isinstance(unit, StoredAttempt) and not live:
                num_overdue += len(list(attempts.overdue(unit)))
        held = await contents.read(connection)
    contents.check(report, held, needed, spooled.reported)
    lost = await _check_blobs(database, stored, needed, progress)
    copies = [digest for digest in lost if held.has_blob(digest, needed[digest].size_bytes)]
    report.findings.extend(finding for digest, finding in lost.items() if digest not in copies)
    if copies:
        report.notes.append(f"{len(copies)} files of models are missing or damaged; {contents.RESTORED}")
    report.findings.extend(await _check_updates(database, updates, held.without(spooled.reported)))
    report.checked |= {"updates": len(spooled.reported)} | {
        "blobs": len(needed),
        "bytes": sum(folder.sizes.get(digest, 0) for digest in needed),
    }
    if num_overdue:
        report.notes.append(f"{num_overdue} assignments are open after their deadline; a running daemon ends them")
    orphans = len(folder.sizes.keys() - needed)
    if orphans:
        report.notes.append(f"{orphans} blobs belong to no version; {_REMOVED[place.is_remote]}")
    report.notes.extend(f"the file {path} in {place.folder} is not a blob" for path in folder.unknown)
    report.notes.extend(await asyncio.to_thread(lambda: list(updates.notes(spooled))))
    return report


async def _check_blobs(
    database: str, stored: files.StoredBlobs, needed: Mapping[str, files.ReferencedFiles], progress: files.Progress
) -> dict[str, Finding]:
    findings = await asyncio.to_thread(lambda: dict(files.blobs(stored, needed, progress)))
    if not findings:
        return {}
    # A running daemon may have removed the blobs meanwhile.
    still_needed = dict[str, files.ReferencedFiles]()
    async with snapshot(database) as connection:
        async for unit in units(connection):
            if isinstance(unit, StoredJob):
                _add_references(still_needed, unit)
    return {digest: finding for digest, finding in findings.items() if digest in still_needed}


async def _check_updates(database: str, place: files.SpoolPlace, reported: Mapping[AssignmentId, str]) -> list[Finding]:
    findings = await asyncio.to_thread(lambda: dict(place.check(reported)))
    if not findings:
        return []
    # A running daemon may have merged and removed the updates meanwhile.
    still_spooled = files.ExpectedUpdates()
    async with snapshot(database) as connection:
        async for unit in units(connection):
            still_spooled.add(unit)
    return [finding for key, finding in findings.items() if key in still_spooled.reported]


def _count(report: Report, unit: Unit) -> None:
    if isinstance(unit, AuditPart):
        report.checked.update({"audit rows": len(unit.rows)})
    if isinstance(unit, StoredJob):
        report.checked.update(jobs=1, versions=len(unit.versions))
    if isinstance(unit, StoredAttempt):
        report.checked.update(attempts=1, assignments=len(unit.made))
    report.checked.update(
        {"history rows": len(unit.history) if isinstance(unit, StoredJob | StoredAttempt | StrayHistory) else 0}
    )


def _add_references(needed: dict[str, files.ReferencedFiles], job: StoredJob) -> None:
    for version in job.versions:
        if version.is_held_by_clients:
            continue
        place = Location(job.row.job_id, version=version.version)
        # Versions may share blobs: an entry with a size must not be replaced by one without.
        if version.model_removed_unix_s is None:
            needed[version.digest] = files.ReferencedFiles(place, "its model", version.size_bytes)
        if version.state_digest and version.state_removed_unix_s is None:
            needed.setdefault(version.state_digest, files.ReferencedFiles(place, "its optimizer's state", None))
        if version.delta_digest and version.model_removed_unix_s is None:
            delta = files.ReferencedFiles(place, "its delta", version.delta_size_bytes)
            needed.setdefault(version.delta_digest, delta)
