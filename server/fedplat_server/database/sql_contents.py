"""The bytes of small updates and blobs as rows of a SQL database, instead of synced files.

A row is added in the transaction that accepts the report, or that adds the version, so it needs no sync of its own. A
transaction that fails leaves neither. Rows are removed in the transaction after which they are not needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import Connection, Row, select

from fedplat.rounds import Assignment, AssignmentId, Attempt, AttemptKey, Change
from fedplat.rounds.closing import needs_update
from fedplat.rounds.states import AssignmentState
from fedplat_server import crash_points
from fedplat_server.database import rows, transactions
from fedplat_server.database.rows import Values
from fedplat_server.database.tables import blob_contents, update_contents

MAX_BYTES = 16 * 2**10
"""Maximum size of an update or a blob that is a row.

CPU for one that is added and removed, in transactions of 1 to 16 of them: 14 to 71 us for 4 KiB, 49 to 106 us for 16,
163 to 385 us for 64. A file that is synced with its folder and unlinked takes 130 to 190 us, whatever its size, and two
syncs. The write-ahead log and the database both receive a row, which also fills a backup; so no more than pays off.
"""
BATCH = 100
"""Number of rows that are read or removed by one query."""
_U = update_contents.c
_KEY = ("this_job", "this_round", "this_number")
_OF_ATTEMPT = update_contents.delete().where(
    _U.job_id == sqlalchemy.bindparam("this_job"),
    _U.round == sqlalchemy.bindparam("this_round"),
    _U.number == sqlalchemy.bindparam("this_number"),
)
_OF_ASSIGNMENT = _OF_ATTEMPT.where(_U.client_id == sqlalchemy.bindparam("this_client"))


@dataclasses.dataclass(frozen=True, slots=True)
class SmallContents:
    """The bytes that belong to events: of updates by assignment, and of blobs by digest."""

    updates: Mapping[AssignmentId, bytes] = dataclasses.field(default_factory=dict[AssignmentId, bytes])
    blobs: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])

    @classmethod
    def merge(cls, parts: Iterable[SmallContents]) -> SmallContents:
        """Return the bytes of several events."""
        updates, blobs = dict[AssignmentId, bytes](), dict[str, bytes]()
        for part in parts:
            updates |= part.updates
            blobs |= part.blobs
        return cls(updates, blobs) if updates or blobs else NO_CONTENTS


NO_CONTENTS = SmallContents()


class StoredUpdate(NamedTuple):
    """An update in a row."""

    digest: str
    content: bytes


@dataclasses.dataclass
class ContentRows:
    """The rows that changes add and remove. `ended` are attempts of which no row remains."""

    updates: dict[AssignmentId, Values] = dataclasses.field(default_factory=dict[AssignmentId, Values])
    blobs: dict[str, Values] = dataclasses.field(default_factory=dict[str, Values])
    obsolete: set[AssignmentId] = dataclasses.field(default_factory=set[AssignmentId])
    ended: set[AttemptKey] = dataclasses.field(default_factory=set[AttemptKey])

    @classmethod
    def of(cls, changes: Iterable[Change], contents: SmallContents) -> ContentRows:
        """Return the rows of changes, some of which belong to events with these bytes."""
        found = cls()
        for change in changes:
            found._add(change, contents)
        return found

    def _add(self, change: Change, contents: SmallContents) -> None:
        obsolete, attempt = {each.id for each in _list_obsolete(change)}, change.attempt
        own = attempt is not None and any(each.attempt == attempt.key for each in obsolete)
        if attempt is not None and own and _has_ended(change, attempt):
            self.ended.add(attempt.key)
        for each in obsolete:
            self.updates.pop(each, None)
        self.obsolete |= {each for each in obsolete if each.attempt not in self.ended}
        for each in change.assignments:
            content = contents.updates.get(each.id)
            if content is not None and each.state is AssignmentState.REPORTED and needs_update(change.job, each):
                place = {**each.key._asdict(), "client_id": each.client_id, "digest": each.digest}
                self.updates[each.id] = place | {"content": content}
        if (version := change.version) is not None:
            for digest in {version.digest, version.state_digest, version.delta_digest} & contents.blobs.keys():
                self.blobs[digest] = {"digest": digest, "content": contents.blobs[digest]}

    def write(self, connection: Connection) -> None:
        """Write the rows, after those of the assignments."""
        if self.ended:
            connection.execute(_OF_ATTEMPT, [dict(zip(_KEY, key, strict=True)) for key in sorted(self.ended)])
        _delete_updates(connection, self.obsolete)
        dialect = connection.dialect.name
        if self.updates:
            connection.execute(_upsert_updates(dialect), list(self.updates.values()))
        if self.blobs:
            connection.execute(_upsert_blobs(dialect), [self.blobs[digest] for digest in sorted(self.blobs)])
        if self.updates or self.blobs:
            crash_points.point("rows.uncommitted")


def _list_obsolete(change: Change) -> Iterator[Assignment]:
    """Yield the assignments with a small update that is not needed after a change."""
    attempt = change.attempt
    ended = attempt.assignments.values() if attempt is not None and not attempt.is_open else ()
    for each in (*change.assignments, *ended):
        if 0 < each.update_bytes <= MAX_BYTES and not needs_update(change.job, each):
            yield each


def _has_ended(change: Change, attempt: Attempt) -> bool:
    """Return whether a change ends an attempt, and no update of its own assignments is needed any more."""
    if attempt.is_open:
        return False
    assignments = (*attempt.assignments.values(), *change.job.carried_over.assignments.values())
    return not any(each.key == attempt.key and needs_update(change.job, each) for each in assignments)


class ContentStore:
    """The rows, for the start of a daemon, which brings what they have to where it is read."""

    def __init__(self, database: transactions.Database) -> None:
        self._database = database

    async def load_updates(self) -> Mapping[AssignmentId, StoredUpdate]:
        """Return all updates."""
        found = await self._database.fetch(select(update_contents))
        return {assignment_of(row): StoredUpdate(row.digest, row.content) for row in found}

    async def remove_updates(self, keys: Collection[AssignmentId]) -> None:
        """Remove updates that no assignment needs."""
        if keys:
            await self._database.write(lambda connection: _delete_updates(connection, keys))

    async def list_blobs(self) -> frozenset[str]:
        """Return the digests of all blobs that are rows."""
        return frozenset(row.digest for row in await self._database.fetch(select(blob_contents.c.digest)))

    async def load_blobs(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """Return the bytes of blobs that are rows; others are left out."""
        query = select(blob_contents).where(blob_contents.c.digest.in_(digests))
        return {row.digest: row.content for row in await self._database.fetch(query)}

    async def remove_blobs(self, digests: Collection[str]) -> None:
        """Remove blobs that no version references."""
        if digests:
            await self._database.write(lambda connection: delete_blobs(connection, digests))


def assignment_of(row: Row[Any]) -> AssignmentId:
    """Return the assignment of a row of an update."""
    return AssignmentId(AttemptKey(row.job_id, row.round, row.number), row.client_id)


def lock_blobs(connection: Connection, digests: Collection[str]) -> None:
    """Let no other transaction add these rows again, until this one has decided whether they are referenced."""
    ordered = sorted(digests)
    for start in range(0, len(ordered), BATCH):
        part = blob_contents.c.digest.in_(ordered[start : start + BATCH])
        query = select(blob_contents.c.digest).where(part).order_by(blob_contents.c.digest).with_for_update()
        connection.execute(query)


def delete_blobs(connection: Connection, digests: Collection[str]) -> None:
    """Remove the rows of blobs that no version references any more."""
    ordered = sorted(digests)
    for start in range(0, len(ordered), BATCH):
        part = ordered[start : start + BATCH]
        connection.execute(blob_contents.delete().where(blob_contents.c.digest.in_(part)))


def _delete_updates(connection: Connection, keys: Collection[AssignmentId]) -> None:
    values = [dict(zip(_KEY, each.attempt, strict=True)) | {"this_client": each.client_id} for each in sorted(keys)]
    if values:
        connection.execute(_OF_ASSIGNMENT, values)


@functools.cache
def _upsert_updates(dialect: str) -> sqlalchemy.Executable:
    statement = rows.insert(dialect, update_contents)
    changed = {name: statement.excluded[name] for name in ("digest", "content")}
    return statement.on_conflict_do_update(index_elements=["job_id", "round", "number", "client_id"], set_=changed)


@functools.cache
def _upsert_blobs(dialect: str) -> sqlalchemy.Executable:
    statement = rows.insert(dialect, blob_contents)  # the update locks a row that is there, against its removal
    return statement.on_conflict_do_update(index_elements=["digest"], set_={"content": statement.excluded["content"]})
